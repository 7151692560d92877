"""Whether an edit would be applied at this boundary: known before it is promised."""

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from paramd.memory.control_page import (
    BUFFERS_REFUSED,
    PAGE_BYTES,
    ControlPage,
    Refusal,
    Word,
    read_text,
    stands_of,
)
from paramd.memory.gate import TrainerGate
from paramd.trainer.boundary.agreement import CAPTURE, EDIT, RESUME, Request, Round
from paramd.trainer.boundary.hold import MOST_MISSED, BoundaryHandler, HoldState
from paramd.trainer.home.moving import BufferChangedError
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.sidecar.copying.page_requests import fate_of


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
    agreed: bool = False,
    copied: list[str] | None = None,
    computes: Callable[[], bool] = lambda: False,
    collect: Callable[[], Round | None] = lambda: None,
) -> BoundaryHandler:
    """A rank whose rounds agree on nothing, or on what it promised; a hold ends after some."""
    left = [rounds_left]
    copied = copied if copied is not None else []

    def exchange(request: Request, **_: Any) -> Round:
        left[0] -= 1
        if left[0] <= 0:
            page[Word.HELD] = HoldState.RUNNING
        return Round(request if agreed and request.number else None, True)

    agreement: Any = SimpleNamespace(
        alone=alone,
        due=True,
        passes=lambda *, wanted: False,
        collect=collect,
        exchange=exchange,
        finish=lambda: None,
        launch=launch,
    )
    nothing: Any = SimpleNamespace(
        stay=lambda: True, update=lambda heard: None, pass_boundary=lambda: None, end=lambda: None
    )
    home: Any = SimpleNamespace(
        copy_buffers=partial(copied.append, "buffers"),
        computes=computes,
        gather_again=lambda: copied.append("gathered"),
    )
    return BoundaryHandler(
        page, agreement, TrainerGate(page, stall_budget_ns=0), home=home, hold=nothing,
        editor=editor, copy_state=lambda _: copied.append("moments"), answer=lambda announce: None,
    )  # fmt: skip


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


class Failing(Asked):
    """An editor that cannot even look at what is asked for."""

    def accept(self, request: Request, *, now: bool) -> bool:
        raise RuntimeError("a fault of ours")


class Failed(Asked):
    failed = True


@pytest.mark.parametrize(
    ("editor", "action", "at_home", "held", "computes", "refusal"),
    [
        (Failing(), EDIT, True, False, False, Refusal.FAULTY),
        (Asked(), RESUME + 1, True, False, False, Refusal.FAULTY),
        (Failed(), EDIT, False, False, False, Refusal.AWAY),
        (Asked(), EDIT, False, True, False, Refusal.AWAY),
        (Asked(), EDIT, True, True, True, Refusal.GATHERED),
        (Asked(), EDIT, False, False, False, None),
        (Asked(), EDIT, True, False, True, None),
    ],
)
def test_what_a_rank_will_not_promise_it_refuses(
    page: ControlPage,
    editor: Asked,
    action: int,
    at_home: bool,
    held: bool,
    computes: bool,
    refusal: Refusal | None,
) -> None:
    """Else the others would wait for it; what it may promise at a later boundary it does not."""
    page[Word.READY], page[Word.ACTION] = 3, action
    page[Word.HELD] = HoldState.HELD if held else HoldState.RUNNING
    acting(page, editor, alone=False, rounds_left=2, computes=lambda: computes).at_boundary(at_home)
    assert page[Word.PROMISED] == 0
    assert page[Word.REFUSED] == (3 if refusal is not None else 0)
    if refusal is not None:
        assert page[Word.REFUSED_STEP] == refusal


def test_an_edit_whose_boundaries_all_lie_within_a_forward_of_fsdp_is_refused(
    page: ControlPage,
) -> None:
    """It would be waited for until the training ends."""
    page[Word.READY], page[Word.ACTION] = 3, EDIT
    handler = acting(page, Asked(), alone=False, computes=lambda: True)
    for _ in range(MOST_MISSED - 1):
        handler.at_boundary(True)
    assert page[Word.REFUSED] == 0
    handler.at_boundary(True)
    assert (page[Word.REFUSED], page[Word.REFUSED_STEP]) == (3, Refusal.GATHERED)


@pytest.mark.parametrize("at_home", [False, True])
def test_what_fsdp_left_gathered_is_gathered_again_after_an_edit_on_every_rank(
    page: ControlPage, at_home: bool
) -> None:
    found: list[str] = []
    handler = acting(page, Asked(), alone=True, copied=found)
    heard = Round(Request(3, 5, EDIT, 0), True)
    handler._hear(heard, at_home)
    assert found == ["gathered"]


