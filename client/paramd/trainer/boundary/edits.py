"""Apply edits: the training thread runs a staged program at an agreed boundary.

    accept    when a round is launched: parse the program, fault in its memory, make its
              views; large ones in the background, and not promised until that is done
    apply     at the agreed boundary: EDIT_AGREED, SEQ odd, the operations, SEQ even, then
              EDIT_APPLIED; a trainer killed in between leaves its rank torn

A program that cannot run is refused (word REFUSED) and never promised, so no rank applies it.
So is an edit with `if_step`, unless the round ends at this very boundary and that is the step:
agreement needs every rank's promise, so the compare-and-swap happens on all ranks or none.
"""

from __future__ import annotations

import errno
import logging
import mmap
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from paramd.errors import ExhaustedError, ParamdError, UsageError
from paramd.layout.types import joined
from paramd.memory.arena import HostArena
from paramd.memory.control_page import ControlPage, Refusal, Word
from paramd.memory.descriptors import SparseMemory, populate
from paramd.memory.edit_program import (
    ANY_STEP,
    NO_DATA,
    Note,
    NoteKind,
    Record,
    note_of,
    parse_program,
    read_note,
    record_count,
    wanted_step,
    write_answer,
)
from paramd.memory.gate import TrainerGate
from paramd.tensors.edit_ops import Views, run
from paramd.trainer.boundary.agreement import Request, refuse
from paramd.trainer.boundary.optimizers import (
    HyperparameterChange,
    Owned,
    find_owned,
    owner_of,
    zero_moments,
)
from paramd.trainer.home.device import DeviceMemory
from paramd.trainer.home.mirrored import MirroredHome

log = logging.getLogger("paramd")

AT_ONCE_RECORDS = 32
AT_ONCE_BYTES = 2 << 20
"""Programs up to these sizes are prepared inline at the boundary: some 0.5 ms."""

NO_STATES = "this training keeps no states; attach it with resume='auto'"


@dataclass(slots=True)
class _Step:
    record: Record
    target: torch.Tensor
    data: torch.Tensor | None
    preimage: torch.Tensor | None
    owner: Owned | None = None


class Deed(Protocol):
    """An action that an edit's note asks for. Training thread only."""

    exact: bool
    """Whether it is promised only in a round that ends at the boundary where it is done."""

    @property
    def spans(self) -> Sequence[tuple[int, int]]:
        """The spans of edit memory that it touches."""

    def refusal(self) -> str:
        """Why it cannot be done at this boundary; empty if it can."""

    def apply(self, token: int) -> str:
        """Do it, and write what undoes it to the note; return remarks for its user."""


@dataclass(slots=True)
class _Preparation:
    """A program being prepared; ends with `steps` or `refusal`."""

    request: Request
    steps: list[_Step] | None = None
    owners_found: bool = False
    deed: Deed | None = None
    note: int = 0
    refusal: str = ""
    if_step: int = ANY_STEP
    done: threading.Event = field(default_factory=threading.Event)


