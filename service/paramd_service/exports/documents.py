"""REST documents of exports and schedules; assets (small files copied into an export) on disk.

Also loads the destinations: of paramd.toml, overridden by PARAMD_DESTINATIONS, or a job's own.
"""

from __future__ import annotations

import base64
import os
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from paramd import bounds, clock
from paramd.answers import read_file
from paramd.documents import read_document
from paramd.errors import ConflictError, ExhaustedError, NotFoundError, UnreachableError, UsageError
from paramd.layout.exports.peft import PEFT
from paramd.layout.exports.settings import CAST_DTYPES, FORMATS, ExportSettings, NameMap, parse_size
from paramd.mesh.exports.calls import (
    MAX_ASSETS,
    MAX_ASSETS_BYTES,
    MAX_TIMEOUT_S,
    OWN,
    ExportFile,
    ExportInfo,
)
from paramd.state_files import read_toml
from paramd.v1 import export_pb2
from paramd_service.admission import CALLER, Shares, Who
from paramd_service.control.api.models import WaitRequest
from paramd_service.control.base.config import table_of_file, table_of_text
from paramd_service.destinations.destinations import (
    ENVIRONMENT,
    Destination,
    check_file_name,
    parse_destinations,
)
from paramd_service.exports.store import ExportRow, File, ScheduleRow

ADDED: Final = "destinations.json"
MAX_MISSING = 1000
"""Names of missing contents in one export's document."""
MAX_OWNERS: Final = 64
UNOWNED_S: Final = 3600.0
"""Assets that no export or schedule has claimed after this long are removed."""

_RESERVED: Final = (".partial", *(end for one in FORMATS.values() for end in one.endings))

_ID: Final = "^[0-9a-f]{32}$"

Id = Annotated[str, StringConstraints(pattern=_ID)]
AssetName = Annotated[str, StringConstraints(min_length=1, max_length=255)]
if TYPE_CHECKING:
    FormatName = str
    CastDtype = str
else:
    FormatName, CastDtype = Literal[tuple(FORMATS)], Literal[CAST_DTYPES]


class Assets:
    """Asset files by job and owner: the id of an export or schedule of the job, which need not
    exist yet. They are under the control plane's directory. Blocking: call in a thread."""

    def __init__(self, directory: Path) -> None:
        self._root = directory / "export-assets"
        self._whose: dict[str, Who] = {}

    def put(self, job: str, owner: str, name: str, offset_bytes: int, data: str) -> int:
        """Write the next part of a file; return the file's size. A part may be repeated.

        Raises:
            UsageError: `name` is not a plain file name, or `data` not base64.
            ConflictError: The part before it is missing.
            ExhaustedError: Too many files, bytes or owners.
            UnreachableError: The disk failed.
        """
        check_asset_name(name)
        try:
            part = base64.b64decode(data, validate=True)
        except ValueError:  # not ASCII either
            raise UsageError("data: not valid base64") from None
        try:
            return self._put(self._folder(job, owner), name, offset_bytes, part)
        except OSError as error:
            raise UnreachableError(
                f"assets: the control plane cannot write {name!r} ({error.strerror})"
            ) from error

    def _put(self, folder: Path, name: str, offset_bytes: int, part: bytes) -> int:
        if not folder.exists():
            self._make_room()
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._whose[folder.name] = CALLER.get()
        path = folder / name
        others = [other for other in folder.iterdir() if other != path]
        size_bytes = sum(other.stat().st_size for other in others) + offset_bytes + len(part)
        if len(others) >= MAX_ASSETS or size_bytes > MAX_ASSETS_BYTES:
            raise ExhaustedError(
                f"assets: an export can have at most {MAX_ASSETS} files with {MAX_ASSETS_BYTES:,} "
                "bytes in total; copy larger files to the destination by other means"
            )
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            found_bytes = file.seek(0, os.SEEK_END)
            if found_bytes < offset_bytes:
                raise ConflictError(
                    f"{name}: the part begins at byte {offset_bytes}, but only {found_bytes} bytes "
                    f"have been received; continue from byte {found_bytes}"
                )
            file.seek(offset_bytes)
            file.write(part)
            file.truncate()
        return offset_bytes + len(part)

    def read(self, job: str, owner: str, names: Iterable[str]) -> dict[str, bytes]:
        """Contents of an owner's files.

        Raises:
            NotFoundError: When one was not uploaded.
        """
        folder = self._folder(job, owner)
        if not folder.exists():
            folder = self._root / owner  # of an earlier version, which kept them by owner alone
        found = {}
        for name in names:
            path = folder / check_asset_name(name)
            try:
                found[name] = read_file(path, bounds.ASSET)
            except FileNotFoundError:
                raise NotFoundError(
                    f"assets: {name!r} was not uploaded; upload it with store_export_asset first"
                ) from None
        return found

    def forget(self, job: str, owner: str) -> None:
        """Remove the files of an owner. Idempotent."""
        for folder in (self._folder(job, owner), self._root / owner):
            shutil.rmtree(folder, ignore_errors=True)

    def sweep(self, owners: Iterable[str]) -> None:
        """Remove files older than UNOWNED_S that belong to none of `owners`."""
        kept = set(owners)
        if not self._root.exists():
            return
        for folder in self._root.iterdir():
            owner = folder.name.partition(".")[0]
            if owner not in kept and clock.now_s() - folder.stat().st_mtime > UNOWNED_S:
                shutil.rmtree(folder, ignore_errors=True)

    def _folder(self, job: str, owner: str) -> Path:
        # By job, so that who knows the id of another job's schedule changes none of its files.
        return self._root / f"{owner}.{job}"

    def _make_room(self) -> None:
        there = [one.name for one in self._root.iterdir()] if self._root.exists() else []
        self._whose = {name: self._whose.get(name) for name in there}
        shares = Shares(MAX_OWNERS, "exports with uploaded assets")
        for holder in self._whose.values():
            shares.count(holder)
        shares.check(CALLER.get())


