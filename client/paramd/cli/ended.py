"""What commands answer of a job that has ended: from the state dir, without a server.

When and after which step it ended stands in the job's incarnations.jsonl. Edits and the audit lie
in the service's store, which only the service can read, so it is run for them: one process that
prints a document in the shape of REST and ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from paramd import extras, places
from paramd.cli.options import Format, Target
from paramd.cli.output import Column, Listing, count, emit, when
from paramd.cli.shell import say
from paramd.errors import CODES, NotFoundError, ParamdError, UnreachableError
from paramd.places import IncarnationRecord

if TYPE_CHECKING:
    from paramd.mesh.peers.control import RestClient

READER = "paramd_service.control.ended"
READER_S = 60.0
NOTED_S = 3.0
"""The control plane notes an end within a second of the last rank's leaving."""

COLUMNS = (
    Column("job", "JOB"),
    Column("state", "STATE"),
    Column("step", "STEP", lambda step: count(step) if step >= 0 else "-", right=True),
    Column("incarnation", "INCARNATION", right=True),
    Column("world_size", "RANKS", right=True),
    Column("ended_s", "ENDED", lambda ended_s: when(ended_s) if ended_s is not None else "?"),
    Column("reason", "REASON"),
)


class Past:
    """A job that has ended, as its state dir tells. Reads files; starts nothing that stays."""

    def __init__(self, job: str, last: IncarnationRecord) -> None:
        self.job = job
        self.last = last

    def edits(self, **options: str | int | None) -> list[dict[str, Any]]:
        """Documents of its edits, newest first. Raises as `_read`."""
        return list(_read("edits", self.job, **options)["edits"])

    def audit(self, *, oldest: bool, limit: int) -> dict[str, Any]:
        """One page with its audit records. Raises as `_read`."""
        return _read("audit", self.job, oldest=oldest, limit=limit)

    def say(self) -> None:
        """Tell on stderr that this is the past."""
        say(f"job {self.job!r} {places.end_text(self.last)}; this is what is stored of it")


def find(target: Target) -> Past | None:
    """The job that the settings name, if it has ended on this host; None if it may be running.

    Raises:
        NotFoundError: no job of that name was ever here.
        UnreachableError: its control plane does not run, but sidecars of it do.
        ConflictError: its directory is open to other users.
    """
    job = target.settings.job
    if job is None or target.settings.url is not None:
        return None
    try:
        places.read_endpoint(job)
        return None
    except UnreachableError:
        # Checks that the directory is ours and private.
        places.job_dir(job)
    from paramd.cli.end import sidecars

    living = sorted(one.rank for one in sidecars(job))
    if living:
        raise UnreachableError(
            f"no control plane of job {job!r} runs, but sidecars of ranks "
            f"{', '.join(map(str, living))} do: the training is starting, or starts it again; "
            f"sidecars of a dead one leave by themselves or with: paramd end {job}"
        )
    past = places.incarnations(job)
    return Past(job, past[-1]) if past else None


async def found_ended(client: RestClient, job: str) -> IncarnationRecord | None:
    """The last incarnation if its control plane, which runs, says that the job has ended.

    Raises:
        ParamdError: from the control plane, which may end meanwhile.
    """
    path = f"/jobs/{quote(job, safe='')}"
    if (await client.send("GET", path))["state"] != "ended":
        return None
    deadline_s = time.monotonic() + NOTED_S
    while True:
        last = (await client.send("GET", f"{path}/incarnations"))["incarnations"][-1]
        if last["ended_s"] is not None:
            return IncarnationRecord(**last)
        if time.monotonic() > deadline_s:
            return None


def emit_status(past: Past, form: Format) -> None:
    """Print the status of a job that has ended."""
    last = past.last
    if last.ended_s is None:
        # Killed, so nobody noted the end. The metric history, if any, knows the last step seen.
        try:
            seen = _read("step", past.job)
        except ParamdError:
            seen = {"step": -1}
        last = replace(last, step=seen["step"], reason="its control plane was killed")
    row = {
        **asdict(last),
        "job": past.job,
        "state": "ended",
        "reason": last.reason.removesuffix("; attach again"),
    }
    if form is Format.JSON:
        emit(Listing(name="ranks", rows=[], columns=(), about=row, id_key="rank"), form)
    else:
        emit(Listing(name="jobs", rows=[row], columns=COLUMNS, about={}, id_key="job"), form)
    seen_text = f"; the last step seen was {last.step:,}" if past.last.step < 0 <= last.step else ""
    say(f"job {past.job!r} {places.end_text(last)}, incarnation {last.incarnation}{seen_text}")


def _read(what: str, job: str, **options: str | int | bool | None) -> dict[str, Any]:
    """Run the service's reader of its own store.

    Raises:
        UsageError: the service is not installed.
        ParamdError: the class of the reader's exit code.
    """
    extras.need("the store of an ended job", "service")
    # -P: a file in the working directory must not stand in for the service.
    arguments = [sys.executable, "-P", "-m", READER, what, "--job", job]
    for name, value in options.items():
        if value is True:
            arguments.append(f"--{name}")
        elif value is not None and value is not False:
            arguments.append(f"--{name}={value}")
    # The reader needs no token, so it gets none.
    environment = {name: text for name, text in os.environ.items() if name != "PARAMD_TOKEN"}
    found = subprocess.run(
        arguments, capture_output=True, env=environment, timeout=READER_S, check=False
    )
    if found.returncode:
        lines = found.stderr.decode(errors="replace").strip().splitlines()
        text = lines[-1] if lines else f"{READER} ended with code {found.returncode}"
        kinds = {codes.exit: kind for kind, codes in reversed(CODES.items())}
        raise kinds.get(found.returncode, ParamdError)(text)
    parsed = json.loads(found.stdout)
    if not isinstance(parsed, dict):
        raise NotFoundError(f"{READER} printed no document")
    return parsed
