"""Whether an edit would be applied at this boundary: known before it is promised."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
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
    page: ControlPage,
    editor: Asked,
    *,
    alone: bool,
    rounds_left: int = 1,
    launch: Callable[..., None] = lambda request, **_: None,
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
        launch=launch,
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
        copy_state=lambda _: None,
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


def test_a_rank_is_quiet_until_its_sidecar_has_a_client_and_again_later(page: ControlPage) -> None:
    quiet: list[bool] = []

    def launch(_request: Request, **sent: Any) -> None:
        quiet.append(sent["quiet"])

    handler = acting(page, Asked(), alone=False, launch=launch)
    now_ns = time.monotonic_ns()
    for until_ns in (0, now_ns + 60_000_000_000, now_ns - 1):
        page[Word.CLIENTS_UNTIL_NS] = until_ns
        handler.at_boundary(True)
    assert quiet == [True, False, True]