def check_asset_name(name: str) -> str:
    """Raise UsageError unless this is a plain file name that clashes with none of an export's."""
    check_file_name(name)
    if name.endswith(_RESERVED):
        raise UsageError(
            f"assets: {name!r} has an ending of the export's own files; rename the file"
        )
    return name


def load_destinations(
    files: Sequence[tuple[Path, bool]], environment: Mapping[str, str], own: Path | None = None
) -> dict[str, Destination] | None:
    """Destinations by name: of the user's own paramd.toml, overridden by the environment.

    Where neither has a table, the folder `own`, which is made; None where their tables are empty.
    `files` are (path, is_own): one that is not the user's own may come with a cloned project and
    must not decide where checkpoints go.

    Raises:
        UsageError: A source is unreadable, invalid or not own.
    """
    found: dict[str, Destination] = {}
    given = ENVIRONMENT in environment
    for path, trusted in files:
        table = table_of_file(path, "destinations")
        if table and not trusted:
            raise UsageError(
                f"{path}: destinations in the working directory are not trusted; set them in the "
                f"user's own paramd.toml or in {ENVIRONMENT}"
            )
        given |= trusted and "destinations" in read_toml(path)
        found |= parse_destinations(table)
    found |= parse_destinations(table_of_text(environment.get(ENVIRONMENT, ""), ENVIRONMENT))
    if given or own is None:
        return found or (None if given else {})
    with suppress(OSError):  # an export says so, too
        own.mkdir(mode=0o700)
    return parse_destinations({OWN: str(own)})


def load_added(file: Path) -> dict[str, Destination]:
    """Destinations that admins added, by name; none without the file. Raises UsageError."""
    try:
        text = file.read_text() if file.exists() else "{}"
        return parse_destinations(table_of_text(text or "damaged", file.name))
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: mend or remove it: {error}") from error


