"""The meeting place of a job's processes: the state dir and its contents.

    <state dir>/<job>/            0700, ours
        endpoint.json             0600: address of the job's control plane, and its token
        incarnation               0600: the last incarnation issued
        incarnations.jsonl        0600: when each incarnation began and ended
        control.sqlite            0600: edits, exports, audit, history; the service's own
        port                      0600: where REST listened last, for the next start
        past.json                 0600: address of the process that shows an ended job's records
        generation                0600: of the last control plane whose store is here
        checkpoints/              0700: exports, where no destination is configured
        destinations.json         0600: the destinations that admins added
        rank-<r>.sock             the sidecars' Unix sockets

    <state dir>/_sockets/         0700: Unix sockets of REST and gRPC, beside ports on loopback

The state dir is PARAMD_STATE_DIR, else $XDG_STATE_HOME/paramd, else ~/.local/state/paramd.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from dataclasses import replace as changed
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

from paramd.answers import parsed_json, read_file
from paramd.bounds import ENDPOINT, SMALL_FILE, OverBoundError
from paramd.documents import Document, read_document
from paramd.errors import ConflictError, NotFoundError, UnreachableError, UsageError
from paramd.state_files import check_job_name as check_job_name
from paramd.state_files import host_id as host_id
from paramd.state_files import is_job_name, kernel_of, locked, opened, replace, state_dir_errors
from paramd.state_files import job_dir as job_dir
from paramd.state_files import process_start as process_start
from paramd.state_files import socket_path as socket_path
from paramd.state_files import state_dir as state_dir

log = logging.getLogger("paramd")

ENDPOINT_FILE = "endpoint.json"
INCARNATION_FILE = "incarnation"
"""The counter of a job's incarnations: it must never go back."""
MAX_ENDPOINT_BYTES = ENDPOINT.most_bytes
REMOTE_S = 1.0
"""Longest wait, in seconds, for a control plane on another host (of a shared state dir)."""

GENERATION_FILE = "generation"
"""The generation of the last control plane of the directory."""

PORT_FILE = "port"
PAST_FILE = "past.json"

HISTORY_FILE = "incarnations.jsonl"
"""The history of a job's incarnations."""
MAX_HISTORY_BYTES = 256 << 10
"""Only the newest lines are read: about a thousand incarnations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """How to reach a job's control plane. Holds a token: never log it."""

    url: str
    """Base URL of its REST API, for example "http://127.0.0.1:8470"."""
    token: str = field(repr=False)
    """Bearer token for the REST API."""
    pid: int
    """Process of the control plane."""
    job: str
    """Name of the job."""
    grpc_address: str
    """gRPC target "host:port" of the control plane."""
    incarnation: int = 0
    """Incarnation the control plane serves."""
    pid_start: int = 0
    """Start time of `pid` from /proc, to detect a reused pid; 0 unknown."""
    host_id: str = ""
    """As `state_files.host_id` of its process; empty: unknown, taken for this host."""
    ca: str = ""
    """The job's own CA certificate (PEM), which signed the URL's; empty: none."""
    ca_pin: str = ""
    """Fingerprint of that CA's public key, "sha256:..."; empty: none."""
    socket: str = ""
    """Path of REST's Unix socket on its host, for clients of the same user; empty: none."""
    via: str = ""
    """Host that `paramd connect` reaches it through; empty: it lives in this state dir."""


