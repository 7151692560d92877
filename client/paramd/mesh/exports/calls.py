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

from paramd.errors import DeadlineError, UnreachableError, UsageError
from paramd.mesh.exports.results import ExportInfo, Progress, parse_export
from paramd.mesh.peers.control import RestClient
from paramd.mesh.peers.discovery import SidecarFinder

ASSET_CHUNK_BYTES: Final = 512 << 10
MAX_ASSETS_BYTES: Final = 64 << 20
"""Of all files that are copied beside an export, in all."""
MAX_ASSETS: Final = 64

_AGAIN_S: Final = 0.3
_PAGE: Final = 200
_LOOK_S: Final = 0.5
_FIRST_LOOK_S: Final = 0.05
_AWAY_S: Final = 60.0
_CREATE_S: Final = 15.0


class ExportCalls:
    """Requests about one job. What is idempotent is asked again when nobody answered."""

    def __init__(self, rest: RestClient, reach: SidecarFinder) -> None:
        self._rest = rest
        self._reach = reach

    async def create(self, body: Mapping[str, Any], assets: str | Path | None) -> ExportInfo:
        """Begins the export that `body["id"]` names, with the files of the folder `assets`."""
        body = {**body, "assets": await self._upload_assets(body["id"], assets)}
        return parse_export(await self._again("POST", "/exports", body))

    async def get(self, export_id: str) -> ExportInfo:
        """One export."""
        return parse_export(await self._rest.send("GET", f"{self._path}/exports/{_q(export_id)}"))

    async def cancel(self, export_id: str) -> ExportInfo:
        """Ends one."""
        return parse_export(await self._again("DELETE", f"/exports/{_q(export_id)}", None))

    async def ended(
        self, info: ExportInfo, timeout_s: float | None = None, progress: Progress | None = None
    ) -> ExportInfo:
        """The export once it has ended. Args, Raises: as `AsyncExport.wait`."""
        began_s = heard_s = time.monotonic()
        pause_s = _FIRST_LOOK_S
        while not info.ended:
            left_s = timeout_s - (time.monotonic() - began_s) if timeout_s is not None else pause_s
            if left_s <= 0:
                raise DeadlineError(
                    f"export {info.id} is {info.state} after {timeout_s:g} s and goes on; wait "
                    f"longer, or end it: paramd exports --cancel {info.id}"
                )
            await asyncio.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LOOK_S)
            try:
                info = await self.get(info.id)
            except UnreachableError:
                # A control plane that was killed goes on with it when it is back.
                if time.monotonic() - heard_s > _AWAY_S:
                    raise
                continue
            heard_s = time.monotonic()
            if progress is not None:
                progress(info)
        return info

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

    async def create_schedule(
        self, body: Mapping[str, Any], assets: str | Path | None
    ) -> dict[str, Any]:
        """Has exports begin by themselves, with the files of the folder `assets`."""
        body = {**body, "assets": await self._upload_assets(body["id"], assets)}
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

    async def _upload_assets(self, owner_id: str, folder: str | Path | None) -> list[str]:
        """Gives the control plane the files that are copied beside an export; their names."""
        files = await asyncio.to_thread(read_assets, Path(folder)) if folder is not None else []
        for name, data in files:
            for begin in range(0, max(len(data), 1), ASSET_CHUNK_BYTES):
                part = data[begin : begin + ASSET_CHUNK_BYTES]
                body = {
                    "owner": owner_id,
                    "name": name,
                    "offset_bytes": begin,
                    "data": base64.b64encode(part).decode(),
                }
                await self._again("POST", "/export-assets", body, within_s=30.0)
        return [name for name, _ in files]

    @property
    def _path(self) -> str:
        return f"/jobs/{quote(self._reach.document.job, safe='')}"

    async def _again(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        within_s: float = _CREATE_S,
    ) -> Any:
        deadline_s = time.monotonic() + within_s
        while True:
            try:
                return await self._rest.send(method, self._path + path, body)
            except UnreachableError:
                # A control plane that was killed is back within seconds.
                if time.monotonic() + _AGAIN_S > deadline_s:
                    raise
                await asyncio.sleep(_AGAIN_S)


def export_body(
    destination: str,
    format: str,
    max_shard_size: str | int | None,
    dtype: str | None,
    include: Sequence[str],
    tied: str,
    name_map: Mapping[str, str] | None,
    verify: bool,
) -> dict[str, Any]:
    """What requests of an export and of a schedule have in common; see `AsyncMesh.export`."""
    body: dict[str, Any] = {
        "id": secrets.token_hex(16),  # made before it is sent: sending it twice does it once
        "destination": destination,
        "format": format,
        "include": [include] if isinstance(include, str) else list(include),
        "tied": tied,
        "verify": verify,
    }
    if max_shard_size is not None:
        body["max_shard_size"] = str(max_shard_size)
    if dtype is not None:
        body["dtype"] = dtype.removeprefix("torch.")
    if name_map:
        body["name_map"] = dict(name_map)
    return body


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