class Editor:
    """One rank's edits. Only the training thread calls `accept` and `apply`."""

    def __init__(
        self,
        page: ControlPage,
        arena: HostArena | DeviceMemory,
        edits: SparseMemory,
        *,
        at_point: Callable[[str], None] | None = None,
        mirror: MirroredHome | None = None,
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        """`mirror`: the home of the parameters when they are not in the arena. `finish`: waits
        until a device has done what training queued."""
        self._finish = finish
        self._words = page.words
        self._arena = arena
        self._mirror = mirror
        self._edits = edits
        self._arena_views = Views(
            arena.buffer if isinstance(arena, HostArena) else arena.at(0, arena.size_bytes)
        )
        self._edit_views = Views(edits.buffer)
        self._present: tuple[int, list[tuple[int, int]]] = (0, [])
        self._at_point = at_point if at_point is not None else lambda _: None
        self._preparation: _Preparation | None = None
        self.optimizers: Collection[torch.optim.Optimizer] = ()
        self.given: Callable[[], Sequence[torch.optim.Optimizer]] = lambda: list(self.optimizers)
        """The optimizers in the order they were given to attach."""
        self.groups_changed: Callable[[], None] = lambda: None
        """Called when an edit has changed hyper-parameters, before it ends."""
        self.rollback: Callable[[Note, SparseMemory], Deed] | None = None
        """Makes a rollback of its note; None: this training keeps no earlier states."""
        self.failed = False
        """Whether an edit failed half way: the arena must no longer be served."""

    def accept(self, request: Request, *, now: bool) -> bool:
        """Whether an edit's program is ready to apply; starts preparing it if new.

        `now`: once all ranks promise, it is applied at this boundary; else at the next, whose step
        is not known yet.
        """
        preparation = self._preparation
        if preparation is None or preparation.request != request:
            preparation = self._preparation = _Preparation(request)
            self._begin(preparation)
        if not preparation.done.is_set():
            return False
        step = self._words[Word.STEP]
        fits = preparation.if_step == ANY_STEP or (now and preparation.if_step == step)
        if preparation.refusal or not fits:
            self._refuse(preparation, step if now else step + 1)
            return False
        if self.failed:
            refuse(self._words, request.number, Refusal.AWAY)
            return False
        deed = preparation.deed
        if deed is not None and deed.exact and not now:
            if not self._words[Word.HELD]:
                refuse(self._words, request.number, Refusal.NOT_HELD)
            return False
        preparation.refusal = self._why_not(preparation)
        if preparation.refusal:
            self._refuse(preparation, Refusal.FAULTY)
        return not preparation.refusal

    def _why_not(self, preparation: _Preparation) -> str:
        try:
            if not preparation.owners_found:
                self._find_owners(preparation)
            return preparation.deed.refusal() if preparation.deed is not None else ""
        except Exception as error:
            # Refused, not raised: the others would wait for a rank that neither promises nor
            # refuses.
            log.exception("paramd: an edit could not be examined")
            return repr(error)

    def apply(self, request: Request, gate: TrainerGate) -> None:
        """Change the parameters. EDIT_AGREED and AGREED have been written already."""
        words = self._words
        preparation, self._preparation = self._preparation, None
        self._at_point("agreed")
        begin_ns, step = time.monotonic_ns(), words[Word.STEP]
        if preparation is not None and preparation.if_step not in (ANY_STEP, words[Word.STEP]):
            words[Word.EDIT_FAILED] = request.number
            raise AssertionError("an edit was promised for another step than that of its boundary")
        gate.begin_update()
        try:
            if preparation is None or preparation.request != request or preparation.steps is None:
                raise AssertionError("an edit was promised that had not been prepared")
            if self._mirror is not None:
                gate.begin_mirror()
            self._finish()
            self._run(preparation.steps)
            if preparation.deed is not None:
                told = preparation.deed.apply(request.token)
                write_answer(self._edits.buffer, preparation.note, told)
        except BaseException:
            # SEQ stays odd: the parameters mix two states.
            self.failed = True
            words[Word.EDIT_FAILED] = request.number
            raise
        gate.end_edit()
        words[Word.EDIT_NS] = time.monotonic_ns() - begin_ns
        words[Word.EDIT_STEP] = step
        words[Word.EDIT_TOKEN] = request.token
        # Last: it publishes the words above and ends the span in which a death means torn.
        words[Word.EDIT_APPLIED] = request.number
        self._at_point("applied")

    def close(self) -> None:
        preparation, self._preparation = self._preparation, None
        if preparation is not None:
            # Its thread still touches this memory.
            preparation.done.wait()
        self._arena_views = self._edit_views = Views(memoryview(b""))
        self._edits.close()

    def _begin(self, preparation: _Preparation) -> None:
        if record_count(self._edits.buffer, preparation.request.argument) <= AT_ONCE_RECORDS:
            self._prepare(preparation, AT_ONCE_BYTES)
        if not preparation.done.is_set():
            threading.Thread(
                target=self._prepare, args=(preparation,), name="paramd-edit", daemon=True
            ).start()

    def _prepare(self, preparation: _Preparation, most_bytes: int | None = None) -> None:
        """Prepare a program or record a refusal; return undone if it exceeds `most_bytes`."""
        try:
            program = preparation.request.argument
            records = parse_program(self._edits.buffer, program, arena_bytes=self._arena.size_bytes)
            preparation.deed = self._deed(preparation, note_of(self._edits.buffer, program))
            spans = _spans(records)
            if preparation.deed is not None:
                spans = joined([*spans, *preparation.deed.spans], mmap.PAGESIZE)
            if most_bytes is not None and sum(end - begin for begin, end in spans) > most_bytes:
                return
            self._fault_in(spans)
            preparation.if_step = wanted_step(self._edits.buffer, program)
            preparation.steps = self._steps(records)
        except ParamdError as error:
            preparation.refusal = str(error)
        except Exception as error:
            log.exception("paramd: an edit could not be prepared")
            preparation.refusal = repr(error)
        # Last: the training thread reads the outcome only once this is set.
        preparation.done.set()

    def _deed(self, preparation: _Preparation, begin: int) -> Deed | None:
        if not begin:
            return None
        note = read_note(self._edits.buffer, begin)
        preparation.note = begin
        if note.kind is NoteKind.HYPERPARAMETERS:
            return HyperparameterChange(note, self._edits.buffer, self.given, self.groups_changed)
        if self.rollback is None:
            raise UsageError(NO_STATES)
        return self.rollback(note, self._edits)

    def _fault_in(self, spans: Sequence[tuple[int, int]]) -> None:
        """Populate the page tables of the spans that are not known to be present.

        So applying neither pays for first touches nor fails on one. Raises ExhaustedError if a
        range is not reserved and the machine is out of memory.
        """
        # Read before faulting in: a hole punched meanwhile changes the count and voids the result.
        holes, (seen, known) = self._words[Word.EDIT_HOLES], self._present
        if holes != seen:
            known = []
        missing = [s for s in spans if not any(k[0] <= s[0] and s[1] <= k[1] for k in known)]
        for begin, end in missing:
            first = begin // mmap.PAGESIZE * mmap.PAGESIZE
            number = populate(self._edits.address + first, end - first)
            if number not in (0, errno.EINVAL):  # an older kernel pays at the first touch
                raise ExhaustedError(
                    f"{end - begin:,} bytes of staged data are missing (errno {number}); "
                    "stage the edit again"
                )
        self._present = holes, joined([*known, *missing], mmap.PAGESIZE)

    def _find_owners(self, preparation: _Preparation) -> None:
        """Call only at a boundary: elsewhere FSDP1 may point parameters at gathered memory."""
        preparation.owners_found = True
        steps = preparation.steps if preparation.steps is not None else []
        if any(step.record.reset_moments for step in steps):
            locate = self._mirror.locator() if self._mirror is not None else None
            arena = self._arena
            owned = find_owned(self.optimizers, arena.address, arena.size_bytes, locate)
            for step in steps:
                if step.record.reset_moments:
                    step.owner = owner_of(owned, step.record)

    def _steps(self, records: Sequence[Record]) -> list[_Step]:
        at, dense = self._arena_views.at, self._edit_views.dense
        return [
            _Step(
                record,
                at(record.dtype, record.arena_begin, record.sizes, record.strides),
                dense(record, record.data_begin),
                dense(record, record.preimage_begin),
            )
            for record in records
        ]

    def _run(self, steps: Sequence[_Step]) -> None:
        lives: Sequence[torch.Tensor | None] = [None] * len(steps)
        if self._mirror is not None:
            lives = self._mirror.live([step.record for step in steps])
        with torch.no_grad():
            for number, (step, live) in enumerate(zip(steps, lives, strict=True)):
                if live is not None:
                    step.target.copy_(live)
                _run_on_host(step)
                if live is not None:
                    live.copy_(step.target)
                if step.owner is not None:
                    zero_moments(step.owner, step.record)
                if number == 0:
                    self._at_point("applying")

    def _refuse(self, preparation: _Preparation, step: int) -> None:
        words, number = self._words, preparation.request.number
        if words[Word.REFUSED] == number:
            return
        if preparation.refusal and preparation.note:
            write_answer(self._edits.buffer, preparation.note, preparation.refusal)
        words[Word.REFUSED_IF_STEP] = preparation.if_step
        refuse(words, number, Refusal.FAULTY if preparation.refusal else step)
        reason = preparation.refusal or f"it is for step {preparation.if_step}, not {step} or later"
        log.warning("paramd: edit request %d is refused: %s", number, reason)


def _run_on_host(step: _Step) -> None:
    """Run a step whose staged values, and those kept for an undo, are in host memory."""
    on_host = step.target.device.type == "cpu"
    target = step.target if on_host else step.target.cpu()
    run(step.record, target, step.data, step.preimage)
    if not on_host:
        step.target.copy_(target)


def _spans(records: Sequence[Record]) -> list[tuple[int, int]]:
    """The joined spans of edit memory that the program touches."""
    return joined(
        (
            (place, place + record.size_bytes)
            for record in records
            for place in (record.data_begin, record.preimage_begin)
            if place != NO_DATA
        ),
        # On the same or adjacent pages.
        mmap.PAGESIZE,
    )
