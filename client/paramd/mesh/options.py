"""Keyword arguments of a mesh's methods, for what passes them on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypedDict

from paramd.mesh.loop import Timeout
from paramd.mesh.reading.stream import Transport

if TYPE_CHECKING:
    import torch

    from paramd.mesh.edits.editing import Progress
    from paramd.mesh.edits.operands import Operand


class SummonOptions(TypedDict, total=False):
    """Of `Mesh.summon`, but for those of a writeback."""

    dtype: torch.dtype | str | None
    device: torch.device | str | None
    into: Mapping[str, torch.Tensor] | None
    buffers: bool
    unsettled: bool
    optimizer: bool
    replica: int | None
    timeout: Timeout
    transport: Transport
    progress: Callable[[int, int], object] | None


class StatsOptions(TypedDict, total=False):
    """Of `Mesh.stats`."""

    buffers: bool
    histogram: bool
    unsettled: bool
    timeout: Timeout


class EditOptions(TypedDict, total=False):
    """Of `Mesh.edit`."""

    fill: float | None
    add: Operand | Mapping[str, Operand] | None
    mul: Operand | Mapping[str, Operand] | None
    set: Operand | Mapping[str, Operand] | None
    lerp: Operand | Mapping[str, Operand] | None
    weight: float | None
    clamp: tuple[float | None, float | None] | None
    if_step: int | None
    reset_moments: bool
    allow_nonfinite: bool
    dry_run: bool
    note: str
    wait: bool
    timeout: Timeout
    progress: Progress | None
    transport: Transport
