"""What the trainer is doing, and the numbers and lines that it logs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from paramd import state_files
from paramd.errors import UnreachableError, UsageError
from paramd.security.tickets import Role
from paramd.v1 import common_pb2
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.insight.line import Looked, TrainerInsight
from paramd_service.insight.process import MAX_LOG_LINES, Tail, facts_of, last_lines, own_tail
from paramd_service.sidecar.calls import CALLER, Call, CallTable
from paramd_service.sidecar.owner import AttachedMemory, Ownership
from paramd_service.sidecar.parts import Op, Peer, SidecarHost, SidecarPart
from paramd_service.sidecar.rpc import messages

MAX_ENTRIES = 1000

_MAY_READ_LOGS = frozenset({Role.EDITOR, Role.CONTROL})
"""Roles that may see what a script prints, which may include secrets."""


class Insight(SidecarPart):
    """Looks at a trainer that is overdue, and keeps what its script logs."""

    name = "insight"

    def __init__(self, host: SidecarHost) -> None:
        super().__init__(host)
        self._of: TrainerInsight | None = None

    def calls(self) -> CallTable:
        return {
            "InspectTrainer": Call(unary=self._inspect),
            "GetLogged": Call(unary=self._logged),
            "GetLog": Call(unary=self._log),
        }

    def ops(self) -> Mapping[str, Op]:
        return {"insight": self._open_line}

    async def attached(self, memory: AttachedMemory) -> None:
        self._of = TrainerInsight(memory)
        self._of.start()

    def trainer_ended(self, how: Ownership) -> None:
        if self._of is not None:
            self.host.start_task(self._of.stop())

    def report(self, state: common_pb2.RankState) -> None:
        if self._of is not None:
            state.logged_count = self._of.numbers.count

    def activity(self) -> str:
        return self._of.activity if self._of is not None else ""

    async def released(self) -> None:
        found, self._of = self._of, None
        if found is not None:
            await found.close()

    @property
    def _current(self) -> TrainerInsight:
        """Of the attached trainer. Raises UnreachableError before the first attach."""
        if self._of is None:
            raise UnreachableError(f"{Ownership.WAITING.value}; try again when training runs")
        return self._of

    async def _open_line(self, peer: Peer, message: dict[str, Any], descriptors: list[int]) -> None:
        peer.check_owner("insight")
        self._current.line.open(message, descriptors)
        peer.answer({"op": "insight"})

    async def _inspect(
        self, request: pb.InspectTrainerRequest, _timeout_s: float
    ) -> pb.InspectTrainerResponse:
        if not 0 <= request.log_line_count <= MAX_LOG_LINES:
            raise UsageError(
                f"log_line_count: {request.log_line_count}; expected 0 to {MAX_LOG_LINES}"
            )
        answer = pb.InspectTrainerResponse(
            header=messages.header(self.host), state=messages.rank_state(self.host), age_ms=-1
        )
        pid = answer.state.trainer_pid
        if not self.host.trainer_lives:
            answer.missing = self.host.ownership.value
            return answer
        looked = await self._current.look(with_collectives=request.with_collectives)
        _tell_stacks(answer, looked)
        # /proc and the log may be on a disk that does not answer: keep that off the event loop.
        answer.MergeFrom(await asyncio.to_thread(facts_of, pid))
        if request.log_line_count and CALLER.get().role not in _MAY_READ_LOGS:
            answer.log_missing = "what the training prints needs a ticket that may read logs"
        elif request.log_line_count:
            lines, why = await asyncio.to_thread(last_lines, pid, request.log_line_count)
            answer.log_lines.extend(lines)
            answer.log_missing = why
        return answer

    async def _logged(
        self, request: pb.GetLoggedRequest, _timeout_s: float
    ) -> pb.GetLoggedResponse:
        if request.after < 0 or not 0 <= request.limit <= MAX_ENTRIES:
            raise UsageError(f"after, limit: expected 0 or more, and 0 to {MAX_ENTRIES}")
        answer = pb.GetLoggedResponse(header=messages.header(self.host))
        numbers = self._current.numbers
        answer.count = numbers.count
        limit = request.limit if request.limit else MAX_ENTRIES
        for entry in numbers.after(request.after, limit):
            answer.entries.add(
                number=entry.number, step=entry.step, time_s=entry.time_s, values=entry.values
            )
        return answer

    async def _log(self, request: pb.GetLogRequest, _timeout_s: float) -> pb.GetLogResponse:
        count = request.line_count
        if not 1 <= count <= state_files.MAX_LOG_LINES:
            raise UsageError(f"line_count: {count}; expected 1 to {state_files.MAX_LOG_LINES}")
        # Before the first attach there is no trainer that could have written anything.
        output = self._current.output if self.host.has_pins else None

        def tails() -> list[Tail]:
            return [own_tail(count), *(output.tails(count) if output is not None else ())]

        # The files may be on a disk that does not answer: keep that off the event loop.
        found = await asyncio.to_thread(tails)
        answer = pb.GetLogResponse(header=messages.header(self.host))
        for source, lines, missing in found:
            answer.logs.add(source=source, lines=lines, missing=missing)
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
    answer.threads.extend(stacks.threads)
    answer.collectives.extend(stacks.collectives)
