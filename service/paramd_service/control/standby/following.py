"""The standby's side: it follows a control plane, and copies its store, until that one is gone."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from enum import Enum
from typing import Any

import grpc.aio

from paramd.errors import ParamdError
from paramd.mesh.peers.grpc import Channels
from paramd.v1 import control_pb2
from paramd_service.control.base.config import Bootstrap
from paramd_service.control.mesh.sidecars import ControlTicket
from paramd_service.control.standby.image import Replica

SILENT_S = 3.0
"""So long without a word a control plane that says something every half second is gone."""

KEEP_EVERY_S = 5.0
"""How often the copy is written to disk at most; it is complete in memory."""

BACK_AFTER_S = 10.0
"""So long the first control plane follows another without a break before it wants to be it again:
programs elsewhere know its address."""

log = logging.getLogger("paramd.control.standby")


class Outcome(Enum):
    """Why a control plane is followed no more."""

    OVER = "over"
    """The incarnation is: there is nothing left to stand by for."""
    HANDED_OVER = "handed over"
    """It has handed over to this process."""
    LOST = "lost"
    """It is gone, or cannot be reached from here."""


class Following:
    """Follows one control plane after the other. Event loop."""

    def __init__(
        self, bootstrap: Bootstrap, replica: Replica | None, on_url: Callable[[str], None]
    ) -> None:
        """No I/O.

        Args:
            replica: None when both use one database.
            on_url: Called with the URL of the control plane that is followed, once it is known.
        """
        self._bootstrap, self._replica = bootstrap, replica
        self._on_url = on_url
        self._ticket = ControlTicket(bootstrap)
        self._said = asyncio.Event()
        self.heard_s = 0.0
        """When the one that is followed said something last, on the monotonic clock."""

    async def follow(self, address: str, *, stood: int) -> Outcome:
        """Follow until it is gone; `stood` is the highest generation that we stood with."""
        if self._replica is not None:
            self._replica.begin()
        channels = Channels(self._ticket, job_tls=self._bootstrap.certificates.own)
        try:
            call = channels.control(address).FollowStore(
                self._acknowledged(stood),
                metadata=(("authorization", f"Bearer {self._ticket()}"),),
            )
            try:
                return await self._read(call)
            finally:
                call.cancel()
        except grpc.aio.AioRpcError as error:
            log.info("control plane %s: %s", address, error.details())
            over = error.code() is grpc.StatusCode.NOT_FOUND
            return Outcome.OVER if over else Outcome.LOST
        except ParamdError as error:
            log.info("control plane %s: %s", address, error)
            return Outcome.LOST
        finally:
            await channels.close()
            await self._keep()

    async def _read(self, call: Any) -> Outcome:
        kept_s, url = time.monotonic(), ""
        while True:
            try:
                async with asyncio.timeout(SILENT_S):
                    part = await call.read()
            except TimeoutError:
                return Outcome.LOST
            if part is grpc.aio.EOF:
                # Its status says why.
                code = await call.code()
                return Outcome.OVER if code is grpc.StatusCode.NOT_FOUND else Outcome.LOST
            self.heard_s = time.monotonic()
            if part.url != url:
                url = part.url
                self._on_url(url)
            if self._replica is not None:
                self._replica.take(part)
            if part.handed_over:
                return Outcome.HANDED_OVER
            self._said.set()
            if time.monotonic() - kept_s >= KEEP_EVERY_S:
                await self._keep()
                kept_s = time.monotonic()

    async def _acknowledged(self, stood: int) -> AsyncIterator[control_pb2.FollowStoreRequest]:
        mine, begun_s = self._bootstrap, time.monotonic()
        at_home = mine.stands is not None and mine.stands.at_home
        self._said.clear()
        while True:
            yield control_pb2.FollowStoreRequest(
                job=mine.job,
                incarnation=mine.incarnation,
                number=self._replica.number if self._replica is not None else 0,
                generation=stood,
                wants_back=at_home and time.monotonic() - begun_s >= BACK_AFTER_S,
            )
            await self._said.wait()
            self._said.clear()

    async def _keep(self) -> None:
        if self._replica is None:
            return
        try:
            await asyncio.to_thread(self._replica.keep)
        except OSError as error:
            log.error("the copy of the store cannot be written: %s", error)
