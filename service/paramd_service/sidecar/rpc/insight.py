"""InspectTrainer, GetLogged, GetLog: what the trainer is doing, the numbers and lines it logs."""

from __future__ import annotations

import asyncio
from functools import partial

from paramd import state_files
from paramd.errors import UsageError
from paramd.security.tickets import Role
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.sidecar.insight.insight import Looked
from paramd_service.sidecar.insight.process import (
    MAX_LOG_LINES,
    ProcessFacts,
    Tail,
    facts_of,
    last_lines,
    own_tail,
)
from paramd_service.sidecar.rank import RankSidecar
from paramd_service.sidecar.rpc import messages
from paramd_service.sidecar.rpc.auth import CALLER, Call, CallTable

MAX_ENTRIES = 1000

_MAY_READ_LOGS = frozenset({Role.EDITOR, Role.CONTROL})
"""What a script prints is not ours to know: it may hold secrets."""


def calls(rank: RankSidecar) -> CallTable:
    """The methods, by name."""
    return {
        "InspectTrainer": Call(unary=partial(_inspect, rank)),
        "GetLogged": Call(unary=partial(_logged, rank)),
        "GetLog": Call(unary=partial(_log, rank)),
    }


async def _inspect(
    rank: RankSidecar, request: pb.InspectTrainerRequest, _timeout_s: float
) -> pb.InspectTrainerResponse:
    if not 0 <= request.log_line_count <= MAX_LOG_LINES:
        raise UsageError(f"log_line_count: {request.log_line_count}; expected 0 to {MAX_LOG_LINES}")
    answer = pb.InspectTrainerResponse(
        header=messages.header(rank), state=messages.rank_state(rank), age_ms=-1
    )
    pid = answer.state.trainer_pid
    if not rank.trainer_lives:
        answer.missing = rank.ownership.value
        return answer
    looked = await rank.insight.look(with_collectives=request.with_collectives)
    _tell_stacks(answer, looked)
    # /proc and the log may lie on a disk that does not answer: keep that off the event loop.
    facts = await asyncio.to_thread(facts_of, pid)
    _tell_process(answer, facts)
    if request.log_line_count and CALLER.get().role not in _MAY_READ_LOGS:
        answer.log_missing = "what the training prints needs a ticket that may read logs"
    elif request.log_line_count:
        lines, why = await asyncio.to_thread(last_lines, pid, request.log_line_count)
        answer.log_lines.extend(lines)
        answer.log_missing = why
    return answer


def _tell_stacks(answer: pb.InspectTrainerResponse, looked: Looked) -> None:
    stacks = looked.stacks
    answer.activity_kind = stacks.activity.kind
    answer.activity = stacks.activity.what
    answer.activity_where = stacks.activity.where
    answer.age_ms = round(looked.seen_for_s * 1e3)
    answer.overdue = looked.overdue
    answer.source, answer.missing = stacks.source, stacks.missing
    answer.device_bytes = stacks.device_bytes
    answer.collectives_missing = stacks.no_collectives
    for one in stacks.threads:
        frames = [pb.StackFrame(file=f.file, line=f.line, function=f.function) for f in one.frames]
        answer.threads.add(
            name=one.name, native_id=one.native_id, training=one.training, frames=frames
        )
    for made in stacks.collectives:
        answer.collectives.add(
            name=made.name,
            group=made.group,
            sequence=made.sequence,
            done=made.done,
            age_ms=round(made.age_s * 1e3),
        )


def _tell_process(answer: pb.InspectTrainerResponse, facts: ProcessFacts) -> None:
    answer.process_state = facts.state
    answer.rss_bytes = facts.rss_bytes
    answer.peak_rss_bytes = facts.peak_rss_bytes
    answer.thread_count = facts.thread_count
    answer.open_file_count = facts.open_files
    answer.open_file_limit = facts.open_files_limit
    answer.host_available_bytes = facts.host_available_bytes


async def _logged(
    rank: RankSidecar, request: pb.GetLoggedRequest, _timeout_s: float
) -> pb.GetLoggedResponse:
    if request.after < 0 or not 0 <= request.limit <= MAX_ENTRIES:
        raise UsageError(f"after, limit: expected 0 or more, and 0 to {MAX_ENTRIES}")
    answer = pb.GetLoggedResponse(header=messages.header(rank))
    numbers = rank.insight.numbers
    answer.count = numbers.count
    limit = request.limit if request.limit else MAX_ENTRIES
    for entry in numbers.after(request.after, limit):
        answer.entries.add(
            number=entry.number, step=entry.step, time_s=entry.time_s, values=entry.values
        )
    return answer


async def _log(
    rank: RankSidecar, request: pb.GetLogRequest, _timeout_s: float
) -> pb.GetLogResponse:
    count = request.line_count
    if not 1 <= count <= state_files.MAX_LOG_LINES:
        raise UsageError(f"line_count: {count}; expected 1 to {state_files.MAX_LOG_LINES}")
    # Before the first attach there is no trainer that could have written anything.
    output = rank.insight.output if rank.has_pins else None

    def tails() -> list[Tail]:
        return [own_tail(count), *(output.tails(count) if output is not None else ())]

    # The files may lie on a disk that does not answer: keep that off the event loop.
    found = await asyncio.to_thread(tails)
    answer = pb.GetLogResponse(header=messages.header(rank))
    for source, lines, missing in found:
        answer.logs.add(source=source, lines=lines, missing=missing)
    return answer
