"""Exports, schedules and destinations as REST tells of them.

Reads the destinations: [destinations] of paramd.toml, and PARAMD_DESTINATIONS over it.

Small files that are copied beside an export: kept on disk until it has ended.
"""

from __future__ import annotations

import base64
import logging
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from paramd import clock
from paramd.errors import ConflictError, ExhaustedError, NotFoundError, UnreachableError, UsageError
from paramd.layout.exports.formats import FORMATS
from paramd.layout.exports.settings import CAST_DTYPES, ExportSettings, NameMap, parse_size
from paramd.state_files import file_places
from paramd_service.admission import CALLER, Shares, Who
from paramd_service.control.base.config import table_of_file
from paramd_service.control.store.exports import ExportFileRow, ExportRow, ScheduleRow
from paramd_service.destinations.destinations import (
    ENVIRONMENT,
    Destination,
    check_file_name,
    destinations_of,
    parse_destinations,
)

MAX_BYTES: Final = 64 << 20
"""Of all files of one owner."""
MAX_FILES: Final = 64
MAX_OWNERS: Final = 64
UNOWNED_S: Final = 3600.0
"""Files that no export or schedule has claimed by then are removed."""

_RESERVED: Final = (".partial", *(end for one in FORMATS.values() for end in one.endings))


class Assets:
    """Files by owner, in a directory of the control plane. Methods do I/O: run them beside."""

    def __init__(self, directory: Path) -> None:
        self._root = directory / "export-assets"
        self._whose: dict[str, Who] = {}

    def put(self, owner: str, name: str, offset_bytes: int, data: str) -> int:
        """Writes one part, in order; the file's size. The same part may come again.

        Raises:
            UsageError: no plain name, no base64. ConflictError: a part is missing before it.
            ExhaustedError: too many files, bytes or owners. UnreachableError: no disk.
        """
        check_asset_name(name)
        try:
            part = base64.b64decode(data, validate=True)
        except ValueError:  # not ASCII either
            raise UsageError("data: no base64") from None
        try:
            return self._put(self._root / owner, name, offset_bytes, part)
        except OSError as error:
            raise UnreachableError(
                f"assets: the control plane cannot keep {name!r} ({error.strerror})"
            ) from error

    def _put(self, folder: Path, name: str, offset_bytes: int, part: bytes) -> int:
        if not folder.exists():
            self._make_room()
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._whose[folder.name] = CALLER.get()
        path = folder / name
        others = [other for other in folder.iterdir() if other != path]
        size_bytes = sum(other.stat().st_size for other in others) + offset_bytes + len(part)
        if len(others) >= MAX_FILES or size_bytes > MAX_BYTES:
            raise ExhaustedError(
                f"assets: at most {MAX_FILES} files of {MAX_BYTES:,} bytes in all are copied "
                "beside an export; put larger ones there by other means"
            )
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            found_bytes = file.seek(0, os.SEEK_END)
            if found_bytes < offset_bytes:
                raise ConflictError(
                    f"{name}: {found_bytes} bytes are here, the part begins at {offset_bytes}; "
                    "send it from there"
                )
            file.seek(offset_bytes)
            file.write(part)
            file.truncate()
        return offset_bytes + len(part)

    def read(self, owner: str, names: Iterable[str]) -> dict[str, bytes]:
        """The files of an owner. Raises NotFoundError when one was never sent."""
        found = {}
        for name in names:
            path = self._root / owner / check_asset_name(name)
            try:
                found[name] = path.read_bytes()
            except FileNotFoundError:
                raise NotFoundError(
                    f"assets: {name!r} was not sent; send it with store_export_asset first"
                ) from None
        return found

    def forget(self, owner: str) -> None:
        """Removes the files of an owner. Idempotent."""
        shutil.rmtree(self._root / owner, ignore_errors=True)

    def sweep(self, owners: Iterable[str]) -> None:
        """Removes what belongs to none of `owners` and is old."""
        kept = set(owners)
        if not self._root.exists():
            return
        for folder in self._root.iterdir():
            if folder.name not in kept and clock.now_s() - folder.stat().st_mtime > UNOWNED_S:
                shutil.rmtree(folder, ignore_errors=True)

    def _make_room(self) -> None:
        there = [one.name for one in self._root.iterdir()] if self._root.exists() else []
        self._whose = {name: self._whose.get(name) for name in there}
        shares = Shares(MAX_OWNERS, "exports that wait with assets")
        for holder in self._whose.values():
            shares.count(holder)
        shares.check(CALLER.get())


def check_asset_name(name: str) -> str:
    """A plain file name that no file of an export has. Raises UsageError."""
    check_file_name(name)
    if name.endswith(_RESERVED):
        raise UsageError(f"assets: {name!r} could be taken for a file of the export itself")
    return name


log = logging.getLogger("paramd.control.exports")


