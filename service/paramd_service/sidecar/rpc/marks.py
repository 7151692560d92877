"""MakeMark, DropMark and ListKeptStates: the states that this rank could be put back to."""

from __future__ import annotations

import asyncio

from google.protobuf.message import Message

from paramd.errors import ConflictError
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.sidecar.owner import Ownership
from paramd_service.sidecar.rank import RankSidecar
from paramd_service.sidecar.rpc import messages
from paramd_service.sidecar.rpc.auth import Call, CallTable
from paramd_service.sidecar.snapshots.marks import Mark
from paramd_service.sidecar.snapshots.standing import StandingLabel


def calls(rank: RankSidecar) -> CallTable:
    """Methods of this subject."""
    subject = _MarkCalls(rank)
    return {
        "MakeMark": Call(unary=subject.make, heavy=True),
        "DropMark": Call(unary=subject.drop),
        "ListKeptStates": Call(unary=subject.all),
    }


class _MarkCalls:
    def __init__(self, rank: RankSidecar) -> None:
        self._rank = rank

    async def make(self, request: pb.MakeMarkRequest, timeout_s: float) -> Message:
        rank, marks = self._rank, self._rank.marks
        rank.follow_control(request.generation)
        async with asyncio.timeout(timeout_s), rank.using_memory:
            attached = rank.attached
            if attached is None or rank.ownership is not Ownership.OWNED:
                raise ConflictError(f"no mark can be made: {rank.ownership.value}")
            if request.fill:
                work = asyncio.to_thread(marks.fill, request.mark, attached, rank.layout_digest)
            else:
                work = asyncio.to_thread(marks.reserve, request.mark, request.by, attached)
            # Shielded: the thread uses the memory until it ends, whoever has left.
            made = asyncio.ensure_future(work)
            try:
                mark = await asyncio.shield(made)
            finally:
                if not made.done():
                    await asyncio.wait({made})
        if request.fill:
            rank.faults.at("mark-made")
        header = messages.header(rank, mark.label.step if mark.label is not None else None)
        return pb.MakeMarkResponse(header=header, state=_state_of(mark))

    async def drop(self, request: pb.DropMarkRequest, _timeout_s: float) -> Message:
        self._rank.follow_control(request.generation)
        dropped = self._rank.marks.drop(request.mark)
        return pb.DropMarkResponse(header=messages.header(self._rank), dropped=dropped)

    async def all(self, _request: pb.ListKeptStatesRequest, _timeout_s: float) -> Message:
        rank = self._rank
        answer = pb.ListKeptStatesResponse(header=messages.header(rank))
        answer.states.extend(_state_of(mark) for mark in rank.marks.all())
        answer.states.extend(_standing(label) for label, _ in rank.standing.labels())
        return answer


def _state_of(mark: Mark) -> pb.KeptState:
    state = _standing(mark.label) if mark.label is not None else pb.KeptState(step=-1)
    state.mark, state.by, state.made_s = mark.name, mark.by, mark.made_s
    return state


def _standing(label: StandingLabel) -> pb.KeptState:
    return pb.KeptState(
        step=label.step,
        lineage=label.lineage,
        edits=label.edits,
        size_bytes=label.size_bytes,
        whole=bool(label.digest),
    )
