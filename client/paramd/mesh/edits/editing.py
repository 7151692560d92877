"""One edit from its operations to its end (`make_edit`), and the changes of a writeback block."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from xxhash import xxh3_128_digest

from paramd.errors import ParamdError, UsageError
from paramd.layout.edits.ops import OpSpec
from paramd.layout.select import Selection, select
from paramd.layout.types import Box, full_box
from paramd.mesh.edits.calls import Edit, EditCalls, EditTerms, check_applied, new_edit_id
from paramd.mesh.edits.lending import Lender
from paramd.mesh.edits.upload import LENT_FROM_BYTES, Progress, Uploads, manifest_of
from paramd.mesh.peers.discovery import SidecarFinder
from paramd.mesh.peers.sidecars import Sidecars
from paramd.mesh.reading.stream import Transport
from paramd.mesh.reading.transfer import (
    MAX_COPY_THREADS,
    Transfer,
    check_transport,
    is_same_host,
)
from paramd.mesh.results import Summoned
from paramd.wire import LEASE_S

if TYPE_CHECKING:
    from torch import Tensor

Mode = Literal["replace", "delta"]


def check_mode(mode: str | None, *, hold: bool) -> Mode:
    """`mode`, or its default: "replace" with a hold, "delta" without.

    Raises:
        UsageError: there is no such mode.
    """
    if mode is None:
        return "replace" if hold else "delta"
    if mode == "replace":
        return "replace"
    if mode == "delta":
        return "delta"
    raise UsageError(f"mode: {mode!r}; expected one of {', '.join(get_args(Mode))}")


@dataclass(frozen=True, slots=True)
class _Known:
    """One tensor as it was summoned."""

    names: tuple[str, ...]
    pattern: str
    tensor: Tensor
    digest: bytes
    copy: Tensor | None


class Changes:
    """Finds what a writeback block changed in the tensors it was given."""

    def __init__(
        self,
        found: Summoned,
        selection: Selection,
        *,
        mode: Mode,
        room: Mapping[str, Tensor],
    ) -> None:
        """Record the current contents of `found`: digests, and in delta mode copies.

        Args:
            room: Where copies go, by name; the others are allocated.
        """
        self._found = found
        self._names = set(found)
        self._known: dict[str, _Known] = {}
        tensors = [found[item.name] for item in selection]
        for item, tensor, known_digest in zip(selection, tensors, _digests(tensors), strict=True):
            whole = item.box == full_box(item.tensor.shape)
            by_delta = mode == "delta" and item.tensor.dtype != "bool"
            self._known[item.name] = _Known(
                names=item.names,
                pattern=item.name if whole else _sliced(item.name, item.box),
                tensor=tensor,
                digest=known_digest,
                copy=_copied(tensor, room.get(item.name)) if by_delta else None,
            )

    def ops(self) -> list[OpSpec]:
        """The operations that write the changes, in layout order. Call once.

        Raises:
            UsageError: names were added or removed, or a shape or dtype changed.
        """
        _check_names(self._found, self._names)
        ops: list[OpSpec] = []
        now = {name: self._now(known) for name, known in self._known.items()}
        for name, known in self._known.items():
            tensor = now[name]
            if (tensor.shape, tensor.dtype) != (known.tensor.shape, known.tensor.dtype):
                raise UsageError(
                    f"{name!r} now has shape {list(tensor.shape)}, {tensor.dtype}; expected "
                    f"{list(known.tensor.shape)}, {known.tensor.dtype}; nothing was written"
                )
        for (name, known), new_digest in zip(
            self._known.items(), _digests(now.values()), strict=True
        ):
            tensor = now[name]
            if new_digest == known.digest:
                continue
            if known.copy is None:
                ops.append(OpSpec(pattern=known.pattern, op="set", data=True, operand=tensor))
            else:
                # In place, as the model may be large; the copy is not needed again.
                change = known.copy.neg_().add_(tensor)
                ops.append(OpSpec(pattern=known.pattern, op="add", data=True, operand=change))
        return ops

    def _now(self, known: _Known) -> Tensor:
        """The current tensor: the same object, or one assigned to any of its names."""
        others = (self._found[name] for name in known.names)
        return next((o for o in others if o is not known.tensor), known.tensor).detach()


async def selected(reach: SidecarFinder, patterns: Sequence[str]) -> Selection:
    """What `patterns` select of the current layout."""

    async def attempt(sidecars: Sidecars) -> Selection:
        return select(await reach.index(sidecars), patterns)

    return await reach.attempts(attempt, time.monotonic() + LEASE_S)


def lent_room(lender: Lender, reach: SidecarFinder, selection: Selection) -> dict[str, Tensor]:
    """A tensor in lent memory for each that is selected; none if no sidecar is on this host.

    Blocks.
    """
    from paramd.mesh.edits.operands import lent_tensors  # imports torch

    if not any(map(is_same_host, reach.document.peers.values())):
        return {}
    return lent_tensors(lender, selection, from_bytes=LENT_FROM_BYTES)


def _copied(tensor: Tensor, room: Tensor | None) -> Tensor:
    return room.copy_(tensor) if room is not None else tensor.clone()


def _digests(tensors: Iterable[Tensor]) -> list[bytes]:
    """As `digest`, of several at once, which is a matter of memory bandwidth."""
    with ThreadPoolExecutor(min(MAX_COPY_THREADS, len(os.sched_getaffinity(0)))) as threads:
        return list(threads.map(digest, tensors))


def digest(tensor: Tensor) -> bytes:
    """XXH3 (128 bit) of a tensor's elements in row-major order."""
    tensor = tensor.detach().cpu().contiguous()
    size_bytes = tensor.numel() * tensor.element_size()
    if not size_bytes:
        return b""
    return xxh3_128_digest((ctypes.c_ubyte * size_bytes).from_address(tensor.data_ptr()))