STARTING_S = 60.0
"""Longest start of a control plane, in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IncarnationRecord(Document):
    """One incarnation of a job."""

    incarnation: int
    world_size: int
    began_s: float
    """Seconds since the Unix epoch."""
    ended_s: float | None = None
    """Seconds since the Unix epoch; None while it is open."""
    reason: str = ""
    """Why it ended: how its first rank died, if one did, then what ended it."""
    step: int = -1
    """Last known step when it ended, or when its first rank died; -1 when unknown."""

    def then(self, later: IncarnationRecord) -> IncarnationRecord:
        """A later note of the same incarnation. The first reason is kept for ever: what ends a run
        whose rank has died (cleanup, the next run) is no cause of that."""
        reason = later.reason if later.reason else self.reason
        if self.reason and not reason.startswith(self.reason):
            reason = f"{self.reason}; then {reason}"
        return changed(
            later,
            began_s=min(self.began_s, later.began_s),
            reason=reason,
            step=max(self.step, later.step),
        )


class StartingError(UnreachableError):
    """The job is starting: its control plane is not there yet."""

    def __init__(self, text: str, jobs: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.jobs = tuple(jobs)
        """Names of the jobs that are starting."""


def write_endpoint(endpoint: Endpoint, *, past: bool = False) -> Path:
    """Replace the job's endpoint.json atomically, or with `past` its past.json.

    Raises:
        UsageError, ConflictError: As `job_dir`.
        ConflictError: If a newer incarnation of the job is running, or a job of another host
            would replace a local one.
    """
    path = job_dir(endpoint.job) / (PAST_FILE if past else ENDPOINT_FILE)
    # Locked from check to replace: a control plane that starts late must not hide a newer one.
    with state_dir_errors(), locked(path.parent):
        found = _load(path)
        if endpoint.via and path.exists() and (found is None or not found.via or _alive(found)):
            raise ConflictError(
                f"a job {endpoint.job!r} is here already ({path}), so the one on {endpoint.via} is "
                "not shown under that name; remove that file if nothing of it runs here any more"
            )
        # The name of another host's job is no reason for a control plane of this one to yield.
        lives = found is not None and not found.via and _alive(found)
        if found is not None and lives and found.incarnation > endpoint.incarnation:
            raise ConflictError(
                f"run {found.incarnation} of job {found.job!r} is already running (pid "
                f"{found.pid}); this is run {endpoint.incarnation}"
            )
        replace(path, json.dumps(asdict(endpoint), sort_keys=True) + "\n")
    return path


def remove_endpoint(endpoint: Endpoint) -> bool:
    """Remove the job's endpoint.json, or past.json, if it is still this one; return whether."""
    directory = state_dir() / check_job_name(endpoint.job)
    try:
        with locked(directory):
            # A later incarnation may have written its own meanwhile.
            mine = [n for n in (ENDPOINT_FILE, PAST_FILE) if _load(directory / n) == endpoint]
            for name in mine:
                (directory / name).unlink()
            return bool(mine)
    except OSError:
        return False


def read_endpoint(job: str | None = None) -> Endpoint:
    """The control plane of `job`, or of the only running job when none is named.

    Skips endpoints whose process has ended and, of several, jobs whose trainers have all ended.

    Raises:
        UsageError: For no job name, or if several run and none was named.
        NotFoundError: This host never had that job.
        StartingError: It is starting.
        UnreachableError: It has ended, or no job is running here.
    """
    if job is not None:
        found = _load(state_dir() / check_job_name(job) / ENDPOINT_FILE)
        if found is not None and _alive(found):
            return found
        if not is_known(job):
            raise NotFoundError(f"job {job!r} is not known here; {_next_step(running_jobs())}")
        if is_starting(job):
            raise StartingError(
                f"job {job!r} is starting: its control plane is not there yet; try again in a few "
                f"seconds, or see the training's log. State dir searched: {state_dir()}",
                [job],
            )
        past = incarnations(job)
        began = "has ended" if found is not None else "has not begun yet, or its start failed"
        how = end_text(past[-1]) if past else began
        raise UnreachableError(f"job {job!r} {how}; {_next_step(running_jobs(), ended=job)}")
    running = running_jobs()
    if len(running) > 1:
        return _living(running)
    if not running:
        known = known_jobs()
        if starting := [name for name in known if is_starting(name)]:
            raise StartingError(
                f"{_names(starting)} {'is' if len(starting) == 1 else 'are'} starting; try again "
                "in a few seconds",
                starting,
            )
        ended = f"\nended: {_names(known)} (name one to see what is stored of it)" if known else ""
        raise UnreachableError(
            "no job runs here; paramd.attach(model, optimizer, job=...) starts one"
            f"{ended}\nif it runs elsewhere, give url and token (PARAMD_URL, PARAMD_TOKEN), or its "
            f"PARAMD_STATE_DIR; searched here: {state_dir()}"
        )
    return running[0]


