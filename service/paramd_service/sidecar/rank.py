"""One rank's sidecar without its servers: its owner, its pins and edits, its peers.

All methods run on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from paramd import clock, places
from paramd.errors import ConflictError, ParamdError, UnreachableError
from paramd.memory.control_page import Word, sample_digest
from paramd.memory.descriptors import same_object
from paramd.security.tickets import CLOCK_SKEW_S, OF_RANKS, Claims, Role, Verifier
from paramd_service.sidecar.config import SidecarConfig
from paramd_service.sidecar.copying.capture import Capture
from paramd_service.sidecar.copying.copier import Copier
from paramd_service.sidecar.faults import Faults
from paramd_service.sidecar.gradients.slots import EndedError
from paramd_service.sidecar.log import Log
from paramd_service.sidecar.orders import Orders
from paramd_service.sidecar.owner import (
    AttachedMemory,
    AttachRequest,
    Mesh,
    Ownership,
    attach_memory,
    check_sidecar,
    check_successor,
    exit_of,
    ownership_after_end,
    process_state,
)
from paramd_service.sidecar.parts import SidecarHost, SidecarPart
from paramd_service.sidecar.pins import Pins
from paramd_service.sidecar.snapshots.store import BlockMaker, SnapshotStore

if TYPE_CHECKING:
    pass

CLOSE_S = 5.0
"""Closing an attachment takes milliseconds; after this long, the log says what it waits for."""
ENDING_S = 1.0
"""How long an offer waits for a trainer that is just ending."""
CLIENT_NS = 10_000_000_000
"""How long a caller counts as a client that may soon ask for a boundary."""


def make_pins(rank: RankSidecar, attached: AttachedMemory) -> Pins:
    """Set up snapshots of a trainer's memory and start the thread that copies them."""
    config, arena_bytes = rank.config, attached.request.arena_bytes
    store = SnapshotStore(
        budget_bytes=rank.budget_bytes(arena_bytes),
        blocks=rank.blocks,
        clock_ns=time.monotonic_ns,
        idle_memory_s=config.idle_memory_s,
    )
    capture = Capture(
        attached.page,
        clock_ns=time.monotonic_ns,
        at_point=rank.faults.at,
        digest=lambda: sample_digest(attached.page, attached.host_bytes),
        move=attached.move,
        stopped=lambda: process_state(attached.trainer_pid) == "T",
        serve_standing=rank.parts.copying(attached),
    )
    copier = Copier(capture, attached.shared.wake, rank.log)
    pins = Pins(
        attached,
        store=store,
        copier=copier,
        blocks=rank.blocks,
        executor=rank.executor,
        faults=rank.faults,
        room=rank.room,
    )
    copier.start()
    return pins


