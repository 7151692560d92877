"""Standing snapshots copied to another host: those sent there, and those received from others.

With replicas, each rank has a buddy: a rank on another host whose sidecar keeps copies of its
standing snapshots (offer.py). `Sending` sends it the newest whole one in parts, never
faster than the configured rate. Sending holds the snapshot's buffer; the trainer never waits for
it. A part names its offset, so a sender continues where the receiver says, even after either was
interrupted.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING

from paramd.errors import (
    ConflictError,
    DataLossError,
    DeadlineError,
    DeniedError,
    ParamdError,
    UnreachableError,
    UsageError,
)
from paramd.memory.continuation import MAX_PAYLOAD_BYTES
from paramd.memory.control_page import Word
from paramd.memory.handover import optimizer_bytes
from paramd.mesh.peers.grpc import Asked, Channels, check_way
from paramd.v1 import layout_pb2
from paramd.v1 import sidecar_pb2 as pb
from paramd.wire import CHUNK_BYTES
from paramd_service.aio import post, stopped
from paramd_service.resume.offer import Copies
from paramd_service.resume.standing import Standing
from paramd_service.sidecar.calls import CALLER
from paramd_service.sidecar.kept_states import StandingLabel
from paramd_service.sidecar.owner import Mesh
from paramd_service.sidecar.parts import SidecarHost
from paramd_service.sidecar.rpc import messages

if TYPE_CHECKING:
    from paramd_service.sidecar.snapshots.store import Block

CALL_S = 30.0
"""Longest time for one part."""
PAUSES_S = (0.5, 1.0, 2.0, 4.0)
"""Pause before each further attempt: a buddy that was killed is back within seconds. Afterwards
the next standing snapshot is sent instead."""
MAX_RESTARTS = 3
"""How often a receiver may lose the parts it had."""


async def put(
    rank: SidecarHost, copies: Copies, request: pb.PutCopyRequest, _timeout_s: float
) -> pb.PutCopyResponse:
    """Take a part of another rank's standing snapshot.

    Raises:
        DeniedError: It is not this rank's to keep.
        UsageError, ConflictError: It can be no state of that rank in this run.
    """
    mesh, sender = rank.ready_mesh(), CALLER.get().rank
    if sender is None or mesh.buddy_of(sender) != rank.config.rank:
        error = DeniedError(f"rank {rank.config.rank} keeps no copies of rank {sender}")
        rank.refusals.saw("PutCopy", str(error))
        raise error
    if len(request.data) > CHUNK_BYTES:
        raise UsageError(f"data: {len(request.data):,} bytes; expected at most {CHUNK_BYTES:,}")
    label = label_of(request.copy)
    if not request.offset_bytes:
        _check(rank, mesh, sender, label)
    received = await copies.put(
        sender, label, request.keep_step, request.offset_bytes, request.data
    )
    rank.faults.at("copy-received")
    return pb.PutCopyResponse(header=messages.header(rank), received_bytes=received)


def label_of(copy: pb.StandingCopy) -> StandingLabel:
    """The label of a copy that another rank sends."""
    return StandingLabel(
        lineage=copy.lineage,
        step=copy.step,
        edits=copy.edits,
        arena_bytes=copy.arena_bytes,
        optimizer_bytes=copy.optimizer_bytes,
        record_bytes=copy.record_bytes,
        table_bytes=copy.table_bytes,
        world_size=copy.world_size,
        layout_digest=copy.layout_digest,
        digest=copy.digest,
    )


def copy_of(label: StandingLabel) -> pb.StandingCopy:
    """The message for a label; the histories before it and the device's share stay here."""
    return pb.StandingCopy(
        lineage=label.lineage,
        step=label.step,
        edits=label.edits,
        arena_bytes=label.arena_bytes,
        optimizer_bytes=label.optimizer_bytes,
        record_bytes=label.record_bytes,
        table_bytes=label.table_bytes,
        world_size=label.world_size,
        layout_digest=label.layout_digest,
        digest=label.digest,
    )


def _check(rank: SidecarHost, mesh: Mesh, sender: int, label: StandingLabel) -> None:
    """Raise unless the copy can be a state of that rank in this incarnation. Checked before memory
    is allocated, so that nobody makes a sidecar keep more than a rank can have."""
    attached = rank.attached
    if attached is None:
        raise UnreachableError("no trainer is attached; try again in a moment")
    arena_bytes = layout_pb2.Layout.FromString(mesh.layout).arena_bytes[sender]
    world_size = attached.request.world_size
    limits = {
        "world_size": (world_size, world_size),
        "step": (0, (1 << 63) - 1),
        "arena_bytes": (arena_bytes, arena_bytes),
        "optimizer_bytes": (0, optimizer_bytes(arena_bytes)),
        "record_bytes": (1, MAX_PAYLOAD_BYTES),
        "table_bytes": (1, MAX_PAYLOAD_BYTES),
        "digest": (1, (1 << 64) - 1),
    }
    for name, (least, most) in limits.items():
        if not least <= getattr(label, name) <= most:
            raise UsageError(
                f"copy.{name}: {getattr(label, name):,}; expected {least:,} to {most:,}"
            )
    own = attached.page[Word.LINEAGE], mesh.layout_digest
    if (label.lineage, label.layout_digest) != own:
        raise ConflictError("the copy is of another history or layout than this rank's")