def _check_names(found: Mapping[str, object], names: set[str]) -> None:
    if set(found) != names:
        strange: Sequence[str] = sorted(names.symmetric_difference(found))
        raise UsageError(
            f"{strange[0]!r} was added to or removed from the summoned tensors; change tensors in "
            "place, or assign others of the same shape to their names. Nothing was written"
        )


def _sliced(name: str, box: Box) -> str:
    ranges = (f"{begin}:{end}" for begin, end in zip(box.begin, box.end, strict=True))
    return f"{name}[{', '.join(ranges)}]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sending:
    """Options of the upload of operands."""

    lender: Lender
    transport: Transport = "auto"
    progress: Progress | None = None
    deadline_s: float
    """Of the whole edit, on the monotonic clock."""


async def make_edit(
    calls: EditCalls,
    reach: SidecarFinder,
    transfer: Transfer,
    ops: Sequence[OpSpec],
    terms: EditTerms,
    sending: Sending,
    *,
    wait: bool = True,
) -> Edit:
    """Create an edit, upload its operands, commit it and, with `wait`, wait for its end.

    Raises: as `AsyncMesh.edit`.
    """
    check_transport(sending.transport)
    deadline_s = sending.deadline_s
    with_data = any(op.data for op in ops)
    if with_data:
        await transfer.load_torch()
    edit = await calls.create(new_edit_id(), ops, terms, deadline_s)
    if with_data and not edit.ended:
        try:
            await _upload(reach, transfer, edit.id, ops, terms, sending)
        except BaseException:
            # Free the staged operands now rather than when the edit expires.
            with suppress(ParamdError):
                await calls.abort(edit.id)
            raise
        if terms.dry_run:
            edit = await calls.preview(edit.id, deadline_s)
            await calls.abort(edit.id)
            return edit
        edit = await calls.commit(edit.id, deadline_s)
    if terms.dry_run:
        return await calls.ended(edit, deadline_s)
    return check_applied(await calls.ended(edit, deadline_s)) if wait else edit


async def _upload(
    reach: SidecarFinder,
    transfer: Transfer,
    edit_id: str,
    ops: Sequence[OpSpec],
    terms: EditTerms,
    sending: Sending,
) -> None:
    from paramd.mesh.edits.operands import prepare  # imports torch

    async def attempt(sidecars: Sidecars) -> None:
        index = await reach.index(sidecars)
        operands = prepare(index, ops, allow_nonfinite=terms.allow_nonfinite)
        await Uploads(
            sidecars,
            manifest_of(edit_id, sidecars, operands, terms),
            operands,
            transfer=transfer,
            lender=sending.lender,
            transport=sending.transport,
            deadline_s=sending.deadline_s,
            progress=sending.progress,
        ).run()

    await reach.attempts(attempt, sending.deadline_s)
