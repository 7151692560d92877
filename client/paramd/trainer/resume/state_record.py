"""Reports to the sidecar of a training without `resume` where the optimizers' state is.

    moved     beside parameters in an arena it lives in the optimizer memory (optimizer_home.py);
              every boundary notes the place of each tensor
    copied    where parameters or partitions stay in the trainer's own memory, so does the state;
              an agreed request has it copied into the optimizer memory, and noted

Both write the table and the record of keeper.py, without what only resuming needs, so the sidecar
has one way to read them (memory/optimizer_state.py). State that cannot be described is refused
with the reason, which the table then has instead.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch

from paramd.errors import ConflictError, ParamdError
from paramd.memory.arena import unpack_wanted
from paramd.memory.continuation import RECORD, TABLE, KeptSlots
from paramd.memory.control_page import ControlPage, Word, Words
from paramd.memory.descriptors import SparseMemory, pages
from paramd.tensors.edit_ops import Views
from paramd.trainer.boundary.agreement import Request
from paramd.trainer.boundary.optimizers import Owned, find_owned
from paramd.trainer.home.arena_plan import ALIGN_BYTES
from paramd.trainer.home.moving import Range
from paramd.trainer.home.owned import ParameterStorage
from paramd.trainer.model.dtensor import split
from paramd.trainer.model.local_shard import dtype_name
from paramd.trainer.resume.codec import encode
from paramd.trainer.resume.optimizer_home import OptimizerHome

log = logging.getLogger("paramd")

_MOST_PAUSE = 1024
"""Boundaries between two attempts to describe state, after failures."""


class StateRecord(Protocol):
    """One rank's optimizer state, as readers see it. Training thread only; its failures never reach
    the training.
    """

    optimizers: Collection[torch.optim.Optimizer]

    def settle(self, step: int) -> None:
        """At every boundary, before its state is published."""

    def copy_for(self, request: Request) -> None:
        """An agreed request wants the state."""

    def groups_changed(self) -> None:
        """An edit has set hyper-parameters."""

    def has_groups(self) -> bool:
        """Whether the last record has the hyper-parameters as they are now."""

    def close(self) -> None:
        """Release the memory, and give the optimizers their own again."""


class _Notes:
    def __init__(self, memory: SparseMemory, words: Words) -> None:
        self._memory = memory
        self._record = KeptSlots(memory, RECORD)
        self._table = KeptSlots(memory, TABLE)
        self._words = words
        self._table_number = 0
        self._told: list[Any] = []

    def write(
        self,
        step: int,
        optimizers: Collection[torch.optim.Optimizer],
        others: Sequence[Any],
        table: Mapping[str, Any] | None,
    ) -> None:
        """Note this step's state; `table`: None if it is unchanged."""
        if table is not None:
            self._table_number = self._table.write(encode(dict(table)))
        told = [list(map(_groups, optimizers)), list(map(_told, others)), torch.get_num_threads()]
        if table is not None or told != self._told:
            record = {"step": step, **dict(zip(("groups", "others", "threads"), told, strict=True))}
            self._record.write(encode(record), beside=self._table_number)
            self._told = told
        # The same record may be of many steps.
        self._words[Word.RECORD_STEP] = step

    def has_groups(self, optimizers: Collection[torch.optim.Optimizer]) -> bool:
        """Whether the last record has their hyper-parameters as they are now."""
        return self._told[:1] == [list(map(_groups, optimizers))]

    def fail(self, step: int, why: str) -> None:
        """Note that the state of this step cannot be described."""
        self.write(step, (), (), {"params": [], "classes": [], "entries": [], "failure": why})

    def close(self) -> None:
        self._memory.close()


class MovedState:
    """State that lives in the optimizer memory, wherever its optimizer puts it."""

    def __init__(
        self, memory: SparseMemory, page: ControlPage, home: ParameterStorage, state: OptimizerHome
    ) -> None:
        """`memory`: of records and tables."""
        self._notes = _Notes(memory, page.words)
        self._words = page.words
        self._home = home
        self._state = state
        self._why = ""
        self._noted = False
        self._pause = self._left = 0

    @property
    def optimizers(self) -> Collection[torch.optim.Optimizer]:
        return self._state.alive()

    @optimizers.setter
    def optimizers(self, followed: Collection[torch.optim.Optimizer]) -> None:
        self._state.followed = followed

    def settle(self, step: int) -> None:
        try:
            if self._left:
                self._left -= 1
                self._notes.fail(step, self._why)
                return
            moved = self._state.settle()
            table = None
            if moved or self._why or not self._noted:
                table = self._state.table(self._home.arena_address)
            self._notes.write(step, self._state.alive(), self._state.others(), table)
            self._why, self._noted, self._pause = "", True, 0
        except Exception as error:
            self._give_up(step, error)

    def copy_for(self, request: Request) -> None:
        """Nothing: the sidecar reads it where it lies."""

    def groups_changed(self) -> None:
        if self._noted and not self._why:
            self.settle(self._words[Word.STEP])

    def has_groups(self) -> bool:
        return self._notes.has_groups(self._state.alive())

    def close(self) -> None:
        self._notes.close()
        self._state.close()

    def _give_up(self, step: int, error: Exception) -> None:
        self._pause = self._left = min(2 * self._pause + 1, _MOST_PAUSE)
        why = str(error) or repr(error)
        if why != self._why:
            expected = isinstance(error, ParamdError)
            said = "paramd: the optimizer's state cannot be read: %s"
            log.warning(said, why, exc_info=None if expected else error)
        self._why = why
        try:
            self._notes.fail(step, why)
        except Exception:
            log.exception("paramd: the optimizer's state has no record")


