"""Copies of other ranks' standing snapshots: whole or not there, within the budget."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from paramd.errors import DataLossError, ExhaustedError
from paramd.memory.continuation import digest_of
from paramd_service.resume.offer import Copies
from paramd_service.sidecar.kept_states import StandingLabel
from paramd_service.sidecar.snapshots.store import BlockMaker

SIZE, PART = 20_000, 7_000


def data_of(step: int) -> bytes:
    return bytes([step]) * SIZE


def label_of(step: int, *, lineage: int = 7) -> StandingLabel:
    return StandingLabel(
        lineage=lineage, step=step, edits=0, arena_bytes=SIZE - 300, optimizer_bytes=100,
        record_bytes=100, table_bytes=100, world_size=2, layout_digest="d",
        digest=digest_of(memoryview(data_of(step))),
    )  # fmt: skip


class Sender:
    """Puts copies of one rank."""

    def __init__(self, copies: Copies, rank: int = 0) -> None:
        self.copies, self.rank = copies, rank

    def put(self, step: int, *, parts: int = 99, keep: int = 0) -> int:
        """Some parts of a copy, or all; how much is there then."""
        received = self.part(step, 0, b"", keep=keep)
        for _ in range(parts):
            if received == SIZE:
                break
            received = self.part(step, received, data_of(step)[received : received + PART])
        return received

    def part(self, step: int, offset: int, data: bytes, *, keep: int = 0) -> int:
        label = label_of(step)
        return asyncio.run(self.copies.put(self.rank, label, keep, offset, data))


@pytest.fixture
def made() -> Iterator[Callable[..., Copies]]:
    with ThreadPoolExecutor(1) as executor:
        found = []

        def make(budget_bytes: int | None = None) -> Copies:
            found.append(Copies(BlockMaker(executor), executor, budget_bytes=lambda: budget_bytes))
            return found[-1]

        yield make
        for copies in found:
            copies.keep_only(())


def whole(copies: Copies) -> list[tuple[int, int]]:
    """(rank, step) of what is whole, after a look at its bytes."""
    found = []
    for rank, label in copies.labels():
        descriptor = copies.opened(rank, label.lineage, label.step)
        assert os.pread(descriptor, label.size_bytes, 0) == data_of(label.step)
        with pytest.raises(OSError, match="Bad file"):
            os.pwrite(descriptor, b"x", 0)
        os.close(descriptor)
        found.append((rank, label.step))
    return sorted(found)


def test_a_sender_that_dies_in_the_middle_leaves_the_copy_before(
    made: Callable[..., Copies],
) -> None:
    copies = made()
    sender = Sender(copies)
    sender.put(1)
    sender.put(2, parts=1)
    assert whole(copies) == [(0, 1)]
    # Its successor does not have that snapshot any more, and sends another one.
    assert sender.put(3) == SIZE
    assert whole(copies) == [(0, 1), (0, 3)]


def test_bytes_that_do_not_have_their_digest_are_dropped(made: Callable[..., Copies]) -> None:
    copies = made()
    sender = Sender(copies)
    sender.put(1)
    sender.put(2, parts=2)
    with pytest.raises(DataLossError, match="rank 0's step 2"):
        sender.part(2, 2 * PART, b"\xff" * (SIZE - 2 * PART))
    assert whole(copies) == [(0, 1)]
    # From the beginning, since nobody knows which byte was wrong.
    assert sender.part(2, 2 * PART, b"x") == 0
    assert sender.put(2) == SIZE
    assert whole(copies) == [(0, 1), (0, 2)]


def test_what_all_ranks_have_stays_until_they_have_another(made: Callable[..., Copies]) -> None:
    copies = made()
    sender = Sender(copies)
    sender.put(1)
    sender.put(2, keep=1)
    for step in (3, 4, 5):
        sender.put(step, keep=1)
        assert whole(copies) == [(0, 1), (0, step)]
    sender.put(6, keep=5)
    assert whole(copies) == [(0, 5), (0, 6)]
    # A successor of the sender knows nothing of it: what was said before holds.
    sender.put(7, keep=0)
    assert whole(copies) == [(0, 5), (0, 7)]


def test_memory_is_bounded(made: Callable[..., Copies]) -> None:
    copies = made(100_000)
    first, second = Sender(copies, 0), Sender(copies, 1)
    first.put(1)
    # There is room for one buffer only: it is used alone.
    first.put(2, keep=1)
    assert whole(copies) == [(0, 2)]
    with pytest.raises(ExhaustedError, match="--standing-budget-bytes"):
        second.put(1)
    assert copies.size_bytes <= 100_000
    # A mesh in which this rank keeps others' gives the memory back.
    copies.keep_only([1])
    second.put(1)
    assert whole(copies) == [(1, 1)]


def test_a_new_history_keeps_what_it_continues(made: Callable[..., Copies]) -> None:
    copies = made()
    sender = Sender(copies)
    sender.put(4)
    sender.put(8)
    copies.rebase(7, 9, 4)
    assert [(label.lineage, label.step) for _, label in copies.labels()] == [(9, 4)]
    copies.rebase(0, 11, -1)
    assert list(copies.labels()) == []


async def test_memory_that_was_made_for_a_sender_that_left_is_the_next_ones(
    made: Callable[..., Copies], monkeypatch: pytest.MonkeyPatch
) -> None:
    copies, label = made(), label_of(1)
    make, begun, go = copies._blocks.make, threading.Event(), threading.Event()
    monkeypatch.setattr(
        copies._blocks, "make", lambda size: (begun.set(), go.wait(60), make(size))[2]
    )
    left = asyncio.create_task(copies.put(0, label, 0, 0, b""))
    await asyncio.to_thread(begun.wait, 60)
    left.cancel()
    go.set()
    await asyncio.wait([left])
    had = copies.size_bytes
    await copies.put(0, label, 0, 0, b"")
    assert had == copies.size_bytes > SIZE
