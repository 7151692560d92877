"""The continuation record: what resuming needs beside parameters, buffers and state tensors.

    update ends      random states, and what the script iterates over (loaders), are noted: the
                     script fetches its next batch only after this
    continues        state tensors and buffers are brought into shared memory, all other kept
                     objects (schedulers, scalers) are noted, the record is written: complete
    `end_iteration()`         the script's loop body is over: complete at once

A trainer that dies with a complete record of the step its parameters are at can be resumed
without loss; one that dies between its update and the record cannot. A script with several
optimizers settles in the middle of its loop, and one that has its updates in `update()` right
after them, so there only `end_iteration()` completes a record.

    {"step", "incarnation", "groups", "others", "threads", "early", "late", "random_forward"}

The sidecar reads step, groups and threads (memory/optimizer_state.py).

`random_forward` is the state at the first forward after the boundary, when it is known: the
script's own draws since, such as a seed for its loader, do not change what its layers draw.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from paramd.errors import ConflictError, UnreachableError, UsageError
from paramd.memory.continuation import MAX_PAYLOAD_BYTES, RECORD, TABLE, KeptSlots
from paramd.memory.control_page import ControlPage, Word, Words, step_of
from paramd.memory.descriptors import SparseMemory
from paramd.trainer.home.owned import ParameterStorage
from paramd.trainer.resume.codec import decode, encode, random_state, set_random_state
from paramd.trainer.resume.optimizer_home import OptimizerHome

log = logging.getLogger("paramd")


LEAST_PACE, MOST_PACE = 10, 10_000
"""Fewest and most steps between standing snapshots when their cost decides."""

RETRY_S, MOST_RETRY_S = 2.0, 600.0
"""Pauses, in seconds, after a sidecar failed to make memory, since training waits for each try."""

SOON_COUNT = 8
"""The first steps of a start, which all have a standing snapshot; then those of powers of two."""


@runtime_checkable
class Keepable(Protocol):
    """An object that `extra_state` accepts."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class Keeping:
    """Cost of recording for the training thread."""

    count: int
    total_s: float
    longest_s: float
    last_bytes: int
    standing_step: int
    """Step of this rank's last complete standing snapshot; 0: none."""
    copies_step: int = 0
    """Step of the last one that all ranks have copied to other hosts; 0: none."""


def check_keep(keep: Mapping[str, Any]) -> None:
    """Check that every object can be kept, by keeping it once.

    UsageError names an object that has no `state_dict` and `load_state_dict`, or a state that is
    too large or has no form without pickle.
    """
    for name, thing in keep.items():
        if not isinstance(name, str) or not isinstance(thing, Keepable):
            raise UsageError(
                f"extra_state[{name!r}] is a {type(thing).__name__}; expected an object with "
                "state_dict and load_state_dict"
            )
        size = len(encode(thing.state_dict(), name=f"extra_state[{name!r}].state_dict()"))
        if size > MAX_PAYLOAD_BYTES // 2:
            raise UsageError(
                f"extra_state[{name!r}]: its state has {size:,} bytes; at most "
                f"{MAX_PAYLOAD_BYTES // 2:,} are kept at each step, save it another way"
            )


class _Slots:
    """The places of the last record, and of the table that it belongs to."""

    def __init__(self, memory: SparseMemory) -> None:
        self._record = KeptSlots(memory, RECORD)
        self._table = KeptSlots(memory, TABLE)
        self._table_number = 0

    @property
    def has_table(self) -> bool:
        """Whether a table has been written."""
        return bool(self._table_number)

    def write_table(self, data: bytes) -> None:
        """Write a table; the records that follow belong to it."""
        self._table_number = self._table.write(data)

    def write_record(self, data: bytes) -> None:
        """Write a record."""
        self._record.write(data, beside=self._table_number)


@dataclass(slots=True)
class _Retry:
    """Requests for memory after one that the sidecar did not answer."""

    at_s: float = 0.0
    """Time of the next one."""
    pause_s: float = RETRY_S
    """Pause after it, if it fails as well."""

    @property
    def early(self) -> bool:
        """Whether it is too early for the next one."""
        return time.monotonic() < self.at_s

    def failed(self) -> None:
        """One has failed: pause, longer each time."""
        self.at_s = time.monotonic() + self.pause_s
        self.pause_s = min(2 * self.pause_s, MOST_RETRY_S)

    def succeeded(self) -> None:
        """One was answered."""
        self.pause_s = RETRY_S


