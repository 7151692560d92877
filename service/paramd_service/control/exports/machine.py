"""An export's life. Pure: events in, the next state out.

    PLANNED --planned--> RUNNING --all files written--> VERIFYING --committed--> DONE
       |                    |                              |
       +--------------------+-------failed, cancelled------+--> FAILED, CANCELLED

PLANNED: kept in the store; nothing is pinned or written.
RUNNING: one step is pinned on all ranks that are needed; sidecars write files that no reader
takes for an export, for its commit marker is missing.
VERIFYING: all files are written; they are read back, then the marker is put beside them.
DONE: the marker is there.
FAILED, CANCELLED: no marker is there, and what was written has been removed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from paramd.errors import ConflictError


class State(StrEnum):
    """Where an export is."""

    PLANNED = "PLANNED"
    RUNNING = "RUNNING"
    VERIFYING = "VERIFYING"
    DONE = "DONE"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


TERMINAL = frozenset({State.DONE, State.FAILED, State.CANCELLED})


class FileState(StrEnum):
    """Where one file is."""

    WAITING = "WAITING"
    WRITING = "WRITING"
    WRITTEN = "WRITTEN"
    VERIFIED = "VERIFIED"


@dataclass(frozen=True, kw_only=True, slots=True)
class File:
    """One file of an export."""

    name: str
    size_bytes: int
    rank: int = -1
    """Who writes, or wrote, it; planned for while it waits."""
    state: FileState = FileState.WAITING
    written_bytes: int = 0
    checksum: str = ""
    """Of the whole file, once it is written."""
    sources: frozenset[int] = frozenset()
    """Ranks whose snapshots hold its bytes."""
    attempt: int = 0
    """How often it was given away."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """One export now."""

    state: State = State.PLANNED
    reason: str = ""
    """Why it failed or was cancelled."""
    incarnation: int = 0
    """0 before a step is pinned."""
    step: int = -1
    files: Mapping[str, File]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files.values())

    @property
    def written_bytes(self) -> int:
        return sum(file.written_bytes for file in self.files.values())

    @property
    def is_over(self) -> bool:
        return self.state in TERMINAL


NEW = Export(files={})


def planned(export: Export, *, incarnation: int, step: int, files: Sequence[File]) -> Export:
    """One step is pinned, and these are the files to write."""
    _expect(export, State.PLANNED)
    return replace(
        export,
        state=State.RUNNING if files else State.VERIFYING,
        incarnation=incarnation,
        step=step,
        files={file.name: file for file in files},
    )


def given(export: Export, name: str, rank: int) -> Export:
    """A file is given to a rank, which begins it anew."""
    _expect(export, State.RUNNING)
    file = export.files[name]
    if file.state is not FileState.WAITING:
        raise ConflictError(f"file {name!r} is {file.state}; only a waiting one is given away")
    return _with(
        export,
        replace(
            file,
            rank=rank,
            state=FileState.WRITING,
            written_bytes=0,
            attempt=file.attempt + 1,
        ),
    )


def moved(export: Export, name: str, written_bytes: int) -> Export:
    """Bytes of a file that its writer has written so far."""
    file = export.files[name]
    if file.state is not FileState.WRITING:
        return export  # said before it was lost
    return _with(export, replace(file, written_bytes=min(written_bytes, file.size_bytes)))


def written(export: Export, name: str, checksum: str) -> Export:
    """A file is whole; the last one ends the writing."""
    _expect(export, State.RUNNING)
    file = export.files[name]
    found = _with(
        export,
        replace(file, state=FileState.WRITTEN, written_bytes=file.size_bytes, checksum=checksum),
    )
    whole = all(one.state is FileState.WRITTEN for one in found.files.values())
    return replace(found, state=State.VERIFYING) if whole else found


def returned(export: Export, name: str) -> Export:
    """A file's writer has given it back; it waits for another try."""
    file = export.files[name]
    if file.state is not FileState.WRITING:
        return export
    return _with(export, replace(file, state=FileState.WAITING, written_bytes=0))


