"""Reports of the control plane on a job: its alerts, its ranks' activity, the end of their logs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from html import escape
from typing import Any, Literal, get_args
from urllib.parse import urlencode

from paramd.documents import Document, read_document
from paramd.errors import UsageError
from paramd.mesh.peers.discovery import JobRest
from paramd.mesh.results import Table, ranks_text
from paramd.state_files import MAX_LOG_LINES

AlertState = Literal["all", "firing", "resolved"]

MAX_RANKS = 64
MAX_WHY_LINES = 100
TIMEOUT_S = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspect(Document):
    """The change that an alert may come from.

    Only applied edits of what the alert is about, a few of its samples before, and only for alerts
    about values.
    """

    edit: str
    """Id of the edit; `mesh.undo(edit, dry_run=True)` tells what undoing it would do."""
    what: str
    """In words, without values: "mul layers.3.*"."""
    actor: str
    """Name of the token that created it."""
    step: int
    """Step at whose boundary it was applied."""
    steps_before: int
    """Steps between the edit and the first sample that shows the problem."""

    @property
    def text(self) -> str:
        """In words: "mul layers.3.*, by owner, applied 38 steps before"."""
        steps = "1 step" if self.steps_before == 1 else f"{self.steps_before:,} steps"
        return f"{self.what}, by {self.actor}, applied {steps} before"


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Alert(Document):
    """One problem, from when it was first found until it was last found.

    REST, the events, webhooks and the store all have it in this form. Times are in seconds since
    the Unix epoch, by the control plane's clock.
    """

    id: str
    job: str
    incarnation: int
    rule: str
    """non-finite, norm-jump, gradient-jump, replica-drift, stale-rank, stalled-rank, straggler,
    slow-rank, stuck, layout-mismatch, clock-jump, certificate, store, failed-export,
    lost-mark or logged-number; docs/alerts.md says more."""
    subject: str
    """The subject: a rank, a tensor, the mesh."""
    severity: str
    """warning or critical."""
    state: str
    """firing or resolved."""
    reason: str
    """In words; names ranks and tensors, never values."""
    ranks: tuple[int, ...]
    """Ranks it concerns."""
    name: str
    """Tensor it concerns; empty for none."""
    step: int
    """Step it was first found at; -1 for none."""
    first_seen_s: float
    last_seen_s: float
    resolved_s: float | None
    """None while it fires."""
    suspect: Suspect | None = None
    """The change that it may come from; None: none is suspected."""

    @property
    def firing(self) -> bool:
        return self.state == "firing"


class Alerts(Table[Alert]):
    """Alerts of one run: those firing, then those resolved, each newest first."""

    columns = (
        ("severity", lambda row: row.severity),
        ("rule", lambda row: row.rule),
        ("state", lambda row: row.state),
        ("since", lambda row: _time_text(row.first_seen_s)),
        ("ranks", lambda row: ranks_text(row.ranks)),
        ("reason", lambda row: row.reason),
        ("suspect", lambda row: row.suspect.text if row.suspect is not None else ""),
    )
    row_type = Alert
    about = ("job", "incarnation", "watch", "verdict")
    job: str
    incarnation: int
    watch: bool
    """Whether NaN and Inf are looked for, and the last round succeeded."""
    verdict: str
    """The control plane's verdict on the job now: its word and its line; empty for a past run."""

    def summary(self) -> str:
        return (
            f"{sum(row.firing for row in self)} of {len(self)} alerts of {self.job!r} firing "
            f"(run {self.incarnation})" + (f"; {self.verdict}" if self.verdict else "")
        )


async def ask_alerts(
    rest: JobRest, state: AlertState, incarnation: int | None, limit: int
) -> Alerts:
    """Up to `limit` alerts, over as many pages as it takes. Raises as `AsyncMesh.alerts`."""
    if state not in get_args(AlertState):
        raise UsageError(f"state: {state!r}; expected one of {', '.join(get_args(AlertState))}")
    if limit < 1:
        raise UsageError(f"limit: {limit}; expected at least 1")
    rows: dict[str, Alert] = {}
    about: dict[str, Any] = {}
    async for page in rest.pages("/alerts", limit, state=state, incarnation=incarnation):
        found = rest.read(partial(_alerts, page))
        # By id: one that is resolved between two pages is listed on both.
        rows |= {row.id: row for row in found}
        about = {
            "incarnation": int(page["incarnation"]),
            "watch": bool(page["watch"]),
            "verdict": _verdict_text(page.get("verdict")),
        }
        if len(rows) >= limit:
            break
    # All that fire come with the first page.
    return Alerts(list(rows.values())[:limit], job=rest.job, **about)


def _verdict_text(verdict: Mapping[str, Any] | None) -> str:
    return f"{verdict['word']}: {verdict['line']}" if verdict else ""


def _alerts(page: Mapping[str, Any]) -> list[Alert]:
    # A control plane of an earlier version names no suspect.
    return [read_document(Alert, {"suspect": None} | one) for one in page["alerts"]]


