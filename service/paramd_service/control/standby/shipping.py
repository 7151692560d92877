"""The control plane's side: it sends what changes in the store, and hears what has arrived."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial
from typing import Any

from paramd.errors import ConflictError, NotFoundError, UnreachableError
from paramd.v1 import control_pb2
from paramd_service.control.mesh.jobs import Incarnation
from paramd_service.control.mesh.registry import Membership, MeshView
from paramd_service.control.records.records import Records
from paramd_service.control.standby.election import is_enough
from paramd_service.control.standby.image import State, changes, state_of
from paramd_service.control.store.engine import StoreError

SAY_S = 0.5
"""Time between two words to the standby when nothing changes."""

HEARD_S = 2.0
"""So long after its last word the standby counts as there: less than it waits before it stands."""

TOGETHER_S = 0.05
"""Time between two states: changes that come together are sent together."""

HANDED_S = 5.0
"""How long nothing is changed after it was handed over: else whoever took it has failed."""

COPIED_S = 1.0
"""Longest that a change waits for the standby to have it."""

log = logging.getLogger("paramd.control.standby")


class Shipping:
    """What the standby of one job has. Event loop, but for `_committed`."""

    def __init__(self, records: Records, *, generation: int, url: str, at_home: bool) -> None:
        """Takes its places in `records`; no I/O. `at_home`: it is the job's first one."""
        self._at_home = at_home
        self._records = records
        self._generation, self._url = generation, url
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._arrived = asyncio.Condition()
        self._following: object | None = None
        """The stream that counts: a standby that comes back opens another one."""
        self._heard_s = -HEARD_S
        self._wanted_back = False
        self._handed_s = -HANDED_S
        """When it was handed over, on the monotonic clock."""
        self._copied = 0
        """Commits of the store that the standby has."""
        records.store.on_commit = self._committed
        records.audit.copied = self._wait_copied

    @property
    def is_followed(self) -> bool:
        """Whether the standby was heard of just now."""
        return time.monotonic() - self._heard_s < HEARD_S

    def check(self, view: MeshView) -> None:
        """Raise UnreachableError when another control plane may have been elected by now."""
        if time.monotonic() - self._handed_s < HANDED_S:
            raise UnreachableError(
                "the control plane is moving back to its first host; try again in a few seconds"
            )
        joined = sum(rank.membership is Membership.JOINED for rank in view.ranks)
        enough = is_enough(joined, len(view.ranks), at_home=self._at_home)
        if not (self.is_followed or enough):
            raise UnreachableError(
                f"this control plane hears of {joined} of {len(view.ranks)} ranks and not of the "
                "job's other control plane, which may have taken over: nothing is changed here; "
                "ask that one, or try again when the network is whole"
            )

    async def serve(
        self, mesh: Incarnation, requests: AsyncIterator[control_pb2.FollowStoreRequest]
    ) -> AsyncGenerator[control_pb2.FollowStoreResponse, None]:
        """The answers to one standby, until the incarnation is over or it leaves.

        Raises:
            NotFoundError: the incarnation is over.
            ConflictError, UnreachableError: it goes on under another control plane.
        """
        me = self._following = object()
        sent: dict[int, int] = {}
        hearing = asyncio.create_task(self._hear(me, mesh, requests, sent))
        log.info("a standby follows")
        try:
            before, number = b"", 0
            while self._following is me and not hearing.done():
                self._changed.clear()
                commits = self._records.store.commits
                handed = self._hands_over()
                due = handed or commits != sent.get(number, -1)
                if due and (state := await self._state()) is not None:
                    number += 1
                    sent[number] = commits
                    for part in await asyncio.to_thread(self._parts, number, before, state):
                        part.handed_over = handed and part.last
                        yield part
                    before = state.file
                    await asyncio.sleep(TOGETHER_S)
                else:
                    yield self._message(handed_over=handed and self._shares)
                    if handed and not self._shares:
                        self._handed_s = -HANDED_S  # the store cannot be read now
                _check_goes_on(mesh)
                try:
                    async with asyncio.timeout(SAY_S):
                        await self._changed.wait()
                except TimeoutError:
                    pass
            _check_goes_on(mesh)
        finally:
            hearing.cancel()
            await asyncio.gather(hearing, return_exceptions=True)
            if self._following is me:
                self._heard_s = -HEARD_S
            log.info("a standby follows no more")

    @property
    def _shares(self) -> bool:
        """Whether the standby uses the same database: there is no file to copy."""
        return self._records.store.address.path is None

    def _hands_over(self) -> bool:
        """Whether the state that is sent next is the last before the first control plane is back.

        From now on nothing is changed here, and nothing is being changed.
        """
        if not self._wanted_back or self._records.audit.mutations:
            return False
        self._wanted_back, self._handed_s = False, time.monotonic()
        return True

    async def _state(self) -> State | None:
        """None without a file to copy, or when it cannot be read now."""
        store = self._records.store
        if self._shares:
            return None
        try:
            return await store.read(
                partial(state_of, directory=self._records.directory, job=self._records.chain)
            )
        except StoreError as error:
            log.warning("the standby gets no copy of the store: %s", error)
            return None

    def _parts(
        self, number: int, before: bytes, state: State
    ) -> list[control_pb2.FollowStoreResponse]:
        found = [
            self._message(
                number=number,
                pages=[control_pb2.StorePage(offset_bytes=offset, data=data)],
            )
            for offset, data in changes(before, state.file)
        ]
        last = self._message(
            number=number,
            size_bytes=len(state.file),
            audit_head=state.audit_head,
            last=True,
        )
        return [*found, last]

    def _message(self, **parts: Any) -> control_pb2.FollowStoreResponse:
        return control_pb2.FollowStoreResponse(generation=self._generation, url=self._url, **parts)

    async def _hear(
        self,
        me: object,
        mesh: Incarnation,
        requests: AsyncIterator[control_pb2.FollowStoreRequest],
        sent: dict[int, int],
    ) -> None:
        async for request in requests:
            if self._following is not me:
                return
            mesh.saw_generation(request.generation)
            self._heard_s = time.monotonic()
            self._wanted_back = request.wants_back
            async with self._arrived:
                self._copied = max(self._copied, sent.get(request.number, 0))
                for older in [number for number in sent if number < request.number]:
                    del sent[older]
                self._arrived.notify_all()

    def _committed(self) -> None:
        # On the store's writer thread.
        self._loop.call_soon_threadsafe(self._changed.set)

    async def _wait_copied(self) -> None:
        """Wait until the standby has what is committed now, as long as it is there."""
        store = self._records.store
        if self._shares or not self.is_followed:
            return
        commits = store.commits
        try:
            async with asyncio.timeout(COPIED_S), self._arrived:
                await self._arrived.wait_for(lambda: self._copied >= commits)
        except TimeoutError:
            log.warning("the standby is behind: it does not have record %d yet", commits)


def _check_goes_on(mesh: Incarnation) -> None:
    if mesh.over is None:
        return
    if mesh.superseded or not isinstance(mesh.over, ConflictError):
        raise mesh.over
    raise NotFoundError(str(mesh.over))
