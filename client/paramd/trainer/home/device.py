"""A home on a device: parameters in memory that the sidecar owns, read without the trainer.

As in host memory, parameters are moved once and stay. Their memory is wrapped differently, the
device is behind the host (memory/device_arena.py), and the processor does not look at the bytes:
only version counters show changes outside of updates.

On the simulated driver of the tests, device memory is the host's, and so are the tensors.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from operator import getitem
from typing import Any

import torch
from torch import nn

from paramd.errors import ConflictError, ExhaustedError
from paramd.layout.types import TensorKind
from paramd.memory.control_page import ControlPage
from paramd.memory.device_arena import Addresses, DeviceMap, TrainerDevice, why_not
from paramd.memory.device_driver import CUDA, HIP, HIP_VARIABLE, VARIABLE, DeviceError, Driver, load
from paramd.memory.handover import Allocation
from paramd.trainer.home.arena_plan import ALIGN_BYTES
from paramd.trainer.home.moving import Memory, live_tensors
from paramd.trainer.home.owned import ParameterStorage
from paramd.trainer.home.watch import Contents, Slots
from paramd.trainer.model.local_shard import LocalShard
from paramd.trainer.model.shards import find_shards

DEVICE_ALIGN_BYTES = 512
"""torch's own alignment on CUDA devices."""


def align_bytes(device: torch.device) -> int:
    """torch's alignment of tensors on the device; with the simulated driver, the processor's."""
    return ALIGN_BYTES if device.type == "cpu" else DEVICE_ALIGN_BYTES


CAPTURED = (
    "an update was captured in a CUDA graph, whose replays run no hooks, so nobody knows when the "
    "parameters change; leave the optimizer's step out of the graph, and attach again"
)


class MappedBytes:
    """Mapped device memory as tensors."""

    def __init__(self, mapped: Addresses, device: torch.device, size_bytes: int) -> None:
        self._mapped = mapped
        self._device = device
        self.size_bytes = size_bytes
        self.address = mapped.address

    @property
    def nbytes(self) -> int:
        return self.size_bytes

    @property
    def buffer(self) -> MappedBytes:
        """The memory that tensors are moved into."""
        return self

    def at(self, begin: int, size_bytes: int) -> torch.Tensor:
        """As `bytes_at`; nothing is copied."""
        span = _Span(self._mapped, self.address + begin, size_bytes)
        if self._device.type == "cpu":
            return torch.frombuffer(span.of_host(), dtype=torch.uint8)
        return torch.as_tensor(span, dtype=torch.uint8, device=self._device)


class DeviceMemory(MappedBytes):
    """An arena on a device as tensors, in place of a `HostArena`."""

    def __init__(self, mapped: DeviceMap, device: torch.device) -> None:
        super().__init__(mapped, device, mapped.size_bytes)
        self.descriptor = mapped.descriptor

    def populate(self) -> None:
        """Do nothing: device memory is present from the start."""

    def close(self) -> None:
        """Nothing: it is unmapped with the last tensor in it. The descriptor is its owner's."""


class DeviceState(MappedBytes):
    """Memory on a device for optimizer state, which the sidecar makes as it is needed."""

    def __init__(
        self,
        device: TrainerDevice,
        place: torch.device,
        *,
        size_bytes: int,
        allocations: Sequence[Allocation],
        add: Callable[[int], object],
    ) -> None:
        """`size_bytes`: at most; it takes addresses alone. `allocations`: the existing memory;
        `add` has the sidecar make more, of at least so many bytes, and appends it.
        """
        super().__init__(
            Addresses(device.driver, device.device, size_bytes), device=place, size_bytes=size_bytes
        )
        self._allocations = allocations
        self._add = add

    @property
    def align_bytes(self) -> int:
        """As of `plan_arena`."""
        return align_bytes(self._device)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a state tensor is on this device.

        With the simulated driver, tensors that have dimensions count as on the device, and the
        rest, such as counts of steps, as in host memory: torch's own default.
        """
        simulated = self._device.type == "cpu"
        return tensor.device == self._device and not (simulated and tensor.dim() == 0)

    def reserve(self, begin: int, end: int) -> None:
        """Have memory up to `end`; ExhaustedError: none left, UnreachableError: no sidecar."""
        self._map_new()
        mapped = self._mapped
        while mapped.mapped_bytes < end:
            there, left = mapped.mapped_bytes, self.size_bytes - mapped.mapped_bytes
            self._grow(max(end - there, min(there // 4, left)))
            self._map_new()

    def _grow(self, size_bytes: int) -> None:
        try:
            self._add(size_bytes)
        except ExhaustedError:
            if self._device.type == "cpu":
                raise
            # torch caches freed memory, such as that of activations.
            torch.accelerator.empty_cache()
            self._add(size_bytes)

    def _map_new(self) -> None:
        for allocation in self._allocations[self._mapped.allocation_count :]:
            self._mapped.map(allocation.descriptor, allocation.size_bytes)


class _Span:
    """Bytes of a map, for torch to make a tensor of; they keep the map alive."""

    def __init__(self, mapped: Addresses, address: int, size_bytes: int) -> None:
        self._mapped = mapped
        self._address, self._size_bytes = address, size_bytes
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (size_bytes,),
            "typestr": "|u1",
            "version": 3,
        }

    def of_host(self) -> Any:
        """The same as a buffer, where device memory is the host's."""
        found: Any = (ctypes.c_ubyte * self._size_bytes).from_address(self._address)
        found.span = self
        return found