def _living(running: Sequence[Endpoint]) -> Endpoint:
    """The only one of several jobs whose trainers live; UsageError if they are more, or none."""
    # Only here: importing it takes longer than all else of a command that names its job.
    from paramd.memory.lingering import has_ended

    ended = [one.job for one in running if has_ended(one.job, _world_size(one))]
    living = [one for one in running if one.job not in ended]
    if len(living) == 1:
        log.warning(
            "paramd: taking job %r; no trainer of %s is alive (paramd cleanup frees its memory)",
            living[0].job,
            _names(ended),
        )
        return living[0]
    if not living:
        raise UsageError(
            f"the trainers of all jobs here have ended: {_names(ended)}; name one to read its last "
            "step (job=, --job)"
        )
    raise UsageError(
        f"several jobs run here: {_names([one.job for one in living])}; name one (job=, --job)"
    )


def _world_size(endpoint: Endpoint) -> int:
    """Ranks of the endpoint's run; 0: unknown, or the job is not of this host."""
    last = incarnations(endpoint.job)[-1:]
    here = not endpoint.via and kernel_of(endpoint.host_id) in ("", kernel_of(host_id()))
    known = here and last and last[0].incarnation == endpoint.incarnation
    return last[0].world_size if known else 0


def _names(jobs: Sequence[str]) -> str:
    """Names in words, the first eight of them."""
    return ", ".join([*jobs[:8], *(["..."] if len(jobs) > 8 else [])])


def past_endpoint(job: str) -> Endpoint | None:
    """The process of this host that shows the records of a job which has ended, if one lives."""
    found = _load(state_dir() / check_job_name(job) / PAST_FILE)
    here = found is not None and kernel_of(found.host_id) == kernel_of(host_id())
    return found if found is not None and here and _alive(found) else None


def running_jobs() -> list[Endpoint]:
    """Endpoints in this user's state dir whose process is alive, ordered by job name."""
    try:
        paths = sorted(state_dir().iterdir())
    except OSError:
        return []
    loaded = (_load(path / ENDPOINT_FILE) for path in paths if is_job_name(path.name))
    return [endpoint for endpoint in loaded if endpoint is not None and _alive(endpoint)]


def known_jobs() -> list[str]:
    """Names of all jobs of this state dir, running or not, sorted."""
    try:
        names = sorted(path.name for path in state_dir().iterdir())
    except OSError:
        return []
    return [name for name in names if is_job_name(name) and is_known(name)]


def is_known(job: str) -> bool:
    """Whether a job of that name has ever begun here.

    Raises:
        UsageError: As `job_dir`.
    """
    directory = state_dir() / check_job_name(job)
    kept = (ENDPOINT_FILE, HISTORY_FILE, INCARNATION_FILE)
    return any((directory / name).is_file() for name in kept)


def is_starting(job: str) -> bool:
    """Whether a training has just taken an incarnation whose control plane was never here."""
    path = state_dir() / check_job_name(job) / INCARNATION_FILE
    try:
        age_s, taken = time.time() - path.stat().st_mtime, _counted(path)
    except (OSError, ConflictError):
        return False
    if age_s >= STARTING_S:
        return False
    # A control plane notes that it has begun once its endpoint is there.
    past = incarnations(job)
    return not past or taken > past[-1].incarnation


