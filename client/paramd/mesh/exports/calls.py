"""REST calls for exports and schedules; `AsyncExport` and `Export`, handles of a running export.

To restore a finished export, its tensors are read through the control plane, and verified.
"""

from __future__ import annotations

import asyncio
import base64
import re
import secrets
import shlex
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

from xxhash import xxh3_128_hexdigest

from paramd import bounds
from paramd.answers import parsed_json, read_file
from paramd.documents import Document, read_document
from paramd.errors import (
    ConflictError,
    DataLossError,
    DeadlineError,
    NotFoundError,
    ParamdError,
    UnreachableError,
    UsageError,
)
from paramd.inside import own_wait
from paramd.layout.exports.files import EXPORT_ENDS, ExportState
from paramd.layout.exports.safetensors import MODEL_FILES, SAFETENSORS, SUFFIX
from paramd.layout.types import Layout, TensorKind, TensorLayout
from paramd.memory.left import check_client
from paramd.mesh.peers.control import RestClient
from paramd.mesh.peers.discovery import JobRest, segment
from paramd.mesh.results import Table

if TYPE_CHECKING:
    import torch

MANIFEST: Final = "paramd-export.json"
OWN: Final = "checkpoints"
"""The destination that a job has where none is configured, and which a key alone goes to."""
BY_STEP: Final = "step-{step}"
"""The key where none is given."""

Moved = Callable[[int, int], object]
"""Called with bytes done and total bytes."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class ExportFile(Document):
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


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class ExportInfo(Document):
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
    """Name of the token that requested it."""
    created_s: float
    """Seconds since the Unix epoch."""
    ended_s: float | None
    """None while it runs."""
    files: tuple[ExportFile, ...]
    """Empty in lists."""
    size_bytes: int
    written_bytes: int
    schedule: str
    """Id of the schedule that started it; empty: started by a request."""
    removed: bool
    """Removed by the schedule's retention."""
    missing: tuple[str, ...]
    """What the model's state dict has and the export has not, such as extra state that is neither
    tensors nor JSON; at most 1,000 names. Empty in lists."""
    replicas_differ: tuple[str, ...] | None = None
    """As in `Summoned`; at most 1,000. None in lists."""
    unsettled: bool = False
    """Training had not continued after update `step` when the parameters were copied."""

    def __repr__(self) -> str:
        reason = f", {self.reason}" if self.reason else ""
        return (
            f"<paramd.ExportInfo {self.id[:8]} to {self.destination!r}: {self.state}{reason}, "
            f"step {self.step if self.step >= 0 else 'not chosen yet'}, {self.written_bytes:,} of "
            f"{self.size_bytes:,} bytes>"
        )

    @property
    def raw(self) -> Mapping[str, Any]:
        """The control plane's own document."""
        return asdict(self)

    @property
    def ended(self) -> bool:
        """Whether the state is terminal."""
        return self.state in EXPORT_ENDS


class Exports(Table[ExportInfo]):
    """Exports, newest first."""

    columns = (
        ("id", lambda row: row.id[:8]),
        ("step", lambda row: str(row.step) if row.step >= 0 else ""),
        ("state", lambda row: row.state.value),
        ("destination", lambda row: row.destination),
        ("who", lambda row: row.actor),
        ("reason", lambda row: row.reason),
    )
    row_type = ExportInfo
    key = "id"


Progress = Callable[["ExportInfo"], object]
"""Called with the export's latest state."""


def check_done(info: ExportInfo) -> None:
    """Raise ConflictError with the reason if an export has failed or was cancelled."""
    if info.ended and info.state is not ExportState.DONE:
        what = "was cancelled" if info.state is ExportState.CANCELLED else "failed"
        raise ConflictError(f"the export to {info.destination} {what}: {info.reason}")


ASSET_CHUNK_BYTES: Final = 512 << 10
MAX_ASSETS_BYTES: Final = 64 << 20
"""Total size limit of an export's assets."""
MAX_ASSETS: Final = 64
MAX_TIMEOUT_S: Final = 86_400.0
"""Longest time that an export may take."""

_LOOK_S: Final = 0.5
_FIRST_LOOK_S: Final = 0.05
_AWAY_S: Final = 60.0
_CREATE_S: Final = 15.0


_ITSELF_S: Final = 2.0
"""How long the thread that trains waits for an export's step: some need no boundary."""
EXPORT_INSTEAD: Final = (
    "Call attachment.export(...) on all ranks, which makes one right here. This one is made when "
    "training goes on, unless it is cancelled"
)


