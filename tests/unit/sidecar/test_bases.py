"""States kept for followers: shared, within a budget of their own, forgotten when idle."""

import pytest

from paramd.errors import ExhaustedError, UsageError
from paramd.state import StateName
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.follow import sidecar as deltas
from paramd_service.follow.bases import IDLE_S, Bases, state_of
from paramd_service.sidecar.snapshots.store import Snapshot
from tests.unit.sidecar.test_sidecar_snapshots import PAGE
from tests.unit.sidecar.test_sidecar_snapshots import Bench as Snapshots


class Bench(Snapshots):
    """A store of four pages, and bases of two."""

    def __init__(self) -> None:
        super().__init__(4)
        self.bases = Bases(self.store, budget_bytes=2 * PAGE, clock_ns=lambda: self.now_ns)

    def one(self, step: int) -> Snapshot:
        """A snapshot of a page, copied and charged."""
        snapshot = self.filled(1, step)
        snapshot.edits = 0
        self.store.uncharge(snapshot, None)
        return snapshot

    def kept(self, step: int) -> Snapshot:
        """A base that nobody else holds."""
        snapshot = self.one(step)
        self.bases.keep(snapshot)
        self.store.drop(snapshot)
        return snapshot


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_base_outlives_its_leases_and_is_found_by_its_state(bench: Bench) -> None:
    kept = bench.kept(7)
    assert bench.bases.find((kept.key, StateName(1, 0, 7, 0))) is kept
    assert bench.bases.find((kept.key, StateName(1, 0, 7, 1))) is None
    assert bench.bases.find((kept.key, StateName(1, 0, 8, 0))) is None
    assert bench.bases.find((kept.key, StateName(1, 1, 7, 0))) is None


def test_a_comparison_of_one_history_is_never_given_to_another(bench: Bench) -> None:
    """Results are kept by these names: all that tells states apart is in them."""
    one, other = bench.one(7), bench.one(7)
    other.history = 1
    assert state_of(one) != state_of(other)
    later = bench.one(7)
    later.edits = 1
    labelled = bench.one(7)
    labelled.label = "ema"
    assert len({state_of(found) for found in (one, other, later, labelled)}) == 4


def test_bases_take_nothing_from_the_budget_of_snapshots(bench: Bench) -> None:
    bench.kept(1)
    bench.kept(2)
    held = [bench.one(step) for step in (3, 4, 5, 6)]
    with pytest.raises(ExhaustedError):
        bench.one(7)
    for snapshot in held:
        bench.store.drop(snapshot)
    bench.bases.close()
    assert bench.store.used_bytes == 0


@pytest.mark.parametrize(
    "item", [(0, 10, 4), (-2, 2, 2), (4, 2, 2), (0, PAGE + 2, 2), (0, 12, 3), (0, 0, 0)]
)
def test_ranges_that_leave_the_snapshot_or_cut_elements_are_refused(
    item: tuple[int, int, int],
) -> None:
    begin, end, size = item
    asked = pb.DeltaItem(begin_bytes=begin, end_bytes=end, element_bytes=size)
    with pytest.raises(UsageError, match="items"):
        deltas._checked([asked], PAGE)


def test_a_base_that_nobody_asks_for_is_forgotten(bench: Bench) -> None:
    kept, idle_ns = bench.kept(1), int(IDLE_S * 1e9)
    bench.now_ns = idle_ns - 1
    assert bench.bases.sweep() == idle_ns
    bench.now_ns = idle_ns
    assert bench.bases.sweep() is None
    assert bench.bases.find(state_of(kept)) is None
    assert bench.store.used_bytes == 0
