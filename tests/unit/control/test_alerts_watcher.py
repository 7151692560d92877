"""The watcher with a mesh made by hand: from what sidecars say to who is told."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import cast

import httpx2
import pytest

from paramd.errors import UnreachableError
from paramd.layout.types import Box, Layout, Piece, TensorKind, TensorLayout
from paramd.mesh.insight.reports import Alert
from paramd_service.alerts import watcher as watcher_module
from paramd_service.alerts import webhook
from paramd_service.alerts.config import AlertConfig
from paramd_service.alerts.drift import Difference, ReplicaGroup
from paramd_service.alerts.looks import LookRounds
from paramd_service.alerts.sampling import (
    DigestRound,
    GradientRound,
    MeshSampler,
    StatsRound,
    TensorInput,
)
from paramd_service.alerts.store import AlertStore
from paramd_service.alerts.watcher import Watcher
from paramd_service.alerts.webhook import Webhooks
from paramd_service.control.mesh.evidence import Evidence
from paramd_service.control.mesh.registry import MeshView
from tests.memory_stores import MemoryStore
from tests.unit.control.reports import report, view

PIECES = [tuple(Piece(rank, 32 * n, Box((0,), (8,))) for rank in range(3)) for n in range(4)]
TENSORS = tuple(
    TensorLayout(f"w{n}", "float32", (8,), TensorKind.PARAMETER, pieces)
    for n, pieces in enumerate(PIECES)
)
LAYOUT = Layout(3, (4096,) * 3, TENSORS)


ALERT = Alert(
    id="1", job="run", incarnation=1, rule="stuck", subject="mesh", severity="critical",
    state="firing", reason="", ranks=(), name="", step=1, first_seen_s=1.0, last_seen_s=1.0,
    resolved_s=None,
)  # fmt: skip


class World:
    """Clock, reports and sidecars under the test's control."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.reports = {rank: report(rank, changed_s=self.now_s) for rank in range(3)}
        self.bad: dict[str, TensorInput] = {}
        self.differing: dict[str, tuple[int, ...]] = {}
        self.asked: list[frozenset[int]] = []
        self.fails = False
        self.mirrored = False
        self.sampled: list[str] = []
        self.unreadable = ""
        self.step = 7
        self.frozen: tuple[str, ...] = ()
        self.during: Callable[[], object] = lambda: None

    def view(self) -> MeshView:
        return view(*self.reports.values(), world_size=3, now_s=self.now_s)

    def clock(self) -> float:
        return self.now_s

    async def layout(self) -> Layout:
        if self.fails:
            raise UnreachableError("nobody answers")
        return replace(LAYOUT, mirrored=self.mirrored)

    async def stats(self, tensors: Sequence[TensorLayout], *, timeout_s: float) -> StatsRound:
        self.sampled += [t.fqn for t in tensors]
        if self.unreadable in self.sampled[-len(tensors) :]:
            raise UnreachableError("a rank is away")
        well = {
            t.fqn: TensorInput(fqn=t.fqn, count=8, nan_count=0, inf_count=0, norm=3.0)
            for t in tensors
        }
        self.during()
        return StatsRound(step=self.step, tensors=tuple((well | self.bad).values()))

    async def gradients(self, patterns: Sequence[str], *, timeout_s: float) -> GradientRound:
        found = tuple(
            TensorInput(fqn=one.fqn, count=8, nan_count=0, inf_count=0, norm=1.0)
            for one in TENSORS
            if one.fqn not in self.frozen
        )
        return GradientRound(step=self.step, tensors=found, frozen=self.frozen)

    async def digests(self, groups: Sequence[ReplicaGroup], *, timeout_s: float) -> DigestRound:
        self.asked.append(frozenset(rank for group in groups for rank in group.begins))
        found = tuple(
            Difference(group=g, ranks=self.differing[g.fqn], majority=2)
            for g in groups
            if g.fqn in self.differing
        )
        return DigestRound(step=9, differences=found, places={})


@pytest.fixture
def world() -> World:
    return World()