def lost(export: Export, rank: int, *, keeps_snapshot: bool, why: str) -> Export:
    """A rank writes no more. Its files wait for others, while all bytes still needed are held.

    Args:
        keeps_snapshot: False when its memory is gone, too: a killed sidecar, or its successor.
    """
    if export.is_over:
        return export
    files = {
        name: replace(file, state=FileState.WAITING, written_bytes=0)
        if file.rank == rank and file.state is FileState.WRITING
        else file
        for name, file in export.files.items()
    }
    needed = [
        file.name
        for file in files.values()
        if file.state in (FileState.WAITING, FileState.WRITING) and rank in file.sources
    ]
    found = replace(export, files=files)
    if needed and not keeps_snapshot:
        return failed(
            found,
            f"rank {rank} was lost ({why}) with its part of step {export.step}, which "
            f"{len(needed)} of {len(files)} files still need; export again",
        )
    return found


def verified(export: Export, name: str) -> Export:
    """A file was read back and is what was written."""
    _expect(export, State.VERIFYING)
    return _with(export, replace(export.files[name], state=FileState.VERIFIED))


def committed(export: Export, beside: Sequence[File] = ()) -> Export:
    """The commit marker is there, and with it files such as the index."""
    _expect(export, State.VERIFYING)
    files = {**export.files, **{file.name: file for file in beside}}
    return replace(export, state=State.DONE, files=files)


def failed(export: Export, reason: str) -> Export:
    """It ends with a cause; an end that was there before stays."""
    return export if export.is_over else replace(export, state=State.FAILED, reason=reason)


def cancelled(export: Export, reason: str) -> Export:
    """Somebody ended it; an end that was there before stays."""
    return export if export.is_over else replace(export, state=State.CANCELLED, reason=reason)


def next_files(export: Export, ranks: Collection[int], *, per_rank: int) -> list[tuple[str, int]]:
    """(file, rank) to give away now: each to the rank it was planned for, if that one is well,
    else to the one with the fewest bytes before it.

    Args:
        ranks: Ranks that write, and are well.
        per_rank: Files that one rank writes at once.
    """
    if export.state is not State.RUNNING or not ranks:
        return []
    busy = dict.fromkeys(ranks, 0)
    load = dict.fromkeys(ranks, 0)
    for file in export.files.values():
        if file.rank in busy and file.state in (FileState.WAITING, FileState.WRITING):
            load[file.rank] += file.size_bytes - file.written_bytes
            busy[file.rank] += file.state is FileState.WRITING
    found: list[tuple[str, int]] = []
    for file in export.files.values():
        if file.state is not FileState.WAITING:
            continue
        rank = file.rank
        if rank not in busy:
            rank = min(busy, key=lambda one: (load[one], one))
            load[rank] += file.size_bytes
        if busy[rank] < per_rank:
            busy[rank] += 1
            found.append((file.name, rank))
    return found


def after_restart(export: Export, *, incarnation: int, snapshot_lives: bool) -> tuple[Export, str]:
    """What a new control plane makes of an export that it finds, and why.

    Args:
        incarnation: The job's present one.
        snapshot_lives: All pinned snapshots could be renewed.
    """
    if export.is_over:
        return export, "it is over"
    if export.state is State.PLANNED:
        return export, "nothing had begun"
    if export.incarnation != incarnation:
        why = f"incarnation {export.incarnation} of the job has ended"
        return failed(export, f"{why}; export again"), why
    if export.state is State.VERIFYING:
        return export, "all files are written"
    if not snapshot_lives:
        why = "the control plane was away for longer than the snapshot's lease"
        return failed(export, f"{why}; export again"), why
    files = {
        name: replace(file, state=FileState.WAITING, written_bytes=0)
        if file.state is FileState.WRITING
        else file
        for name, file in export.files.items()
    }
    return replace(export, files=files), "the snapshot lives"


def _with(export: Export, file: File) -> Export:
    return replace(export, files={**export.files, file.name: file})


def _expect(export: Export, state: State) -> None:
    if export.state is not state:
        raise ConflictError(f"the export is {export.state}; expected {state}")