def _time_text(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


@dataclass(frozen=True, slots=True)
class StackFrame(Document):
    """One frame of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ThreadStack(Document):
    """One thread of a trainer."""

    name: str
    native_id: int
    """The thread's number in the kernel; 0 when unknown."""
    training: bool
    """Whether it is the thread that attached."""
    frames: tuple[StackFrame, ...]
    """Innermost first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective(Document):
    """A collective in a trainer's flight recorder."""

    name: str
    group: str
    sequence: int
    done: bool
    age_s: float
    """Seconds since it was called."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class RankActivity(Document):
    """The activity of one rank. None where a number is unknown."""

    rank: int
    error: str
    """Why its sidecar does not answer; empty when it does."""
    step: int
    phase: str
    phase_reason: str
    boundary_age_s: float | None
    """Seconds since its last boundary."""
    overdue: bool
    """Whether the next boundary should have come long ago."""
    activity: str
    """collective, dataloader, checkpoint, debugger, paramd, lock, optimizer, backward, forward,
    code; empty when unknown."""
    doing: str
    """In words that follow "is", such as "in DataLoader.next"."""
    where: str
    """Innermost frame of the user's own code."""
    seen_for_s: float | None
    """Seconds that its thread has been seen there, at least."""
    source: str
    """Source of the stacks: "trainer" or "faulthandler"; empty: no stacks."""
    missing: str
    """Why there are no stacks."""
    threads: tuple[ThreadStack, ...]
    collectives: tuple[Collective, ...]
    """The latest, unfinished ones first; only of ranks that are overdue."""
    collectives_missing: str
    process_state: str
    rss_bytes: int | None
    peak_rss_bytes: int | None
    device_bytes: int | None
    thread_count: int | None
    open_file_count: int | None
    open_file_limit: int | None
    host_available_bytes: int | None
    log_lines: tuple[str, ...]
    """Last lines of the trainer's output."""
    log_missing: str

    @property
    def document(self) -> Mapping[str, Any]:
        """All of it, as REST has it."""
        return asdict(self)


class Why(Table[RankActivity]):
    """The activity of the requested ranks, by rank, and the verdict."""

    columns = (
        ("rank", lambda row: str(row.rank)),
        ("step", lambda row: str(row.step)),
        ("phase", lambda row: row.phase),
        ("boundary", lambda row: _age(row.boundary_age_s)),
        ("doing", lambda row: row.error or row.doing),
        ("seen for", lambda row: _age(row.seen_for_s)),
        ("where", lambda row: row.where),
    )
    row_type = RankActivity
    about = ("job", "incarnation", "verdict")
    job: str
    incarnation: int
    verdict: str
    """The rank that keeps the others waiting, in a sentence."""

    def summary(self) -> str:
        return self.verdict


async def ask_why(rest: JobRest, ranks: Sequence[int], log_lines: int) -> Why:
    """Raises as `AsyncMesh.why`."""
    if len(ranks) > MAX_RANKS or any(rank < 0 for rank in ranks):
        raise UsageError(f"ranks: {len(ranks)}; expected at most {MAX_RANKS}, each 0 or more")
    if not 0 <= log_lines <= MAX_WHY_LINES:
        raise UsageError(f"log_lines: {log_lines}; expected 0 to {MAX_WHY_LINES}")
    query = urlencode([("log_lines", log_lines), *(("rank", rank) for rank in ranks)])
    found = await rest.send("GET", f"/why?{query}", timeout_s=TIMEOUT_S)
    return rest.read(
        lambda: Why(
            [read_document(RankActivity, one) for one in found["ranks"]],
            job=rest.job,
            incarnation=int(found["incarnation"]),
            verdict=str(found["verdict"]),
        )
    )


def _age(age_s: float | None) -> str:
    return f"{age_s:.1f} s" if age_s is not None else "-"


@dataclass(frozen=True, kw_only=True, slots=True)
class LogTail(Document):
    """The end of one log."""

    source: str
    """sidecar, stderr or stdout; trainer where its output goes to no file."""
    lines: tuple[str, ...]
    """The newest last, each at most 2,000 characters."""
    missing: str
    """Why there are none; empty when there are some."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class RankLog(Document):
    """The end of one rank's logs at the time of the call. Prints as their lines."""

    job: str
    incarnation: int
    rank: int
    error: str
    """Why its sidecar did not answer, so that only logs on the control plane's host are here;
    empty when it did."""
    logs: tuple[LogTail, ...]
    """The sidecar's first."""

    def __str__(self) -> str:
        return "\n".join(self.text())

    def __repr__(self) -> str:
        found = ", ".join(f"{len(one.lines)} lines of its {one.source}" for one in self.logs)
        return f"<paramd.RankLog of rank {self.rank}: {found}; print shows them>"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def text(self) -> Iterator[str]:
        """The lines, each log under a heading."""
        if self.error:
            yield f"rank {self.rank}: {self.error}"
        for one in self.logs:
            yield f"==> rank {self.rank}, {one.source} <=="
            yield from one.lines or (f"nothing: {one.missing}",)


async def ask_log(rest: JobRest, rank: int, lines: int) -> RankLog:
    """Raises as `AsyncMesh.logs`."""
    if rank < 0:
        raise UsageError(f"rank: {rank}; expected 0 or more")
    if not 1 <= lines <= MAX_LOG_LINES:
        raise UsageError(f"lines: {lines}; expected 1 to {MAX_LOG_LINES}")
    found = await rest.send("GET", f"/ranks/{rank}/log?lines={lines}", timeout_s=TIMEOUT_S)
    return rest.read(lambda: read_document(RankLog, found))