def watcher_of(
    world: World,
    told: list[Alert],
    config: AlertConfig | None = None,
    store: MemoryStore | None = None,
    webhooks: Webhooks | None = None,
) -> Watcher:
    config = config if config is not None else AlertConfig(watch=True)
    store = store if store is not None else MemoryStore()
    return Watcher(
        config=config, webhooks=webhooks if webhooks is not None else Webhooks(config.webhooks),
        job="job", incarnation=1, view=world.view, sampler=cast("MeshSampler", world),
        store=cast("AlertStore", store), offer=store.offer, tell=told.append, clock=world.clock,
    )  # fmt: skip


async def looking(world: World, told: list[Alert], store: MemoryStore | None = None) -> Watcher:
    """A watcher that has begun; its rounds run when the test says so."""
    watcher = watcher_of(world, told, AlertConfig(watch=False), store)
    watcher.start()
    await _until(lambda: watcher.ready)
    return watcher


async def test_a_restart_of_the_control_plane_does_not_tell_again(world: World) -> None:
    told: list[Alert] = []
    store = MemoryStore()
    before = watcher_of(world, told, store=store)
    world.differing = {"w1": (2,)}
    await before.rounds.digests()
    await before.close()
    after = watcher_of(world, told, AlertConfig(watch=False), store=store)
    after.start()
    await _until(lambda: len(after.book.firing) == 1)
    await after.rounds.digests()
    assert len(told) == 1
    await after.close()


