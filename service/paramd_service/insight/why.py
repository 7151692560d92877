"""Ask the sidecars what their trainers are doing, worst ranks first; ends of logs.

The end of a rank's logs comes from its sidecar, else from the files on this host.
"""

import asyncio
import random
from collections.abc import Collection, Iterable, Sequence

from paramd import places, state_files
from paramd.errors import NotFoundError, ParamdError
from paramd.mesh.insight.reports import Collective, LogTail
from paramd.mesh.peers.ends import ended_well
from paramd.v1 import common_pb2
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.control.mesh.evidence import Evidence
from paramd_service.control.mesh.registry import RankView
from paramd_service.control.mesh.sidecars import SidecarCalls
from paramd_service.logs import without_secrets

MAX_ASKED = 64
"""Most ranks asked at once: of a larger mesh, those without a boundary for the longest."""
ASK_TIMEOUT_S = 8.0
"""A sidecar gives its trainer 2 s to answer, then a second for the signal."""
LOOKS = 7
LOOK_S = 0.25
"""Average time between two samples, as one alone may be chance."""

Found = tuple[RankView, pb.InspectTrainerResponse | ParamdError | None]
"""A rank with its sidecar's answer; None if it was not asked."""


def chosen(ranks: Sequence[RankView], wanted: Collection[int]) -> list[RankView]:
    """The ranks to ask: those wanted, else the worst.

    Raises:
        NotFoundError: No such rank.
    """
    unknown = set(wanted) - {one.rank for one in ranks}
    if unknown:
        raise NotFoundError(
            f"rank: {min(unknown)}; expected ranks below {len(ranks)}, the job's world size"
        )
    if wanted:
        return [one for one in ranks if one.rank in wanted]
    worst = sorted(ranks, key=_badness)[:MAX_ASKED]
    return sorted(worst, key=lambda one: one.rank)


def _badness(one: RankView) -> tuple[bool, int, float, int]:
    state = one.report.state if one.report is not None else common_pb2.RankState()
    return one.connected and not one.reason, state.step, -state.boundary_age_ns, one.rank


async def inspect(calls: SidecarCalls, ranks: Sequence[RankView], *, log_lines: int) -> list[Found]:
    """The ranks' answers, in order. A rank that fails raises nothing. Once one rank is overdue, the
    others' collectives are requested, too: they wait for it."""

    async def one(rank: RankView, *, with_collectives: bool = False) -> Found:
        if not rank.connected or rank.report is None:
            return rank, None
        request = pb.InspectTrainerRequest(
            log_line_count=log_lines, with_collectives=with_collectives
        )
        try:
            answer = await calls.ask(
                rank.rank, rank.report.address, request, timeout_s=ASK_TIMEOUT_S
            )
        except ParamdError as error:
            return rank, error
        return rank, answer

    found = list(await asyncio.gather(*map(one, ranks)))
    overdue = [isinstance(a, pb.InspectTrainerResponse) and a.overdue for _, a in found]
    if any(overdue):
        others = [at for at, is_overdue in enumerate(overdue) if not is_overdue]
        again = await asyncio.gather(*(one(ranks[at], with_collectives=True) for at in others))
        for at, answer in zip(others, again, strict=True):
            found[at] = answer
    return found


async def looks(calls: SidecarCalls, ranks: Sequence[RankView]) -> list[list[Evidence]]:
    """Samples of what the ranks do, the last one last; ends early once a rank is stuck."""
    found: list[list[Evidence]] = []
    while len(found) < LOOKS and len(ranks) > 1:
        seen = [evidence_of(one) for one in await inspect(calls, ranks, log_lines=0)]
        if any(one.gone or one.stopped or one.overdue or one.held for one in seen):
            break
        found.append(seen)
        # Random, so as not to be in step with the training.
        await asyncio.sleep(LOOK_S * (0.5 + random.random()))
    return found


def evidence_of(found: Found) -> Evidence:
    rank, answer = found
    if answer is None:
        return Evidence(rank=rank.rank, gone=rank.reason or "its sidecar has not joined")
    if isinstance(answer, ParamdError):
        return Evidence(rank=rank.rank, gone=f"its sidecar does not answer ({answer})")
    state = answer.state
    if state.phase in (common_pb2.PHASE_ORPHANED, common_pb2.PHASE_TORN, common_pb2.PHASE_WAITING):
        ended_s = state.trainer_ended_ms / 1e3
        return Evidence(
            rank=rank.rank,
            step=state.step,
            gone=state.phase_reason,
            ended_s=ended_s,
            ended_well=ended_well(state),
        )
    return Evidence(
        rank=rank.rank,
        step=state.step,
        stopped=answer.process_state in ("T", "t"),
        held=state.phase == common_pb2.PHASE_HELD,
        overdue=answer.overdue,
        boundary_age_s=state.boundary_age_ns / 1e9 if state.boundary_age_ns >= 0 else -1.0,
        kind=answer.activity_kind,
        what=answer.activity,
        where=answer.activity_where,
        seen_for_s=answer.age_ms / 1e3,
        open=tuple(one for one in collectives_of(answer) if not one.done),
        memory=state.phase_reason if "memory-short" in state.alerts else "",
    )


def collectives_of(answer: pb.InspectTrainerResponse) -> tuple[Collective, ...]:
    return tuple(
        Collective(
            name=one.name,
            group=one.group,
            sequence=one.sequence,
            done=one.done,
            age_s=one.age_ms / 1e3,
        )
        for one in answer.collectives
    )


async def tails_of(
    calls: SidecarCalls, job: str, rank: RankView, *, count: int
) -> tuple[list[LogTail], str]:
    """(the ends of the rank's logs, why its sidecar does not send them).

    A sidecar that has ended left its log in the state dir of its host, which is this host, or
    shares the directory, in some cases.

    Raises:
        ConflictError: When the job's directory is open to other users.
    """
    why = rank.reason or "its sidecar has not joined"
    if rank.connected and rank.report is not None:
        request = pb.GetLogRequest(line_count=count)
        address = rank.report.address
        try:
            answer: pb.GetLogResponse = await calls.ask(
                rank.rank, address, request, timeout_s=ASK_TIMEOUT_S
            )
        except ParamdError as error:
            why = str(error)
        else:
            return [_tail(one.source, one.lines, one.missing) for one in answer.logs], ""
    return [await asyncio.to_thread(_left, job, rank.rank, count)], why


def _tail(source: str, lines: Iterable[str], missing: str) -> LogTail:
    return LogTail(source=source, lines=tuple(map(without_secrets, lines)), missing=missing)


def _left(job: str, rank: int, count: int) -> LogTail:
    try:
        # Checks that the directory is this user's and private.
        places.job_dir(job)
        lines = state_files.lines_of_log(job, rank, count)
    except NotFoundError as error:
        return _tail("sidecar", [], str(error))
    return _tail("sidecar", lines, "" if lines else "nothing has been written to it")
