"""What every rank of a job is doing, as its control plane tells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

from paramd.errors import UsageError
from paramd.mesh.peers.control import RestClient, read_document, readable
from paramd.mesh.peers.discovery import SidecarFinder
from paramd.mesh.results import Table

MAX_RANKS = 64
MAX_LOG_LINES = 100
TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class StackFrame:
    """One frame of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ThreadStack:
    """One thread of a trainer."""

    name: str
    training: bool
    """Whether it is the thread that attached."""
    frames: tuple[StackFrame, ...]
    """Innermost first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """A collective in a trainer's flight recorder."""

    name: str
    group: str
    sequence: int
    done: bool
    age_s: float
    """Seconds since it was called."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankActivity:
    """What one rank is doing. None where a number is unknown."""

    rank: int
    error: str
    """Why its sidecar tells nothing; empty when it does."""
    step: int
    phase: str
    boundary_age_s: float | None
    """Seconds since its last boundary."""
    overdue: bool
    """Whether the next boundary should have come long ago."""
    doing: str
    """In words that follow "is", such as "in DataLoader.next"."""
    where: str
    """Innermost frame of the user's own code."""
    seen_for_s: float | None
    """Seconds that its thread has been seen there, at least."""
    source: str
    """How the stacks were had: "trainer" or "faulthandler"; empty: there are none."""
    missing: str
    """Why there are no stacks."""
    threads: tuple[ThreadStack, ...]
    collectives: tuple[Collective, ...]
    """The latest, those that are not over first; only of ranks that are overdue."""
    collectives_missing: str
    rss_bytes: int | None
    device_bytes: int | None
    open_file_count: int | None
    open_file_limit: int | None
    log_lines: tuple[str, ...]
    """Last lines of the trainer's output."""
    log_missing: str
    document: Mapping[str, Any]
    """All of it, as REST has it."""


class Why(Table[RankActivity]):
    """What the asked ranks are doing, by rank, and the verdict."""

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
    """Which rank keeps the others waiting, in a sentence."""

    def summary(self) -> str:
        return self.verdict


async def ask_why(
    rest: RestClient, reach: SidecarFinder, ranks: Sequence[int], log_lines: int
) -> Why:
    """Raises as `AsyncMesh.why`."""
    if len(ranks) > MAX_RANKS or any(rank < 0 for rank in ranks):
        raise UsageError(f"ranks: {len(ranks)}; expected at most {MAX_RANKS}, each 0 or more")
    if not 0 <= log_lines <= MAX_LOG_LINES:
        raise UsageError(f"log_lines: {log_lines}; expected 0 to {MAX_LOG_LINES}")
    job = reach.document.job
    query = urlencode([("log_lines", log_lines), *(("rank", rank) for rank in ranks)])
    found = await rest.send("GET", f"/jobs/{quote(job, safe='')}/why?{query}", timeout_s=TIMEOUT_S)
    with readable(rest.url):
        return Why(
            map(_row, found["ranks"]),
            job=job,
            incarnation=int(found["incarnation"]),
            verdict=str(found["verdict"]),
        )


def _row(found: Mapping[str, Any]) -> RankActivity:
    return read_document(
        RankActivity,
        found,
        threads=tuple(map(_thread, found["threads"])),
        collectives=tuple(Collective(**one) for one in found["collectives"]),
        log_lines=tuple(found["log_lines"]),
        document=found,
    )


def _thread(found: Mapping[str, Any]) -> ThreadStack:
    frames = tuple(StackFrame(f["file"], f["line"], f["function"]) for f in found["frames"])
    return ThreadStack(name=found["name"], training=found["training"], frames=frames)


def _age(age_s: float | None) -> str:
    return f"{age_s:.1f} s" if age_s is not None else "-"
