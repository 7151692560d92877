"""A home whose parameters stay where they are: the arena is a copy, made on request.

For parameters on devices, and wherever nothing may be moved (`arena="mirror"`). Nothing is
re-homed, so there is nothing to take back. But the arena's bytes date from the last boundary
that asked for them, so only agreed boundaries can serve reads (memory/arena.py).

The arena has the geometry of the live memory: relative to its piece, every byte has the same
offset in both. So an edit's views, and optimizer state, are found by adding.

Copies from an accelerator go through torch's streams of any device: a side stream per device waits
for the training's current stream, copies, and records one event; the host waits for those events
only. CUDA and HIP can register memory that was made elsewhere; torch has no similar call for other
accelerators, whose copies therefore wait one by one.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paramd.errors import ConflictError
from paramd.layout.types import TensorKind
from paramd.memory.arena import unpack_wanted
from paramd.memory.edit_program import DTYPE_CODES, Record
from paramd.memory.gate import TrainerGate
from paramd.trainer.home import moving
from paramd.trainer.home.arena_plan import ArenaPlan, plan_arena
from paramd.trainer.home.device import device_home
from paramd.trainer.home.moving import BufferCopies, Memory, Range
from paramd.trainer.home.owned import ParameterStorage, address_of, check_arena
from paramd.trainer.model import accelerator
from paramd.trainer.model.local_shard import LocalShard, dtype_name
from paramd.trainer.model.shards import find_shards

if TYPE_CHECKING:
    from paramd.trainer.boundary.agreement import Request

log = logging.getLogger("paramd")

Locate = Callable[[Range], int | None]
"""Maps a parameter's memory to its first arena byte; None for memory of no parameter."""


def mirrored_devices() -> tuple[str, ...]:
    """Device types whose tensors can be copied into host memory."""
    found = accelerator.kind()
    return ("cpu",) if found is None else ("cpu", found)


def _check_reachable(shard: LocalShard) -> None:
    """Raise ConflictError for a tensor that cannot be copied into host memory."""
    kind = shard.tensor.device.type
    if kind == "meta":
        raise ConflictError(
            f"tensor {shard.fqn!r} is on meta, so it has no values yet; before attaching, "
            "materialize the model (model.to_empty(device=...)) and load or initialize its weights"
        )
    if kind not in mirrored_devices():
        raise ConflictError(
            f"tensor {shard.fqn!r} is on {shard.tensor.device}, which cannot be copied from; move "
            f"it to {' or '.join(mirrored_devices())}"
        )


