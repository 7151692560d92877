"""Optimizer state in memory that outlives the trainer.

Every state tensor (moments, momentum buffers, `step` tensors, factors of any shape) gets its own
place in the optimizer memory, or on its device, with the shape, strides and alignment it had; the
tensor object stays the same and only its address changes, so training computes the same bits.
State appears with the first updates and is replaced by `load_state_dict`, so `settle` comes before
every use.

A place is a number: the byte in the optimizer memory; for state on a device, DEVICE_PLACES and the
byte in its memory there (memory/optimizer_state.py). A tensor of the same size reuses the place of
one that is gone.

Other values stay in the optimizer; `others` lists them for the continuation record.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from operator import is_
from typing import Any

import torch

from paramd.errors import ConflictError
from paramd.memory.control_page import ControlPage, Word
from paramd.memory.descriptors import SparseMemory
from paramd.memory.optimizer_state import DEVICE_PLACES
from paramd.trainer.home.arena_plan import ALIGN_BYTES
from paramd.trainer.home.device import DeviceState
from paramd.trainer.home.moving import address, extent, has_unseen_users, placed, repoint
from paramd.trainer.model.dtensor import is_dtensor, like, split
from paramd.trainer.model.local_shard import dtype_name
from paramd.trainer.model.plain import has_plain_memory
from paramd.trainer.resume.memory_places import Places

LOOKS = 8
"""Number of addresses checked in each update; identity is checked for all tensors."""

PART_BYTES = 64 << 20
"""Most bytes of state in host memory that exist twice while state moves to its places; one tensor
may be larger."""

Place = tuple[int, int, Any]
"""Optimizer, parameter (counted over all groups) and state key."""


@dataclass(slots=True, eq=False)
class _Lodged:
    place: int
    size_bytes: int
    local: torch.Tensor
    base: torch.Tensor
    """The bytes of its place."""
    distributed: bool
    """Whether it is the local part of a DTensor that is sharded like its parameter."""

    def described(self) -> list[Any]:
        local = self.local
        layout = [dtype_name(local.dtype), list(local.shape), list(local.stride())]
        return [self.place, self.size_bytes, *layout, self.distributed]


@dataclass(slots=True, eq=False)
class _Move:
    """A state tensor that is about to move to a place."""

    key: Place
    local: torch.Tensor
    size_bytes: int
    distributed: bool
    place: int = 0


class OptimizerHome:
    """One rank's optimizer state. Training thread only; changes it only at boundaries."""

    def __init__(
        self,
        memory: SparseMemory,
        page: ControlPage,
        optimizers: Sequence[torch.optim.Optimizer],
        device: DeviceState | None = None,
        *,
        resumable: bool = True,
    ) -> None:
        """`optimizers`: of the model; `followed` replaces them. `device`: memory on the parameters'
        device, None: they are in host memory. `resumable`: resuming needs all state; otherwise
        state of no parameter is left alone.
        """
        self._resumable = resumable
        self.followed: Collection[torch.optim.Optimizer] | None = None
        self._host_memory = memory
        self._most_bytes = memory.size_bytes
        self._page = page
        self._device = device
        self._host = Places(memory, first=0, align_bytes=ALIGN_BYTES)
        self._on_device = (
            Places(device, first=DEVICE_PLACES, align_bytes=device.align_bytes)
            if device is not None
            else None
        )
        # Weakly: an optimizer that the script drops must not keep its parameters alive.
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._lodged: dict[Place, _Lodged] = {}
        self._entries: list[Place] = []
        self._expected: list[Any] = []
        self._others: list[int] = []
        self._no_tensors: frozenset[int] = frozenset()
        self._placed: list[_Lodged] = []
        self._members: list[list[torch.Tensor]] = []
        self._turn = count()

    def settle(self) -> bool:
        """Move new and replaced state to its places; return whether the table has changed.

        Raises:
            ConflictError: State that cannot live here; the message names it.
            ExhaustedError: No memory for it.
            UnreachableError: No sidecar answers to make memory on the device; ask again later.
        """
        now = self._values()
        if not self._same_members():
            # A parameter's group, and its number, are part of the table.
            self._bring_home()
            return True
        if len(now) == len(self._expected):
            # Without a line of Python for each of them: this is done at every step.
            if all(map(is_, now, self._expected)) and self._in_place():
                return False
            strange = [i for i, same in enumerate(map(is_, now, self._expected)) if not same]
            plain = all(
                i in self._no_tensors and not isinstance(now[i], torch.Tensor) for i in strange
            )
            if plain and self._in_place():
                for i in strange:
                    self._expected[i] = now[i]
                return False
        self._bring_home()
        return True

    def table(self, arena_address: int) -> dict[str, Any]:
        """The places of all state, for `adopt`; and for the sidecar, the elements it belongs to."""
        entries = []
        for place in self._entries:
            lodged = self._lodged.get(place)
            entries.append([*place, lodged.described() if lodged is not None else None])
        return {
            "optimizers": signature(self.alive()),
            "on_device": self._on_device is not None,
            "used_bytes": self.used_bytes,
            "entries": entries,
            "params": [_in_arena(optimizer, arena_address) for optimizer in self.alive()],
            "classes": [
                f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
                for optimizer in self.alive()
            ],
        }

    def others(self) -> list[Any]:
        """The values of entries without a place, in the table's order."""
        return [self._expected[i] for i in self._others]

    def adopt(self, table: dict[str, Any], others: Sequence[Any]) -> None:
        """Give the optimizers, of the table's signature, the state in this memory."""
        self._lodged.clear()
        for places, used_bytes in zip(self.places, table["used_bytes"], strict=True):
            places.begin_again(used_bytes)
        params = [_params(optimizer) for optimizer in self.alive()]
        for optimizer in self.alive():
            optimizer.state.clear()
        values = iter(others)
        for number, index, key, described in table["entries"]:
            param = params[number][index]
            optimizer = self.alive()[number]
            value = next(values) if described is None else self._adopted(param, described)
            if described is not None:
                place, size, *_ = described
                local, _ = split(value)
                base = placed(torch.uint8, local.untyped_storage(), 0, (size,), (1,))
                self._lodged[number, index, key] = _Lodged(
                    place, size, local, base, is_dtensor(value)
                )
            optimizer.state[param][key] = value
        self._tell()
        self._remember()

    def move_out(self) -> None:
        """Give every tensor private memory again. Idempotent."""
        targets = []
        for one in self._lodged.values():
            if one.size_bytes:
                storage = one.base.clone().untyped_storage()
                local = one.local
                view = placed(local.dtype, storage, 0, local.shape, local.stride())
                if address(local) == address(one.base):
                    targets.append((local, view))
        repoint(targets)
        self._lodged, self._placed, self._members = {}, [], []
        self._entries, self._expected, self._others = [], [], []

    def close(self) -> None:
        """Move out, and drop the map of the memory in the host. Idempotent."""
        self.move_out()
        self._host_memory.close()

    @property
    def places(self) -> tuple[Places, ...]:
        """The memories of state: host memory, then the device if parameters are on one."""
        return (self._host,) if self._on_device is None else (self._host, self._on_device)

    @property
    def used_bytes(self) -> list[int]:
        """Bytes of each of `places` in use."""
        return [places.used_bytes for places in self.places]

    def alive(self) -> list[torch.optim.Optimizer]:
        """The optimizers. Raises ConflictError once the script has dropped one."""
        if self.followed is not None:
            return list(self.followed)
        found = [reference() for reference in self._optimizers]
        if None in found:
            raise ConflictError("an optimizer given to attach is gone; keep a reference to it")
        return found  # type: ignore[return-value]

    def _values(self) -> list[Any]:
        states = [*chain.from_iterable(o.state.values() for o in self.alive())]
        try:
            return [*chain.from_iterable(map(dict.values, states))]
        except TypeError:
            # An optimizer's other state may be no dict.
            return [v for state in states if isinstance(state, dict) for v in state.values()]

    def _same_members(self) -> bool:
        """Whether every group has the parameters that it had, in their order."""
        groups = [group["params"] for one in self.alive() for group in one.param_groups]
        # Without a line of Python for each parameter. Not `==`, which compares tensors' values.
        return len(groups) == len(self._members) and all(
            len(now) == len(before) and all(map(is_, now, before))
            for now, before in zip(groups, self._members, strict=True)
        )

    def _in_place(self) -> bool:
        """Check the addresses of a few tensors, different ones each time."""
        places = self._placed
        if not places:
            return True
        first = LOOKS * next(self._turn)
        turns = (places[(first + i) % len(places)] for i in range(min(LOOKS, len(places))))
        return all(address(one.local) == address(one.base) for one in turns)

    def _bring_home(self) -> None:
        # Or it would keep replaced tensors alive, and their places could not be used again.
        self._expected = []
        found = [(place, value, of) for place, value, of in self._found() if of is not None]
        for place in set(self._lodged) - {place for place, _, _ in found}:
            self._release(self._lodged.pop(place))
        moves = []
        for place, value, param in found:
            if isinstance(value, torch.Tensor):
                move = self._move(place, value, param)
                if move is not None:
                    moves.append(move)
        # Numbers come to lie together, where the sidecar reads them at once.
        moves.sort(key=lambda move: move.size_bytes)
        for part in self._parts(moves):
            self._make_room(part)
            for move in part:
                self._lodge(move)
        self._tell()
        self._remember()

    def _found(self) -> Iterator[tuple[Place, Any, torch.Tensor | None]]:
        """All state, in the order of `_values`, with its parameter; None: of no parameter."""
        for number, optimizer in enumerate(self.alive()):
            indices = {id(param): (i, param) for i, param in enumerate(_params(optimizer))}
            for owner, state in optimizer.state.items():
                known = indices.get(id(owner))
                if self._resumable and (known is None or not isinstance(state, dict)):
                    raise ConflictError(
                        f"optimizer {number} ({type(optimizer).__name__}) has state that belongs "
                        "to none of its parameters"
                    )
                if not isinstance(state, dict):
                    continue
                index, param = known if known is not None else (-1, None)
                for key, value in state.items():
                    yield (number, index, key), value, param

    def _move(self, place: Place, value: torch.Tensor, param: torch.Tensor) -> _Move | None:
        """A tensor that has to move; None when it is in its place."""
        local, distributed = self._checked(place, value, param)
        known = self._lodged.get(place)
        memory = extent(local)
        size = memory.end - memory.begin
        if known is not None:
            if known.local is local and (not size or address(local) == address(known.base)):
                return None
            self._release(self._lodged.pop(place))
        if size and has_unseen_users([local]):
            raise ConflictError(
                f"{_named(place)} shares its memory with another tensor, so it cannot be moved"
            )
        return _Move(place, local, size, distributed)

    def _checked(
        self, place: Place, value: torch.Tensor, param: torch.Tensor
    ) -> tuple[torch.Tensor, bool]:
        distributed = is_dtensor(value)
        local = split(value)[0] if distributed else value
        known = local.device.type == "cpu" or self._places_of(local) is self._on_device
        if not known or not has_plain_memory(local):
            where = f"in host memory{' or on their device' if self._device is not None else ''}"
            raise ConflictError(
                f"{_named(place)} is a {type(local).__name__} on {local.device}; expected a plain "
                f"tensor {where}"
            )
        if distributed and not _spread_alike(value, param):
            raise ConflictError(f"{_named(place)} is sharded differently from its parameter")
        return local, distributed

    def _places_of(self, tensor: torch.Tensor) -> Places:
        on_device = self._on_device
        if on_device is not None and self._device is not None and self._device.holds(tensor):
            return on_device
        return self._host

    def _of_place(self, place: int) -> Places:
        on_device = self._on_device
        return on_device if on_device is not None and place >= on_device.first else self._host

    def _parts(self, moves: Sequence[_Move]) -> Iterator[list[_Move]]:
        """The moves in parts that are made one after the other.

        The old memory of a part is free before the next one takes new memory: a state that has
        just appeared must not be there twice, which may be more than the host has left. Memory on
        a device comes in few and large allocations, so its moves are one part.
        """
        part: list[_Move] = [
            move for move in moves if self._places_of(move.local) is not self._host
        ]
        if part:
            yield part
        part, part_bytes = [], 0
        for move in moves:
            if self._places_of(move.local) is not self._host:
                continue
            if part and part_bytes + move.size_bytes > PART_BYTES:
                yield part
                part, part_bytes = [], 0
            part.append(move)
            part_bytes += move.size_bytes
        if part:
            yield part

    def _make_room(self, moves: Sequence[_Move]) -> None:
        """Give each move a place with memory."""
        for move in moves:
            places = self._places_of(move.local)
            move.place = places.first
            if move.size_bytes:
                offset = extent(move.local).begin % places.align_bytes
                move.place = places.room(move.size_bytes, offset)
        used_bytes = sum(self.used_bytes)
        try:
            if used_bytes > self._most_bytes:
                raise ConflictError(
                    f"the optimizer's state takes {used_bytes:,} bytes; at most "
                    f"{self._most_bytes:,} can be kept for a model of this size"
                )
            for places in self.places:
                places.reserve()
        except BaseException:
            # The next attempt gets the same.
            for move in moves:
                if move.size_bytes:
                    self._of_place(move.place).give_back(move.place, move.size_bytes)
            raise

    def _tell(self) -> None:
        """Publish to the sidecar how far places reach."""
        self._page[Word.OPTIMIZER_BYTES] = self._host.used_bytes
        if self._on_device is not None:
            self._page[Word.STATE_BYTES] = self._on_device.used_bytes

    def _lodge(self, move: _Move) -> None:
        local, size = move.local, move.size_bytes
        base = local
        if size:
            base = self._of_place(move.place).at(move.place, size)
            offset = int(local.storage_offset()) * local.itemsize
            with torch.no_grad():
                # As bytes, so that any strides will do.
                base.copy_(placed(torch.uint8, local.untyped_storage(), offset, (size,), (1,)))
            view = placed(local.dtype, base.untyped_storage(), 0, local.shape, local.stride())
            repoint([(local, view)])
        self._lodged[move.key] = _Lodged(move.place, size, local, base, move.distributed)

    def _release(self, old: _Lodged) -> None:
        """Free a place, unless the script still has the tensor that was there."""
        reference, old.local = weakref.ref(old.local), old.base
        if old.size_bytes and reference() is None and not has_unseen_users([old.base]):
            self._of_place(old.place).give_back(old.place, old.size_bytes)

    def _adopted(self, param: torch.Tensor, described: Sequence[Any]) -> torch.Tensor:
        place, size, name, shape, strides, distributed = described
        dtype = getattr(torch, name)
        if size:
            storage = self._of_place(place).at(place, size).untyped_storage()
            local = placed(dtype, storage, 0, shape, strides)
        else:
            device = split(param)[0].device if place >= DEVICE_PLACES else "cpu"
            local = torch.empty(shape, dtype=dtype, device=device)
        return like(param, local) if distributed else local

    def _remember(self) -> None:
        self._expected = self._values()
        self._members = [[*group["params"]] for one in self.alive() for group in one.param_groups]
        found = list(self._found())
        self._entries = [place for place, _, of in found if of is not None]
        self._placed = [one for one in self._lodged.values() if one.size_bytes]
        numbers = [i for i, (_, v, _of) in enumerate(found) if not isinstance(v, torch.Tensor)]
        self._others = [i for i in numbers if found[i][2] is not None]
        self._no_tensors = frozenset(numbers)


