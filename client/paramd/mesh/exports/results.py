"""An export as the control plane tells of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from paramd.errors import ConflictError, ParamdError


class ExportState(StrEnum):
    """Where an export is; the last three are ends."""

    PLANNED = "PLANNED"
    RUNNING = "RUNNING"
    VERIFYING = "VERIFYING"
    DONE = "DONE"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


ENDS = frozenset({ExportState.DONE, ExportState.FAILED, ExportState.CANCELLED})


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportFile:
    """One file of an export."""

    name: str
    size_bytes: int
    written_bytes: int
    rank: int
    """Whose sidecar writes it; -1 while none does."""
    checksum: str
    """XXH3, 128 bit, as hexadecimal digits; empty while the file is not whole."""
    state: str
    """WAITING, WRITING, WRITTEN or VERIFIED."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportInfo:
    """An export at one moment."""

    id: str
    job: str
    epoch: int
    """0 while no step is pinned."""
    step: int
    """-1 while no step is pinned."""
    state: ExportState
    reason: str
    """Why it failed or was cancelled."""
    destination: str
    """Name of the destination, "/", key."""
    format: str
    actor: str
    created_s: float
    """Seconds since the Unix epoch."""
    ended_s: float | None
    files: tuple[ExportFile, ...]
    size_bytes: int
    written_bytes: int
    schedule: str
    """Id of the schedule that began it; empty: somebody did."""
    raw: Mapping[str, Any] = field(repr=False, compare=False)
    """As the control plane sent it."""

    @property
    def ended(self) -> bool:
        """Whether it goes on no more."""
        return self.state in ENDS


Progress = Callable[["ExportInfo"], object]
"""Is called with what is known of an export, now and then."""


def parse_export(found: Mapping[str, Any]) -> ExportInfo:
    """An ExportDocument. Raises ParamdError when it cannot be read."""
    try:
        return ExportInfo(
            id=str(found["id"]),
            job=str(found["job"]),
            epoch=int(found["epoch"]),
            step=int(found["step"]),
            state=ExportState(found["state"]),
            reason=str(found["reason"]),
            destination=str(found["destination"]),
            format=str(found["format"]),
            actor=str(found["actor"]),
            created_s=float(found["created_s"]),
            ended_s=float(found["ended_s"]) if found["ended_s"] is not None else None,
            files=tuple(_file(one) for one in found["files"]),
            size_bytes=int(found["size_bytes"]),
            written_bytes=int(found["written_bytes"]),
            schedule=str(found["schedule"] or ""),
            raw=dict(found),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ParamdError(
            f"the control plane told of an export in a way that this client cannot read "
            f"({error!r}); the two may run different versions of paramd"
        ) from error


def _file(found: Mapping[str, Any]) -> ExportFile:
    return ExportFile(
        name=str(found["name"]),
        size_bytes=int(found["size_bytes"]),
        written_bytes=int(found["written_bytes"]),
        rank=int(found["rank"]),
        checksum=str(found["checksum"]),
        state=str(found["state"]),
    )


def check_done(info: ExportInfo) -> None:
    """Raises ConflictError when an export ended in another way than DONE; the text says why."""
    if info.ended and info.state is not ExportState.DONE:
        what = "was cancelled" if info.state is ExportState.CANCELLED else "failed"
        raise ConflictError(f"the export to {info.destination} {what}: {info.reason}")
