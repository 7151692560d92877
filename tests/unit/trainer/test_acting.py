"""Whether an edit would be applied at this boundary: known before it is promised."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from paramd.memory.control_page import PAGE_BYTES, ControlPage, Word
from paramd.memory.gate import TrainerGate
from paramd.trainer.boundary.agreement import EDIT, Request, Round
from paramd.trainer.boundary.hold import BoundaryHandler, HoldState


@pytest.fixture
def page() -> Iterator[ControlPage]:
    descriptor = os.memfd_create("page")
    os.ftruncate(descriptor, PAGE_BYTES)
    page = ControlPage(descriptor)
    os.close(descriptor)
    yield page
    page.close()


class Asked:
    """An editor that notes for which boundary it is asked."""

    failed = False

    def __init__(self) -> None:
        self.now: list[bool] = []

    def accept(self, request: Request, *, now: bool) -> bool:
        self.now.append(now)
        return False

    def apply(self, request: Request, gate: TrainerGate) -> None:
        raise AssertionError("nothing was promised")


def acting(
    page: ControlPage, editor: Asked, *, alone: bool, rounds_left: int = 1
) -> BoundaryHandler:
    """A rank whose rounds agree on nothing; a hold ends after some of them."""
    left = [rounds_left]

    def exchange(request: Request, **_: Any) -> Round:
        left[0] -= 1
        if left[0] <= 0:
            page[Word.HELD] = HoldState.RUNNING
        return Round(None, True)

    agreement: Any = SimpleNamespace(
        alone=alone,
        due=True,
        passes=lambda *, wanted: False,
        collect=lambda: None,
        exchange=exchange,
        launch=lambda request, **_: None,
    )
    nothing: Any = SimpleNamespace(
        stay=lambda: True, update=lambda heard: None, pass_boundary=lambda: None, end=lambda: None
    )
    return BoundaryHandler(
        page,
        agreement,
        TrainerGate(page, stall_budget_ns=0),
        hold=nothing,
        editor=editor,
        copy_buffers=lambda: None,
        mirror_moments=lambda: None,
        answer=lambda announce: None,
    )


@pytest.mark.parametrize(
    ("alone", "held", "now"),
    [(False, False, [False]), (True, False, [True]), (False, True, [True, True, False])],
)
def test_an_edit_is_promised_for_this_boundary_in_rounds_that_are_exchanged_alone(
    page: ControlPage, alone: bool, held: bool, now: list[bool]
) -> None:
    """A round that is launched ends at the next boundary."""
    page[Word.STEP], page[Word.READY], page[Word.ACTION] = 7, 1, EDIT
    page[Word.HELD] = HoldState.HELD if held else HoldState.RUNNING
    editor = Asked()
    acting(page, editor, alone=alone, rounds_left=2).at_boundary(True)
    assert editor.now == now
