"""The end of one rank's logs, as its control plane tells it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import quote

from paramd.errors import UsageError
from paramd.mesh.peers.control import RestClient, read_document, readable
from paramd.mesh.peers.discovery import SidecarFinder
from paramd.state_files import MAX_LOG_LINES

TIMEOUT_S = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LogTail:
    """The end of one log."""

    source: str
    """"sidecar", "stderr" or "stdout"; "trainer" where its output goes to no file."""
    lines: tuple[str, ...]
    """The newest last."""
    missing: str
    """Why there are none; empty when there are some."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLog:
    """The end of one rank's logs, as they were when asked. Prints as their lines."""

    job: str
    incarnation: int
    rank: int
    error: str
    """Why its sidecar told nothing, so that only what lies on the control plane's host is here;
    empty when it did."""
    logs: tuple[LogTail, ...]
    """The sidecar's first."""

    def __str__(self) -> str:
        return "\n".join(self.text())

    def text(self) -> Iterator[str]:
        """The lines, each log under a heading."""
        if self.error:
            yield f"rank {self.rank}: {self.error}"
        for one in self.logs:
            yield f"==> rank {self.rank}, {one.source} <=="
            yield from one.lines or (f"nothing: {one.missing}",)


def check_lines(lines: int) -> None:
    """Raise UsageError unless that many lines may be asked for."""
    if not 1 <= lines <= MAX_LOG_LINES:
        raise UsageError(f"lines: {lines}; expected 1 to {MAX_LOG_LINES}")


async def ask_log(rest: RestClient, reach: SidecarFinder, rank: int, lines: int) -> RankLog:
    """Raises as `AsyncMesh.logs`."""
    if rank < 0:
        raise UsageError(f"rank: {rank}; expected 0 or more")
    check_lines(lines)
    job = quote(reach.document.job, safe="")
    path = f"/jobs/{job}/ranks/{rank}/log?lines={lines}"
    found = await rest.send("GET", path, timeout_s=TIMEOUT_S)
    with readable(rest.url):
        logs = [
            read_document(LogTail, one, lines=tuple(map(str, one["lines"])))
            for one in found["logs"]
        ]
        return read_document(RankLog, found, logs=tuple(logs))
