"""Resume from an export, when nothing is left in memory.

    offered   the exports that the control plane knows, newest first
    open      the manifest, the headers and every checksum; changes nothing
    fill      parameters and buffers, each rank its own parts
    restore   the optimizers' state, if the export has it

An export has no continuation record: random states, hyper-parameters and `extra_state`
are not in it. Exports in directories and of format safetensors are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from xxhash import xxh3_128

from paramd import bounds
from paramd.answers import parsed_json
from paramd.bounds import HEADER
from paramd.errors import ConflictError, DataLossError, ParamdError, UsageError
from paramd.layout.dtypes import SAFETENSORS_NAMES, item_bytes
from paramd.layout.exports.safetensors import (
    MODEL_FILES,
    OPTIMIZER_FILES,
    OPTIMIZER_GROUPS,
    SAFETENSORS,
    SUFFIX,
)
from paramd.layout.types import (
    Box,
    Layout,
    Piece,
    TensorKind,
    TensorLayout,
    boxes_of_interval,
    intersection,
    row_major,
)
from paramd.trainer.boundary.optimizers import Owned, find_owned
from paramd.trainer.home.moving import Memory, bytes_at, placed
from paramd.trainer.model.dtensor import like
from paramd.trainer.resume.export_files import CHUNK_BYTES, MANIFEST, ExportFiles

_DTYPES = {theirs: ours for ours, theirs in SAFETENSORS_NAMES.items()}


@dataclass(frozen=True, slots=True)
class Offered:
    """A finished export that the control plane knows of."""

    id: str
    step: int
    format: str
    destination: str
    """The name that its user gave it."""
    directory: str
    """Absolute path; empty if there is none."""
    why_not: str
    """Why it cannot be read from a directory; empty if it can."""

    def __str__(self) -> str:
        return f"step {self.step} as {self.format} at {self.destination}"


@dataclass(frozen=True, slots=True)
class _Stored:
    file: str
    dtype: str
    shape: tuple[int, ...]
    begin_bytes: int
    parts: tuple[tuple[Box, _Stored], ...] = ()
    """If written in parts, each part and its box; the other fields are the first part's."""


