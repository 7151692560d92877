"""State machine of one export: pure functions from a state and an event to the next state.

    PLANNED --planned--> RUNNING --all files written--> VERIFYING --committed--> DONE
       |                    |                              |
       +--------------------+-------failed, cancelled------+--> FAILED, CANCELLED

PLANNED            in the store; nothing is pinned or written.
RUNNING            one step is pinned on all ranks it needs, and sidecars write its files. Readers
                   ignore them, because the commit marker is missing.
VERIFYING          all files are written; they are read back, then the marker is written.
DONE               the marker is written.
FAILED, CANCELLED  there is no marker; what was written is removed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from paramd.errors import ConflictError
from paramd.layout.exports.files import EXPORT_ENDS, ExportState
from paramd_service.exports.store import File, FileState


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    state: ExportState = ExportState.PLANNED
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
        return self.state in EXPORT_ENDS


def planned(export: Export, *, incarnation: int, step: int, files: Sequence[File]) -> Export:
    """One step is pinned; `files` are to be written."""
    _expect(export, ExportState.PLANNED)
    return replace(
        export,
        state=ExportState.RUNNING if files else ExportState.VERIFYING,
        reason="",
        incarnation=incarnation,
        step=step,
        files={file.name: file for file in files},
    )


def given(export: Export, name: str, rank: int) -> Export:
    """A waiting file is assigned to a rank, which writes it from the start."""
    _expect(export, ExportState.RUNNING)
    file = export.files[name]
    if file.state is not FileState.WAITING:
        raise ConflictError(f"file {name!r} is {file.state}; only a waiting one can be assigned")
    return _with(export, replace(file, rank=rank, state=FileState.WRITING, written_bytes=0))


def moved(export: Export, name: str, written_bytes: int) -> Export:
    """Progress of a file's writer."""
    file = export.files[name]
    if file.state is not FileState.WRITING:
        return export  # a late message of a writer that was lost
    return _with(export, replace(file, written_bytes=min(written_bytes, file.size_bytes)))


def written(export: Export, name: str, checksum: str) -> Export:
    """A file is written; after the last one the export is VERIFYING."""
    _expect(export, ExportState.RUNNING)
    file = export.files[name]
    found = _with(
        export,
        replace(file, state=FileState.WRITTEN, written_bytes=file.size_bytes, checksum=checksum),
    )
    whole = all(one.state is FileState.WRITTEN for one in found.files.values())
    return replace(found, state=ExportState.VERIFYING) if whole else found


def returned(export: Export, name: str) -> Export:
    """A file's writer failed; the file waits for another attempt."""
    return _with(export, _waiting(export.files[name]))


def lost(export: Export, rank: int, *, why: str) -> Export:
    """A rank and its snapshot are lost. Other ranks write its files; the export fails if an
    unwritten file needs its snapshot."""
    if export.is_over:
        return export
    files = {
        name: _waiting(file) if file.rank == rank else file for name, file in export.files.items()
    }
    needed = [
        file.name
        for file in files.values()
        if file.state in (FileState.WAITING, FileState.WRITING) and rank in file.sources
    ]
    found = replace(export, files=files)
    if needed:
        return failed(
            found,
            f"rank {rank} was lost ({why}) with its snapshot of step {export.step}, which "
            f"{len(needed)} of {len(files)} files still need; export again",
        )
    return found


def verified(export: Export, name: str) -> Export:
    """A file was read back and matches."""
    _expect(export, ExportState.VERIFYING)
    return _with(export, replace(export.files[name], state=FileState.VERIFIED))


def committed(export: Export, beside: Sequence[File] = ()) -> Export:
    """The commit marker is written, along with files such as the index (`beside`)."""
    _expect(export, ExportState.VERIFYING)
    files = {**export.files, **{file.name: file for file in beside}}
    return replace(export, state=ExportState.DONE, files=files)


def failed(export: Export, reason: str) -> Export:
    """The export fails; no effect if it has already ended."""
    return export if export.is_over else replace(export, state=ExportState.FAILED, reason=reason)


def cancelled(export: Export, reason: str) -> Export:
    """The export is cancelled; no effect if it has already ended."""
    return export if export.is_over else replace(export, state=ExportState.CANCELLED, reason=reason)


def next_files(export: Export, ranks: Collection[int], *, per_rank: int) -> list[tuple[str, int]]:
    """(file, rank) to assign now, at most `per_rank` files at once to each healthy rank of `ranks`.
    Each goes to its planned rank if that is healthy, else to the one with the fewest bytes left."""
    if export.state is not ExportState.RUNNING or not ranks:
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
    """(next state, reason) of an export whose job is now in `incarnation`, for a new control plane.
    `snapshot_lives`: the leases of all pinned snapshots could be renewed."""
    if export.is_over:
        return export, "it has ended"
    if export.state is ExportState.PLANNED:
        return export, "nothing was pinned yet"
    if export.incarnation != incarnation:
        why = f"run {export.incarnation} of the job has ended"
        return failed(export, f"{why}; export again"), why
    if export.state is ExportState.VERIFYING:
        return export, "all files are written"
    if not snapshot_lives:
        why = "the control plane was down for longer than the snapshot's lease"
        return failed(export, f"{why}; export again"), why
    files = {name: _waiting(file) for name, file in export.files.items()}
    return replace(export, files=files), "the snapshot is still leased"


def _waiting(file: File) -> File:
    """The file, back to waiting if it was being written."""
    if file.state is not FileState.WRITING:
        return file
    return replace(file, state=FileState.WAITING, written_bytes=0)


def _with(export: Export, file: File) -> Export:
    return replace(export, files={**export.files, file.name: file})


def _expect(export: Export, state: ExportState) -> None:
    if export.state is not state:
        raise ConflictError(f"the export is {export.state}; expected {state}")
