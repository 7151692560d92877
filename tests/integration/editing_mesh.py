"""Fake sidecars that stage, agree on and apply edits, and hold; the test says when."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from paramd.layout.edits.ops import manifest_digest
from paramd.v1 import common_pb2
from paramd.v1 import sidecar_pb2 as pb
from tests.integration.control_process import Control, FakeSidecar, joined, serving, until


@dataclass(eq=False)
class Trainers:
    """What the trainers of all ranks agree on. They do so only while `agree` is set."""

    step: int = 10
    edits: int = 0
    held: bool = False
    lease_ms: int = 0
    agree: asyncio.Event = field(default_factory=asyncio.Event)
    ready: dict[int, pb.ReachBoundaryRequest] = field(default_factory=dict)
    done: dict[int, int] = field(default_factory=dict)
    """Step of each boundary that was agreed on."""
    steps_left: int = 0

    def look(self, world_size: int) -> None:
        """Agrees when every rank is ready for one request."""
        found = {(one.boundary, one.token) for one in self.ready.values()}
        if not self.agree.is_set() or len(self.ready) < world_size or len(found) != 1:
            return
        request = next(iter(self.ready.values()))
        self.ready.clear()
        self.step += not self.held
        self.edits += request.action == pb.BOUNDARY_ACTION_EDIT
        self.done[request.boundary] = self.step
        if request.action == pb.BOUNDARY_ACTION_HOLD:
            self.held, self.lease_ms = True, request.lease_ms
        elif request.action == pb.BOUNDARY_ACTION_RESUME:
            self.held = False
        elif request.action == pb.BOUNDARY_ACTION_STEP:
            self.steps_left = request.step_count


@dataclass(eq=False)
class Staged:
    """An edit at one rank."""

    manifest: pb.EditManifest
    phase: int = pb.EDIT_PHASE_STAGED
    size_bytes: int = 0
    author: str = ""
    reached: pb.ReachBoundaryRequest | None = None


@dataclass
class EditingSidecar(FakeSidecar):
    """A rank of `Trainers`."""

    trainers: Trainers = field(default_factory=Trainers)
    staged: dict[str, Staged] = field(default_factory=dict)
    world_size: int = 2

    async def StageEdit(self, requests: Any, context: Any) -> Any:
        async for request in requests:
            if request.HasField("manifest"):
                name = request.manifest.edit_id
                self.staged.setdefault(name, Staged(request.manifest))
        return pb.StageEditResponse(header=self.now(), progress=self.progress(name))

    async def GetEdit(self, request: Any, context: Any) -> Any:
        if request.edit_id not in self.staged:
            await context.abort(grpc.StatusCode.NOT_FOUND, "nothing is known of it")
        found = self.staged[request.edit_id]
        header = self.now()
        if found.reached is not None and found.reached.boundary in self.trainers.done:
            header.step = self.trainers.done[found.reached.boundary]
        return pb.GetEditResponse(header=header, progress=self.progress(request.edit_id))

    async def PreviewEdit(self, request: Any, context: Any) -> Any:
        count = len(self.staged[request.edit_id].manifest.ops)
        one = pb.Stats(count=4, mean=1.0, min=-2.0, max=3.0, sum_squares=8.0)
        return pb.PreviewEditResponse(header=self.now(), before=[one] * count, after=[one] * count)

    async def DropEdit(self, request: Any, context: Any) -> Any:
        self.staged.pop(request.edit_id, None)
        return pb.DropEditResponse(header=self.now())

    async def GetState(self, request: Any, context: Any) -> Any:
        return pb.GetStateResponse(header=self.now(), state=self.report().state)

    async def RenewHold(self, request: Any, context: Any) -> Any:
        self.trainers.lease_ms = request.lease_ms
        self.trainers.held = self.trainers.held and request.lease_ms > 1
        return pb.RenewHoldResponse(header=self.now(), lease_ms=request.lease_ms)

    async def ReachBoundary(self, request: Any, context: Any) -> Any:
        trainers, number = self.trainers, request.boundary
        assert request.token > 0
        if number <= self.ready_boundary:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the number is past")
        self.ready_boundary = number
        self.asked.append((number, (request.edit_id,)))
        if request.edit_id:
            self.staged[request.edit_id].reached = request
        wanted = self.staged[request.edit_id].manifest if request.edit_id else pb.EditManifest()
        step = trainers.step + (not trainers.held)
        if wanted.HasField("if_step") and wanted.if_step != step:
            answer = pb.ReachBoundaryResponse(
                reason=f"if_step is {wanted.if_step}, and the next boundary is at step {step}"
            )
            answer.header.CopyFrom(self.header(request.incarnation, -1))
            return answer
        trainers.ready[self.rank] = request
        while number not in trainers.done:
            if self.rank not in trainers.ready:
                answer = pb.ReachBoundaryResponse(reason="it was withdrawn")
                answer.header.CopyFrom(self.header(request.incarnation, -1))
                return answer
            trainers.look(self.world_size)
            await asyncio.sleep(0.005)
        header = self.now()
        header.step = trainers.done[number]
        return pb.ReachBoundaryResponse(header=header, captured=True, stop_ns=500_000)

    async def WithdrawBoundary(self, request: Any, context: Any) -> Any:
        trainers = self.trainers
        fate = pb.BOUNDARY_FATE_WITHDRAWN
        if request.boundary in trainers.done:
            fate = pb.BOUNDARY_FATE_DONE
        else:
            self.ready_boundary = max(self.ready_boundary, request.boundary)
            trainers.ready.pop(self.rank, None)
        return pb.WithdrawBoundaryResponse(header=self.now(), fate=fate)

    def progress(self, edit_id: str) -> pb.EditProgress:
        found = self.staged[edit_id]
        reached = found.reached
        applied = reached is not None and reached.boundary in self.trainers.done
        return pb.EditProgress(
            phase=pb.EDIT_PHASE_APPLIED if applied else found.phase,  # type: ignore[arg-type]
            manifest_digest=manifest_digest(found.manifest),
            data_digests=[b"d" * 16] * len(found.manifest.ops),
            boundary=reached.boundary if reached is not None else 0,
            token=reached.token if reached is not None else 0,
            stop_ns=500_000,
            size_bytes=found.size_bytes,
            author=found.author,
        )

    def now(self) -> common_pb2.Header:
        header = self.header(1, self.trainers.step)
        header.edits = self.trainers.edits
        return header

    def report(self, *, incarnation: int = 1, leaving: bool = False) -> Any:
        self.step = self.trainers.step
        found = super().report(incarnation=incarnation, leaving=leaving)
        if self.trainers.held:
            found.state.phase = common_pb2.PHASE_HELD
            found.state.hold_left_ms = self.trainers.lease_ms
            found.state.hold_steps_left = self.trainers.steps_left
        return found


@asynccontextmanager
async def editing_ranks() -> AsyncIterator[list[EditingSidecar]]:
    """Both ranks, serving; the trainers agree on whatever is asked."""
    trainers = Trainers()
    trainers.agree.set()
    ranks = [EditingSidecar(rank, trainers=trainers) for rank in range(2)]
    async with AsyncExitStack() as stack:
        for rank in ranks:
            await stack.enter_async_context(serving(rank))
        yield ranks


@asynccontextmanager
async def both_joined(control: Control, ranks: list[EditingSidecar]) -> AsyncIterator[None]:
    """The ranks at a control plane."""
    async with AsyncExitStack() as stack:
        for rank in ranks:
            await stack.enter_async_context(joined(control, rank))
        await until(lambda: control.job()["joined_count"] == 2)
        yield
