"""Exports over the control plane's REST side."""

from __future__ import annotations

import asyncio
import base64
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode

from paramd.errors import UnreachableError, UsageError
from paramd.mesh.exports.results import ExportInfo, parse_export
from paramd.mesh.peers.control import RestClient

ASSET_CHUNK_BYTES: Final = 512 << 10
MAX_ASSETS_BYTES: Final = 64 << 20
"""Of all files that are copied beside an export, in all."""
MAX_ASSETS: Final = 64

_AGAIN_S: Final = 0.3
_PAGE: Final = 200


def new_export_id() -> str:
    """A name for an export, made before it is sent: sending it twice does it once."""
    return secrets.token_hex(16)


class ExportCalls:
    """Requests about one job. What is idempotent is asked again when nobody answered."""

    def __init__(self, rest: RestClient, job: str) -> None:
        self._rest = rest
        self._path = f"/jobs/{quote(job, safe='')}"

    async def create(self, body: Mapping[str, Any], deadline_s: float) -> ExportInfo:
        """Begins the export that `body["id"]` names."""
        return parse_export(await self._again("POST", "/exports", body, deadline_s))

    async def get(self, export_id: str) -> ExportInfo:
        """One export."""
        return parse_export(await self._rest.send("GET", f"{self._path}/exports/{_q(export_id)}"))

    async def cancel(self, export_id: str, deadline_s: float) -> ExportInfo:
        """Ends one."""
        return parse_export(
            await self._again("DELETE", f"/exports/{_q(export_id)}", None, deadline_s)
        )

    async def all(self, *, state: str | None, limit: int) -> list[ExportInfo]:
        """The newest exports, newest first; without their files."""
        found: list[ExportInfo] = []
        token = ""
        while len(found) < limit:
            wanted = min(limit - len(found), _PAGE)
            asked = urlencode({"state": state or "", "limit": wanted, "page_token": token})
            page = await self._rest.send("GET", f"{self._path}/exports?{asked}")
            found += [parse_export(one) for one in page["exports"]]
            token = page["next_page_token"]
            if not token:
                break
        return found

    async def create_schedule(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Has exports begin by themselves."""
        return dict(await self._rest.send("POST", f"{self._path}/export-schedules", body))

    async def schedules(self) -> list[dict[str, Any]]:
        """Schedules in force, oldest first."""
        found = await self._rest.send("GET", f"{self._path}/export-schedules")
        return [dict(one) for one in found["schedules"]]

    async def delete_schedule(self, schedule_id: str) -> dict[str, Any]:
        """Ends a schedule; what it exported stays."""
        path = f"{self._path}/export-schedules/{_q(schedule_id)}"
        return dict(await self._rest.send("DELETE", path))

    async def destinations(self) -> list[dict[str, Any]]:
        """Names and kinds of the places that exports may go to."""
        found = await self._rest.send("GET", "/destinations")
        return [dict(one) for one in found["destinations"]]

    async def upload_assets(self, owner_id: str, files: Sequence[tuple[str, bytes]]) -> None:
        """Gives the control plane the files that are copied beside an export."""
        for name, data in files:
            for begin in range(0, max(len(data), 1), ASSET_CHUNK_BYTES):
                part = data[begin : begin + ASSET_CHUNK_BYTES]
                body = {
                    "owner": owner_id,
                    "name": name,
                    "offset_bytes": begin,
                    "data": base64.b64encode(part).decode(),
                }
                deadline_s = time.monotonic() + 30.0
                await self._again("POST", "/export-assets", body, deadline_s)

    async def _again(
        self, method: str, path: str, body: Mapping[str, Any] | None, deadline_s: float
    ) -> Any:
        while True:
            try:
                return await self._rest.send(method, self._path + path, body)
            except UnreachableError:
                # A control plane that was killed is back within seconds.
                if time.monotonic() + _AGAIN_S > deadline_s:
                    raise
                await asyncio.sleep(_AGAIN_S)


def read_assets(folder: Path) -> list[tuple[str, bytes]]:
    """Plain files of a directory, by name; no links, no directories below.

    Raises:
        UsageError: no directory, too many files or bytes.
    """
    if not folder.is_dir():
        raise UsageError(f"assets: {folder} is no directory")
    paths = [p for p in sorted(folder.iterdir()) if p.is_file() and not p.is_symlink()]
    size_bytes = sum(path.stat().st_size for path in paths)
    if len(paths) > MAX_ASSETS or size_bytes > MAX_ASSETS_BYTES:
        raise UsageError(
            f"assets: {folder} holds {len(paths)} files of {size_bytes:,} bytes; at most "
            f"{MAX_ASSETS} of {MAX_ASSETS_BYTES:,} in all are copied beside an export"
        )
    return [(path.name, path.read_bytes()) for path in paths]


def _q(name: str) -> str:
    return quote(name, safe="")