@dataclass(slots=True)
class _Cost:
    """What recording has cost so far."""

    count: int = 0
    total_ns: int = 0
    longest_ns: int = 0
    last_bytes: int = 0

    def note(self, begin_ns: int) -> None:
        """A record that was begun then has been written, or given up."""
        took_ns = time.monotonic_ns() - begin_ns
        self.count += 1
        self.total_ns += took_ns
        self.longest_ns = max(self.longest_ns, took_ns)


class Keeper:
    """Writes one rank's records. Training thread only; no failure of it reaches the training."""

    def __init__(
        self,
        memory: SparseMemory,
        page: ControlPage,
        home: ParameterStorage,
        state: OptimizerHome,
        *,
        keep: Mapping[str, Any],
        every: int = 1,
        standing_every: int | None = None,
        agreed: Callable[[int, int, int], tuple[int, int]],
        copies: Callable[[int, int], tuple[int, int]] | None = None,
    ) -> None:
        """Args:
        memory: The memory of records and tables.
        page: This rank's control page.
        home: Where the parameters are.
        state: Where the optimizers' state is.
        keep: The objects of `extra_state`, by name.
        every: A record is kept at the multiples of this many steps.
        standing_every: A standing snapshot is kept at those of this many: 0 makes none, None
            keeps their cost below a hundredth of the training's time.
        agreed: Sends the other ranks this one's wanted steps between standing snapshots, and
            its last one; returns the highest and the lowest of all ranks.
        copies: Progress of all ranks' copies on other hosts (Agreement.copies); None without
            copies.
        """
        self.memory = memory
        """The memory of records and tables."""
        self._words = page.words
        self._home = home
        self._state = state
        self._given_count = len(state.alive())
        self.followed: Collection[torch.optim.Optimizer] = ()
        """All optimizers that update the model, once they are known."""
        self._keep = dict(keep)
        self._loaders = _loaders(keep)
        self._every = every
        self._standing_every = standing_every
        self._agreed = agreed
        self._copies = copies
        self._stood_at: int = page[Word.STEP]
        self._settled_count = 0
        self._slots = _Slots(memory)
        self._early = b""
        self._early_step = -1
        self._complete_step = -1
        self._parts: dict[str, Any] = {}
        self._written: dict[str, Any] = {}
        self._forward: dict[str, Any] | None = None
        self._why = ""
        self._retry = _Retry()
        self._cost = _Cost()
        self.explicit = self._given_count > 1
        """Whether only `kept` completes records."""

    def begin(self, step: int, *, early: bytes | None = None, forward: Any = None) -> None:
        """Note the early part of the state that training begins with. `early`: the earlier
        trainer's note; None takes it now. `forward`: random states to continue with at the first
        forward, if they were recorded."""
        self._forward = forward
        if self.explicit:
            log.warning(
                "paramd: with several optimizers a training can be resumed only where it calls "
                "attachment.end_iteration(), at the end of its loop's body"
            )
        if early is not None:
            self._early, self._early_step = early, step
        else:
            self.rested(step)

    def rested(self, step: int) -> None:
        """An update has ended: note the state that the script changes next."""
        words = self._words
        # Or at the step of a request for optimizer state that has missed it before.
        wanted = words[Word.MOMENTS_WANTED] > words[Word.AGREED]
        if self._why or (step % self._every and not wanted):
            return
        begin_ns = time.monotonic_ns()
        try:
            self._early = self._noted_early()
            self._early_step = step
        except Exception as error:
            self._give_up(error)
        self._cost.total_ns += time.monotonic_ns() - begin_ns

    def settling(self, step: int, *, trusted: bool) -> bool:
        """Training continues: complete the record; return whether to announce this boundary.

        `trusted`: the update and the script alone made the parameters; nothing else changes them
        before the next update.
        """
        self._continue_random()
        if self._why or not trusted or self._early_step != step:
            return False
        if self.explicit and self._complete_step != step:
            return False
        begin_ns = time.monotonic_ns()
        try:
            if self._complete_step != step:
                self._complete(step)
            self._write(self._parts | {"random_forward": random_state()})
        except UnreachableError as error:
            # As on the other ranks: the steps of the first standing snapshots follow from it.
            self._settled_count += 1
            self._postpone(step, error)
            return False
        except Exception as error:
            self._give_up(error)
            return False
        self._cost.note(begin_ns)
        return not step % self._every and self._stands(step)

    def ended(self, step: int, *, trusted: bool) -> bool:
        """As `settling` where no forward begins, of a step of which `kept` has the record."""
        return trusted and not self._why and self._complete_step == step and self._stands(step)

    def kept(self, step: int) -> None:
        """The script's loop starts its next iteration: complete the record of this step now."""
        self.explicit = True
        if self._why or step % self._every:
            return
        begin_ns = time.monotonic_ns()
        try:
            self._early, self._early_step = self._noted_early(), step
            self._complete(step)
            self._write(self._parts)
        except UnreachableError as error:
            self._postpone(step, error)
        except Exception as error:
            self._give_up(error)
        self._cost.note(begin_ns)

    def groups_changed(self) -> None:
        """An edit has set hyper-parameters: the record of this step has to have them."""
        if self._why or self._written.get("step") != self._words[Word.STEP]:
            return
        try:
            self._parts["groups"] = [_groups(optimizer) for optimizer in self._state.alive()]
            self._write(self._written | {"groups": self._parts["groups"]})
        except Exception as error:
            self._give_up(error)

    def has_groups(self) -> bool:
        """Whether the last record has the hyper-parameters as they are now."""
        now = [_groups(optimizer) for optimizer in self._state.alive()]
        values = (value for groups in now for group in groups for value in group.values())
        # A tensor is the record's own, and may have been written since.
        written = any(isinstance(value, torch.Tensor) for value in values)
        return not written and self._parts.get("groups") == now

    def rewound(self, step: int, record: dict[str, Any], data: bytes, table: bytes) -> None:
        """Continue from the record, given in both forms, of a state that was put back.

        Asks for a standing snapshot, since the existing ones are of the discarded steps.
        """
        self._slots.write_table(table)
        self._slots.write_record(data)
        self._words[Word.RECORD_STEP] = step
        self._early, self._early_step = record["early"], step
        self._forward = record["random_forward"]
        self._parts, self._written, self._complete_step = {}, {}, -1
        # The next one after an update: until then another rank may lack the rollback, and all ranks
        # have only the discarded steps in common.
        self._settled_count = -1
        if self._standing_every != 0:
            self._ask_for_standing(step)

    def cost(self) -> Keeping:
        """Cost of recording since attach."""
        return Keeping(
            self._cost.count,
            self._cost.total_ns / 1e9,
            self._cost.longest_ns / 1e9,
            self._cost.last_bytes,
            step_of(self._words[Word.STANDING_MADE]),
            self._words[Word.COPIES_STEP],
        )

    def close(self) -> None:
        self._why = "detached"
        self._keep, self._loaders, self._parts = {}, {}, {}
        self.memory.close()

    def _continue_random(self) -> None:
        """At the first forward, continue the recorded random states."""
        forward, self._forward = self._forward, None
        if forward is not None:
            try:
                set_random_state(forward)
            except Exception:
                log.exception("paramd: random states could not be continued")

    def _noted_early(self) -> bytes:
        loaders = {name: loader.state_dict() for name, loader in self._loaders.items()}
        return encode({"random": random_state(), "keep": loaders}, name="keep")

    def _complete(self, step: int) -> None:
        if len(self.followed) > self._given_count:
            raise ConflictError(
                "an optimizer that attach was not given updates the model; give attach all of them"
            )
        if self._retry.early:
            raise UnreachableError("the sidecar did not answer a moment ago")
        if self._state.settle() or not self._slots.has_table:
            self._slots.write_table(encode(self._state.table(self._home.arena_address)))
        self._retry.succeeded()
        # First: a copy for a reader that is under way finds that it is no longer its request's.
        self._words[Word.BUFFERS_FOR] = 0
        self._home.copy_buffers()
        late = {
            name: kept.state_dict()
            for name, kept in self._keep.items()
            if name not in self._loaders
        }
        self._parts = {
            "step": step,
            "incarnation": self._words[Word.INCARNATION],
            "groups": [_groups(optimizer) for optimizer in self._state.alive()],
            "others": self._state.others(),
            "threads": torch.get_num_threads(),
            "early": self._early,
            "late": encode(late, name="keep"),
            "random_forward": None,
        }
        self._complete_step = step

    def _write(self, parts: dict[str, Any]) -> None:
        self._written = parts
        data = encode(parts)
        self._cost.last_bytes = len(data)
        self._slots.write_record(data)
        self._words[Word.RECORD_STEP] = parts["step"]

    def _stands(self, step: int) -> bool:
        """Whether a standing snapshot is due; the same on all ranks, which keep the same steps."""
        words, every = self._words, self._standing_every
        self._settled_count += 1
        wanted = wanted_pace(words)
        # Rounds show which one all ranks have, so there is a round for each.
        interval = wanted if self._settled_count > 2 * SOON_COUNT else 1
        pace, common = self._agreed(wanted, words[Word.STANDING_MADE], interval)
        words[Word.STANDING_COMMON] = max(words[Word.STANDING_COMMON], common)
        if self._copying():
            return False
        if every is None:
            every = pace if pace else LEAST_PACE
        # Soon after the start already, where there is least to go back to. For a large state the
        # first only has memory made, so several in a row.
        count = self._settled_count
        soon = 0 < count < every and (count <= SOON_COUNT or count.bit_count() == 1)
        if not every or not (soon or step // every > self._stood_at // every):
            return False
        self._ask_for_standing(step)
        return True

    def _ask_for_standing(self, step: int) -> None:
        self._stood_at = step
        self._words[Word.STANDING_STEP] = step
        self._words[Word.STANDING] += 1

    def _copying(self) -> bool:
        """Whether the last standing snapshot is still being sent to other hosts, on all ranks.

        Until it arrives, no other is made: it would replace the one before, which is all that
        survives if a host is lost now.
        """
        if self._copies is None:
            return False
        words = self._words
        # In this order: what is settled does not change any more.
        all_settled, all_copied = self._copies(words[Word.COPY_SETTLED], words[Word.COPIED])
        if all_copied:
            words[Word.COPIES_STEP] = all_copied
        return all_settled < words[Word.STANDING_STEP]

    def _postpone(self, step: int, error: UnreachableError) -> None:
        if self._retry.early:
            return
        self._retry.failed()
        log.warning(
            "paramd: the optimizer's state of step %d has no memory on the device, since %s; until "
            "it has, this training cannot be resumed where it is",
            step,
            error,
        )

    def _give_up(self, error: Exception) -> None:
        self._why = str(error) or repr(error)
        lost = "this training cannot be resumed from memory"
        if isinstance(error, UsageError | ConflictError):
            log.warning("paramd: %s: %s", lost, self._why)
        else:
            log.exception("paramd: %s", lost)


def wanted_pace(words: Words) -> int:
    """Steps between standing snapshots at which copying takes a hundredth of the time."""
    step_ns, copy_ns = words[Word.STEP_TIME_NS], words[Word.STANDING_NS]
    if step_ns <= 0:
        return LEAST_PACE
    return min(max(LEAST_PACE, -(-100 * copy_ns // step_ns)), MOST_PACE)


def read_record(data: bytes) -> dict[str, Any]:
    """A record, with its parts decoded; UsageError if malformed."""
    found = decode(data)
    if not isinstance(found, dict) or not isinstance(found.get("step"), int):
        raise UsageError("the continuation record has no step")
    return found


def _loaders(keep: Mapping[str, Any]) -> dict[str, Any]:
    """What the script iterates over, of the objects that are kept."""
    iterated = ("__iter__", "__next__")
    return {
        name: kept for name, kept in keep.items() if any(hasattr(kept, word) for word in iterated)
    }


def _groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