def end_text(last: IncarnationRecord) -> str:
    """The end of a job's last incarnation, for a sentence that begins with its name."""
    if last.ended_s is None:
        return "has ended, and nobody noted when: its control plane was killed"
    moment = datetime.fromtimestamp(last.ended_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    after = f"after step {last.step:,}" if last.step >= 0 else "before its first step was known"
    return f"ended at {moment}, {after}"


def next_incarnation(job: str, *, above: int = 0) -> int:
    """Issue the job's next incarnation: starts at 1, never repeats, durable when it returns.

    The number is also above `above`, the last one known to be issued elsewhere.

    Raises:
        UsageError: As `job_dir`.
        ConflictError: As `job_dir`, or if the counter cannot be read.
    """
    directory = job_dir(job)
    path = directory / INCARNATION_FILE
    with state_dir_errors(), locked(directory):
        incarnation = max(_counted(path), above) + 1
        replace(path, f"{incarnation}\n")
    return incarnation


def last_incarnation(job: str, *, at_least: int = 0) -> int:
    """The last incarnation, 0: none; raises the counter to `at_least`. As `next_incarnation`."""
    directory = job_dir(job)
    path = directory / INCARNATION_FILE
    with state_dir_errors(), locked(directory):
        incarnation = _counted(path)
        if incarnation < at_least:
            incarnation = at_least
            replace(path, f"{incarnation}\n")
            # Taken elsewhere: nothing is starting here.
            os.utime(path, (0, 0))
    return incarnation


def incarnations(job: str) -> list[IncarnationRecord]:
    """All known incarnations, oldest first. Every incarnation but the last counts as ended.

    The file has one line per change. Lines are only appended, each in a single write, so control
    planes of two incarnations may both write. Truncated or unknown lines are skipped.
    """
    found: dict[int, IncarnationRecord] = {}
    directory = state_dir() / check_job_name(job)
    with suppress(OSError), (directory / HISTORY_FILE).open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_HISTORY_BYTES))
        for line in file.read(MAX_HISTORY_BYTES).splitlines():
            _take_in(found, line)
    ordered = [found[incarnation] for incarnation in sorted(found)]
    for place, later in enumerate(ordered[1:]):
        open_one = ordered[place]
        if open_one.ended_s is None:
            begun = f"run {later.incarnation} has begun"
            ordered[place] = open_one.then(changed(open_one, ended_s=later.began_s, reason=begun))
    return ordered


def _take_in(found: dict[int, IncarnationRecord], line: bytes) -> None:
    try:
        absent = {"ended_s": None, "reason": "", "step": -1}
        record = read_document(IncarnationRecord, absent | json.loads(line))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return
    # A restarted control plane notes the beginning again.
    first = found.get(record.incarnation)
    found[record.incarnation] = first.then(record) if first is not None else record


def _counted(path: Path) -> int:
    try:
        text = read_file(path, SMALL_FILE).decode(errors="replace")
    except FileNotFoundError:
        return 0
    except OverBoundError:
        text = ""
    if not re.fullmatch(r"[0-9]{1,18}\n?", text):
        raise ConflictError(
            f"{path} does not hold a number; write the job's last run into it, "
            "or remove it when no process of the job is left"
        )
    return int(text)


def _load(path: Path) -> Endpoint | None:
    """The endpoint in a file private to us; None when there is no such file."""
    try:
        with opened(path) as descriptor:
            found = os.fstat(descriptor)
            # If others could write the file, they could redirect our calls to themselves.
            if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
                return None
            return _parse(os.read(descriptor, MAX_ENDPOINT_BYTES), path.parent.name)
    except OSError:
        return None


def _parse(text: bytes, job: str) -> Endpoint | None:
    try:
        endpoint = Endpoint(**parsed_json(text, ENDPOINT))
    except (ValueError, TypeError):
        return None
    texts = (
        endpoint.url,
        endpoint.token,
        endpoint.grpc_address,
        endpoint.host_id,
        endpoint.ca,
        endpoint.ca_pin,
        endpoint.socket,
        endpoint.via,
    )
    numbers = (endpoint.pid, endpoint.incarnation, endpoint.pid_start)
    typed = all(isinstance(t, str) for t in texts) and all(type(n) is int for n in numbers)
    return endpoint if typed and endpoint.job == job and endpoint.pid > 0 else None


def _alive(endpoint: Endpoint) -> bool:
    if endpoint.host_id and kernel_of(endpoint.host_id) != kernel_of(host_id()):
        return _answers(endpoint.url)
    start = process_start(endpoint.pid)
    return start != 0 and endpoint.pid_start in (0, start)


def _answers(url: str) -> bool:
    """Whether a server listens there; for a process on another host nothing more is known."""
    parts = urlsplit(url)
    try:
        with socket.create_connection((parts.hostname, parts.port), REMOTE_S):
            return True
    except (OSError, ValueError):
        return False


def _next_step(running: list[Endpoint], *, ended: str = "") -> str:
    if ended and not running:
        return f"what is stored of it: paramd status|edits|audit --job {ended}"
    if running:
        return f"jobs that run here: {', '.join(endpoint.job for endpoint in running)}"
    return (
        "start one with paramd.attach(model, optimizer, job=...), or say where it is "
        "(url and token, PARAMD_URL and PARAMD_TOKEN); state dir searched: " + str(state_dir())
    )