class Applying(Asked):
    """An editor that promises whatever it is asked for, and notes what it applies."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def accept(self, request: Request, *, now: bool) -> bool:
        super().accept(request, now=now)
        return True

    def apply(self, request: Request, gate: TrainerGate) -> None:
        self.found.append(f"edit {request.number}")


@pytest.mark.parametrize("ends", [False, True])
def test_an_edit_agreed_on_within_a_forward_of_fsdp_is_applied_after_it(
    page: ControlPage, ends: bool
) -> None:
    """Promised at one boundary, it is agreed on at the next: that forward has gathered before."""
    found: list[str] = []
    computes = [False]
    editor = Applying(found)
    heard: list[Round | None] = [None]
    handler = acting(
        page, editor, alone=False, copied=found, computes=lambda: computes[0],
        collect=lambda: heard[0],
    )  # fmt: skip
    page[Word.READY], page[Word.TOKEN], page[Word.ACTION] = 3, 5, EDIT
    handler.at_boundary(True)
    assert page[Word.PROMISED] == 3
    computes[0] = True
    handler._hear(Round(Request(3, 5, EDIT, 0), True), True)
    assert (page[Word.AGREED], page[Word.EDIT_AGREED], page[Word.PROMISED]) == (3, 3, 0)
    heard[0] = Round(None, True, postponed=3)
    # Others are promised meanwhile: a pause at this boundary can be ended. Another edit waits.
    page[Word.READY] = 4
    handler.at_boundary(True)
    assert page[Word.PROMISED] == 0
    page[Word.READY], page[Word.ACTION] = 5, RESUME
    handler.at_boundary(True)
    assert page[Word.PROMISED] == 5
    handler.leave()
    assert found == [], "it computes still"
    computes[0] = False
    if ends:
        # The process ends: no forward follows, and the other ranks may be gone.
        handler.leave()
        assert found == ["edit 3"]
    else:
        handler.at_boundary(True)
        handler.at_boundary(True)
        assert found == ["edit 3", "gathered"]


def test_an_edit_that_a_detach_leaves_postponed_is_told_as_failed(
    page: ControlPage, caplog: pytest.LogCaptureFixture
) -> None:
    """Its sidecar, which is asked for the edit's fate, would find it agreed on for ever."""
    found: list[str] = []
    handler = acting(page, Applying(found), alone=False, copied=found, computes=lambda: True)
    handler._hear(Round(Request(3, 5, EDIT, 0), True), True)
    assert fate_of(page.words, 3, ended=False) == pb.BOUNDARY_FATE_AGREED
    handler.close()
    assert fate_of(page.words, 3, ended=False) == pb.BOUNDARY_FATE_TORN
    assert (found, "edit 3 is not applied" in caplog.text) == ([], True)


def test_an_edit_that_others_have_applied_already_is_not_applied_at_a_later_step(
    page: ControlPage,
) -> None:
    """Stages of a pipeline: FSDP computes at the boundary of one, and not of the other."""
    found: list[str] = []
    computes, sent = [False], list[dict[str, Any]]()
    heard: list[Round | None] = [None]
    handler = acting(
        page, Applying(found), alone=False, computes=lambda: computes[0], collect=lambda: heard[0],
        launch=lambda request, **more: sent.append(more),
    )  # fmt: skip
    page[Word.READY], page[Word.TOKEN], page[Word.ACTION] = 3, 5, EDIT
    handler.at_boundary(True)
    computes[0], heard[0] = True, Round(Request(3, 5, EDIT, 0), True)
    handler.at_boundary(True)
    assert (sent[-1]["within"], sent[-1]["postponed"], sent[-1]["pending"]) == (True, 3, True)
    # The round of that boundary: not all ranks have postponed it.
    computes[0], heard[0] = False, Round(None, True, differs=True)
    handler.at_boundary(True)
    assert found == []
    assert (page[Word.EDIT_AGREED], page[Word.EDIT_FAILED]) == (3, 3)
    assert sent[-1]["postponed"] == 0
    # From now on all ranks refuse edits, rather than wait for a boundary that all can take.
    heard[0], page[Word.READY], page[Word.TOKEN] = None, 4, 6
    handler.at_boundary(True)
    assert (page[Word.REFUSED], page[Word.REFUSED_STEP]) == (4, Refusal.GATHERED)


@pytest.mark.parametrize(("wanted", "copied"), [(2, []), (3, ["buffers", "moments"]), (4, [])])
def test_what_a_withdrawn_request_wanted_is_not_copied_for_another(
    page: ControlPage, wanted: int, copied: list[str]
) -> None:
    page[Word.READY], page[Word.ACTION], page[Word.STEP] = 3, CAPTURE, 7
    page[Word.BUFFERS_WANTED] = page[Word.MOMENTS_WANTED] = wanted
    page[Word.BUFFERS_STEP] = 6
    found: list[str] = []
    acting(page, Asked(), alone=True, agreed=True, copied=found).at_boundary(True)
    assert page[Word.AGREED] == 3
    assert found == copied
    assert page[Word.BUFFERS_STEP] == (7 if copied else 6)


def test_buffers_of_another_shape_are_told_once_in_one_line(
    page: ControlPage, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise BufferChangedError("buffer 'cache' was float32 [4] and is float32 [5] now")

    copied: Any = SimpleNamespace(append=refuse)
    handler = acting(page, Asked(), alone=True, agreed=True, copied=copied)
    for number in (3, 4):
        page[Word.READY], page[Word.ACTION], page[Word.BUFFERS_WANTED] = number, CAPTURE, number
        handler.at_boundary(True)
        assert (page[Word.AGREED], page[Word.BUFFERS_STEP]) == (number, BUFFERS_REFUSED)
        assert read_text(page).startswith("buffer 'cache'")
    assert [one.message for one in caplog.records] == [f"paramd: {read_text(page)}"]
    times, total_ns, longest_ns = stands_of(page)["state"]
    assert (times, 0 < longest_ns <= total_ns) == (2, True)
