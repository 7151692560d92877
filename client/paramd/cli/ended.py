"""Jobs that have ended: the answers of commands about them, and `paramd cleanup`, which frees their
memory.

Commands answer from the state dir, without a server: a job's incarnations.jsonl has the time and
the last step. Edits and the audit are in the service's store, which only the service can read: a
process of the service prints a document in the shape of REST and ends.

Sidecars linger after their trainer, so that its last step can still be read. `paramd cleanup` finds
them by their sockets in the job's directory. Each decides itself, in one moment, whether its
trainer is gone; only one that does not answer, or is too old to be asked, gets SIGTERM, after the
kernel has confirmed whose sidecar the process is, and that none of the processes that it watches
is alive.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

from paramd import extras, helpers, places
from paramd.cli import completion
from paramd.cli.options import Target, completed, with_output
from paramd.cli.output import Column, Format, count, size, when
from paramd.cli.parts import RUN, CommandPart, Commands
from paramd.cli.shell import say
from paramd.errors import (
    CODES,
    ConflictError,
    NotFoundError,
    ParamdError,
    PartialError,
    UnreachableError,
    UsageError,
)
from paramd.places import Endpoint, IncarnationRecord
from paramd.security.tickets import new_private_key, new_token
from paramd.state_files import resident_bytes

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
    Column("incarnation", "RUN", right=True),
    Column("world_size", "RANKS", right=True),
    Column("ended_s", "ENDED", lambda ended_s: when(ended_s) if ended_s is not None else "?"),
    Column("reason", "REASON"),
)


@dataclass(frozen=True)
class Past:
    """A job that has ended, by its state dir. Reads files; starts nothing that stays."""

    job: str
    last: IncarnationRecord

    def edits(self, **options: str | int | None) -> list[dict[str, Any]]:
        """Documents of its edits, newest first. Raises as `_read`."""
        return list(_read("edits", self.job, **options)["edits"])

    def audit(self, *, oldest: bool, limit: int) -> dict[str, Any]:
        """One page with its audit records. Raises as `_read`."""
        return _read("audit", self.job, oldest=oldest, limit=limit)

    @contextmanager
    def served(self) -> Iterator[tuple[Endpoint, subprocess.Popen[bytes] | None]]:
        """Have a process show the records as the job's control plane would, at its former address.
        It ends with the block; None if somebody else had started one. Raises as `_read`."""
        if (known := places.past_endpoint(self.job)) is not None:
            yield known, None
            return
        extras.need("the records of an ended job", "service")
        secrets = {
            "job": self.job,
            "incarnation": self.last.incarnation,
            "world_size": self.last.world_size,
            "private_key": new_private_key().hex(),
            "token": new_token(),
            "ended": True,
            "parent": os.getpid(),
        }
        log_path = places.job_dir(self.job) / "past.log"
        server = helpers.spawn(
            "paramd_service.control",
            ["--job", self.job, "--listen-near", "127.0.0.1:8470"],
            log_path=log_path,
            stdin=json.dumps(secrets).encode() + b"\n",
            piped=True,
        )
        try:
            assert server.stdout is not None
            with server.stdout as told:
                begun = told.readline()
            endpoint = places.past_endpoint(self.job)
            if not begun or endpoint is None:
                raise UnreachableError(f"the records cannot be shown: {_last_line(log_path)}")
            yield endpoint, server
        finally:
            server.terminate()
            helpers.end(server, grace_s=3.0)

    def say(self) -> None:
        """Print to stderr that these are stored records."""
        say(f"job {self.job!r} {places.end_text(self.last)}; showing its stored records")


def find(target: Target) -> Past | None:
    """The job that the settings name, if it has ended on this host; None if it may be running.
    Raises NotFoundError: this host never had a job of that name. UnreachableError: its control
    plane does not run, but sidecars of it do. ConflictError: its directory is open to other
    users."""
    job = target.settings.job
    if job is None or target.settings.url is not None:
        return None
    try:
        places.read_endpoint(job)
        return None
    except places.StartingError:
        return None
    except UnreachableError:
        # Checks that the directory is ours and private.
        places.job_dir(job)
    living = sorted(one.rank for one in sidecars(job))
    if living:
        raise UnreachableError(
            f"no control plane of job {job!r} runs, but sidecars of ranks "
            f"{', '.join(map(str, living))} do: the training is starting it, or restarting "
            f"it. Sidecars of a dead training end by themselves, or with: paramd cleanup {job}"
        )
    past = places.incarnations(job)
    return Past(job, past[-1]) if past else None


async def found_ended(client: RestClient, job: str) -> IncarnationRecord | None:
    """The last incarnation if its running control plane reports that the job has ended.

    Raises the control plane's ParamdError; it may end meanwhile.
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