class MirroredHome(ParameterStorage):
    """Parameters in the trainer's own memory, on any device, with copies in an arena.

    Outside after the constructor and after `move_out`, inside after `move_in`; the model itself
    never changes.
    """

    mirrored = True

    def __init__(self, model: nn.Module) -> None:
        """As `ParameterStorage`, but parameters may also be on CUDA devices."""
        super().__init__(model)
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._copies: DeviceCopies | None = None

    def _planned(self, shards: Sequence[LocalShard]) -> ArenaPlan:
        for shard in shards:
            _check_reachable(shard)
        return plan_arena(shards, ())

    def move_in(self, arena: Memory) -> None:
        """Use `arena` for the copies and leave the model alone.

        Raises:
            UsageError: If the arena is too small or read-only.
            ConflictError: If the model has changed since the constructor.
        """
        assert isinstance(arena, memoryview)
        check_arena(arena, self.arena_bytes)
        shards = find_shards(self._model)
        if self._planned(shards) != self._plan or moving.differences(self._shards, shards):
            raise ConflictError(
                "the model's parameters changed while they were being attached; attach again"
            )
        self._shards = shards
        self._arena_address = address_of(arena)
        if arena.nbytes:
            self._memory = moving.bytes_at(arena, 0, arena.nbytes)
        if not _on_host(shard.tensor for shard in shards):
            self._copies = DeviceCopies(self._arena_address, arena.nbytes)
        self._buffers = BufferCopies(arena, self._placed(TensorKind.BUFFER))
        self._rewatch()
        self.copy_buffers()

    def check(self, full: bool = False) -> list[str]:
        """Follow parameters that were replaced; as cheap as for an owned arena.

        Raises:
            ConflictError: If names, shape, dtype, strides or placement changed.
        """
        assert self._watch is not None, "move_in comes first"
        if self._watch.look() or full or self._watch.added:
            self._shards = self._found_again()
            self._rewatch()
        return []

    def copy_back(self) -> list[str]:
        """Return nothing: no parameter ever leaves."""
        return []

    def take_back(self) -> list[str]:
        """Return nothing: no parameter ever leaves."""
        return []

    def move_out(self) -> None:
        """Release the arena. Idempotent."""
        self._close_watch()
        self._buffers, self._shards = None, []
        self._memory = self._memory.new_empty(0)
        if self._copies is not None:
            self._copies.close()

    def refresh_for(self, request: Request, gate: TrainerGate) -> None:
        """Copy what an agreed capture wants into the arena, buffers included.

        First waits, within the stall budget, for a sidecar still copying from it; all of this
        counts as a stall.

        Raises:
            ConflictError: If a tensor's layout changed: this rank misses the request.
        """
        if request.argument == 0:
            return
        begin, end = unpack_wanted(request.argument)
        gate.begin_mirror()
        if begin == end:
            gate.end_mirror(request.number)
            return
        begin_ns = time.monotonic_ns()
        # If this raises, MIRRORED_FOR stays 0 and no copy of the half-written arena is taken.
        self._refresh(begin, end)
        if any(at < end for _, at in self._placed(TensorKind.BUFFER)):
            self.copy_buffers()
        gate.end_mirror(request.number)
        gate.note_stall(time.monotonic_ns() - begin_ns)

    def live(self, records: Sequence[Record]) -> list[torch.Tensor]:
        """The live elements that each record addresses, shaped like its view.

        At a boundary only. Writing to one changes the parameter, not its version counter.

        Raises:
            ConflictError: If no single parameter of this rank contains a record.
        """
        self.check(full=True)
        found = [(begin, shard) for shard, begin in self._placed(TensorKind.PARAMETER)]
        pieces = sorted(found, key=itemgetter(0))
        return [_live(pieces, record) for record in records]

    def locator(self) -> Locate:
        """A map from the parameters' memory to the arena, valid at this boundary."""
        self.check(full=True)
        ways = sorted(
            (moving.extent(shard.tensor).begin, moving.extent(shard.tensor).end, begin)
            for shard, begin in self._placed(TensorKind.PARAMETER)
        )

        def locate(memory: Range) -> int | None:
            for low, high, begin in reversed(ways[: bisect_left(ways, (memory.end,))]):
                if memory.begin < high:
                    return memory.begin + begin - low
            return None

        return locate

    def _refresh(self, begin: int, end: int) -> None:
        self.check(full=True)
        wanted = [
            (shard.tensor, at)
            for shard, at in self._placed(TensorKind.PARAMETER)
            if at < end and begin < at + moving.span_bytes(shard.tensor)
        ]
        storage = self._memory.untyped_storage()
        sources = [tensor for tensor, _ in wanted]
        targets = [moving.placed(t.dtype, storage, at, t.shape, t.stride()) for t, at in wanted]
        with torch.no_grad():
            if not _on_host(sources):
                if self._copies is None:
                    self._copies = DeviceCopies(self._arena_address, self._memory.numel())
                self._copies.to_host(targets, sources)
            elif targets:
                torch._foreach_copy_(targets, sources)

    def _way_home(self, shard: LocalShard, begin: int) -> int:
        return 0


def _on_host(tensors: Iterable[torch.Tensor]) -> bool:
    return all(tensor.device.type == "cpu" for tensor in tensors)


