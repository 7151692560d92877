"""Plans of exports, made again here from the layout; the last one is kept."""

from __future__ import annotations

import asyncio

from paramd.errors import UsageError
from paramd.layout.codec import decode_layout
from paramd.layout.exports.plan import ExportPlan
from paramd.layout.exports.safetensors import ExportFile
from paramd.mesh.exports.messages import decode_plan
from paramd.v1 import export_pb2, layout_pb2
from paramd_service.sidecar.rank import RankSidecar

KEPT_S = 60.0
"""How long a plan is kept after it was last asked for."""


class Plans:
    """The plan that a message stands for."""

    def __init__(self, rank: RankSidecar) -> None:
        self._rank = rank
        self._key: tuple[int, str, bytes] | None = None
        self._kept: ExportPlan | None = None
        self._making = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None

    async def plan(self, message: export_pb2.ExportPlan) -> ExportPlan:
        """The plan.

        Raises:
            ConflictError: another epoch or layout, or planned by another version.
            UsageError: the message asks for something that there is not.
        """
        self._rank.check_plan(message.epoch, message.layout_digest)
        key = (message.epoch, message.layout_digest, message.digest)
        async with self._making:
            if self._kept is None or key != self._key:
                layout = self._rank.ready_mesh().layout
                self._kept = await asyncio.to_thread(_made, layout, message)
                self._key = key
            self._forget_later()
            return self._kept

    def _forget_later(self) -> None:
        """A plan of many tensors takes memory; it is made again when it is asked for again."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(KEPT_S, self._forget)

    def _forget(self) -> None:
        self._kept = self._key = None

    async def file(
        self, message: export_pb2.ExportPlan, number: int
    ) -> tuple[ExportPlan, ExportFile]:
        """The plan, and one of its files. Raises as `plan`."""
        plan = await self.plan(message)
        if not 0 <= number < len(plan.files):
            raise UsageError(f"file: {number}; the plan has {len(plan.files)} files")
        return plan, plan.files[number]


def _made(layout: bytes, message: export_pb2.ExportPlan) -> ExportPlan:
    return decode_plan(message, decode_layout(layout_pb2.Layout.FromString(layout)))
