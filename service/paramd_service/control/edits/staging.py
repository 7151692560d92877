"""What is done of an edit before it is committed: staging, looking, numbers before and after."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from paramd.errors import ConflictError, NotFoundError, ParamdError
from paramd.layout.edits import PlannedOp
from paramd.layout.select import NameIndex
from paramd.mesh.summary import stats_of
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.control.edits.calls import PREVIEW_S, EditCalls
from paramd_service.control.edits.driver import EditDriver
from paramd_service.control.edits.planning import merged
from paramd_service.control.edits.words import Staged
from paramd_service.control.verdicts import worst
from paramd_service.control.view import MeshView, listed

Result = TypeVar("Result")


async def on_all(
    view: MeshView, call: Callable[[int, str], Awaitable[Result]]
) -> dict[int, Result]:
    """The answers of all joined ranks. Raises one error for all that failed."""
    ranks = [(report.rank, report.peer.address) for report in view.joined]
    found = await asyncio.gather(
        *(call(rank, address) for rank, address in ranks), return_exceptions=True
    )
    answers: dict[int, Result] = {}
    failures: dict[int, ParamdError] = {}
    for (rank, _), one in zip(ranks, found, strict=True):
        if isinstance(one, ParamdError):
            failures[rank] = one
        elif isinstance(one, BaseException):
            raise one
        else:
            answers[rank] = one
    if failures:
        raise worst(failures)
    return answers


async def stage_all(
    driver: EditDriver, calls: EditCalls, view: MeshView, manifest: pb.EditManifest
) -> None:
    """Stages an edit without data on all ranks. Raises what the ranks raise."""
    found = await on_all(view, lambda rank, address: calls.stage(rank, address, manifest))
    _tell(driver, found)


async def look_all(
    driver: EditDriver, calls: EditCalls, view: MeshView, manifest: pb.EditManifest
) -> int:
    """Looks whether all ranks have it whole; returns their step when it is one, else -1.

    Raises:
        ConflictError: data is missing somewhere.
    """

    async def look(rank: int, address: str) -> pb.GetEditResponse:
        try:
            return await calls.get(rank, address, manifest.edit_id)
        except NotFoundError:
            # A rank that needs no data need not have been told by who uploads.
            progress = await calls.stage(rank, address, manifest)
            state = await calls.state(rank, address)
            return pb.GetEditResponse(header=state.header, progress=progress)

    found = await on_all(view, look)
    lacking = [rank for rank, one in found.items() if one.progress.phase == pb.EDIT_PHASE_STAGING]
    if lacking:
        one = found[lacking[0]].progress
        raise ConflictError(
            f"ranks {listed(lacking)} have not all of its data (rank {lacking[0]}: "
            f"{one.staged_bytes:,} of {one.size_bytes:,} bytes); upload the rest first"
        )
    _tell(driver, {rank: one.progress for rank, one in found.items()})
    steps = {one.header.step for one in found.values()}
    return steps.pop() if len(steps) == 1 else -1


async def preview_all(
    calls: EditCalls,
    view: MeshView,
    edit_id: str,
    index: NameIndex,
    ops: Sequence[PlannedOp],
    *,
    timeout_s: float = PREVIEW_S,
) -> dict[str, Any]:
    """{"before", "after"} of a staged edit over all ranks. Raises what the ranks raise."""
    found = await on_all(
        view, lambda rank, address: calls.preview(rank, address, edit_id, timeout_s=timeout_s)
    )
    before = {rank: [stats_of(one) for one in answer.before] for rank, answer in found.items()}
    after = {rank: [stats_of(one) for one in answer.after] for rank, answer in found.items()}
    return {"before": merged(index, ops, before), "after": merged(index, ops, after)}


def _tell(driver: EditDriver, found: dict[int, pb.EditProgress]) -> None:
    for rank, progress in found.items():
        driver.feed(Staged(rank, progress.manifest_digest, tuple(progress.data_digests)))
