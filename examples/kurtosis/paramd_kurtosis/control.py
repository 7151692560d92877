"""At the control plane: `GET /api/v1/jobs/{job}/kurtosis`."""

from fastapi import APIRouter

from paramd_kurtosis.sidecar import DTYPES
from paramd_service.control.parts import ControlPart


class Kurtosis(ControlPart):
    """Adds an operation of REST, for admins."""

    name = "kurtosis"

    def routes(self) -> list[APIRouter]:
        routes = APIRouter(tags=["kurtosis"])

        @routes.get("/jobs/{job}/kurtosis")
        async def list_kurtosis_tensors(job: str) -> list[str]:
            mesh = self.host.jobs.get(job)
            _, index = await mesh.layouts.get(mesh.registry.view())
            return [tensor.fqn for tensor in index.layout.tensors if tensor.dtype in DTYPES]

        return [routes]
