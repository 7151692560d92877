"""Gradient capture in the pre-hook: copy what the sidecar armed for this update.

Each update reads two words and does nothing more if they name another update. It never waits
for a slot to be armed, unless the operator lets lossless readers hold up an update for a
bounded time (`lossless_budget_ms`).

Optimizers that step within the backward free some gradients before others exist: their
updates have no gradient frame, and readers are told that it was left out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from paramd.memory.control_page import ControlPage, Word
from paramd.memory.descriptors import wake
from paramd.memory.gradient_program import MAX_NOTES, Note, Notes, Slot
from paramd.memory.shared import GRADIENT_SLOTS
from paramd.memory.sparse import SparseMemory
from paramd.trainer.boundary.gradient_sources import (
    Pieces,
    Room,
    Source,
    copy_gradient,
    find_sources,
)
from paramd.trainer.boundary.signals import backward_id
from paramd.trainer.home.devices import finish_copies

log = logging.getLogger("paramd")

# Plain ints: these are read on every update.
_STEP, _GRADIENTS_STEP = int(Word.STEP), int(Word.GRADIENTS_STEP)
_ARM_SLOT0, _ARM_SLOT1 = int(Word.ARM_SLOT0), int(Word.ARM_SLOT1)
_LOSSLESS_EVERY = int(Word.LOSSLESS_EVERY)

POLL_S = 50e-6
"""Poll interval while an update waits for a lossless reader."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """How to serve one version of a program for one owner."""

    version: int
    owner: object
    """Kept alive so that its id is not reused."""
    shape: tuple[int, ...]
    """Parameters in each of the optimizer's groups; adding one invalidates the plan."""
    sources: list[Source]
    notes: list[Note]
    devices: tuple[torch.device, ...]
    """Devices other than the host that hold gradients."""


class GradientCapture:
    """One rank's side of gradient frames. Called only on the thread that runs updates."""

    def __init__(
        self,
        page: ControlPage,
        wake_descriptor: int,
        descriptor: int,
        *,
        arena_bytes: int,
        pieces: Callable[[], Pieces],
        lossless_budget_ns: int,
    ) -> None:
        """`descriptor` is the gradient memory's; `pieces` is called once per plan."""
        self._words = page.words
        self._wake_descriptor = wake_descriptor
        self._pieces = pieces
        self._budget_ns = lossless_budget_ns
        self._memory = SparseMemory(descriptor)
        self._slots: list[tuple[Slot, Room]] = []
        for index in range(GRADIENT_SLOTS if arena_bytes else 0):
            slot = Slot(self._memory.buffer, arena_bytes, index)
            begin, end = slot.begin_bytes, slot.tail_begin_bytes
            room = Room(self._memory.buffer[begin:end], self._memory.address + begin)
            self._slots.append((slot, room))
        self._plans: dict[tuple[int, int], _Plan] = {}
        self._clip_factor = 0.0
        self._failed = False
        self.iteration: Callable[[], int] = lambda: -1
        """Backward passes this rank has seen."""

    def clipped(self, factor: float) -> None:
        """Note that the next update's gradients were multiplied by `factor`."""
        self._clip_factor = factor

    def before_update(self, owner: object) -> None:
        """Call before each update begins. Never raises; waits only for lossless readers.

        Args:
            owner: the optimizer about to update; anything else means all parameters.
        """
        words = self._words
        step = words[_STEP] + 1
        if self._budget_ns and words[_LOSSLESS_EVERY]:
            self._await_reader(step)
        if words[_ARM_SLOT0] == step:
            self._serve(0, step, owner)
        if words[_ARM_SLOT1] == step:
            self._serve(1, step, owner)
        # After the DONE words: a reader that sees this knows no more will come for this update.
        words[_GRADIENTS_STEP] = step
        self._clip_factor = 0.0

    def close(self) -> None:
        """Release the memory."""
        for slot, _ in self._slots:
            slot.close()
        self._slots.clear()
        self._plans.clear()
        self._memory.close()

    def _serve(self, index: int, step: int, owner: object) -> None:
        words, done = self._words, -step
        slot, room = self._slots[index]
        if words[slot.done_word] == step:
            return
        try:
            if (
                not _skips(owner)
                and backward_id() == -1
                and self._fill(index, slot, room, step, owner)
            ):
                done = step
        except Exception:
            if not self._failed:
                log.exception("paramd: gradients could not be captured; training goes on")
            self._failed = True
        words[slot.done_word] = done
        wake(self._wake_descriptor)

    def _fill(self, index: int, slot: Slot, room: Room, step: int, owner: object) -> bool:
        plan = self._plan(index, slot, owner)
        if plan is None:
            return False
        notes = list(plan.notes)
        with torch.no_grad():
            for source in plan.sources:
                notes += copy_gradient(source, room)
        finish_copies(plan.devices)
        if len(notes) > MAX_NOTES:
            return False
        slot.write_notes(
            Notes(
                step,
                plan.version,
                _scale(owner),
                self._clip_factor,
                tuple(notes),
                self.iteration(),
            )
        )
        return True

    def _plan(self, index: int, slot: Slot, owner: object) -> _Plan | None:
        shape = tuple(len(group["params"]) for group in getattr(owner, "param_groups", ()))
        known = self._plans.get((index, id(owner)))
        if known is not None and (known.version, known.shape) == (slot.version(), shape):
            return known
        program = slot.read_program()
        if program is None:
            return None
        version, spans = program
        sources, notes = find_sources(self._pieces(), spans, owner)
        found = dict.fromkeys(source.local.device for source in sources)
        devices = tuple(device for device in found if device.type != "cpu")
        plan = _Plan(version, owner, shape, sources, notes, devices)
        self._plans = {
            k: p for k, p in self._plans.items() if k[0] != index or p.version == version
        }
        self._plans[index, id(owner)] = plan
        return plan

    def _await_reader(self, step: int) -> None:
        """Wait, within the budget, until a lossless reader has armed this step."""
        words = self._words
        if step % words[Word.LOSSLESS_EVERY]:
            return
        now_ns = time.monotonic_ns()
        end_ns = now_ns + self._budget_ns
        while (
            step not in (words[Word.ARM_SLOT0], words[Word.ARM_SLOT1])
            and now_ns < end_ns
            and now_ns < words[Word.LOSSLESS_UNTIL_NS]
        ):
            time.sleep(POLL_S)
            now_ns = time.monotonic_ns()


def _skips(owner: object) -> bool:
    """Whether this update has no frame: skipped by a gradient scaler, or within a backward."""
    if backward_id() != -1:
        return True
    found: Any = getattr(owner, "found_inf", None)
    return isinstance(found, torch.Tensor) and bool(found.item())


def _scale(owner: object) -> float:
    """The loss scale a fused optimizer still divides by; others get gradients unscaled."""
    scale: Any = getattr(owner, "grad_scale", None)
    return float(scale.item()) if isinstance(scale, torch.Tensor) else 1.0
