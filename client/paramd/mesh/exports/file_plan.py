"""What a downloaded file holds and where, and how a journal tells of its snapshot. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from xxhash import xxh3_128_hexdigest

from paramd.layout.exports.safetensors import TensorSpec, encode_header, file_order
from paramd.layout.plan import ReadPlan, ResultTensor
from paramd.mesh.exports.journal import Ranges
from paramd.mesh.peers.pins import Pinned, RankPin
from paramd.mesh.reading.transfer import Chosen

if TYPE_CHECKING:
    import torch

LEASE_S: Final = 120.0
"""How long the snapshot outlives a break."""
BATCH_BYTES: Final = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What shall be in the file."""

    chosen: Chosen
    dtype: torch.dtype | None
    names: Mapping[str, str]
    """From the name of a tensor to its name in the file."""
    metadata: Mapping[str, str]
    """Of the header; job, epoch and step are added."""
    key: str
    """Equal for equal requests."""


@dataclass
class FileLayout:
    """The file's layout at one step."""

    header: bytes
    begins: dict[int, int] = field(default_factory=dict)
    """Where a tensor of the plan begins."""
    order: list[int] = field(default_factory=list)
    """Tensors of the plan in file order."""
    size_bytes: int = 0


def file_layout(wanted: Wanted, pinned: Pinned) -> FileLayout:
    plan = wanted.chosen.plan
    by_name: dict[str, int] = {}
    specs = []
    for index, tensor in enumerate(plan.tensors):
        name = wanted.names[wanted.chosen.names[index][0]]
        by_name[name] = index
        specs.append(TensorSpec(name=name, dtype=_dtype(tensor, wanted), shape=tensor.shape))
    ordered = file_order(specs)
    metadata = {
        **wanted.metadata,
        "paramd_epoch": str(pinned.epoch),
        "paramd_step": str(pinned.step),
    }
    found = FileLayout(header=encode_header(ordered, metadata))
    at = len(found.header)
    for spec in ordered:
        found.begins[by_name[spec.name]] = at
        found.order.append(by_name[spec.name])
        at += spec.size_bytes
    found.size_bytes = at
    return found


def _dtype(tensor: ResultTensor, wanted: Wanted) -> str:
    return str(wanted.dtype).removeprefix("torch.") if wanted.dtype is not None else tensor.dtype


def file_sizes(wanted: Wanted) -> list[int]:
    return [
        TensorSpec(name="", dtype=_dtype(tensor, wanted), shape=tensor.shape).size_bytes
        for tensor in wanted.chosen.plan.tensors
    ]


def covered(ranges: Ranges, begin: int, end: int) -> bool:
    """Whether [begin, end) is a union of noted ranges, which never cross tensors."""
    have = sum(stop - start for start, stop in ranges if begin <= start and stop <= end)
    return have == end - begin


def batches(plan: ReadPlan, missing: Sequence[int]) -> Iterator[list[int]]:
    batch: list[int] = []
    size_bytes = 0
    for index in missing:
        more = plan.tensors[index].size_bytes
        if batch and size_bytes + more > BATCH_BYTES:
            yield batch
            batch, size_bytes = [], 0
        batch.append(index)
        size_bytes += more
    if batch:
        yield batch


def request_key(
    job: str, digest: str, plan: ReadPlan, dtype: object, names: Mapping[str, str]
) -> str:
    """Names a request: equal for equal ones of one layout."""
    told = repr((job, digest, str(dtype), sorted(names.items()), plan.tensors, plan.ranks))
    return xxh3_128_hexdigest(told.encode())


def told_of(pinned: Pinned) -> dict[str, Any]:
    return {
        "epoch": pinned.epoch,
        "step": pinned.step,
        "edits": pinned.edits,
        "unsettled": pinned.unsettled,
        "pins": [[pin.rank, pin.snapshot_id, pin.size_bytes] for pin in pinned.pins.values()],
    }


def pinned_of(about: Mapping[str, Any]) -> Pinned | None:
    try:
        epoch, step, edits = int(about["epoch"]), int(about["step"]), int(about["edits"])
        pins = {
            int(rank): RankPin(
                rank=int(rank),
                snapshot_id=str(snapshot_id),
                epoch=epoch,
                step=step,
                size_bytes=int(size_bytes),
                lease_s=LEASE_S,
                edits=edits,
                unsettled=bool(about.get("unsettled", False)),
            )
            for rank, snapshot_id, size_bytes in about["pins"]
        }
    except (KeyError, TypeError, ValueError):
        return None
    if not pins:
        return None
    unsettled = any(pin.unsettled for pin in pins.values())
    return Pinned(epoch=epoch, step=step, pins=pins, edits=edits, unsettled=unsettled)