class ExportCalls:
    """Export requests of one job. Idempotent ones are retried while unreachable."""

    def __init__(self, rest: JobRest) -> None:
        self._rest = rest

    async def create(self, body: Mapping[str, Any], assets: str | Path | None) -> ExportInfo:
        """Start the export `body["id"]`, with the files of the directory `assets`."""
        body = {**body, "assets": await self._upload_assets(body["id"], assets)}
        return self._info(await self._again("POST", "/exports", body))

    async def get(self, export_id: str) -> ExportInfo:
        return self._info(await self._rest.send("GET", f"/exports/{segment(export_id)}"))

    async def cancel(self, export_id: str) -> ExportInfo:
        return self._info(await self._again("DELETE", f"/exports/{segment(export_id)}", None))

    async def ended(
        self, info: ExportInfo, timeout_s: float | None = None, progress: Progress | None = None
    ) -> ExportInfo:
        """Poll an export until it has ended. Args, Raises: as `AsyncExport.wait`."""
        began_s = heard_s = time.monotonic()
        pause_s = _FIRST_LOOK_S
        while not info.ended:
            late = time.monotonic() - began_s > _ITSELF_S
            if info.step < 0 and late and self._rest.waits_for_itself():
                raise own_wait(f"export {info.id[:8]}", EXPORT_INSTEAD)
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
        return [self._info(one) for one in await self._rest.rows("exports", limit, state=state)]

    async def create_schedule(
        self, body: Mapping[str, Any], assets: str | Path | None
    ) -> dict[str, Any]:
        """Create a schedule, with the files of the directory `assets`."""
        body = {**body, "assets": await self._upload_assets(body["id"], assets)}
        return dict(await self._rest.send("POST", "/export-schedules", body))

    async def schedules(self) -> list[dict[str, Any]]:
        found = await self._rest.send("GET", "/export-schedules")
        return [dict(one) for one in found["schedules"]]

    async def delete_schedule(self, schedule_id: str) -> dict[str, Any]:
        """Delete a schedule; its exports stay."""
        return dict(await self._rest.send("DELETE", f"/export-schedules/{segment(schedule_id)}"))

    async def _upload_assets(self, owner_id: str, folder: str | Path | None) -> list[str]:
        """Upload an export's assets to the control plane; return their names."""
        files = await asyncio.to_thread(read_assets, Path(folder)) if folder is not None else []
        for name, data in files:
            for begin in range(0, max(len(data), 1), ASSET_CHUNK_BYTES):
                body = {
                    "owner": owner_id,
                    "name": name,
                    "offset_bytes": begin,
                    "data": base64.b64encode(data[begin : begin + ASSET_CHUNK_BYTES]).decode(),
                }
                await self._again("POST", "/export-assets", body, within_s=30.0)
        return [name for name, _ in files]

    async def _again(
        self, method: str, path: str, body: Mapping[str, Any] | None, within_s: float = _CREATE_S
    ) -> Any:
        return await self._rest.again(method, path, body, time.monotonic() + within_s)

    def _info(self, found: Mapping[str, Any]) -> ExportInfo:
        return self._rest.read(lambda: read_document(ExportInfo, found))


def check_no_path(given: str | None) -> None:
    """Raise UsageError, with what to write instead, for a path or an address."""
    if not re.match(r"[/.~]|.*://|[^/]*\.(safetensors|pt)\Z", given or "", re.DOTALL):
        return
    given = re.sub("://.*@", "://", str(given), flags=re.DOTALL)  # an address may hold a secret
    instead = "write NAME/KEY; an admin names an absolute path of the job's hosts, or s3://"
    # A folder or a prefix, and a key in it; nobody is told to open "/" to all exporters.
    split = re.fullmatch(r"(?!.*\.\.)((?:s3:/|file://)?/[^/].*?)/+([\w.=+-]+)/*", given, re.ASCII)
    if split is not None:
        root, key = split.groups()
        name = re.sub(r"[^a-z0-9]+", "-", root.rpartition("/")[2].lower())[:64].strip("-")
        name = "data" if name in ("", OWN) else name
        instead = (
            f"write {f'{name}/{key}'!r}, once an admin has written "
            f"mesh.add_destination({name!r}, {root!r}), or: paramd exports --add-destination "
            f"{shlex.quote(f'{name}={root}')}"
        )
    raise UsageError(
        f"destination: {given!r}; {instead}. mesh.download('FILE.safetensors') writes a file here"
    )


def located(given: str | None, known: Sequence[str]) -> str:
    """The "NAME/KEY" that a name alone, a key alone, or None for both stands for.

    Raises:
        UsageError: Where there is no destination, or several may be meant.
    """
    home = OWN if OWN in known else known[0] if len(known) == 1 else None
    if home is None and given not in known:
        raise UsageError(
            f"destination: there are several, {', '.join(known)}; write NAME/{given or BY_STEP}"
            if known
            else "destination: none; an admin adds one: mesh.add_destination('data', '/data')"
        )
    return f"{given}/{BY_STEP}" if given in known else f"{home}/{given or BY_STEP}"


