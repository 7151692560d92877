"""Leases, budget and kept memory, with a clock and blocks of the test's own."""

import pytest

from paramd.errors import ExhaustedError, NotFoundError
from paramd.memory.descriptors import pages
from paramd_service.sidecar.snapshots.store import Block, Fill, Key, Snapshot, SnapshotStore

PAGE = 4096


class FakeBlock:
    lost = False

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = pages(size_bytes)
        self.buffer = memoryview(bytearray(self.size_bytes))


class FakeBlocks:
    def __init__(self) -> None:
        self.disposed: list[Block] = []

    def make(self, size_bytes: int) -> Block:
        return FakeBlock(size_bytes)  # type: ignore[return-value]

    def dispose(self, block: Block) -> None:
        self.disposed.append(block)


class Bench:
    """A store of so many pages, and its clock."""

    def __init__(self, page_count: int = 10) -> None:
        self.now_ns = 0
        self.blocks = FakeBlocks()
        self.store = SnapshotStore(
            budget_bytes=page_count * PAGE,
            blocks=self.blocks,
            clock_ns=lambda: self.now_ns,
            idle_memory_s=60,
        )

    def filled(self, pages: int, step: int, *, at_boundary: bool = False) -> Snapshot:
        """A held snapshot of the arena's first pages."""
        snapshot = self.store.reserve(key(pages), at_boundary=at_boundary)
        if snapshot.block is None:
            snapshot.block = self.blocks.make(snapshot.size_bytes)
        snapshot.step, snapshot.fill = step, Fill.FILLED
        return snapshot


def key(pages: int, incarnation: int = 1) -> Key:
    return Key(incarnation, ((0, pages * PAGE),))


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_lease_ends_at_its_time_and_not_before(bench: Bench) -> None:
    lease = bench.store.lease(bench.filled(2, 1), 30.0)
    bench.now_ns = 30_000_000_000 - 1
    assert bench.store.expire() == 30_000_000_000
    assert bench.store.get(lease.snapshot_id) is lease
    bench.now_ns += 1
    with pytest.raises(NotFoundError, match="lease has ended"):
        bench.store.get(lease.snapshot_id)
    bench.store.expire()
    assert bench.store.used_bytes == 0
    assert bench.store.kept_bytes == 2 * PAGE


@pytest.mark.parametrize(("pages", "incarnation", "step"), [(2, 1, 6), (1, 1, 5), (2, 2, 5)])
def test_other_bytes_are_not_found(bench: Bench, pages: int, incarnation: int, step: int) -> None:
    bench.filled(2, 5)
    assert bench.store.find(key(pages, incarnation), step=step) is None


def test_the_bytes_before_an_edit_are_not_found_after_it(bench: Bench) -> None:
    before, after = bench.filled(2, 5), bench.filled(2, 5)
    before.edits, after.edits = 0, 1
    before.proof, after.proof = 10, 12
    assert bench.store.find(key(2), proof=10) is before
    assert bench.store.find(key(2), proof=12) is after
    assert bench.store.find(key(2), proof=14) is None
    for snapshot in (before, before, after, after):
        bench.store.drop(snapshot)
    assert bench.store.find(key(2), proof=14) is None
    assert bench.store.find(key(2)) is after, "the newest state, when any will do"
    assert bench.store.find(key(2), proof=10) is before


def test_bytes_of_another_history_are_not_found_and_a_later_one_is_newer(bench: Bench) -> None:
    left, present = bench.filled(2, 9), bench.filled(2, 5)
    present.history = 1
    assert bench.store.find(key(2), history=0, step=5) is None
    assert bench.store.find(key(2), history=1, step=5) is present
    assert bench.store.find(key(2), history=0, step=9) is left
    assert bench.store.find(key(2)) is present


@pytest.mark.parametrize("of", ["label", "private"])
def test_what_was_made_for_a_reader_that_takes_other_weights_is_nobody_elses(
    bench: Bench, of: str
) -> None:
    snapshot = bench.filled(2, 5)
    setattr(snapshot, of, "ema" if of == "label" else True)
    assert bench.store.find(key(2), history=0, step=5) is None
    bench.store.drop(snapshot)
    assert bench.store.find(key(2)) is None


def test_what_a_boundary_filled_is_never_shared(bench: Bench) -> None:
    snapshot = bench.filled(2, 5, at_boundary=True)
    assert bench.store.find(key(2), step=5) is None
    bench.store.drop(snapshot)
    assert bench.store.find(key(2), step=5) is None


def test_memory_is_used_again_and_forgets_its_old_bytes(bench: Bench) -> None:
    first = bench.filled(4, 1)
    block = first.block
    bench.store.drop(first)
    second = bench.store.reserve(Key(1, ((PAGE, 5 * PAGE),)), at_boundary=False)
    assert second.block is block
    assert bench.store.find(key(4), step=1) is None


@pytest.mark.parametrize("tainted", [False, True])
def test_memory_that_a_client_may_still_map_is_forgotten(bench: Bench, tainted: bool) -> None:
    snapshot = bench.filled(4, 1)
    block = snapshot.block
    if tainted:
        snapshot.tainted = True
    else:
        snapshot.map_count = 1
    bench.store.drop(snapshot)
    assert bench.blocks.disposed == [block]
    assert bench.store.kept_bytes == bench.store.used_bytes == 0


def test_idle_memory_is_freed_but_not_after_the_trainer_ended(bench: Bench) -> None:
    bench.store.drop(bench.filled(4, 1))
    bench.now_ns = 60_000_000_000
    assert bench.store.expire() is None
    assert len(bench.blocks.disposed) == 1
    bench.store.drop(bench.filled(4, 2))
    bench.store.keep_for_ever()
    bench.now_ns = 10**15
    bench.store.expire()
    assert bench.store.find(key(4), step=None) is not None


def test_the_budget_is_checked_before_anything_is_made(bench: Bench) -> None:
    bench.filled(7, 1)
    with pytest.raises(ExhaustedError, match=r"16,384 bytes does not fit: 12,288 of the .*40,960"):
        bench.store.reserve(key(4), at_boundary=False)
    assert bench.store.used_bytes == 7 * PAGE


def test_a_state_that_was_copied_at_rest_is_not_the_settled_one_of_its_step(bench: Bench) -> None:
    rested = bench.filled(2, 5)
    rested.unsettled, rested.proof = True, -3
    assert bench.store.find(key(2), history=0, step=5) is None
    assert bench.store.find(key(2), proof=-3) is rested
    settled = bench.filled(2, 5)
    assert bench.store.find(key(2), history=0, step=5) is settled


def test_a_snapshot_tells_that_somebody_was_given_its_bytes(bench: Bench) -> None:
    snapshot = bench.filled(2, 5, at_boundary=True)
    lease = bench.store.lease(snapshot, 30.0)
    assert not snapshot.shown
    bench.store.filled(lease.snapshot_id)
    assert snapshot.shown, "another boundary must not fill it: a reader would get parts of both"