class CopiedState:
    """State that stays where it is, and is copied when an agreed request wants it."""

    def __init__(
        self,
        memory: SparseMemory,
        optimizer_memory: SparseMemory,
        page: ControlPage,
        home: ParameterStorage,
        *,
        locator: Callable[[], Callable[[Range], int | None]] | None,
    ) -> None:
        """`memory`: of records and tables. `locator` returns the map from parameters to arena
        bytes, at this boundary; None: they are in the arena.
        """
        self.optimizers: Collection[torch.optim.Optimizer] = ()
        self._notes = _Notes(memory, page.words)
        self._memory = optimizer_memory
        self._views = Views(optimizer_memory.buffer)
        self._words = page.words
        self._home = home
        self._locator = locator

    def settle(self, step: int) -> None:
        """Nothing: only requests have anything copied."""

    def groups_changed(self) -> None:
        """Do nothing: every request notes them again."""

    def has_groups(self) -> bool:
        """True: state that is copied at requests has no record of each step."""
        return True

    def copy_for(self, request: Request) -> None:
        """Copy the state of what the request wants, and note all of it.

        The sidecar gives the memory back afterwards. Costs the trainer one copy of the state.
        """
        self._words[Word.MOMENTS_FOR] = 0
        try:
            self._home.finish()
            with torch.no_grad():
                self._copy(*unpack_wanted(request.argument))
        except Exception as error:
            expected = isinstance(error, ParamdError)
            said = "paramd: the optimizer's state could not be copied: %s"
            log.warning(said, error, exc_info=None if expected else error)
            self._notes.fail(self._words[Word.STEP], str(error) or repr(error))
        # Last: it vouches for the copies and for their record.
        self._words[Word.MOMENTS_FOR] = request.number

    def close(self) -> None:
        self._views = Views(memoryview(b""))
        self._memory.close()
        self._notes.close()

    def _copy(self, begin: int, end: int) -> None:
        """Copy the state of arena bytes [begin, end)."""
        locate = self._locator() if self._locator is not None else None
        home, optimizers = self._home, list(self.optimizers)
        numbers = {id(optimizer): i for i, optimizer in enumerate(optimizers)}
        listing = _Listing(len(optimizers), begin, end)
        for owned in find_owned(optimizers, home.arena_address, home.arena_bytes, locate):
            listing.add(numbers[id(owned.optimizer)], owned)
        if listing.used_bytes > self._memory.size_bytes:
            raise ConflictError(
                f"the optimizer's state takes {listing.used_bytes:,} bytes; at most "
                f"{self._memory.size_bytes:,} can be kept for a model of this size"
            )
        self._memory.reserve(0, pages(listing.used_bytes))
        for owned, moment, place in listing.copies:
            sizes, strides = tuple(owned.local.shape), tuple(owned.local.stride())
            self._views.at(dtype_name(moment.dtype), place, sizes, strides).copy_(moment)
        classes = [f"{type(one).__module__}.{type(one).__qualname__}" for one in optimizers]
        table = {"params": listing.params, "classes": classes, "entries": listing.entries}
        self._notes.write(self._words[Word.STEP], optimizers, listing.others, table)


class _Listing:
    """The optimizers' parameters and state as a table has them, and what is copied where."""

    def __init__(self, optimizer_count: int, begin: int, end: int) -> None:
        """State of the arena's bytes [begin, end) is copied."""
        self._begin, self._end = begin, end
        self.params: list[list[object]] = [[] for _ in range(optimizer_count)]
        """By optimizer."""
        self.entries: list[object] = []
        self.others: list[object] = []
        """Values without a place, in the order of their entries."""
        self.copies: list[tuple[Owned, torch.Tensor, int]] = []
        """Parameter, its state, and the place of that in the optimizer memory."""
        self.used_bytes = 0

    def add(self, optimizer: int, owned: Owned) -> None:
        """Add a parameter and its state."""
        local, moments = owned.local, dict(owned.moments())
        layout: list[object] = [list(local.shape), list(local.stride())]
        params = self.params[optimizer]
        params.append([owned.begin, owned.group, dtype_name(local.dtype), *layout])
        for key, value in owned.state().items():
            moment, described = moments.get(key), None
            if moment is not None:
                described = self._placed(owned, moment, layout)
            elif isinstance(value, torch.Tensor) and value.numel() != 1:
                shape = list(split(value)[0].shape)
                described = [0, 0, dtype_name(value.dtype), shape, shape, False]
            else:
                self.others.append(value)
            self.entries.append([optimizer, len(params) - 1, key, described])

    def _placed(self, owned: Owned, moment: torch.Tensor, layout: Sequence[object]) -> list[object]:
        """Describe state that corresponds to its parameter, and have it copied if it is wanted."""
        size_bytes = moment.itemsize * ((owned.end - owned.begin) // owned.local.itemsize)
        place = self.used_bytes
        if owned.begin < self._end and self._begin < owned.end:
            self.copies.append((owned, moment, place))
            self.used_bytes += -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES
        # With the strides of its parameter, whatever its own are.
        return [place, size_bytes, dtype_name(moment.dtype), *layout, False]


def _groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {name: _plain(value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def _told(value: Any) -> Any:
    """A value without a place: a number, None, or text for one that cannot be described."""
    if isinstance(value, torch.Tensor):
        local, _ = split(value)
        value = local.item() if local.numel() == 1 else None
    return value if value is None or isinstance(value, bool | int | float) else "no number"


def _plain(value: Any) -> Any:
    """A hyperparameter in a form that can be written, else its repr."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = split(value)[0].item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return repr(value)
