"""Which ranks only wait for others that work, as clients see it."""

from paramd.mesh.peers.waits import MOST_NAMED, NOBODY, awaited_of
from paramd.mesh.results import MeshStatus, rank_status
from paramd.v1 import common_pb2

S = 1_000_000_000


def state(rank: int, *, waits: bool = False, works: bool = False) -> common_pb2.RankState:
    return common_pb2.RankState(
        rank=rank,
        phase=common_pb2.PHASE_IDLE if works else common_pb2.PHASE_STALLED,
        phase_reason="" if works else "no boundary for 70 s",
        agreement_works=True,
        boundary_age_ns=70 * S,
        waits_for_others=waits,
        works=works,
    )


def test_a_status_calls_ranks_that_wait_healthy_and_says_for_whom() -> None:
    states = [state(0, waits=True), state(1, works=True), state(2)]
    awaited = awaited_of(states)
    rows = [rank_status(one.rank, "", one, awaited) for one in states]
    assert [row.healthy for row in rows] == [True, True, False]
    assert [row.awaits for row in rows] == [(1,), (), ()]
    assert [row.phase for row in rows] == ["idle", "idle", "stalled"]
    assert rows[0].reason == "waits for rank 1, in its step for 70 s"
    status = MeshStatus(rows, job="run", incarnation=1, world_size=3)
    assert "2 of 3 ranks healthy" in status.summary()


def test_many_are_counted_and_one_before_its_first_boundary_has_no_age() -> None:
    states = [state(rank, works=True) for rank in range(MOST_NAMED + 2)]
    states[0].boundary_age_ns = -1
    text = awaited_of(states).text()
    assert text == "waits for ranks 0, 1, 2, 3 and 2 more, in their first step"
    assert awaited_of([state(0), state(1, waits=True)]) is NOBODY