async def test_without_a_store_alerts_go_on_and_are_kept_when_it_is_back(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Away(MemoryStore):
        away = True

        async def save(self, alerts: Sequence[Alert]) -> None:
            if self.away:
                raise UnreachableError("disk full")
            await super().save(alerts)

    monkeypatch.setattr(watcher_module, "KEEP_AGAIN_S", 0.01)
    told: list[Alert] = []
    store = Away()
    watcher = await looking(world, told, store)
    world.differing = {"w1": (2,)}
    await watcher.rounds.digests()
    await _until(lambda: "disk full" in caplog.text)
    assert len(told) == 1
    store.away = False
    await _until(lambda: len(store.alerts) == 1)
    await watcher.close()
    assert caplog.text.count("disk full") == 1


@pytest.mark.parametrize("mirrored", [False, True])
async def test_replicas_are_compared_by_default_unless_a_copy_would_stop_the_trainer(
    world: World, mirrored: bool
) -> None:
    world.mirrored = mirrored
    told: list[Alert] = []
    watcher = watcher_of(world, told, AlertConfig(watch=False, digests_every_s=0.01))
    world.differing = {"w1": (2,)}
    watcher.start()
    await _until(lambda: watcher.round_counts["digests"] > 1)
    await watcher.close()
    assert watcher.round_counts["stats"] == 0
    assert bool(world.asked) is not mirrored
    assert [a.name for a in told] == ([] if mirrored else ["w1"])


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("status", [200, 301, 404, 503])
async def test_a_change_is_posted_once_whatever_the_receiver_answers(
    world: World, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    seen: list[httpx2.Request] = []

    def receive(request: httpx2.Request) -> httpx2.Response:
        seen.append(request)
        return httpx2.Response(status, headers={"location": "http://127.0.0.1/elsewhere"})

    url = "https://hooks.example.com/secret-path"
    hooks = Webhooks([url], transport=httpx2.MockTransport(receive))
    watcher = watcher_of(world, [], webhooks=hooks)
    world.differing = {"w0": (1,)}
    await watcher.rounds.digests()
    await watcher.rounds.digests()
    await _until(lambda: hooks.posted_count + hooks.failed_count == 1)
    await watcher.close(incarnation_over=True)
    await _until(lambda: hooks.posted_count + hooks.failed_count == 2)
    await hooks.close()
    assert [str(request.url) for request in seen] == [url] * 2
    first, last = (json.loads(request.content) for request in seen)
    assert (first["rule"], first["name"], first["ranks"]) == ("replica-drift", "w0", [1])
    assert (first["state"], last["state"], first["id"]) == ("firing", "resolved", last["id"])
    assert hooks.posted_count == (2 if status == 200 else 0)
    told = [r.getMessage() for r in caplog.records if "is not posted" in r.getMessage()]
    assert len(told) == hooks.failed_count
    assert all(text.endswith(f"HTTP {status}") for text in told)
    assert "secret-path" not in caplog.text


async def test_posts_are_bounded_and_a_receiver_that_hangs_delays_nobody(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(request: httpx2.Request) -> httpx2.Response:
        await asyncio.sleep(0.05 if b'"w1"' in request.content else 600)
        return httpx2.Response(200)

    monkeypatch.setattr(webhook, "MAX_POSTS", 3)
    monkeypatch.setattr(webhook, "TIMEOUT_S", 1.0)
    hooks = Webhooks(["https://a.example.com/secret-path"], transport=httpx2.MockTransport(hang))
    watcher = watcher_of(world, [], webhooks=hooks)
    world.differing = {f"w{n}": (1,) for n in range(4)}
    await watcher.rounds.digests()
    assert (hooks.posted_count, hooks.failed_count) == (0, 1)
    assert "3 posts are under way" in caplog.text
    assert "secret-path" not in caplog.text
    await watcher.close()
    await hooks.close()
    assert (hooks.posted_count, hooks.failed_count) == (1, 3), "those that hang at the end, too"


class Endless(httpx2.AsyncByteStream):
    """The body of an answer that never ends."""

    def __init__(self) -> None:
        self.read_count = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            self.read_count += 1
            yield bytes(1 << 20)


async def test_of_a_receivers_answer_only_the_head_is_read() -> None:
    body = Endless()

    async def receive(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, headers={"content-encoding": "gzip"}, stream=body)

    hooks = Webhooks(["https://a.example.com"], transport=httpx2.MockTransport(receive))
    hooks.post([ALERT])
    await _until(lambda: hooks.posted_count == 1)
    await hooks.close()
    assert body.read_count == 0


async def test_a_receiver_that_trickles_keeps_no_other_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def receive(request: httpx2.Request) -> httpx2.Response:
        if request.url.host == "slow":
            await asyncio.Event().wait()
        return httpx2.Response(200)

    monkeypatch.setattr(webhook, "MAX_POSTS", 3)
    transport = httpx2.MockTransport(receive)
    hooks = Webhooks(["https://slow", "https://good"], transport=transport)
    for number in range(1, 11):
        hooks.post([ALERT])
        await _until(lambda number=number: hooks.posted_count == number)
    assert hooks.failed_count == 7, "those beyond its three"
    monkeypatch.setattr(webhook, "TIMEOUT_S", 0.01)
    await hooks.close()
    assert (hooks.posted_count, hooks.failed_count) == (10, 10)


@pytest.mark.parametrize("disabled", [(), ("non-finite",)])
async def test_values_are_looked_at_once_a_round_succeeds_and_past_what_fails(
    world: World, disabled: tuple[str, ...]
) -> None:
    config = AlertConfig(watch_share=1, stats_every_s=0.01, sample_bytes=32, disabled=disabled)
    watcher = watcher_of(world, [], config)
    assert not watcher.looks_at_values
    world.unreadable = "w0"
    watcher.start()
    await _until(lambda: "w2" in world.sampled)
    world.unreadable = ""
    await _until(lambda: watcher.looks_at_values or len(world.sampled) > 20)
    assert watcher.looks_at_values is not bool(disabled)
    await watcher.close()


@pytest.mark.parametrize("on_purpose", [True, False])
async def test_a_layer_stands_still_without_a_word_only_if_it_is_frozen_on_purpose(
    world: World, on_purpose: bool
) -> None:
    told: list[Alert] = []
    rounds = watcher_of(world, told).rounds

    def norm(number: int) -> float:
        return 3.0 + min(world.step, 16 if number == 0 else 999) / 1024

    for world.step in range(8, 30):
        world.frozen = ("w0",) if on_purpose and world.step > 16 else ()
        world.bad = {
            one.fqn: TensorInput(fqn=one.fqn, count=8, nan_count=0, inf_count=0, norm=norm(n))
            for n, one in enumerate(TENSORS)
        }
        assert await rounds.gradients()
        assert await rounds.stats()
    assert [(one.rule, one.name) for one in told] == [("norm-jump", "w0")] * (not on_purpose)


async def test_after_a_rollback_a_rate_of_zero_leaves_no_layer_behind(world: World) -> None:
    told: list[Alert] = []
    rounds = watcher_of(world, told).rounds
    for world.step in [*range(1000, 1010), *range(20, 30)]:
        norm = 3.0 + max(world.step, 1000) / 1024
        world.bad = {
            one.fqn: TensorInput(fqn=one.fqn, count=8, nan_count=0, inf_count=0, norm=norm)
            for one in TENSORS
        }
        assert await rounds.gradients()
        assert await rounds.stats()
    assert told == []


async def test_after_turning_off_nothing_of_values_fires(world: World) -> None:
    told: list[Alert] = []
    watcher = watcher_of(world, told)
    world.bad = {"w1": TensorInput(fqn="w1", count=8, nan_count=2, inf_count=0, norm=3.0)}
    assert await watcher.rounds.stats()
    assert [one.state for one in told] == ["firing"]
    watcher.turn(on=False)
    assert [one.state for one in told] == ["firing", "resolved"]
    watcher.turn(on=True)
    world.during = lambda: watcher.turn(on=False)
    assert not await watcher.rounds.stats(), "it was turned off meanwhile"
    assert len(told) == 2
    assert watcher.book.firing == ()


async def test_waits_that_are_reported_after_a_sample_are_part_of_its_cost(world: World) -> None:
    watcher = watcher_of(world, [], AlertConfig(watch_share=1, stats_every_s=0.01))
    watcher.start()
    await _until(lambda: bool(world.sampled))
    assert watcher.watches()[0].every_s < 1.0
    world.reports[1].state.stall_total_ns += 50 * 10**9
    await _until(lambda: watcher.watches()[0].every_s > 1.0)
    await watcher.close()


async def test_a_slow_rank_and_a_stuck_one_are_told_from_looks_and_held_training_is_not(
    world: World,
) -> None:
    def at(kind: str, seen_for_s: float = 0.0, **changed: bool) -> list[Evidence]:
        both = Evidence(rank=0, kind="collective", what="in all_reduce", step=7, **changed)
        both = replace(both, seen_for_s=seen_for_s)
        return [both, replace(both, rank=1, kind=kind, what=f"in {kind}")]

    seen, step = at("collective"), 0

    async def look() -> list[Evidence]:
        return seen

    told: list[Alert] = []
    host = world.reports[1].state.host
    host.trainer_delay, host.others, host.processors = 0.5, 0.75, 4
    rounds = LookRounds(watcher_of(world, told), look)

    async def after(looks: int, found: list[Evidence]) -> list[str]:
        nonlocal seen
        nonlocal step
        for _ in range(looks):
            world.now_s += 2.0
            step += 1
            seen = [replace(one, step=step) for one in found]
            await rounds.round()
        return [f"{one.rule} {one.subject} {one.state}" for one in told]

    assert await after(20, at("collective")) == []
    assert await after(11, at("other")) == []
    assert await after(1, at("other")) == ["slow-rank rank 1 firing"]
    assert "on its host: its trainer waits 50% of the time for a processor" in told[0].reason
    assert (await after(35, at("collective")))[1:] == ["slow-rank rank 1 resolved"]
    reading = [Evidence(rank=n, kind="dataloader", what="in next", step=7) for n in range(8)]
    assert (await after(15, reading))[2:] == []
    assert (await after(3, reading))[2:] == ["slow-rank mesh firing"]
    await after(40, at("collective"))
    del told[2:]
    # One that is long at different places, saves, or is waited for by nobody, does not hang.
    for seen_for_s, kind in ((9.0, "other"), (20.0, "checkpoint")):
        assert (await after(3, at(kind, seen_for_s, overdue=True)))[2:] == []
    busy = [replace(one, kind="forward") for one in at("forward", 20.0, overdue=True)]
    assert (await after(3, busy))[2:] == []
    assert (await after(1, at("other", 20.0, overdue=True)))[2:] == ["stuck rank 1 firing"]
    assert "for rank 1, which is in other" in told[2].reason
    told.clear()
    assert await after(30, at("other", held=True)) == ["stuck rank 1 resolved"]
