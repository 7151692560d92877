"""What a run is resumed from, or goes back to: standing snapshots, copies, restore points."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

from google.protobuf.message import Message

from paramd.errors import ConflictError
from paramd.memory.control_page import Word
from paramd.memory.left import Purpose
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.aio import uncancelled
from paramd_service.resume.marks import Mark, Marks, beside_bytes
from paramd_service.resume.offer import (
    Copies,
    copies_message,
    offer_of,
    offer_of_snapshots,
    opened_standing,
)
from paramd_service.resume.sending import Sending, put
from paramd_service.resume.standing import Standing
from paramd_service.sidecar.calls import Call, CallTable
from paramd_service.sidecar.kept_states import Found, KeptStates, StandingLabel
from paramd_service.sidecar.metrics import Row
from paramd_service.sidecar.owner import AttachedMemory, AttachRequest, Mesh, Ownership
from paramd_service.sidecar.parts import Op, Peer, SidecarHost, SidecarPart, whole_number
from paramd_service.sidecar.rpc import messages

REFRESHED = (
    "it ended with its run, when the training attached its parameters anew (attachment.refresh)"
)

DIGEST_S = 5.0
"""How long an offer waits for the digests of what the trainer left, before it goes without."""

POLL_S = 0.01


class Resume(SidecarPart, KeptStates):
    """Keeps states of this rank and copies of others', and offers them to a restarted trainer."""

    name = "resume"

    def __init__(self, host: SidecarHost) -> None:
        super().__init__(host)
        config, room = host.config, host.room
        self._standing = Standing(
            host.blocks.within(room, Purpose.STANDING),
            host.log,
            budget_bytes=config.standing_budget_bytes,
            allowed=room.standing_count,
            at_point=host.faults.at,
        )
        self._copies = Copies(
            host.blocks.within(room, Purpose.COPY),
            host.executor,
            budget_bytes=self._copies_budget_bytes,
            allowed=room.copies_count,
        )
        """Standing snapshots of other ranks."""
        self._marks = Marks(
            host.blocks.within(room, Purpose.MARK),
            self._standing,
            budget_bytes=config.marks_budget_bytes,
        )
        self._sending = Sending(host, self._standing)

    def calls(self) -> CallTable:
        return {
            "PutCopy": Call(unary=partial(put, self.host, self._copies), heavy=True),
            "MakeMark": Call(unary=self._make_mark, heavy=True),
            "DropMark": Call(unary=self._drop_mark),
            "ListKeptStates": Call(unary=self._list),
        }

    def ops(self) -> Mapping[str, Op]:
        return {"offer": self._offer, "copies": self._offer_copies, "copy": self._open_copy}

    # The trainer's life

    def started(self) -> None:
        self._sending.start()

    def attaching(self, request: AttachRequest, *, reached: int, refreshed: bool) -> None:
        self._standing.rebase(*request.continues, reached=reached)
        self._copies.rebase(*request.continues)
        if refreshed:
            self._marks.end(REFRESHED)

    def copying(self, memory: AttachedMemory) -> Callable[[], None]:
        return self._standing.serving(memory, lambda: self.host.layout_digest)

    def meshed(self, mesh: Mesh) -> None:
        # This trainer has reported what was lost before it; a later one reports only new losses.
        self._standing.reached = 0
        own = self.host.config.rank
        self._copies.keep_only([rank for rank, buddy in enumerate(mesh.buddies) if buddy == own])

    def trainer_ended(self, how: Ownership) -> None:
        attached = self.host.attached
        assert attached is not None
        if how is Ownership.ORPHANED and attached.page[Word.LINEAGE]:
            self._standing.trainer_ended(attached)

    async def stopping(self) -> None:
        await self._sending.stop()

    async def closed(self) -> None:
        self._standing.close()
        self._copies.keep_only(())
        self._marks.close()

    # Memory

    def keeps_for_restarts(self) -> bool:
        return self._standing.wanted_bytes > 0

    def shrink(self, count: int, *, reason: str) -> None:
        self._standing.shrink(count, self.host.attached, reason=reason)
        self._copies.shrink(count)

    def samples(self) -> list[Row]:
        attached = self.host.attached
        copied = attached.page[Word.COPIED] if attached is not None else 0
        return [
            (
                "copied_step",
                "Of the last standing snapshot whole on another host, 0 if none",
                copied,
            ),
            ("copies_bytes", "Memory of other ranks' standing snapshots", self._copies.size_bytes),
        ]

    def _copies_budget_bytes(self) -> int | None:
        """What this rank's own standing snapshots leave of the budget, and of memory."""
        budget = self.host.config.standing_budget_bytes
        room_bytes = self._copies.size_bytes + max(self.host.room.reachable().spare_bytes, 0)
        if budget is None:
            return room_bytes
        return min(max(budget - self._standing.wanted_bytes, 0), room_bytes)

    # Kept states

    def kept_states(self) -> KeptStates:
        return self

    def found(
        self, name: str, step: int, lineage: int, edits: int
    ) -> AbstractContextManager[Found]:
        return self._marks.found(name, step, lineage, edits)

    def read(
        self, name: str, layout_digest: str, spans: Sequence[tuple[int, int]], into: memoryview
    ) -> StandingLabel:
        return self._marks.read(name, layout_digest, spans, into)

    def beside_bytes(self) -> int:
        attached = self.host.attached
        return beside_bytes(attached) if attached is not None else 0

    async def stands(self, timeout_s: float) -> None:
        host, standing = self.host, self._standing
        attached, until_s = host.attached, time.monotonic() + timeout_s
        while attached is not None and attached is host.attached and host.trainer_lives:
            lineage, held = attached.page[Word.LINEAGE], attached.page[Word.HELD]
            known = any(label.lineage == lineage for label, _ in standing.labels())
            # Nothing is copied once training continues, nor without memory for it.
            if known or not held or not standing.labels() or time.monotonic() > until_s:
                return
            await asyncio.sleep(POLL_S)

    # For a restarted trainer. As with attach, the kernel vouches for the user; a living trainer's
    # memory is not given.

    async def _offer(self, peer: Peer, message: dict[str, Any], descriptors: list[int]) -> None:
        host, standing = self.host, self._standing
        host.check_predecessor(message.get("rank"), message.get("job"))
        await host.trainer_gone()
        with suppress(TimeoutError):
            async with asyncio.timeout(DIGEST_S):
                await asyncio.wrap_future(standing.digested())
        async with host.attaching:
            if host.attached is None:
                offer, found = offer_of_snapshots(host.ownership, standing)
            else:
                offer, found = offer_of(host.attached, host.ownership, host.layout_digest, standing)
        descriptors += found  # closed once this message is served
        peer.answer(offer, found)

    async def _offer_copies(
        self, peer: Peer, message: dict[str, Any], _descriptors: list[int]
    ) -> None:
        host = self.host
        host.check_predecessor(message.get("rank"), message.get("job"))
        await host.trainer_gone()
        attached = host.attached
        peer.answer(
            {
                "op": "copies",
                "ownership": host.ownership.name,
                "pid": attached.request.pid if attached is not None else 0,
                "incarnation": host.incarnation,
                "step": host.step,
                "copies": copies_message(host.config.rank, self._standing, self._copies),
            }
        )

    async def _open_copy(self, peer: Peer, message: dict[str, Any], descriptors: list[int]) -> None:
        self.host.check_predecessor(message.get("rank"), message.get("job"))
        of, lineage, step = (whole_number(message, name) for name in ("of", "lineage", "step"))
        if of != self.host.config.rank:
            found = self._copies.opened(of, lineage, step)
        else:
            found = opened_standing(self._standing, lineage, step)
        descriptors.append(found)  # closed once this message is served
        peer.answer({"op": "copy"}, [found])

    # Restore points

    async def _make_mark(self, request: pb.MakeMarkRequest, timeout_s: float) -> Message:
        host, marks = self.host, self._marks
        host.follow_control(request.generation)
        async with asyncio.timeout(timeout_s), host.using_memory:
            attached = host.attached
            if attached is None or host.ownership is not Ownership.OWNED:
                raise ConflictError(f"no restore point can be made: {host.ownership.value}")
            if request.fill:
                work = asyncio.to_thread(marks.fill, request.mark, attached, host.layout_digest)
            else:
                work = asyncio.to_thread(marks.reserve, request.mark, request.by, attached)
            # The thread uses the memory until it ends, even if the caller has left.
            mark = await uncancelled(work)
        if request.fill:
            host.faults.at("mark-made")
        header = messages.header(host, mark.label.step if mark.label is not None else None)
        return pb.MakeMarkResponse(header=header, state=_state_of(mark))

    async def _drop_mark(self, request: pb.DropMarkRequest, timeout_s: float) -> Message:
        host = self.host
        host.follow_control(request.generation)
        async with asyncio.timeout(timeout_s), host.using_memory:  # not while it is made
            dropped = self._marks.drop(request.mark)
        return pb.DropMarkResponse(header=messages.header(host), dropped=dropped)

    async def _list(self, _request: pb.ListKeptStatesRequest, _timeout_s: float) -> Message:
        answer = pb.ListKeptStatesResponse(header=messages.header(self.host))
        answer.states.extend(_state_of(mark) for mark in self._marks.all())
        answer.states.extend(_standing(label) for label, _ in self._standing.labels())
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