def open_destinations(*, strict: bool) -> dict[str, Destination]:
    """The destinations in force here and now, by name.

    Args:
        strict: Refuse to begin with a table that cannot be right. A training's embedded
            control plane is not strict: it says so, and exports nowhere.

    Raises:
        UsageError: the table cannot be right, and `strict`.
    """
    try:
        return load_destinations(file_places(), os.environ)
    except UsageError as error:
        if strict:
            raise
        log.error("there are no destinations for exports: %s", error)
        return {}


def load_destinations(
    files: Sequence[tuple[Path, bool]], environment: Mapping[str, str]
) -> dict[str, Destination]:
    """What the environment says, over the user's own paramd.toml.

    Args:
        files: paramd.toml files and whether each is the user's own: one that may have come
            with somebody else's project names no places where checkpoints go.

    Raises:
        UsageError: something cannot be read, or is no destination.
    """
    found: dict[str, Destination] = {}
    for path, trusted in files:
        table = table_of_file(path, "destinations")
        if table and not trusted:
            raise UsageError(
                f"{path}: destinations in the working directory are not followed; set them in "
                f"the user's own paramd.toml or in {ENVIRONMENT}"
            )
        found |= parse_destinations(table)
    return found | destinations_of(environment.get(ENVIRONMENT, ""))


Id = Annotated[str, StringConstraints(pattern="^[0-9a-f]{32}$")]
AssetName = Annotated[str, StringConstraints(min_length=1, max_length=255)]
if TYPE_CHECKING:
    FormatName = str
    CastDtype = str
else:
    FormatName, CastDtype = Literal[tuple(FORMATS)], Literal[CAST_DTYPES]

MAX_TIMEOUT_S = 86_400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportSpec:
    """One request, read."""

    settings: ExportSettings
    optimizer: bool
    """Whether the optimizer's state is wanted."""
    overwrite: bool
    verify: bool
    timeout_s: float
    assets: tuple[str, ...]
    """Names of files that are copied beside."""


def read_spec(request: Mapping[str, Any]) -> ExportSpec:
    """What a request (as `ExportRequest` has it) asks for.

    Raises:
        UsageError: a size, dtype or name rule that cannot be.
    """
    include = set(request["include"])
    return ExportSpec(
        settings=ExportSettings(
            format=request["format"],
            max_shard_bytes=parse_size(str(request["max_shard_size"])),
            dtype=request["dtype"],
            parameters="parameters" in include,
            buffers="buffers" in include,
            keep_tied=request["tied"] == "keep",
            names=NameMap.of(request["name_map"]),
        ),
        optimizer="optimizer" in include,
        overwrite=bool(request.get("overwrite", False)),
        verify=bool(request["verify"]),
        timeout_s=float(request["timeout_s"]),
        assets=tuple(request["assets"]),
    )


def named_at(destination: str, *, incarnation: int, step: int) -> str:
    """A destination whose key has "{step}" or "{incarnation}" in it, once they are known."""
    return destination.replace("{step}", str(step)).replace("{incarnation}", str(incarnation))


def scheduled(destination: str) -> str:
    """The destination of a schedule, whose exports each need a key of their own."""
    if "{step}" in destination:
        return destination
    return f"{destination.rstrip('/')}/step-{{step}}"


class ExportOptions(BaseModel):
    """What is exported, and how it is laid out."""

    destination: str = Field(
        min_length=3, max_length=1100, description='Name of a destination, "/", relative key'
    )
    format: FormatName = "safetensors"
    max_shard_size: str = Field(
        "5GB", max_length=40, description='Most bytes of tensors in one file, such as "2GiB"'
    )
    dtype: CastDtype | None = Field(
        None, description="Cast floating tensors to it; null keeps each one's own"
    )
    include: list[Literal["parameters", "buffers", "optimizer"]] = Field(
        ["parameters", "buffers"], min_length=1, max_length=3
    )
    tied: Literal["drop", "keep"] = Field(
        "drop", description="Tied tensors once, or under each of their names"
    )
    name_map: dict[str, str] = Field(
        {}, max_length=20_000, description='Names in the model to names in the files; one "*" each'
    )
    verify: bool = Field(True, description="Read everything back before it becomes visible")
    timeout_s: float = Field(
        3600.0, gt=0, le=MAX_TIMEOUT_S, description="It fails after so many seconds"
    )
    assets: list[AssetName] = Field(
        [], max_length=64, description="Files sent with store_export_asset, copied beside"
    )

    model_config = ConfigDict(extra="forbid")


class ExportRequest(ExportOptions):
    """An export. Sent twice with the same id it is begun once."""

    id: Id | None = Field(None, description="32 hexadecimal digits; null: the control plane's")
    overwrite: bool = Field(False, description="What stands at the key may be replaced")


class ScheduleRequest(ExportOptions):
    """Exports that begin by themselves; exactly one of every_steps and every_s."""

    id: Id | None = Field(None, description="32 hexadecimal digits; null: the control plane's")
    every_steps: int | None = Field(None, ge=1, description="At, or soon after, each multiple")
    every_s: float | None = Field(None, ge=1, description="Seconds from begin to begin")
    keep_last: int | None = Field(None, ge=1, description="The newest so many stay; null: all")
    keep_every: int | None = Field(None, ge=1, description="And every so many-th beside them")


