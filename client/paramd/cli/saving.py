"""Writes tensors that are in memory already into a safetensors file."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from paramd.safetensors_file import SafetensorsWriter, TensorSpec

if TYPE_CHECKING:
    import torch

    from paramd.mesh.results import Summoned

CHUNK_BYTES = 16 << 20


def save(found: Summoned, path: Path, *, replace: bool) -> int:
    """Writes what was summoned; returns the size of the file in bytes.

    The metadata have the names that `safetensors.torch.load_model` knows for tied
    tensors: alias to the name that was written.
    """
    kept, aliases = untie(found)
    specs = [
        TensorSpec(name=name, dtype=dtype_name(tensor), shape=tuple(tensor.shape))
        for name, tensor in kept.items()
    ]
    metadata = {
        **aliases,
        "format": "pt",
        "paramd_job": found.job,
        "paramd_epoch": str(found.epoch),
        "paramd_step": str(found.step),
    }
    with SafetensorsWriter(path, specs, metadata=metadata, replace=replace) as writer:
        for spec in writer.specs:
            _append(writer, kept[spec.name])
    return writer.size_bytes


def untie(found: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Each tensor under its first name, and the other names with that first one."""
    first: dict[int, str] = {}
    kept: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    for name, tensor in found.items():
        canonical = first.setdefault(id(tensor), name)
        if canonical == name:
            kept[name] = tensor
        else:
            aliases[name] = canonical
    return kept, aliases


def dtype_name(tensor: torch.Tensor) -> str:
    """The dtype without torch's prefix."""
    return str(tensor.dtype).removeprefix("torch.")


def _append(writer: SafetensorsWriter, tensor: torch.Tensor) -> None:
    tensor = tensor.detach().cpu().contiguous()
    size_bytes = tensor.numel() * tensor.element_size()
    if not size_bytes:
        return
    # The bytes of any dtype, numpy's or not. `tensor` keeps them alive.
    memory = memoryview((ctypes.c_ubyte * size_bytes).from_address(tensor.data_ptr())).cast("B")
    for begin in range(0, size_bytes, CHUNK_BYTES):
        writer.append(memory[begin : begin + CHUNK_BYTES])