def home_of(model: nn.Module, arena: str) -> ParameterStorage:
    """The kind of home that `arena` (see AttachSettings) and the model's devices call for;
    ConflictError names a tensor that cannot be served.
    """
    if arena == "device":
        home, why_not = device_home(model)
        if home is None:
            log.warning("paramd: the parameters cannot be owned on their device: %s", why_not)
        return home if home is not None else MirroredHome(model)
    on_host = _on_host(shard.tensor for shard in find_shards(model))
    return ParameterStorage(model) if on_host and arena != "mirror" else MirroredHome(model)


def _live(pieces: Sequence[tuple[int, LocalShard]], record: Record) -> torch.Tensor:
    """`pieces` are ordered by first arena byte."""
    index = bisect_right(pieces, record.arena_begin, key=itemgetter(0))
    for begin, shard in reversed(pieces[:index]):
        tensor = shard.tensor
        fits = record.arena_end <= begin + moving.span_bytes(tensor)
        # What programs have no code for is set bit by bit.
        own = dtype_name(tensor.dtype)
        alike = record.dtype == own or own not in DTYPE_CODES
        if fits and alike and record.itemsize == tensor.itemsize:
            first = int(tensor.storage_offset()) * tensor.itemsize
            return moving.placed(
                getattr(torch, record.dtype),
                tensor.untyped_storage(),
                first + record.arena_begin - begin,
                record.sizes,
                record.strides,
            )
    raise ConflictError(
        f"bytes [{record.arena_begin}, {record.arena_end}) of the arena are no parameter's"
    )


class DeviceCopies:
    """Copies into one arena. Training thread only."""

    def __init__(self, address: int, size_bytes: int) -> None:
        """Register the memory as pinned, if possible; it must stay mapped until `close`."""
        self._address = address
        self._streams: dict[torch.device, torch.Stream] = {}
        self._events: dict[torch.device, torch.Event] = {}
        self._pinned = size_bytes > 0 and _register(address, size_bytes)

    def to_host(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Fill host targets from sources on any device, after all work on current streams."""
        used: dict[torch.device, torch.Stream] = {}
        for target, source in zip(targets, sources, strict=True):
            if source.device.type == "cpu":
                target.copy_(source)
                continue
            stream = used.get(source.device)
            if stream is None:
                stream = used[source.device] = self._behind_training(source.device)
            with stream:
                # Backends differ in what "non-blocking" means for memory that is not pinned.
                target.copy_(source, non_blocking=self._pinned)
        for device, stream in used.items():
            self._events[device].record(stream)
        for device in used:
            self._events[device].synchronize()

    def close(self) -> None:
        """Unregister the memory. Idempotent."""
        if self._pinned:
            self._pinned = False
            _runtime().cudaHostUnregister(self._address)

    def _behind_training(self, device: torch.device) -> torch.Stream:
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.Stream(device)
            self._events[device] = torch.Event(device, blocking=True)
        stream.wait_stream(torch.accelerator.current_stream(device))
        return stream


def finish_copies(devices: Sequence[torch.device]) -> None:
    """Wait for everything queued on these devices' current streams."""
    for device in devices:
        torch.accelerator.current_stream(device).synchronize()


def _register(address: int, size_bytes: int) -> bool:
    """Register host memory with the accelerator's runtime, so that copies run at link speed."""
    try:
        found = _runtime().cudaHostRegister(address, size_bytes, 0)
    except (AttributeError, RuntimeError, TypeError) as error:
        found = error
    if isinstance(found, Exception) or int(found) != 0:
        log.warning(
            "paramd: %s bytes of host memory could not be pinned (%s); copies from the device "
            "take longer",
            f"{size_bytes:,}",
            found,
        )
        return False
    return True


def _runtime() -> Any:
    """CUDA's runtime or HIP's; AttributeError where the accelerator has neither."""
    return torch.get_device_module().cudart()