def export_body(
    destination: str,
    format: str,
    max_shard_size: str | int | None,
    dtype: str | None,
    include: Sequence[str],
    tied: str,
    name_map: Mapping[str, str] | None,
    verify: bool,
    names: Sequence[str] | None,
    replica: int,
    adapter: str | None,
    merge: bool,
    weights_from: str | None,
) -> dict[str, Any]:
    """The body shared by requests for exports and schedules; see `AsyncMesh.export`.

    Raises:
        UsageError: For a malformed destination.
    """
    if not re.fullmatch(r"[^/]+/.+", destination):
        raise UsageError(
            f"destination: {destination!r}; expected 'NAME/KEY', a name of mesh.destinations() "
            "and a relative key; mesh.download('FILE.safetensors') writes a file here"
        )
    body: dict[str, Any] = {
        "id": secrets.token_hex(16),  # chosen here, so that resending is idempotent
        "destination": destination,
        "format": format,
        "include": [include] if isinstance(include, str) else list(include),
        "tied": tied,
        "verify": verify,
        "replica": replica,
    }
    if max_shard_size is not None:
        body["max_shard_size"] = str(max_shard_size)
    if dtype is not None:
        body["dtype"] = dtype.removeprefix("torch.")
    if names is not None:
        body["patterns"] = [names] if isinstance(names, str) else list(names)
    if name_map:
        body["name_map"] = dict(name_map)
    # Only what is asked for: an older control plane knows none of them.
    if adapter is not None:
        body["adapter"] = adapter
    if merge:
        body["merge"] = True
    if weights_from is not None:
        body["weights_from"] = weights_from
    return body


def read_assets(folder: Path) -> list[tuple[str, bytes]]:
    """(name, contents) of a directory's regular files; links and subdirectories are skipped.

    Raises:
        UsageError: If it is not a directory, or has too many files or bytes.
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
    return [(path.name, read_file(path, bounds.ASSET)) for path in paths]


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

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *dir(self.info)]

    def __repr__(self) -> str:
        return repr(self.info).replace("ExportInfo", type(self).__name__)

    def _repr_html_(self) -> str:
        return self.info._repr_html_()

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


class Export(AsyncExport):
    """An export of a running job. Has the attributes of `ExportInfo`."""

    def __init__(
        self, run: Callable[[Coroutine[Any, Any, ExportInfo]], ExportInfo], begun: AsyncExport
    ) -> None:
        super().__init__(begun._calls, begun.info)
        self._run = run

    def refresh(self) -> ExportInfo:  # type: ignore[override]
        """Fetch its current state. Raises as `Mesh.get_export`."""
        return self._run(super().refresh())

    def wait(  # type: ignore[override]
        self, timeout: float | None = None, progress: Progress | None = None
    ) -> ExportInfo:
        """Wait until the export has ended. Args, Raises: as `AsyncExport.wait`."""
        return self._run(super().wait(timeout, progress))

    def cancel(self) -> ExportInfo:  # type: ignore[override]
        """Cancel the export and remove what it wrote. Raises as `AsyncExport.cancel`."""
        return self._run(super().cancel())


class ExportFiles:
    """Files of a finished export, read through the control plane and verified."""

    def __init__(self, rest: RestClient, job: str, destination: str) -> None:
        self._rest = rest
        self._path = f"/jobs/{segment(job)}/export-file"
        self._destination = destination

    async def manifest(self) -> Mapping[str, Any]:
        """The export's manifest; NotFoundError without one, ParamdError if it is unreadable."""
        try:
            found = parsed_json(
                await self.read(MANIFEST, most_bytes=bounds.MANIFEST.most_bytes), bounds.MANIFEST
            )
            if not isinstance(found, dict) or found["paramd_export"] != 1:
                raise ValueError("another version of the manifest")
        except (ValueError, KeyError) as error:
            raise ParamdError(
                f"{self._destination}: its {MANIFEST} cannot be read ({error})"
            ) from error
        return found

    async def read(
        self,
        name: str,
        moved: Callable[[int], object] = lambda size: None,
        *,
        most_bytes: int,
    ) -> bytes:
        """Read a whole file; `moved` gets the size of each part.

        Raises ParamdError; DataLossError for a file of more than `most_bytes`.
        """
        data = bytearray()
        while True:
            asked = urlencode(
                {"destination": self._destination, "name": name, "offset_bytes": len(data)}
            )
            size_bytes, part = await self._rest.read_bytes(f"{self._path}?{asked}")
            data += part
            if max(size_bytes, len(data)) > most_bytes:
                raise DataLossError(
                    f"{self._destination}: {name} has more than the {most_bytes:,} bytes expected"
                )
            moved(len(part))
            if len(data) >= size_bytes:
                return bytes(data)
            if not part:
                raise DataLossError(f"{self._destination}: {name} ended too early; try again")

    async def tensors(self, manifest: Mapping[str, Any], moved: Moved) -> dict[str, torch.Tensor]:
        """All parameters and buffers, by their names in the files.

        Raises:
            UsageError: For other formats than safetensors.
            DataLossError: If a file does not match the manifest's checksum.
        """
        if manifest["format"] != SAFETENSORS.name:
            raise UsageError(
                f"{self._destination} is of format {manifest['format']!r}; only safetensors can be "
                "restored into a running mesh"
            )
        named = ((str(one["name"]), one) for one in manifest["files"])
        files = [
            one for name, one in named if name.startswith(MODEL_FILES) and name.endswith(SUFFIX)
        ]
        sizes = [int(one["size_bytes"]) for one in files]
        whole_bytes = sum(sizes)
        # Before anything is taken. A file is there as it arrives, as bytes, and as tensors.
        check_client(whole_bytes + 2 * max(sizes, default=0))
        done_bytes = 0

        def more(size_bytes: int) -> None:
            nonlocal done_bytes
            done_bytes += size_bytes
            moved(done_bytes, whole_bytes)

        found: dict[str, torch.Tensor] = {}
        for one in files:
            data = await self.read(str(one["name"]), more, most_bytes=int(one["size_bytes"]))
            if xxh3_128_hexdigest(data) != one["xxh3"]:
                raise DataLossError(
                    f"{self._destination}: {one['name']} is not what was exported; its checksum "
                    "differs from the manifest's"
                )
            name = f"{self._destination}: {one['name']}"
            found |= await asyncio.to_thread(loaded, data, name)
        return found

    async def values(self, layout: Layout, moved: Moved) -> tuple[dict[str, torch.Tensor], str]:
        """All parameters' values, and a note on their source. As `tensors` and `values_of`."""
        manifest = await self.manifest()
        tensors = await self.tensors(manifest, moved)
        said = f"restored {self._destination}, step {manifest['step']} of {manifest['job']}"
        whole = await asyncio.to_thread(joined_parts, layout, tensors, manifest.get("parts", {}))
        return values_of(layout, whole, manifest["renamed"]), said


