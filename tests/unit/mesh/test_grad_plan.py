"""Which ranks are asked for a gradient that turns out to be a sum over some of them."""

from __future__ import annotations

from paramd.layout.select import NameIndex
from paramd.layout.types import Box, Layout, Piece, TensorKind, TensorLayout
from paramd.mesh.frames.frames import GradNote, PartialGroups, ask_for, make_plan


def layout() -> Layout:
    """Four ranks as 2 x 2: `w` is halved along the first axis and held twice along the second."""
    halves = [Box((0, 0), (2, 3)), Box((2, 0), (4, 3))]
    pieces = tuple(Piece(rank, 64 * rank, halves[rank // 2]) for rank in range(4))
    whole = tuple(Piece(rank, 256, Box((0,), (5,))) for rank in range(4))
    tensors = (
        TensorLayout("w", "float32", (4, 3), TensorKind.PARAMETER, pieces),
        TensorLayout("b", "float32", (5,), TensorKind.PARAMETER, whole),
    )
    return Layout(4, (512,) * 4, tensors)


def test_a_sum_is_probed_on_all_holders_then_read_from_its_group() -> None:
    index = NameIndex(layout())
    asked = ask_for(index, ["*"], None)
    learnt = PartialGroups()
    first = make_plan(index.layout, asked, learnt, prefer=None)
    assert not first.sums.ranks
    reader = next(rank for rank, number in first.used if number == 0)
    group = {0: 1, 1: 1, 2: 3, 3: 3}
    assert not learnt.update(first, [GradNote(reader, 0, 0, group[reader])])

    probe = make_plan(index.layout, asked, learnt, prefer=None)
    assert {rank for rank, number in probe.used if number == 0} == {0, 1, 2, 3}
    notes = [GradNote(rank, 0, 0, group[rank]) for rank in range(4)]
    assert not learnt.update(probe, notes), "who belongs together was not known when it was asked"

    final = make_plan(index.layout, asked, learnt, prefer=None)
    assert len(final.layers[0]) == 2, "each half is the sum of two ranks"
    assert not final.layers[1]
    assert learnt.update(final, notes)
    other = [GradNote(rank, 0, 0, 1) for rank in range(4)]
    assert not learnt.update(final, other), "the groups changed: learnt anew"


def test_without_sums_each_element_is_read_once() -> None:
    index = NameIndex(layout())
    asked = ask_for(index, ["*"], None)
    plan = make_plan(index.layout, asked, PartialGroups(), prefer=None)
    assert sum(landing.size_bytes for read in plan.plan.ranks for landing in read.landings) == (
        4 * (12 + 5)
    )
    assert PartialGroups().update(plan, [GradNote(0, 0, 1, 0)])


def test_rows_are_spread_evenly() -> None:
    index = NameIndex(layout())
    (w,) = ask_for(index, ["w"], 2)
    assert (w.rows, w.shape) == ((0, 2), (2, 3))
    (few,) = ask_for(index, ["w"], 9)
    assert few.rows is None
    (cut,) = ask_for(index, ["w[1:4]"], 2)
    assert cut.rows == (1, 2)
