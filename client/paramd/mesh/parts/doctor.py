"""How this process and the job's hosts reach each other."""

# `timeout=` as in other clients; it bounds the whole call with its retries, not one await.

from __future__ import annotations

from paramd.mesh.parts.host import MeshPart
from paramd.mesh.reading.transfer import Lane, Reach, find_lanes, find_reaches
from paramd.mesh.results import Records


class DoctorPart(MeshPart):
    """Which ways there are to each rank, and why not faster ones."""

    async def lanes(self) -> Records[Lane]:
        """How this process would read each rank with `transport="auto"`, and why not faster."""
        return Records(await find_lanes(await self._host.reach.sidecars()))

    async def reaches(self) -> Records[Reach]:
        """How the job's hosts reach each other and the control plane, and why not.

        One sidecar of each host tries one of each other host. None for a job on one host, but for
        the control plane.
        """
        return Records(await find_reaches(await self._host.reach.sidecars()))
