"""One edit from its operations to its end: created, uploaded, committed, waited for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from paramd.errors import ParamdError
from paramd.layout.edits.ops import OpSpec
from paramd.mesh.edits.calls import EditCalls, EditTerms, new_edit_id
from paramd.mesh.edits.results import Edit, check_applied
from paramd.mesh.edits.upload import Progress, Uploads, manifest_of
from paramd.mesh.peers.discovery import SidecarFinder
from paramd.mesh.peers.sidecars import Sidecars
from paramd.mesh.reading.transfer import Transfer, Transport, check_transport


@dataclass(frozen=True, kw_only=True, slots=True)
class Sending:
    """How operands travel."""

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
    """Makes an edit of `ops`; without `wait` returns once it is committed.

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
            # Nobody will commit it; what was staged is let go of now, not when it expires.
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
            transport=sending.transport,
            deadline_s=sending.deadline_s,
            progress=sending.progress,
        ).run()

    await reach.attempts(attempt, sending.deadline_s)