class AssetRequest(BaseModel):
    """A part of a small file that is to be copied beside an export."""

    owner: Id = Field(description="Id of the export or schedule that will be created")
    name: AssetName = Field(description="A plain file name")
    offset_bytes: int = Field(ge=0, le=64 << 20, description="Where the part begins")
    data: str = Field(max_length=720_000, description="Base64, at most 512 KiB of bytes")

    model_config = ConfigDict(extra="forbid")


class AssetDocument(BaseModel):
    """A small file as far as it has come."""

    name: str
    size_bytes: int


class ExportFileDocument(BaseModel):
    """One file of an export."""

    name: str
    size_bytes: int
    written_bytes: int
    rank: int = Field(description="Whose sidecar writes it, or shall; -1: not known yet")
    checksum: str = Field(description="XXH3, 128 bit, hexadecimal; empty while it is not whole")
    state: str = Field(description="WAITING, WRITING, WRITTEN or VERIFIED")


class ExportDocument(BaseModel):
    """One export."""

    id: str
    job: str
    incarnation: int = Field(description="0 while no step is pinned")
    step: int = Field(description="-1 while no step is pinned")
    state: str = Field(description="PLANNED, RUNNING, VERIFYING, DONE, FAILED or CANCELLED")
    reason: str = Field(description="Why it failed or was cancelled")
    destination: str
    format: str
    actor: str = Field(description="Who asked for it, by the name of the token")
    created_s: float = Field(description="Seconds since the Unix epoch")
    ended_s: float | None = Field(description="Seconds since the Unix epoch; null: it goes on")
    files: list[ExportFileDocument] = Field(description="Left out of lists")
    size_bytes: int
    written_bytes: int
    schedule: str = Field(description="Id of the schedule that began it; empty: somebody did")
    removed: bool = Field(description="The schedule's retention has removed it")


class ExportList(BaseModel):
    """Exports of a job, newest first."""

    exports: list[ExportDocument]
    next_page_token: str = Field(description="Ask with it for the next page; empty at the end")


class ScheduleDocument(BaseModel):
    """A schedule in force."""

    id: str
    job: str
    destination: str
    format: str
    actor: str
    every_steps: int | None
    every_s: float | None
    keep_last: int | None
    keep_every: int | None
    last_step: int = Field(description="Step of the last occasion, or of the schedule's making")
    last_s: float
    skipped_count: int = Field(description="Occasions that came while an export ran")
    created_s: float
    deleted_s: float | None


class ScheduleList(BaseModel):
    """Schedules in force, oldest first."""

    schedules: list[ScheduleDocument]


class DestinationDocument(BaseModel):
    """A place that exports may go to."""

    name: str
    kind: str = Field(description='"directory" or "s3"')


class DestinationList(BaseModel):
    """Destinations that the operator has configured; never where they lead."""

    destinations: list[DestinationDocument]


def export_document(
    row: ExportRow, files: list[ExportFileRow], *, size: tuple[int, int] | None = None
) -> ExportDocument:
    """An export as `row` has it.

    Args:
        size: bytes in all and written; None is the sum of the files.
    """
    size_bytes = sum(file.size_bytes for file in files)
    written_bytes = sum(file.written_bytes for file in files)
    if size is not None:
        size_bytes, written_bytes = size
    return ExportDocument(
        id=row.id,
        job=row.job,
        incarnation=row.incarnation,
        step=row.step,
        state=row.state,
        reason=row.reason,
        destination=row.destination,
        format=row.format,
        actor=row.actor,
        created_s=row.created_s,
        ended_s=row.ended_s,
        files=[_file(file) for file in files],
        size_bytes=size_bytes,
        written_bytes=written_bytes,
        schedule=row.schedule,
        removed=row.removed,
    )


def _file(file: ExportFileRow) -> ExportFileDocument:
    return ExportFileDocument(
        name=file.name,
        size_bytes=file.size_bytes,
        written_bytes=file.written_bytes,
        rank=file.rank,
        checksum=file.checksum,
        state=file.state,
    )


def schedule_document(row: ScheduleRow) -> ScheduleDocument:
    """A schedule as it stands in the store."""
    return ScheduleDocument(
        id=row.id,
        job=row.job,
        destination=str(row.request["destination"]),
        format=str(row.request["format"]),
        actor=row.actor,
        every_steps=row.rhythm.get("every_steps"),
        every_s=row.rhythm.get("every_s"),
        keep_last=row.rhythm.get("keep_last"),
        keep_every=row.rhythm.get("keep_every"),
        last_step=row.last_step,
        last_s=row.last_s,
        skipped_count=row.skipped_count,
        created_s=row.created_s,
        deleted_s=row.deleted_s,
    )
