"""paramd for asyncio programs: `async with paramd.aio.connect() as mesh: ...`."""

from __future__ import annotations

from paramd.mesh.amesh import AsyncMesh
from paramd.mesh.connect import async_connect as connect

__all__ = ["AsyncMesh", "connect"]