def loaded(data: bytes, name: str) -> dict[str, torch.Tensor]:
    """Parse a safetensors file. Raises DataLossError."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(data)
    except SafetensorError as error:
        raise DataLossError(f"{name} cannot be read as safetensors: {error}") from error


def joined_parts(
    layout: Layout,
    tensors: Mapping[str, torch.Tensor],
    parts: Mapping[str, Sequence[Mapping[str, Any]]],
) -> Mapping[str, torch.Tensor]:
    """`tensors`, and those that were written in parts, by their names in the model.

    Raises:
        NotFoundError: If a part is missing.
        UsageError: If one has another size.
    """
    shapes = {one.fqn: one.shape for one in layout.tensors}
    found = dict(tensors)
    for fqn, parts_of_tensor in parts.items():
        if fqn not in shapes:
            continue
        for part in parts_of_tensor:
            value = tensors.get(part["name"])
            if value is None:
                raise NotFoundError(f"the export has no {part['name']!r}, a part of {fqn!r}")
            if fqn not in found:
                found[fqn] = value.new_empty(shapes[fqn])
            place = found[fqn][tuple(map(slice, part["begin"], part["end"]))]
            if place.numel() != value.numel():
                raise UsageError(f"{fqn}: its part {part['name']} has shape {tuple(value.shape)}")
            place.copy_(value.view(place.shape))
    return found


def loaded_names(layout: Layout) -> list[str]:
    """The tensors that an export restores, in the order of `values_of`."""
    return [one.fqn for one in _restored(layout)]


def _restored(layout: Layout) -> list[TensorLayout]:
    return [one for one in layout.tensors if one.kind is not TensorKind.BUFFER and one.numel]


def values_of(
    layout: Layout, tensors: Mapping[str, torch.Tensor], renamed: Mapping[str, str]
) -> dict[str, torch.Tensor]:
    """The value of every parameter of a layout.

    `tensors` are by their names in the files; `renamed` maps names in the model to names in the
    files, where they differ.

    Raises:
        NotFoundError: For a missing parameter.
        UsageError: If a shape differs.
    """
    found: dict[str, torch.Tensor] = {}
    for one in _restored(layout):
        names = [renamed.get(name, name) for name in (one.fqn, *one.aliases)]
        value = next((tensors[name] for name in names if name in tensors), None)
        if value is None:
            raise NotFoundError(
                f"the export has no {names[0]!r}; it is of another model, or of part of one"
            )
        if tuple(value.shape) != one.shape:
            raise UsageError(
                f"{one.fqn}: the export has shape {tuple(value.shape)}, the mesh {one.shape}"
            )
        found[one.fqn] = value
    return found
