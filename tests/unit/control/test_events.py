"""The ring of events: order, resuming, gaps, and readers that do not keep up."""

import asyncio
import json

from paramd_service.control.records.events import MAX_DATA_CHARS, Event, EventBus


async def take(events: object, count: int) -> list[Event]:
    async with asyncio.timeout(60):
        return [await anext(events) for _ in range(count)]  # type: ignore[call-overload]


def about(events: list[Event]) -> list[tuple[str, object]]:
    return [(event.kind, json.loads(event.text).get("n")) for event in events]


async def test_what_is_not_kept_any_more_is_a_gap_with_its_size() -> None:
    bus = EventBus(ring_count=3)
    ids = [bus.publish("step", {"n": n}, job="a").id for n in range(10)]
    async with bus.follow(job="a", after=ids[2]) as events:
        gap, *rest = await take(events, 4)
        assert (gap.kind, json.loads(gap.text)["missed"]) == ("gap", 4)
        assert about(rest) == [("step", 7), ("step", 8), ("step", 9)]


async def test_a_reader_that_the_ring_overtakes_is_told_and_goes_on() -> None:
    bus = EventBus(ring_count=3)
    async with bus.follow(job="a") as events:
        await take(events, 1)
        for n in range(8):
            bus.publish("step", {"n": n}, job="a")
        gap, *rest = await take(events, 4)
        assert (gap.kind, json.loads(gap.text)["missed"]) == ("gap", 5)
        assert about(rest) == [("step", 5), ("step", 6), ("step", 7)]


async def test_closing_ends_readers_that_wait() -> None:
    bus = EventBus()
    async with bus.follow(job="a") as events:
        await take(events, 1)
        waiting = asyncio.create_task(anext(events, None))
        await asyncio.sleep(0)
        bus.close()
        assert await asyncio.wait_for(waiting, 60) is None


def test_data_too_long_for_readers_is_cut_to_a_note() -> None:
    event = EventBus(clock=lambda: 5.0).publish("alert", {"text": "x" * MAX_DATA_CHARS}, job="a")
    assert json.loads(event.text)["cut_chars"] > MAX_DATA_CHARS
    assert "\n" not in EventBus().publish("alert", {"text": "a\nb<script>"}).text
