"""History of a job's epochs: one line per change, in the job's directory of the state dir.

Lines are only appended, each in a single write, so control planes of two epochs may both write.
Truncated or unknown lines are skipped.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paramd import places
from paramd.errors import ParamdError

EPOCHS_FILE = "epochs.jsonl"
MAX_READ_BYTES = 256 << 10
"""Only the newest lines are read: about a thousand epochs."""

log = logging.getLogger("paramd.control")


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochRecord:
    """One incarnation of a job."""

    epoch: int
    world_size: int
    began_s: float
    """Seconds since the Unix epoch."""
    ended_s: float | None = None
    """Seconds since the Unix epoch; None while it is open."""
    reason: str = ""
    """Why it ended."""
    step: int = -1
    """Last known step when it ended; -1 when unknown."""


class EpochNotes:
    """Writes the history off the event loop, one line at a time."""

    def __init__(self) -> None:
        self._lines: asyncio.Queue[tuple[str, dict[str, Any]]] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start writing, including what was noted before."""
        self._task = asyncio.create_task(self._run(), name="paramd-epochs")

    def note(self, job: str, record: EpochRecord) -> None:
        """Queue a line for an epoch that has begun or ended."""
        line: dict[str, Any] = {
            "epoch": record.epoch,
            "world_size": record.world_size,
            "began_s": record.began_s,
        }
        if record.ended_s is not None:
            line |= {"ended_s": record.ended_s, "reason": record.reason, "step": record.step}
        self._lines.put_nowait((job, line))

    async def close(self) -> None:
        """Write what is queued, then stop."""
        if self._task is not None:
            await self._lines.join()
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None

    async def _run(self) -> None:
        while True:
            job, line = await self._lines.get()
            try:
                await asyncio.to_thread(_append, job, line)
            except (OSError, ParamdError) as error:
                # The history is a convenience: the job goes on without it.
                log.warning("the list of epochs was not written: %s", error)
            finally:
                self._lines.task_done()


def records(job: str) -> list[EpochRecord]:
    """All known epochs, oldest first. Every epoch but the last counts as ended."""
    found: dict[int, EpochRecord] = {}
    for line in _lines(places.state_dir() / places.check_job_name(job) / EPOCHS_FILE):
        _take_in(found, line)
    ordered = [found[epoch] for epoch in sorted(found)]
    for place, later in enumerate(ordered[1:]):
        if ordered[place].ended_s is None:
            ordered[place] = replace(
                ordered[place], ended_s=later.began_s, reason=f"epoch {later.epoch} has begun"
            )
    return ordered


def _take_in(found: dict[int, EpochRecord], line: bytes) -> None:
    try:
        said = json.loads(line)
        ended_s = said.get("ended_s")
        record = EpochRecord(
            epoch=int(said["epoch"]),
            world_size=int(said["world_size"]),
            began_s=float(said["began_s"]),
            ended_s=float(ended_s) if ended_s is not None else None,
            reason=str(said.get("reason", "")),
            step=int(said.get("step", -1)),
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return
    # A restarted control plane notes the beginning again: the earliest time counts.
    first = found.get(record.epoch, record)
    found[record.epoch] = replace(record, began_s=min(first.began_s, record.began_s))


def _lines(path: Path) -> list[bytes]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - MAX_READ_BYTES))
            text = file.read()
    except OSError:
        return []
    return text.splitlines()


def _append(job: str, message: dict[str, Any]) -> None:
    path = places.job_dir(job) / EPOCHS_FILE
    line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    try:
        os.write(descriptor, line)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
