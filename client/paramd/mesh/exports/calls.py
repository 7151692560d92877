"""REST calls for exports and schedules; `AsyncExport` and `Export`, handles of a running export."""

from __future__ import annotations

import asyncio
import base64
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode

from paramd.errors import ConflictError, DeadlineError, UnreachableError, UsageError
from paramd.layout.exports.files import EXPORT_ENDS, ExportState
from paramd.mesh.peers.control import RestClient, read_document, readable
from paramd.mesh.peers.discovery import SidecarFinder


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportFile:
    """One file of an export."""

    name: str
    size_bytes: int
    written_bytes: int
    rank: int
    """Rank whose sidecar writes it; -1 before one is assigned."""
    checksum: str
    """XXH3 (128 bit) in hexadecimal; empty until the file is complete."""
    state: str
    """WAITING, WRITING, WRITTEN or VERIFIED."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportInfo:
    """An export, as of one response."""

    id: str
    job: str
    incarnation: int
    """0 until a step is pinned."""
    step: int
    """-1 until a step is pinned."""
    state: ExportState
    reason: str
    """Why it failed or was cancelled."""
    destination: str
    """"NAME/KEY"."""
    format: str
    actor: str
    created_s: float
    """Seconds since the Unix epoch."""
    ended_s: float | None
    files: tuple[ExportFile, ...]
    size_bytes: int
    written_bytes: int
    schedule: str
    """Id of the schedule that started it; empty for a manual export."""
    raw: Mapping[str, Any] = field(repr=False, compare=False)
    """As the control plane sent it."""

    @property
    def ended(self) -> bool:
        """Whether the state is terminal."""
        return self.state in EXPORT_ENDS


Progress = Callable[["ExportInfo"], object]
"""Called with the export's latest state."""


def parse_export(found: Mapping[str, Any]) -> ExportInfo:
    """Parse an ExportDocument. Raises ParamdError."""
    with readable("the control plane"):
        return read_document(
            ExportInfo,
            found,
            state=ExportState(found["state"]),
            files=tuple(read_document(ExportFile, one) for one in found["files"]),
            schedule=str(found["schedule"] or ""),
            raw=dict(found),
        )


def check_done(info: ExportInfo) -> None:
    """Raise ConflictError with the reason if an export has failed or was cancelled."""
    if info.ended and info.state is not ExportState.DONE:
        what = "was cancelled" if info.state is ExportState.CANCELLED else "failed"
        raise ConflictError(f"the export to {info.destination} {what}: {info.reason}")


ASSET_CHUNK_BYTES: Final = 512 << 10
MAX_ASSETS_BYTES: Final = 64 << 20
"""Total size limit of an export's assets."""
MAX_ASSETS: Final = 64

_AGAIN_S: Final = 0.3
_PAGE: Final = 200
_LOOK_S: Final = 0.5
_FIRST_LOOK_S: Final = 0.05
_AWAY_S: Final = 60.0
_CREATE_S: Final = 15.0


