"""The end of one rank's logs: from its sidecar, else from what lies on this host."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from paramd import places, state_files
from paramd.errors import NotFoundError, ParamdError
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.control.mesh.registry import RankView
from paramd_service.control.mesh.sidecars import SidecarCalls
from paramd_service.logs import without_secrets

ASK_TIMEOUT_S = 8.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LogTail:
    """The end of one log."""

    source: str
    """sidecar, stderr or stdout; trainer where its output goes to no file."""
    lines: list[str]
    """The newest last."""
    missing: str
    """Why there are none."""


async def tails_of(
    calls: SidecarCalls, job: str, rank: RankView, *, count: int
) -> tuple[list[LogTail], str]:
    """(the ends of the rank's logs, why its sidecar does not tell them).

    A sidecar that is gone has left its log, which lies in the state dir of its host: here, if it
    ran here or the directory is shared.

    Raises:
        ConflictError: the job's directory is open to other users.
    """
    why = rank.reason or "its sidecar has not joined"
    if rank.connected and rank.report is not None:
        request = pb.GetLogRequest(line_count=count)
        address = rank.report.address
        try:
            answer: pb.GetLogResponse = await calls.ask(
                rank.rank, address, "GetLog", request, timeout_s=ASK_TIMEOUT_S
            )
        except ParamdError as error:
            why = str(error)
        else:
            return [_tail(one.source, one.lines, one.missing) for one in answer.logs], ""
    return [await asyncio.to_thread(_left, job, rank.rank, count)], why


def _tail(source: str, lines: Iterable[str], missing: str) -> LogTail:
    return LogTail(source=source, lines=list(map(without_secrets, lines)), missing=missing)


def _left(job: str, rank: int, count: int) -> LogTail:
    try:
        # Checks that the directory is ours and private.
        places.job_dir(job)
        lines = state_files.lines_of_log(job, rank, count)
    except NotFoundError as error:
        return _tail("sidecar", [], str(error))
    return _tail("sidecar", lines, "" if lines else "nothing has been written to it")