class Versions(Contents):
    """Version counters alone, for an arena that the processor cannot sample.

    Changes that bump none, such as through `.data`, go unnoticed outside of updates.
    """

    def __init__(self) -> None:
        self._slots: Slots = ((), ())
        self._noted: tuple[int, ...] = ()
        super().__init__(memoryview(bytes(8)), ())

    def watch(self, slots: Slots, distributed: Slots = ((), ())) -> None:
        self._slots = slots
        self.note()
        super().watch(slots, distributed)

    def note(self) -> None:
        """Record the parameters' versions as those of the resting or settled state."""
        self._noted = self._now()

    def unchanged(self) -> bool:
        return self._now() == self._noted

    def digest(self) -> int:
        """The readers' digest of no samples; another number once something changed."""
        digest = super().digest()
        return digest if self.unchanged() else ~digest

    def strayed(self) -> bool:
        _, tensors, versions = self._seen
        return tuple(tensor._version for tensor in tensors) != versions

    def _now(self) -> tuple[int, ...]:
        return tuple(tensor._version for tensor in map(getitem, *self._slots))


class DeviceHome(ParameterStorage):
    """Parameters in an arena on their own device. States as of a `ParameterStorage`."""

    device: TrainerDevice

    def __init__(self, model: nn.Module, device: TrainerDevice, place: torch.device) -> None:
        """`place` is the parameters' device for torch; the processor with the simulated driver."""
        self.device = device
        self._place = place
        self._align_bytes = align_bytes(place)
        super().__init__(model)

    def _check_movable(self, shard: LocalShard) -> None:
        if shard.kind is TensorKind.PARAMETER and shard.tensor.device != self._place:
            raise ConflictError(
                f"parameter {shard.fqn!r} is on {shard.tensor.device}, others on {self._place}; "
                "an arena is on one device: attach with arena='mirror'"
            )

    def _alive(self) -> list[torch.Tensor]:
        return list(live_tensors(self._place.type))

    def _contents_of(self, arena: Memory) -> Contents:
        return Versions()

    def open_arena(self, descriptor: int, page: ControlPage) -> DeviceMemory:
        return DeviceMemory(self.device.open(descriptor, self.arena_bytes, page.words), self._place)

    def open_state(
        self, allocations: Sequence[Allocation], size_bytes: int, add: Callable[[int], object]
    ) -> DeviceState:
        return DeviceState(
            self.device, self._place, size_bytes=size_bytes, allocations=allocations, add=add
        )

    def finish(self) -> None:
        self.device.finish()

    def check(self, full: bool = False) -> list[str]:
        if self.device.captured:
            raise ConflictError(CAPTURED)
        left = super().check(full)
        if isinstance(self.contents, Versions):
            self.contents.note()
        return left

    def in_place(self) -> bool:
        """As of any home; and whether nothing has changed since the update."""
        contents = self.contents
        return super().in_place() and isinstance(contents, Versions) and contents.unchanged()

    def copy_buffers(self) -> None:
        super().copy_buffers()
        # Published again: readers have to wait for these copies too.
        self.device.publish()

    def move_out(self) -> None:
        if self._bases:
            self.finish()
        super().move_out()
        self.device.close()


def device_home(model: nn.Module) -> tuple[DeviceHome | None, str]:
    """A home on the device where all parameters are, or why there is none.

    With the simulated driver loaded, parameters in host memory count as on its device.
    """
    places = {
        shard.tensor.device
        for shard in find_shards(model)
        if shard.kind is TensorKind.PARAMETER and shard.tensor.numel()
    }
    if len(places) != 1:
        return None, f"the parameters are on {len(places)} devices"
    (place,) = places
    try:
        driver = load(_kind(place))
        # Devices of HIP's are called "cuda" by torch, too.
        if place.type != ("cpu" if driver.simulated else "cuda"):
            return None, f"parameters on {place} are none of this driver's"
        device = driver.device_at(place.index if place.index is not None else 0)
        reason = why_not(driver, device)
        if reason:
            return None, reason
        return DeviceHome(model, _trainer_device(driver, device, place), place), ""
    except DeviceError as error:
        return None, str(error)


def _kind(place: torch.device) -> str:
    """The driver of parameters there: the one that torch was built for.

    Host memory is a simulated driver's alone, whose kind is the one that is named, whatever torch
    was built for.
    """
    if place.type == "cpu" and HIP_VARIABLE in os.environ and VARIABLE not in os.environ:
        return HIP
    return HIP if torch.version.hip is not None else CUDA


def _trainer_device(driver: Driver, device: int, place: torch.device) -> TrainerDevice:
    if place.type != "cuda":
        return TrainerDevice(driver, device)
    return TrainerDevice(driver, device, lambda: int(torch.cuda.current_stream(place).cuda_stream))