class Exported:
    """An export being read by one rank. `close` it."""

    def __init__(self, offered: Offered, layout: Layout, rank: int) -> None:
        self.offered = offered
        self._tensors = [one for one in layout.tensors if one.numel]
        self._rank = rank
        self._files = ExportFiles(offered.directory)
        self._manifest: dict[str, Any] = {}
        self._model: dict[str, _Stored] = {}
        self._states: dict[str, dict[str, _Stored]] = {}
        self._groups: list[dict[str, Any]] | None = None

    @property
    def has_optimizer(self) -> bool:
        return self._groups is not None

    @property
    def extra_state(self) -> list[str]:
        """Names of its extra state, which is not loaded."""
        names: list[str] = self._manifest["extra_state"]
        return names

    def missing_buffers(self) -> int:
        """Number of the model's buffers that the export lacks."""
        return sum(self._found(one) is None for one in self._tensors)

    def open(self, optimizers: Sequence[torch.optim.Optimizer], *, share: tuple[int, int]) -> str:
        """Check that the export is complete and of this model; return a digest of its description.

        `share`: this rank's number among those of its host and their count; together they compare
        the checksums of all files. Raises ParamdError or OSError, with the reason, if it cannot be
        used.
        """
        if self.offered.format != SAFETENSORS.name:
            raise UsageError(
                f"only exports as {SAFETENSORS.name} are loaded; load it before attach"
            )
        if self.offered.why_not:
            raise UsageError(self.offered.why_not)
        text = self._read_manifest()
        number, count = share
        names = [str(file["name"]) for file in self._manifest["files"]]
        for name in names:
            self._files.open(name)
        for file in self._manifest["files"][number::count]:
            self._files.verify(file["name"], file["size_bytes"], file["xxh3"])
        self._read_headers(names)
        self._join_parts()
        self._check_model()
        if self.has_optimizer:
            self._check_groups(optimizers)
        return xxh3_128(text).hexdigest()

    def fill(self, arena: Memory) -> None:
        """Write this rank's parts of parameters and buffers into their places in the arena.

        Raises:
            DataLossError, OSError: If a file ended too early, or cannot be read any more.
        """
        for tensor in self._tensors:
            stored = self._found(tensor)
            if stored is None:
                continue
            for piece in self._pieces(tensor):
                self._copy(stored, piece, bytes_at(arena, 0, arena.nbytes), piece.arena_begin)

    def restore(
        self, optimizers: Sequence[torch.optim.Optimizer], arena_address: int, arena_bytes: int
    ) -> None:
        """Restore the optimizers' state. The parameters are in the arena. Raises as `fill`."""
        by_begin = [(piece, one) for one in self._tensors for piece in self._pieces(one)]
        for owned in find_owned(optimizers, arena_address, arena_bytes):
            within = [
                (piece, one)
                for piece, one in by_begin
                if one.kind is TensorKind.PARAMETER and owned.begin <= piece.arena_begin < owned.end
            ]
            keys = dict.fromkeys(key for _, one in within for key in self._states.get(one.fqn, ()))
            if keys:
                owned.optimizer.state[owned.param] = {
                    key: self._state(owned, key, within) for key in keys
                }

    def close(self) -> None:
        self._files.close()

    def _state(
        self, owned: Owned, key: str, within: Sequence[tuple[Piece, TensorLayout]]
    ) -> torch.Tensor | float:
        stored = [
            (piece, self._states[tensor.fqn][key], tensor)
            for piece, tensor in within
            if key in self._states.get(tensor.fqn, ())
        ]
        first = stored[0][1]
        if not first.shape and stored[0][2].shape:
            return self._number(owned, first)
        dtype: torch.dtype = getattr(torch, first.dtype)
        local = owned.local
        flat = torch.zeros((owned.end - owned.begin) // local.itemsize, dtype=dtype, device="cpu")
        for piece, part, _ in stored:
            begin = (piece.arena_begin - owned.begin) // local.itemsize * flat.itemsize
            self._copy(part, piece, _as_bytes(flat), begin)
        flat = flat.to(local.device)
        return like(owned.param, flat.as_strided(local.shape, local.stride()))

    def _number(self, owned: Owned, stored: _Stored) -> torch.Tensor | float:
        """A count such as Adam's "step": a tensor if it is of a float type, as torch keeps them."""
        dtype: torch.dtype = getattr(torch, stored.dtype)
        value = torch.zeros((), dtype=dtype, device="cpu")
        self._copy(stored, Piece(self._rank, 0, Box((), ())), _as_bytes(value), 0)
        if not dtype.is_floating_point:
            return value.item()
        group = owned.optimizer.param_groups[owned.group]
        with_it = group.get("capturable") or group.get("fused")
        return value.to(owned.local.device) if with_it else value

    def _pieces(self, tensor: TensorLayout) -> Iterator[Piece]:
        return (p for p in tensor.pieces if p.rank == self._rank and p.region.numel)

    def _name(self, name: str) -> str:
        return str(self._manifest["renamed"].get(name, name))

    def _found(self, tensor: TensorLayout) -> _Stored | None:
        names = (self._name(name) for name in (tensor.fqn, *tensor.aliases))
        return next((self._model[name] for name in names if name in self._model), None)

    def _read_manifest(self) -> bytes:
        self._files.open(MANIFEST)
        text = self._files.whole(MANIFEST, bounds.MANIFEST)
        try:
            found = parsed_json(text, bounds.MANIFEST)
            if found["paramd_export"] != 1:
                raise ValueError("another version of the manifest")
            self._manifest = {
                "export_id": str(found["export_id"]),
                "renamed": dict(found["renamed"]),
                "extra_state": list(map(str, found.get("extra_state", ()))),
                "parts": {
                    fqn: [(one["name"], Box(tuple(one["begin"]), tuple(one["end"]))) for one in of]
                    for fqn, of in found.get("parts", {}).items()
                },
                "files": [
                    {
                        "name": str(one["name"]),
                        "size_bytes": int(one["size_bytes"]),
                        "xxh3": str(one["xxh3"]),
                    }
                    for one in found["files"]
                ],
            }
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataLossError(f"its {MANIFEST} cannot be read ({error!r})") from None
        if found.get("weights_from") or found.get("merge"):
            raise UsageError("its weights are not those that were trained, but averaged or merged")
        if self._manifest["export_id"] != self.offered.id:
            raise ConflictError("another export has taken its place")
        return text

    def _read_headers(self, names: Sequence[str]) -> None:
        known = {self._name(one.fqn): one.fqn for one in self._tensors}
        for name in names:
            if name == OPTIMIZER_GROUPS:
                self._groups = self._read_groups(name)
            if not name.endswith(SUFFIX):
                continue
            for tensor, stored in self._header(name):
                if name.startswith(MODEL_FILES):
                    self._model[tensor] = stored
                elif name.startswith(OPTIMIZER_FILES):
                    owner, _, key = tensor.rpartition(".")
                    if owner not in known:
                        raise UsageError(
                            f"it has optimizer state of {owner!r}, which this model lacks"
                        )
                    self._states.setdefault(known[owner], {})[key] = stored

    def _join_parts(self) -> None:
        """Find tensors that were written in parts, as transformers names them, as wholes."""
        shapes = {one.fqn: one.shape for one in self._tensors}
        for fqn, of in self._manifest["parts"].items():
            found = []
            for name, box in of:
                stored = self._model.pop(name, None)
                if stored is None or prod(stored.shape) != box.numel:
                    raise DataLossError(f"it has no {name!r}, a part of {fqn!r}, or another")
                found.append((box, replace(stored, shape=box.sizes)))
            if fqn in shapes and found:
                self._model[fqn] = replace(found[0][1], shape=shapes[fqn], parts=tuple(found))

    def _read_groups(self, name: str) -> list[dict[str, Any]]:
        try:
            text = self._files.whole(name, bounds.OPTIMIZER_GROUPS)
            return [dict(group) for group in parsed_json(text, bounds.OPTIMIZER_GROUPS)["groups"]]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataLossError(f"{name} cannot be read ({error!r})") from None

    def _header(self, name: str) -> Iterator[tuple[str, _Stored]]:
        length = int.from_bytes(self._files.read(name, 0, 8), "little")
        if length > HEADER.most_bytes:
            raise DataLossError(f"{name} has a header of {length:,} bytes")
        try:
            for tensor, facts in parsed_json(
                bytes(self._files.read(name, 8, length)), HEADER
            ).items():
                if tensor != "__metadata__":
                    begin, end = facts["data_offsets"]
                    shape, dtype = tuple(map(int, facts["shape"])), _DTYPES[facts["dtype"]]
                    if end - begin != prod(shape) * item_bytes(dtype) or begin < 0:
                        raise ValueError(f"the size of {tensor}")
                    yield tensor, _Stored(name, dtype, shape, 8 + length + int(begin))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataLossError(f"the header of {name} cannot be read ({error!r})") from None

    def _check_model(self) -> None:
        known = set()
        for tensor in self._tensors:
            known |= {self._name(name) for name in (tensor.fqn, *tensor.aliases)}
            stored = self._found(tensor)
            if stored is None:
                if tensor.kind is TensorKind.BUFFER:
                    continue
                raise UsageError(f"it has no {tensor.fqn!r}")
            if (stored.dtype, stored.shape) != (tensor.dtype, tensor.shape):
                raise UsageError(
                    f"{tensor.fqn!r} is {stored.dtype} {list(stored.shape)} there and "
                    f"{tensor.dtype} {list(tensor.shape)} in this training"
                )
            for key, state in self._states.get(tensor.fqn, {}).items():
                if state.shape not in (tensor.shape, ()):
                    raise UsageError(f"state {key!r} of {tensor.fqn!r} has another shape there")
        if strange := sorted(set(self._model) - known - set(self.extra_state)):
            raise UsageError(f"it has {strange[0]!r}, which this model lacks")

    def _check_groups(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Refuse state of other optimizers. It has no classes, but their settings' names differ."""
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        were = self._groups or []
        if len(were) != len(groups):
            raise UsageError(
                f"its optimizers had {len(were)} parameter groups and have {len(groups)}"
            )
        for number, (was, group) in enumerate(zip(were, groups, strict=True)):
            # A scheduler adds one, whenever it is made.
            apart = (set(was) ^ set(group)) - {"params", "initial_lr"}
            if apart:
                raise UsageError(
                    f"optimizer settings differ: group {number} has {min(apart)!r} only in "
                    f"{'the export' if min(apart) in was else 'this training'}"
                )

    def _copy(self, stored: _Stored, piece: Piece, memory: torch.Tensor, begin_bytes: int) -> None:
        """Copy a region of a stored tensor to its place in `memory`, from `begin_bytes` on."""
        dtype: torch.dtype = getattr(torch, stored.dtype)
        region, at = piece.region, begin_bytes
        boxes = [region] if isinstance(region, Box) else boxes_of_interval(region, stored.shape)
        for box in boxes:
            strides = piece.strides if piece.strides is not None else row_major(box.sizes)
            storage = memory.untyped_storage()
            target = placed(dtype, storage, int(memory.storage_offset()) + at, box.sizes, strides)
            with torch.no_grad():
                self._copy_box(stored, box, target, dtype)
            at += box.numel * dtype.itemsize

    def _copy_box(
        self, stored: _Stored, box: Box, target: torch.Tensor, dtype: torch.dtype
    ) -> None:
        for held, part in stored.parts:
            if (shared := intersection(held, box)) is not None:
                place = _seen_from(box.begin, shared)
                inside = target[tuple(map(slice, place.begin, place.end))]
                self._copy_box(part, _seen_from(held.begin, shared), inside, dtype)
        if stored.parts:
            return
        if stored.shape:
            self._copy_rows(stored, box, target, dtype)
            return
        data = self._files.read(stored.file, stored.begin_bytes, dtype.itemsize)
        target.copy_(torch.frombuffer(data, dtype=dtype).view(()))

    def _copy_rows(
        self, stored: _Stored, box: Box, target: torch.Tensor, dtype: torch.dtype
    ) -> None:
        """Copy a box of a tensor that was written as a whole: some `CHUNK_BYTES` at a time."""
        row_bytes = prod(stored.shape[1:]) * dtype.itemsize
        count = max(CHUNK_BYTES // max(row_bytes, 1), 1)
        inner = tuple(slice(b, e) for b, e in zip(box.begin[1:], box.end[1:], strict=True))
        for first in range(box.begin[0], box.end[0], count):
            last = min(first + count, box.end[0])
            begin = stored.begin_bytes + first * row_bytes
            data = self._files.read(stored.file, begin, (last - first) * row_bytes)
            rows = torch.frombuffer(data, dtype=dtype).view(last - first, *stored.shape[1:])
            target[first - box.begin[0] : last - box.begin[0]].copy_(rows[(slice(None), *inner)])


def _seen_from(origin: Sequence[int], box: Box) -> Box:
    begin = tuple(b - o for b, o in zip(box.begin, origin, strict=True))
    return Box(begin, tuple(e - o for e, o in zip(box.end, origin, strict=True)))


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def opened(
    offered: Offered,
    layout: Layout,
    rank: int,
    optimizers: Sequence[torch.optim.Optimizer],
    share: tuple[int, int],
) -> tuple[Exported | None, dict[str, Any]]:
    """An export that this rank can read, and the message about it for the other ranks."""
    found = Exported(offered, layout, rank)
    try:
        return found, {"why": "", "digest": found.open(optimizers, share=share)}
    except (ParamdError, OSError) as error:
        found.close()
        return None, {"why": str(error) or repr(error), "digest": ""}