class LoadRequest(WaitRequest):
    """How to load an export back into the running training."""

    id: str | None = Field(None, pattern=_ID, description="Id of the edit; as in create_edit")
    reset_moments: bool = Field(False, description="Zero the optimizer's state")
    note: str = Field("", max_length=1000, description="Reason; empty: names the export")
    preview: bool = Field(
        False,
        description="Only send the values to the ranks, and compute the statistics before and "
        "after; commit_edit then applies them, abort_edit frees them",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportSpec:
    """A parsed export request."""

    settings: ExportSettings
    optimizer: bool
    """Whether to export the optimizer state."""
    verify: bool
    timeout_s: float


def read_spec(request: Mapping[str, Any]) -> ExportSpec:
    """Parse fields of `ExportRequest`.

    Raises:
        UsageError: An invalid size, dtype or name rule.
    """
    include = set(request["include"])
    view = [name for name in ("merge", "weights_from") if request.get(name)]
    view += ["format"] if request["format"] == PEFT.name else []
    if "optimizer" in include and view:
        raise UsageError(
            f"include: the optimizer's state is of the weights that are trained, not of what "
            f"{view[0]!r} writes; leave it out"
        )
    return ExportSpec(
        settings=ExportSettings(
            format=request["format"],
            max_shard_bytes=parse_size(str(request["max_shard_size"])),
            dtype=request["dtype"],
            parameters="parameters" in include,
            buffers="buffers" in include,
            patterns=tuple(request["patterns"]),
            keep_tied=request["tied"] == "keep",
            names=NameMap.of(request["name_map"]),
            replica=request.get("replica", 0),
            adapter=request.get("adapter", ""),
            merge=request.get("merge", False),
            weights_from=request.get("weights_from", ""),
        ),
        optimizer="optimizer" in include,
        verify=bool(request["verify"]),
        timeout_s=float(request["timeout_s"]),
    )


def named_at(destination: str, *, incarnation: int, step: int | str) -> str:
    """Fill in "{step}" and "{incarnation}" in a destination."""
    return destination.replace("{step}", str(step)).replace("{incarnation}", str(incarnation))


def named_anew(destination: str, *, incarnation: int, step: int, taken: Collection[str]) -> str:
    """As `named_at`; a step that repeats after a rollback or a restart is numbered: "7-2"."""
    for time in count(1):
        told = f"{step}-{time}" if time > 1 else str(step)
        found = named_at(destination, incarnation=incarnation, step=told)
        if found not in taken or "{step}" not in destination:
            return found
    raise AssertionError("count never ends")


def scheduled(destination: str) -> str:
    """A schedule's destination with "{step}" appended if missing: each export needs its own key."""
    if "{step}" in destination:
        return destination
    return f"{destination.rstrip('/')}/step-{{step}}"


class ExportOptions(BaseModel):
    """What to export, the destination and the format."""

    destination: str = Field(
        min_length=3, max_length=1100, description='Name of a destination, "/", relative key'
    )
    format: FormatName = "safetensors"
    max_shard_size: str = Field(
        "5GB", max_length=40, description='Maximum tensor bytes per file, such as "2GiB"'
    )
    dtype: CastDtype | None = Field(
        None, description="Cast floating-point tensors to this dtype; null keeps theirs"
    )
    include: list[Literal["parameters", "buffers", "optimizer"]] = Field(
        ["parameters", "buffers"], min_length=1, max_length=3
    )
    tied: Literal["drop", "keep"] = Field(
        "drop", description="Write tied tensors once, or under each of their names"
    )
    patterns: list[str] = Field(
        [], max_length=20_000, description="Names and patterns of whole tensors; [] all of them"
    )
    name_map: dict[str, str] = Field(
        {},
        max_length=20_000,
        description='Model names to names in the files, each with at most one "*"',
    )
    replica: int = Field(
        0, ge=0, description="A rank: all is of its replica, where ranks hold the same tensors"
    )
    adapter: str = Field(
        "",
        max_length=200,
        description='The adapter that format "peft" or "merge" is about; empty: the only one',
    )
    merge: bool = Field(False, description="Merge the adapter into its base, and write that")
    weights_from: str = Field(
        "",
        max_length=200,
        description="Write the weights of this model, or those that the optimizers keep as this "
        "kind of state; empty: the parameters",
    )
    verify: bool = Field(True, description="Read everything back before committing")
    timeout_s: float = Field(
        3600.0, gt=0, le=MAX_TIMEOUT_S, description="The export fails after this many seconds"
    )
    assets: list[AssetName] = Field(
        [],
        max_length=MAX_ASSETS,
        description="Files uploaded with store_export_asset, to copy into the export",
    )

    model_config = ConfigDict(extra="forbid")


class ExportRequest(ExportOptions):
    """An export request. Idempotent by id."""

    id: Id | None = Field(
        None, description="32 hexadecimal digits; null: generated by the control plane"
    )
    overwrite: bool = Field(False, description="Replace an export that exists at the key")


class ScheduleRequest(ExportOptions):
    """A schedule of exports."""

    id: Id | None = Field(
        None, description="32 hexadecimal digits; null: generated by the control plane"
    )
    every_steps: int = Field(
        ge=1, description="Export at, or soon after, each multiple of this many steps"
    )
    keep_last: int | None = Field(None, ge=1, description="Keep this many of the newest; null: all")
    keep_every: int | None = Field(None, ge=1, description="Also keep every n-th")


class AssetRequest(BaseModel):
    """One part of an asset: a small file to copy into an export."""

    owner: Id = Field(description="Id of the export or schedule to be created with it")
    name: AssetName = Field(description="A plain file name")
    offset_bytes: int = Field(
        ge=0, le=MAX_ASSETS_BYTES, description="Offset of the part in the file"
    )
    data: str = Field(max_length=720_000, description="Base64 of at most 512 KiB")

    model_config = ConfigDict(extra="forbid")


class AssetDocument(BaseModel):
    """An asset as received so far."""

    name: str
    size_bytes: int


class ExportList(BaseModel):
    """Exports of a job, newest first."""

    exports: list[ExportInfo]
    next_page_token: str = Field(description="Pass it to get the next page; empty at the end")


class ScheduleDocument(BaseModel):
    """An active schedule."""

    id: str
    job: str
    destination: str
    format: str
    actor: str
    every_steps: int
    keep_last: int | None
    keep_every: int | None
    last_step: int = Field(description="Step at which it last fired, or was created")
    skipped_count: int = Field(description="Exports skipped because the previous one was running")
    created_s: float
    deleted_s: float | None


class ScheduleList(BaseModel):
    """Active schedules, oldest first."""

    schedules: list[ScheduleDocument]


class DestinationDocument(BaseModel):
    """A destination of exports."""

    name: str
    kind: str = Field(description='"directory" or "s3"')
    root: str = Field("", description="Its path or URL, for admins; empty for others")


class DestinationRequest(BaseModel):
    """A destination to add."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=64)
    root: str = Field(max_length=4096, description='Absolute path, or "s3://bucket/prefix"')


class DestinationList(BaseModel):
    """Destinations of exports; their paths or URLs are for admins."""

    destinations: list[DestinationDocument]


def export_document(
    row: ExportRow, files: list[File], *, size: tuple[int, int] | None = None
) -> ExportInfo:
    """The document of a stored export. `size` is (total, written) in bytes; None sums the files."""
    if size is None:
        size = sum(one.size_bytes for one in files), sum(one.written_bytes for one in files)
    pinned = export_pb2.ExportPlan.FromString(row.plan)
    # Names by the thousand are told of one export, not in lists.
    told = pinned if files else export_pb2.ExportPlan()
    differ = tuple(told.replicas_differ[:MAX_MISSING]) if told.replicas_compared else None
    return read_document(
        ExportInfo,
        asdict(row),
        missing=tuple(told.missing[:MAX_MISSING]),
        replicas_differ=differ,
        unsettled=pinned.unsettled,
        files=tuple(read_document(ExportFile, asdict(file)) for file in files),
        size_bytes=size[0],
        written_bytes=size[1],
    )


def schedule_document(row: ScheduleRow) -> ScheduleDocument:
    """The document of a stored schedule."""
    asked = {name: row.request[name] for name in ("destination", "format")}
    return ScheduleDocument(**{**asdict(row), **row.cadence, **asked})
