"""Refusals that sidecars report: one record a minute and rank, and none lost or made up."""

from __future__ import annotations

from paramd.v1 import common_pb2
from paramd_service.control.mesh.registry import MeshView, Report, mesh_view
from paramd_service.control.mesh.watch import EVERY_S, RefusalBook
from paramd_service.sidecar.revocations import MAX_CHARS, Refusals


def mesh(*totals: int, pid: int = 1) -> MeshView:
    reports = {
        rank: Report(
            rank=rank,
            step=1,
            layout_digest="d",
            peer=common_pb2.Peer(rank=rank),
            state=common_pb2.RankState(
                rank=rank, sidecar_pid=pid, refused_call_count=total, last_refusal="why"
            ),
            version="0",
            leaving=False,
            connected=True,
            changed_s=0.0,
        )
        for rank, total in enumerate(totals)
    }
    return mesh_view(reports, world_size=len(totals), now_s=0.0, silent_after_s=10.0)


def test_each_rank_is_told_once_a_minute_and_every_refusal_is_counted_once() -> None:
    book, told = RefusalBook(), []
    for now_s in range(int(3 * EVERY_S)):
        told += [(now_s, one) for one in book.tick(mesh(now_s // 2, 0), float(now_s))]
    assert {one.rank for _, one in told} == {0}
    assert len(told) <= 4
    assert [one.total for _, one in told] == [now_s // 2 for now_s, _ in told]
    assert sum(one.count for _, one in told) == told[-1][1].total


def test_what_came_within_the_minute_is_told_after_it() -> None:
    book = RefusalBook()
    assert [one.count for one in book.tick(mesh(1), 0.0)] == [1]
    assert list(book.tick(mesh(5), EVERY_S - 1)) == []
    (late,) = book.tick(mesh(5), EVERY_S)
    assert (late.count, late.total, late.last) == (4, 5, "why")
    assert list(book.tick(mesh(5), 3 * EVERY_S)) == []


def test_a_sidecar_that_was_replaced_counts_from_nothing() -> None:
    book = RefusalBook()
    assert [one.count for one in book.tick(mesh(9), 0.0)] == [9]
    assert [one.count for one in book.tick(mesh(9, pid=2), EVERY_S)] == [9]


def test_what_a_caller_wrote_is_cut_and_made_plain() -> None:
    refusals = Refusals()
    refusals.saw("/x/\ud800\u202e" * 100, "why")
    assert refusals.count == 1
    assert len(refusals.last) == MAX_CHARS
    assert refusals.last.isascii()