def show_status(target: Target, past: Past) -> None:
    """Print the status of a job that has ended."""
    last = past.last
    if last.ended_s is None:
        # Killed, so nobody noted the end. The metric history, if any, has the last step seen.
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
    if target.format is Format.JSON:
        target.show("ranks", [], (), **row)
    else:
        target.show("jobs", [row], COLUMNS, id_key="job")
    seen_text = f"; the last step seen was {last.step:,}" if past.last.step < 0 <= last.step else ""
    say(f"job {past.job!r} {places.end_text(last)}, run {last.incarnation}{seen_text}")


def _read(what: str, job: str, **options: str | int | bool | None) -> dict[str, Any]:
    """Run the service's reader of its store; UsageError without the service, else its error."""
    extras.need("the store of an ended job", "service")
    # -P: a file in the working directory must not replace the service.
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


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"see {path}"


ANSWER_S = 5.0
LEAVE_S = 20.0
"""A sidecar lets running calls finish for 5 s."""

SIDECAR_COLUMNS = (
    Column("rank", "RANK", right=True),
    Column("pid", "PID", right=True),
    Column("freed_bytes", "FREED", size, right=True),
    Column("how", "HOW"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sidecar:
    """A living sidecar of this host."""

    rank: int
    path: Path
    pid: int
    """0: the kernel cannot name it here, in another container."""
    start: int
    resident_bytes: int


@with_output
def cleanup(
    target: Target,
    name: Annotated[
        str | None, completed("[JOB]", "Name of the job; or --job.", completion.jobs)
    ] = None,
) -> None:
    """Free the memory of a training that has ended or died.

    Its sidecars keep the last step for 10 minutes (PARAMD_LINGER_S). This asks
    those of this user on this host to exit now, and ends the job's control
    plane. It is refused while a trainer is alive: stop the training first. If
    nothing of the job is running, there is nothing to do.
    """
    job = _named(target, name)
    found = list(sidecars(job))
    if not found and not places.is_known(job) and target.settings.url is None:
        raise NotFoundError(f"job {job!r} is not known here; state dir: {places.state_dir()}")
    for one in found:
        trainer = watched(one)
        if trainer:
            raise ConflictError(
                f"job {job!r} is training: process {trainer}, the trainer of rank {one.rank}, is "
                "alive; stop it first, paramd cleanup never ends a training"
            )
    told = asyncio.run(_tell_control(target, job))
    rows: list[dict[str, Any]] = []
    for one in found:
        how, left = _asked(one)
        freed_bytes = one.resident_bytes if left else 0
        told_of = {"rank": one.rank, "pid": one.pid, "freed_bytes": freed_bytes}
        rows.append(told_of | {"left": left, "how": how})
    if rows or target.format is not Format.TABLE:
        target.show("sidecars", rows, SIDECAR_COLUMNS, id_key="rank", job=job)
    kept = [row for row in rows if not row["left"]]
    freed = sum(row["freed_bytes"] for row in rows)
    gone = len(rows) - len(kept)
    if rows:
        say(f"freed {size(freed)}: {gone} of {len(rows)} sidecars of job {job!r} have left")
    elif not told:
        say(f"nothing of job {job!r} runs here")
    if told:
        say(told)
    if kept:
        raise PartialError(f"the sidecar of rank {kept[0]['rank']} stays: {kept[0]['how']}")


def _named(target: Target, name: str | None) -> str:
    given = target.settings.job
    if name is not None and given not in (None, name) and not os.environ.get("PARAMD_JOB"):
        raise UsageError(f"JOB is {name!r}, and --job {given!r}; give one")
    job = name if name is not None else given
    if job is None:
        raise UsageError("JOB: name the job to clean up, such as: paramd cleanup my-run")
    return places.check_job_name(job)


def sidecars(job: str) -> Iterator[Sidecar]:
    """The job's sidecars here, by rank; ConflictError if its directory is not ours alone."""
    from paramd.memory import handover

    if not (places.state_dir() / job).exists():
        return
    # Checks that the directory is ours and private.
    for path in sorted(places.job_dir(job).glob("rank-*.sock")):
        rank = re.fullmatch(r"rank-([0-9]{1,9})\.sock", path.name)
        if rank is None:
            continue
        try:
            with handover.connect(path, timeout_s=ANSWER_S) as connection:
                pid = handover.check_peer(connection)
        except (UnreachableError, OSError):
            continue
        start = places.process_start(pid) if pid else 0
        yield Sidecar(
            rank=int(rank[1]), path=path, pid=pid, start=start, resident_bytes=resident_bytes(pid)
        )


def watched(one: Sidecar) -> int:
    """A living process that the sidecar watches by a pidfd, which is its trainer; 0 for none."""
    found = []
    for path in Path(f"/proc/{one.pid}/fdinfo").glob("*"):
        with suppress(OSError):
            named = re.search(r"^Pid:\s+([0-9]+)$", path.read_text(), re.MULTILINE)
            if named is not None:
                found.append(int(named[1]))
    # Its own children, such as the writer of an export, are no trainers.
    living = [pid for pid in found if places.process_start(pid) and _parent(pid) != one.pid]
    return living[0] if living else 0


async def _tell_control(target: Target, job: str) -> str:
    """End the job at its control plane, which audits it; "" if none runs.

    Raises ConflictError if a trainer lives, perhaps on another host; DeniedError: the token's role
    does not suffice.
    """
    try:
        async with target.named(job).rest() as (client, _):
            await client.send("POST", f"/jobs/{quote(job, safe='')}/end")
            return f"notified the control plane at {client.url}"
    except (NotFoundError, UnreachableError):
        return ""


def _asked(one: Sidecar) -> tuple[str, bool]:
    """(the outcome, whether it has left)."""
    from paramd.memory import handover
    from paramd.memory.descriptors import close_all

    with _process(one) as process:
        try:
            with handover.connect(one.path, timeout_s=ANSWER_S) as connection:
                handover.send(connection, {"op": "leave"})
                answer, descriptors = handover.receive(connection)
                close_all(descriptors)
        except (ParamdError, OSError, EOFError):
            answer = {"op": "silent"}
        if answer.get("code") == "FAILED_PRECONDITION":
            return str(answer["message"]), False
        how = "exited on request"
        if answer["op"] != "leaving":
            # Too old to be asked, or it hangs.
            if process is None:
                return "it does not answer, and its process is in another container", False
            if places.process_start(one.pid) != one.start or watched(one):
                return "its process or its trainer changed meanwhile; try again", False
            signal.pidfd_send_signal(process, signal.SIGTERM)
            how = "left on SIGTERM"
        if _wait(one, process):
            return how, True
        return f"it has not left within {LEAVE_S:.0f} s; see rank-{one.rank}.log", False


@contextmanager
def _process(one: Sidecar) -> Iterator[int | None]:
    """A pidfd of the sidecar, so that no signal reaches a process that reuses its pid."""
    try:
        process = os.pidfd_open(one.pid) if one.pid else None
    except ProcessLookupError:
        process = None
    try:
        # Opened first, compared then: from here on the descriptor names that very process.
        same = process is not None and places.process_start(one.pid) == one.start
        yield process if same else None
    finally:
        if process is not None:
            os.close(process)


def _wait(one: Sidecar, process: int | None) -> bool:
    if process is not None:
        poll = select.poll()
        poll.register(process, select.POLLIN)
        return bool(poll.poll(LEAVE_S * 1000))
    deadline_s = time.monotonic() + LEAVE_S
    while one.path.exists():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.1)
    return True


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0


class Cleanup(CommandPart):
    """What is left of a training."""

    name = "cleanup"

    def add_to(self, commands: Commands) -> None:
        commands.add(RUN, cleanup, "my-run")
