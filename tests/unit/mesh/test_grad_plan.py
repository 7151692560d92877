"""Which ranks are asked for a gradient that turns out to be a sum over some of them."""

import pytest
import torch

from paramd.layout.select import NameIndex
from paramd.layout.types import Box, Layout, Piece, TensorKind, TensorLayout
from paramd.mesh.frames.frames import GradNote, PartialGroups, ask_for, make_plan
from paramd.mesh.frames.grad_tensors import Sums


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
    asked, learnt = ask_for(index, ["*"], None), PartialGroups()
    first = make_plan(index.layout, asked, learnt, costs=None)
    assert not first.sums.ranks
    reader = next(rank for rank, number in first.used if number == 0)
    group = {0: 1, 1: 1, 2: 3, 3: 3}
    assert not learnt.update(first, [GradNote(reader, 0, 0, group[reader])])

    probe = make_plan(index.layout, asked, learnt, costs=None)
    assert {rank for rank, number in probe.used if number == 0} == {0, 1, 2, 3}
    notes = [GradNote(rank, 0, 0, group[rank]) for rank in range(4)]
    assert not learnt.update(probe, notes), "who belongs together was not known when it was asked"

    final = make_plan(index.layout, asked, learnt, costs=None)
    assert len(final.layers[0]) == 2, "each half is the sum of two ranks"
    assert not final.layers[1]
    assert learnt.update(final, notes)
    other = [GradNote(rank, 0, 0, 1) for rank in range(4)]
    assert not learnt.update(final, other), "the groups changed: learnt anew"
    again = make_plan(index.layout, asked, learnt, costs=None)
    assert again.probed == {0}
    assert not learnt.update(again, other)
    assert learnt.update(make_plan(index.layout, asked, learnt, costs=None), other)


def test_what_was_asked_for_before_the_groups_were_known_is_never_read() -> None:
    """Frames are asked for ahead: two under each plan."""
    index = NameIndex(layout())
    asked, learnt = ask_for(index, ["w"], None), PartialGroups()
    notes = [GradNote(rank, 0, 0, 1 + rank // 2 * 2) for rank in range(4)]
    plans = [make_plan(index.layout, asked, learnt, costs=None) for _ in range(2)]
    read = []
    for _ in range(8):
        plan = plans.pop(0)
        plans.append(make_plan(index.layout, asked, learnt, costs=None))
        if learnt.update(plan, notes):
            read.append(len(plan.layers[0]))
            assert not plan.probed
            assert plan.groups == {0: {0: 1, 1: 1, 2: 3, 3: 3}}
    assert read == [2, 2]


def test_a_sum_that_is_one_no_longer_is_not_read_as_one_and_none_changes_nothing() -> None:
    index = NameIndex(layout())
    asked = ask_for(index, ["w"], None)
    learnt = PartialGroups(groups={0: {0: 1, 1: 1, 2: 3, 3: 3}})
    plan = make_plan(index.layout, asked, learnt, costs=None)
    none = [GradNote(rank, 0, 1, 0) for rank in range(4)]
    assert learnt.update(plan, none), "no gradient in this frame"
    assert learnt.groups
    assert not learnt.update(plan, []), "each rank has the whole gradient"
    assert learnt.probing == {0}


@pytest.mark.parametrize(
    ("summands", "dtype", "wanted", "found"),
    [
        ([1000.25, -1000.0], torch.float32, torch.bfloat16, 0.25),
        ([256.0, 1.0, 1.0], torch.bfloat16, None, 258.0),
        ([2.0**24, 1.0, 1.0], torch.float32, torch.float64, 2.0**24),
        ([2.0**24, 1.0, 1.0], torch.float64, torch.float32, 2.0**24 + 2),
        ([448.0, -416.0, 0.5], torch.float8_e4m3fn, None, 32.0),
    ],
)
def test_a_sum_is_rounded_once(
    summands: list[float], dtype: torch.dtype, wanted: torch.dtype | None, found: float
) -> None:
    sums = Sums()
    for value in summands:
        sums.add({3: torch.full((2,), value).to(dtype)})
    (result,) = sums.rounded(wanted).values()
    assert result.dtype is (wanted if wanted is not None else dtype)
    assert result.double().tolist() == [found] * 2