class RankSidecar(SidecarHost):
    """The state behind the gRPC and Unix servers."""

    def __init__(
        self,
        config: SidecarConfig,
        *,
        blocks: BlockMaker,
        executor: Executor,
        stats_executor: Executor,
        faults: Faults,
        log: Log,
        parts: Sequence[type[SidecarPart]] = (),
    ) -> None:
        super().__init__(
            config,
            blocks=blocks,
            executor=executor,
            stats_executor=stats_executor,
            faults=faults,
            log=log,
            parts=parts,
        )
        self._verifier: Verifier | None = None
        self._orders: Orders | None = None
        self._ended = asyncio.Event()
        self._ending_on_device: asyncio.Task[None] | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._starter_gone = False
        self._had_trainer = False
        self._tickets_time: float | None = None
        """The control plane's time minus the monotonic clock, if this host's clock differs."""

    def check_meant(self, rank: object) -> None:
        """Raise UnreachableError if a request names another rank; None: it names none."""
        if rank is not None and str(rank) != str(self.config.rank):
            raise UnreachableError(
                f"this is rank {self.config.rank} of job {self.config.job!r}, not rank "
                f"{str(rank)[:16]}; another sidecar listens at this address"
            )

    async def find_control(self) -> str:
        """The control plane's address, from the host's state dir: a restart may change the port."""
        with suppress(ParamdError, OSError):
            found = await asyncio.to_thread(places.read_endpoint, self.config.job)
            if found.incarnation == self.incarnation and not found.via:
                self.move_control(found.grpc_address)
        return self.mesh.control_address if self.mesh is not None else ""

    def move_control(self, address: str) -> None:
        """Join the control plane at this address from now on; empty changes nothing."""
        if self.mesh is not None and address and address != self.mesh.control_address:
            self.mesh = replace(self.mesh, control_address=address)
            self.log("control-plane-moved", address=address)
            self._changed()

    def is_proven(self, signature: bytes, address: str, nonce: bytes) -> bool:
        """Whether the job's key says that the control plane is at `address`."""
        return self._verifier is not None and self._verifier.proves(signature, address, nonce)

    def take_time(self, now_s: float) -> None:
        """Take the control plane's time (0: unknown), which decides what has expired.

        If this host's clock agrees, as usual, it is used instead: it follows corrections.
        """
        apart_s = clock.now_s() - now_s if now_s else 0.0
        known = self._tickets_time is not None
        self._tickets_time = now_s - time.monotonic() if abs(apart_s) > CLOCK_SKEW_S / 2 else None
        if (self._tickets_time is not None) != known:
            self.log("clock-differs", ahead_of_control_plane_s=round(apart_s, 1))

    def verify(self, ticket: str) -> Claims:
        """Verify a ticket, and that its token (if any) is not revoked; return its claims.

        Raises:
            DeniedError: The ticket is invalid.
            UnreachableError: No trainer has attached yet, the ticket is an order for another
                rank, or one that was taken before, or this process cannot know yet whether its
                token is revoked.
        """
        if self.attached is None or self._verifier is None or self._orders is None:
            raise UnreachableError(f"{Ownership.WAITING.value}; try again when training runs")
        request = self.attached.request
        other = self._tickets_time
        claims = self._verifier.verify(
            ticket,
            job=request.job,
            incarnation=request.incarnation,
            now_s=other + time.monotonic() if other is not None else None,
        )
        if claims.role is Role.CONTROL:
            # Another rank may have received it and replay it here.
            self.check_meant(claims.rank)
            self._orders.take(claims.number)
        self.revocations.check(claims)
        if claims.token_id is not None and claims.role not in OF_RANKS:
            self._check_told()
        return claims

    def _check_told(self) -> None:
        """Raise UnreachableError while the control plane has yet to tell what is revoked."""
        alone = self.mesh is not None and not self.mesh.control_address
        if not alone and not self.revocations.heard:
            # A token may have been revoked while no sidecar ran here.
            raise UnreachableError(
                "this sidecar has just begun, and its control plane has not told it yet which "
                "tokens are revoked; try again once the control plane answers"
            )

    def note_client(self, method: str) -> None:
        """Keep the trainers attentive: a caller may request a boundary next."""
        # Metrics and copies are sent all the time, by callers that never wait for a boundary.
        alike = method.endswith(("/GetMetrics", "/PutCopy"))
        if self.attached is not None and not alike:
            self.attached.page[Word.CLIENTS_UNTIL_NS] = time.monotonic_ns() + CLIENT_NS

    def wait_for_trainer(self) -> None:
        """Leave unless a trainer attaches within the linger time."""
        self._stop_waiting()
        # A sidecar that had a trainer may keep its snapshots: the restarted one failed to attach.
        if self._starter_gone and not self._had_trainer:
            self.log("leaving", reason="the trainer that started it ended before it attached")
            self.leaving.set()
            return
        loop = asyncio.get_running_loop()
        self._linger_timer = loop.call_later(self.config.linger_s, self._linger_over)

    def _stop_waiting(self) -> None:
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None

    def starter_ended(self) -> None:
        """Leave if the trainer that started this sidecar ended before any had attached."""
        self._starter_gone = True
        # An attach in progress calls `wait_for_trainer` itself if it fails.
        if not self._had_trainer and not self.attaching.locked():
            self.wait_for_trainer()

    async def attach(
        self, request: AttachRequest, handed_back: Sequence[int], *, elsewhere: int | None = None
    ) -> AttachedMemory:
        """Give the sidecar to a trainer. Takes ownership of the descriptors, even on failure.

        `elsewhere`: see `attach_memory`.

        Raises:
            UsageError, ConflictError, ExhaustedError: See owner.py.
        """
        await self._device_looked_at()
        async with self.attaching:
            try:
                self._check_attach(request, handed_back)
            except BaseException:
                for descriptor in handed_back:
                    os.close(descriptor)
                raise
            self._stop_waiting()
            reached = self.step
            former = self.attached if self.ownership is Ownership.OWNED else None
            try:
                attached = await self._successive(request, handed_back, elsewhere)
            except BaseException:
                # For example, the trainer died. What the earlier one left stays, or its snapshots.
                self.wait_for_trainer()
                raise
            refreshed = former is not None and former.incarnation < request.incarnation
            self.parts.attaching(request, reached=reached, refreshed=refreshed)
            self._had_trainer = True
            self._own(attached)
            await self.parts.attached(attached)
            self.log(
                "attached",
                incarnation=request.incarnation,
                trainer_pid=request.pid,
                arena_bytes=request.arena_bytes,
            )
            return attached

    def _check_attach(self, request: AttachRequest, handed_back: Sequence[int]) -> None:
        check_sidecar(self.config.job, self.config.rank, request)
        if (attached := self.attached) is not None:
            check_successor(
                attached.request,
                self.ownership,
                request,
                elsewhere=not attached.trainer_pid,
                holds_page=bool(handed_back) and same_object(handed_back[0], attached.shared.page),
            )

    async def _successive(
        self, request: AttachRequest, handed_back: Sequence[int], elsewhere: int | None
    ) -> AttachedMemory:
        """Replace the former trainer's memory with the new one's."""

        def make() -> asyncio.Future[AttachedMemory]:
            return asyncio.get_running_loop().run_in_executor(
                self.executor, partial(attach_memory, request, handed_back, elsewhere=elsewhere)
            )

        if handed_back:
            # First: this may be the former's memory, with no other owner if this one just died.
            attached = await make()
            try:
                await self._drop_attached()
            except BaseException:
                attached.close()
                raise
            return attached
        await self._drop_attached()
        return await make()

    async def _device_looked_at(self) -> None:
        """Wait for the check of how an ended trainer left its device, if one is running.

        Bounded: the device is polled, never awaited.
        """
        if self._ending_on_device is not None:
            await asyncio.wait([self._ending_on_device])

    async def trainer_gone(self) -> None:
        await self._device_looked_at()
        if self.ownership is Ownership.OWNED:
            with suppress(TimeoutError):
                async with asyncio.timeout(ENDING_S):
                    await self._ended.wait()

    @property
    def idle_bytes(self) -> int:
        """Bytes that `take_idle` would take, but for a little."""
        pins_bytes = self._pins.idle_bytes if self._pins is not None else 0
        return pins_bytes + self.parts.idle_bytes()

    def take_idle(self) -> list[Callable[[], object]]:
        """Take memory away that is only kept for the next reader, follower, edit or gradient frame;
        return what frees it, on any thread."""
        freeing = self._pins.take_idle() if self._pins is not None else []
        return freeing + self.parts.take_idle()

    def set_mesh(self, mesh: Mesh) -> None:
        """Set the mesh that the trainers agreed on; from now on everything is served."""
        self.mesh = mesh
        self.layout_digest = mesh.layout_digest
        self.parts.meshed(mesh)
        self.log("serving", incarnation=self.incarnation, layout_digest=mesh.layout_digest)
        self._changed()

    def detach(self) -> None:
        """Leave after the trainer's orderly detach."""
        self.detached = True
        if self._pins is not None:
            self._pins.gradient_pins.gradients.end(EndedError("the training has detached"))
        self.log("detached", incarnation=self.incarnation)
        self._changed()
        self.leaving.set()

    def leave(self) -> None:
        """Leave on the user's request instead of lingering. Idempotent.

        Raises:
            ConflictError: If a trainer is attached or expected.
        """
        if self.ownership is Ownership.OWNED or self.attaching.locked():
            raise ConflictError(
                "its trainer is alive; stop the training first, nothing here ends it"
            )
        if self.ownership is Ownership.WAITING and not self.leaving.is_set():
            raise ConflictError(
                f"{Ownership.WAITING.value}; it leaves by itself, {self.config.linger_s:.0f} s "
                "after its start"
            )
        if not self.leaving.is_set():
            self.log("leaving", reason=f"{self.ownership.value}; its user asked it to leave")
            self.leaving.set()

    async def close(self) -> None:
        """End snapshots and the attachment. Call it after the servers have stopped."""
        self._stop_waiting()
        await self._drop_attached()
        await self.parts.closed()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _own(self, attached: AttachedMemory) -> None:
        self.attached = attached
        self.control_generation = 0
        self._verifier = Verifier(attached.request.public_key, self.config.rank + 1)
        self._orders = Orders(attached.page)
        self.ownership = Ownership.OWNED
        self._ended.clear()
        self.end = None
        self._pins = make_pins(self, attached)
        self.room.free_idle_with(asyncio.get_running_loop(), self.take_idle)
        asyncio.get_running_loop().add_reader(attached.pidfd, self._trainer_ended)
        self._changed()

    def _trainer_ended(self) -> None:
        assert self.attached is not None
        assert self._pins is not None
        loop = asyncio.get_running_loop()
        loop.remove_reader(self.attached.pidfd)
        self.end = (time.monotonic(), exit_of(self.attached.trainer_pid))
        # The process has ended, so its words are final.
        ownership = ownership_after_end(self.attached.page.words)
        if self.attached.device is None or ownership is Ownership.TORN:
            self._take_end(ownership)
        else:
            self._ending_on_device = self.start_task(self._look_at_device(self.attached))

    async def _look_at_device(self, attached: AttachedMemory) -> None:
        """Find out whether the device finished what an ended trainer had announced."""
        assert attached.device is not None
        why = await asyncio.get_running_loop().run_in_executor(self.executor, attached.device.end)
        if why:
            self.log("device-unfinished", reason=why)
        if attached is self.attached:
            ended = ownership_after_end(attached.page.words)
            self._take_end(Ownership.TORN if why else ended)

    def _take_end(self, ownership: Ownership) -> None:
        assert self.attached is not None
        assert self._pins is not None
        self.ownership = ownership
        self.parts.trainer_ended(self.ownership)
        self._ended.set()
        self._pins.trainer_ended(self.ownership)
        self.log(
            "trainer-ended",
            ownership=self.ownership.name,
            step=self.step,
            incarnation=self.incarnation,
        )
        self.wait_for_trainer()
        self._changed()

    def _linger_over(self) -> None:
        self.log("leaving", reason=f"{self.ownership.value}, for {self.config.linger_s:.0f} s")
        self.leaving.set()

    async def _drop_attached(self) -> None:
        slow = asyncio.get_running_loop().call_later(CLOSE_S, self._tell_threads)
        try:
            await self._close_attached()
        finally:
            slow.cancel()

    def _tell_threads(self) -> None:
        """Log what all threads do: closing waits for one of them."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks = {
            names.get(number, str(number)): traceback.format_stack(frame)[-3:]
            for number, frame in sys._current_frames().items()
        }
        self.log("closing-takes-long", seconds=CLOSE_S, threads=stacks)

    async def _close_attached(self) -> None:
        pins, attached = self._pins, self.attached
        # Unset before closing, so that new calls are refused at once.
        self.mesh = None
        self._pins = None
        if pins is not None:
            await pins.close()
        await self.parts.released()
        if attached is not None:
            asyncio.get_running_loop().remove_reader(attached.pidfd)
            async with self.using_memory:
                # Last: the copying thread and the edits use its memory until here.
                self.attached = None
                self.ownership = Ownership.WAITING
                attached.close()

    def _changed(self) -> None:
        for callback in self.on_change:
            callback()