class Sending:
    """Sends this rank's standing snapshots to its buddy, if it has one."""

    def __init__(self, rank: SidecarHost, standing: Standing) -> None:
        self._rank = rank
        self._standing = standing
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._sent: tuple[Mesh, StandingLabel] | None = None
        self._told = ""
        rank.on_change.append(self._news.set)

    def start(self) -> None:
        """Send whatever becomes whole from now on."""
        self._standing.on_digested = partial(post, asyncio.get_running_loop(), self._news.set)
        self._task = asyncio.get_running_loop().create_task(self._run(), name="paramd-copies")

    async def stop(self) -> None:
        """Stop, and release the snapshot. Idempotent."""
        self._standing.on_digested = None
        await stopped(self._task)
        self._task = None

    async def _run(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            mesh = self._rank.mesh
            if mesh is None or mesh.buddy_of(self._rank.config.rank) < 0:
                continue
            held = self._standing.hold()
            if held is None:
                continue
            try:
                if self._sent != (mesh, held[0]):
                    await self._send(mesh, *held)
            except Exception as error:  # the next snapshot may get through
                self._tell(f"{error}" if isinstance(error, ParamdError) else repr(error))
            finally:
                self._standing.release()
            attached = self._rank.attached
            if attached is not None and self._rank.mesh is mesh:
                # Let the trainers request the next one (see trainer/resume/keeper.py).
                self._standing.settle(attached, held[0].step)

    async def _send(self, mesh: Mesh, label: StandingLabel, block: Block) -> None:
        rank = self._rank
        attached = rank.attached
        if attached is None or label.lineage != attached.page[Word.LINEAGE]:
            return
        ticket = attached.request.copy_ticket
        if not ticket:
            raise UnreachableError("the control plane gave no tickets for copies")
        channels = Channels(lambda _rank: ticket, job_tls=rank.job_tls)
        try:
            for pause_s in (*PAUSES_S, None):
                try:
                    await self._send_parts(mesh, channels, label, block)
                    break
                except (UnreachableError, DeadlineError):
                    if pause_s is None:
                        raise
                await asyncio.sleep(pause_s)
        finally:
            await channels.close()
        if rank.mesh is not mesh or rank.attached is not attached:
            return
        attached.page[Word.COPIED] = label.step
        self._sent = mesh, label
        self._tell("")

    async def _send_parts(
        self, mesh: Mesh, channels: Channels, label: StandingLabel, block: Block
    ) -> None:
        """Send a snapshot from where its receiver says, until it has all of it.

        Raises:
            ConflictError: The run has ended.
            DataLossError: The receiver loses parts, or says what cannot be.
        """
        rank, receiver = self._rank, self._receiver(mesh)
        copy = copy_of(label)
        size_bytes = label.size_bytes
        received = expected = restarts = 0
        data = b""
        while True:
            begun_s = time.monotonic()
            attached = rank.attached
            if rank.mesh is not mesh or attached is None:
                raise ConflictError("the run has ended")
            request = pb.PutCopyRequest(
                copy=copy,
                keep_step=attached.page[Word.COPIES_STEP],
                offset_bytes=received,
                data=data,
            )
            answer = await channels.ask(receiver, "PutCopy", request, timeout_s=CALL_S)
            received = answer.received_bytes
            if not 0 <= received <= size_bytes:
                raise DataLossError(f"{receiver.who} says that it has {received:,} bytes")
            restarts += received < expected
            if restarts > MAX_RESTARTS:
                raise DataLossError(f"{receiver.who} loses what it has received")
            if received == size_bytes:
                return
            rank.faults.at("copy-sent")
            pause_s = len(data) / rank.config.copy_rate_bytes - (time.monotonic() - begun_s)
            await asyncio.sleep(max(pause_s, 0.0))
            expected = min(received + CHUNK_BYTES, size_bytes)
            data = bytes(block.buffer[received:expected])

    def _receiver(self, mesh: Mesh) -> Asked:
        """The buddy's sidecar. Raises ParamdError: no connection may lead there."""
        config = self._rank.config
        buddy = mesh.buddy_of(config.rank)
        peer = next(peer for peer in mesh.peers if peer.rank == buddy)
        check_way(buddy, peer.address, peer.host_id)
        return Asked(
            job=config.job, incarnation=self._rank.incarnation, rank=buddy, address=peer.address
        )

    def _tell(self, reason: str) -> None:
        """Log a failure once, and the first success after it."""
        sent = self._sent
        if reason:
            if reason != self._told:
                self._rank.log("copy-failed", reason=reason)
        elif sent is not None and self._told != "sent":
            mesh, label = sent
            buddy = mesh.buddy_of(self._rank.config.rank)
            self._rank.log("copied", to_rank=buddy, size_bytes=label.size_bytes)
        self._told = reason if reason else "sent"
