"""Refusals that sidecars report: one record a minute and rank, and none lost or made up."""

from paramd_service.control.mesh.registry import MeshView
from paramd_service.control.mesh.watch import EVERY_S, RefusalBook
from paramd_service.sidecar.revocations import MAX_CHARS, Refusals
from tests.unit.control.reports import report, view


def mesh(*totals: int) -> MeshView:
    told = (
        report(rank, sidecar_pid=1, refused_call_count=total, last_refusal="why")
        for rank, total in enumerate(totals)
    )
    return view(*told, world_size=len(totals))


def test_each_rank_is_told_once_a_minute_and_every_refusal_is_counted_once() -> None:
    book, told = RefusalBook(), []
    for now_s in range(int(3 * EVERY_S)):
        told += [(now_s, one) for one in book.tick(mesh(now_s // 2, 0), float(now_s))]
    assert {one.rank for _, one in told} == {0}
    assert len(told) <= 4
    assert [one.total for _, one in told] == [now_s // 2 for now_s, _ in told]
    assert sum(one.count for _, one in told) == told[-1][1].total


def test_what_a_caller_wrote_is_cut_and_made_plain() -> None:
    refusals = Refusals()
    refusals.saw("/x/\ud800\u202e" * 100, "why")
    assert refusals.count == 1
    assert len(refusals.last) == MAX_CHARS
    assert refusals.last.isascii()