class ExportCalls:
    """Export requests of one job. Idempotent ones are retried while unreachable."""

    def __init__(self, rest: RestClient, reach: SidecarFinder) -> None:
        self._rest = rest
        self._reach = reach

    async def create(self, body: Mapping[str, Any], assets: str | Path | None) -> ExportInfo:
        """Start the export `body["id"]`, with the files of the directory `assets`."""
        body = {**body, "assets": await self._upload_assets(body["id"], assets)}
        return parse_export(await self._again("POST", "/exports", body))

    async def get(self, export_id: str) -> ExportInfo:
        """One export."""
        return parse_export(await self._rest.send("GET", f"{self._path}/exports/{_q(export_id)}"))

    async def cancel(self, export_id: str) -> ExportInfo:
        """Cancel an export."""
        return parse_export(await self._again("DELETE", f"/exports/{_q(export_id)}", None))

    async def ended(
        self, info: ExportInfo, timeout_s: float | None = None, progress: Progress | None = None
    ) -> ExportInfo:
        """Poll an export until it has ended. Args, Raises: as `AsyncExport.wait`."""
        began_s = heard_s = time.monotonic()
        pause_s = _FIRST_LOOK_S
        while not info.ended:
            left_s = timeout_s - (time.monotonic() - began_s) if timeout_s is not None else pause_s
            if left_s <= 0:
                raise DeadlineError(
                    f"export {info.id} is still {info.state} after {timeout_s:g} s and continues; "
                    f"wait longer, or cancel it: paramd exports --cancel {info.id}"
                )
            await asyncio.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LOOK_S)
            try:
                info = await self.get(info.id)
            except UnreachableError:
                # A restarted control plane resumes the export.
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
        """Create a schedule, with the files of the directory `assets`."""
        body = {**body, "assets": await self._upload_assets(body["id"], assets)}
        return dict(await self._rest.send("POST", f"{self._path}/export-schedules", body))

    async def schedules(self) -> list[dict[str, Any]]:
        """Active schedules, oldest first."""
        found = await self._rest.send("GET", f"{self._path}/export-schedules")
        return [dict(one) for one in found["schedules"]]

    async def delete_schedule(self, schedule_id: str) -> dict[str, Any]:
        """Delete a schedule; its exports stay."""
        path = f"{self._path}/export-schedules/{_q(schedule_id)}"
        return dict(await self._rest.send("DELETE", path))

    async def destinations(self) -> list[dict[str, Any]]:
        """Names and kinds of the configured export destinations."""
        found = await self._rest.send("GET", "/destinations")
        return [dict(one) for one in found["destinations"]]

    async def _upload_assets(self, owner_id: str, folder: str | Path | None) -> list[str]:
        """Upload an export's assets to the control plane; return their names."""
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
                # A killed control plane is back within seconds.
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
    """The body shared by requests for exports and schedules; see `AsyncMesh.export`."""
    body: dict[str, Any] = {
        "id": secrets.token_hex(16),  # chosen here, so that resending is idempotent
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
    """(name, contents) of a directory's regular files; links and subdirectories are skipped.

    Raises:
        UsageError: not a directory, or too many files or bytes.
    """
    if not folder.is_dir():
        raise UsageError(f"assets: {folder} is not a directory")
    paths = [p for p in sorted(folder.iterdir()) if p.is_file() and not p.is_symlink()]
    size_bytes = sum(path.stat().st_size for path in paths)
    if len(paths) > MAX_ASSETS or size_bytes > MAX_ASSETS_BYTES:
        raise UsageError(
            f"assets: {folder} holds {len(paths)} files of {size_bytes:,} bytes; at most "
            f"{MAX_ASSETS} of {MAX_ASSETS_BYTES:,} in total can be copied into an export"
        )
    return [(path.name, path.read_bytes()) for path in paths]


def _q(name: str) -> str:
    return quote(name, safe="")


# `timeout=` as in other clients; it bounds the whole wait, not one await.
# ruff: noqa: ASYNC109


class AsyncExport:
    """An export of a running job, for asyncio programs. Has the attributes of `ExportInfo`."""

    def __init__(self, calls: ExportCalls, info: ExportInfo) -> None:
        self._calls = calls
        self._hear(info)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "info":
            raise AttributeError(name)
        return getattr(self.info, name)

    def __repr__(self) -> str:
        info = self.info
        reason = f", {info.reason}" if info.reason else ""
        return (
            f"<paramd export {info.id[:8]} to {info.destination!r}: {info.state}{reason}, "
            f"step {info.step}, {info.written_bytes:,} of {info.size_bytes:,} bytes>"
        )

    async def refresh(self) -> ExportInfo:
        """Fetch its current state. Raises as `AsyncMesh.get_export`."""
        return self._hear(await self._calls.get(self.info.id))

    async def wait(
        self, timeout: float | None = None, progress: Progress | None = None
    ) -> ExportInfo:
        """Wait until the export has ended. Cancelling the wait does not cancel the export.

        Args:
            timeout: Seconds; None means no limit.
            progress: Called with the latest state, about twice a second and at the end.

        Raises:
            ConflictError: it failed or was cancelled; the message says why.
            DeadlineError: it has not ended in time; it continues.
            UnreachableError: the control plane was unreachable for a minute.
        """
        self._hear(await self._calls.ended(self.info, timeout, progress))
        check_done(self.info)
        return self.info

    async def cancel(self) -> ExportInfo:
        """Cancel the export and remove what it wrote. Idempotent.

        Raises:
            ConflictError: it is already DONE or FAILED.
        """
        return self._hear(await self._calls.cancel(self.info.id))

    def _hear(self, info: ExportInfo) -> ExportInfo:
        self.info, self.heard_s = info, time.monotonic()
        return info


class Export:
    """An export of a running job. Has the attributes of `ExportInfo`."""

    def __init__(
        self, run: Callable[[Coroutine[Any, Any, ExportInfo]], ExportInfo], begun: AsyncExport
    ) -> None:
        self._run = run
        self._begun = begun

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._begun, name)

    def __repr__(self) -> str:
        return repr(self._begun)

    def refresh(self) -> ExportInfo:
        """Fetch its current state. Raises as `Mesh.get_export`."""
        return self._run(self._begun.refresh())

    def wait(self, timeout: float | None = None, progress: Progress | None = None) -> ExportInfo:
        """Wait until the export has ended. Args, Raises: as `AsyncExport.wait`."""
        return self._run(self._begun.wait(timeout, progress))

    def cancel(self) -> ExportInfo:
        """Cancel the export and remove what it wrote. Raises as `AsyncExport.cancel`."""
        return self._run(self._begun.cancel())