def _in_arena(optimizer: torch.optim.Optimizer, arena_address: int) -> list[list[Any]]:
    """Each parameter's first byte in the arena, group, dtype, shape and strides."""
    found = []
    for number, group in enumerate(optimizer.param_groups):
        for local in _locals(group):
            begin = extent(local).begin - arena_address
            shape, strides = list(local.shape), list(local.stride())
            found.append([begin, number, dtype_name(local.dtype), shape, strides])
    return found


def signature(optimizers: Sequence[torch.optim.Optimizer]) -> list[Any]:
    """Class and parameters of each optimizer: by group, their dtypes and local shapes."""
    return [
        [
            type(optimizer).__qualname__,
            [
                [[dtype_name(local.dtype), list(local.shape)] for local in _locals(group)]
                for group in optimizer.param_groups
            ],
        ]
        for optimizer in optimizers
    ]


def _params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _locals(group: dict[str, Any]) -> Iterator[torch.Tensor]:
    return (split(param)[0] for param in group["params"])


def _spread_alike(value: torch.Tensor, param: torch.Tensor) -> bool:
    one, other = split(value)[1], split(param)[1]
    if one is None or other is None or not is_dtensor(param):
        return False
    return bool(
        one.mesh == other.mesh and one.placements == other.placements and one.shape == other.shape
    )


def _named(place: Place) -> str:
    number, index, key = place
    return f"state {key!r} of parameter {index} of optimizer {number}"
