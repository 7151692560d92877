"""What is asked of sidecars about edits and holds."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from paramd.errors import UnreachableError
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.control.edits.machine import Applied, Outcome
from paramd_service.control.mesh.sidecars import SidecarCalls
from paramd_service.control.mesh.view import MeshView

ASK_S = 5.0
"""A sidecar that takes longer for a short answer is asked again."""
STAGE_S = 60.0
PREVIEW_S = 60.0

_FATES = {
    pb.BOUNDARY_FATE_WITHDRAWN: Outcome.WITHDRAWN,
    pb.BOUNDARY_FATE_AGREED: Outcome.AGREED,
    pb.BOUNDARY_FATE_DONE: Outcome.DONE,
    pb.BOUNDARY_FATE_TORN: Outcome.TORN,
}


class EditCalls:
    """Calls to the sidecars of one epoch. All raise the ParamdError of the status."""

    def __init__(self, sidecars: SidecarCalls, *, epoch: int, generation: int) -> None:
        self._sidecars = sidecars
        self._epoch = epoch
        self._generation = generation

    async def stage(self, rank: int, address: str, manifest: pb.EditManifest) -> pb.EditProgress:
        """Stages the manifest alone; data, where there is any, comes from elsewhere."""

        async def messages() -> AsyncIterator[pb.StageEditRequest]:
            yield pb.StageEditRequest(manifest=manifest)

        answer: pb.StageEditResponse = await self._ask(
            rank, address, "StageEdit", messages(), STAGE_S
        )
        return answer.progress

    async def get(self, rank: int, address: str, edit_id: str) -> pb.GetEditResponse:
        """How far it is there. Raises NotFoundError when nothing is known of it."""
        request = pb.GetEditRequest(edit_id=edit_id)
        answer: pb.GetEditResponse = await self._ask(rank, address, "GetEdit", request)
        return answer

    async def preview(
        self, rank: int, address: str, edit_id: str, *, timeout_s: float
    ) -> pb.PreviewEditResponse:
        """Statistics before and after."""
        request = pb.PreviewEditRequest(edit_id=edit_id)
        answer: pb.PreviewEditResponse = await self._ask(
            rank, address, "PreviewEdit", request, timeout_s
        )
        return answer

    async def drop(self, rank: int, address: str, edit_id: str) -> None:
        """Forgets what is staged."""
        request = pb.DropEditRequest(edit_id=edit_id, generation=self._generation)
        await self._ask(rank, address, "DropEdit", request)

    async def withdraw(self, rank: int, address: str, boundary: int) -> Outcome:
        """Takes a boundary request back, and says what became of it."""
        request = pb.WithdrawBoundaryRequest(
            epoch=self._epoch, boundary=boundary, generation=self._generation
        )
        answer: pb.WithdrawBoundaryResponse = await self._ask(
            rank, address, "WithdrawBoundary", request
        )
        # What is not known here, a newer sidecar's word, is no certainty.
        return _FATES.get(answer.fate, Outcome.IN_DOUBT)

    async def renew_hold(self, rank: int, address: str, lease_ms: int) -> int:
        """Lease granted, in milliseconds."""
        request = pb.RenewHoldRequest(
            epoch=self._epoch, generation=self._generation, lease_ms=lease_ms
        )
        answer: pb.RenewHoldResponse = await self._ask(rank, address, "RenewHold", request)
        return answer.lease_ms

    async def state(self, rank: int, address: str) -> pb.GetStateResponse:
        """What the rank does now."""
        request = pb.GetStateRequest()
        answer: pb.GetStateResponse = await self._ask(rank, address, "GetState", request)
        return answer

    async def _ask(
        self, rank: int, address: str, method: str, request: object, timeout_s: float = ASK_S
    ) -> Any:
        return await self._sidecars.ask(rank, address, method, request, timeout_s=timeout_s)


def address_of(view: MeshView, rank: int) -> str:
    """Where a rank's sidecar is found. Raises UnreachableError when it is not there."""
    found = view.ranks[rank]
    if found.report is None or not found.connected:
        raise UnreachableError(f"rank {rank}: {found.reason}")
    return found.report.address


def applied_of(answer: pb.GetEditResponse) -> Applied | None:
    """How a rank applied an edit; None when it has not."""
    progress = answer.progress
    if progress.phase != pb.EDIT_PHASE_APPLIED:
        return None
    return Applied(
        boundary=progress.boundary,
        token=progress.token,
        step=answer.header.step,
        edits=answer.header.edits,
        manifest_digest=progress.manifest_digest,
        data_digests=tuple(progress.data_digests),
        stop_ns=progress.stop_ns,
    )
