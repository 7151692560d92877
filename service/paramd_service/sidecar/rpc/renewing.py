"""This rank's certificate within a job on several hosts, renewed in time by the control plane.

The next private key is made here, and handed to nobody but the trainer, which starts a successor
with it. Without a control plane the certificate lasts until its end: a third of its validity.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from paramd.errors import ParamdError, UnreachableError
from paramd.mesh.peers.grpc import Channels
from paramd.security.tls import Pems
from paramd.v1 import control_pb2
from paramd_service.sidecar.rank import RankSidecar
from paramd_service.sidecar.rpc.control_link import short

ANSWER_S = 5.0
"""How long the control plane may take."""

LOOK_S = 60.0
"""Longest pause: machines are suspended, and clocks set."""

LEAST_PAUSE_S = 0.5
RETRY = 1 / 40
"""Pause after a failure, as part of the validity."""

SPREAD = 0.1
"""Ranks ask at different moments of this last part of the time until it is due."""


class Renewing:
    """Renews while a trainer is attached or the sidecar lingers. Event loop."""

    def __init__(self, rank: RankSidecar) -> None:
        self._rank = rank
        self._changed = asyncio.Event()
        self._early = SPREAD * random.random()
        self._failing = ""
        self._expired = False
        self._trainer_has: Pems | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Does nothing without a certificate of the job's."""
        if self._rank.own_pems is not None:
            self._trainer_has = self._rank.own_pems.pems
            self._rank.on_change.append(self._changed.set)
            self._task = asyncio.create_task(self._run(), name="paramd-renewing")

    async def stop(self) -> None:
        """Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            pause_s = await self._look()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._changed.wait()

    async def _look(self) -> float:
        """Renew if it is due; return when to look again, in seconds."""
        # Imported only with TLS of a job's own: it is slow to load.
        from paramd.security.job_authority import renew_at_s, validity

        own = self._rank.own_pems
        assert own is not None
        begin_s, end_s = validity(own.pems.cert)
        due_s = begin_s + (1.0 - self._early) * (renew_at_s(own.pems.cert) - begin_s)
        left_s, failed = due_s - time.time(), False
        if left_s <= 0:
            failed = not await self._renewed(own.pems, end_s)
            left_s = (end_s - begin_s) * RETRY
        self._tell_trainer(own.pems)
        wait_s = min(left_s, LOOK_S)
        return max(wait_s, LEAST_PAUSE_S) if failed else max(wait_s, 0.0)

    async def _renewed(self, pems: Pems, end_s: float) -> bool:
        """Whether another certificate is in force now."""
        rank, own = self._rank, self._rank.own_pems
        assert own is not None
        try:
            found = await self._asked(pems)
        except Exception as error:  # the next attempt may succeed
            self._note_failure(short(error), end_s)
            return False
        # Unless a successor has brought one of its incarnation meanwhile.
        if own.pems is pems:
            own.replace(found)
            self._failing, self._expired = "", False
            if rank.tls is not None:
                # Now, for metrics; handshakes would do it, too.
                rank.tls.refresh()
            rank.log("certificate-renewed")
        return True

    async def _asked(self, pems: Pems) -> Pems:
        """The next one."""
        from paramd.security.job_authority import NextKey

        mesh, attached = self._rank.mesh, self._rank.attached
        if mesh is None or attached is None or not mesh.control_address:
            raise UnreachableError("no control plane is known")
        key = NextKey(pems)
        request = control_pb2.RenewCertificateRequest(
            job=self._rank.config.job,
            incarnation=self._rank.incarnation,
            rank=self._rank.config.rank,
            certificate=pems.cert,
            public_key=key.public_key,
            proof=key.proof,
        )
        # New channels, since one in backoff repeats its last error.
        channels = Channels(lambda: "", job_tls=lambda: pems)
        try:
            answer = await channels.control(mesh.control_address).RenewCertificate(
                request,
                timeout=ANSWER_S,
                metadata=(("authorization", f"Bearer {attached.request.rank_ticket}"),),
            )
        finally:
            await channels.close()
        return key.certified(answer.certificate)

    def _note_failure(self, why: str, end_s: float) -> None:
        """Log it once, and once more when the certificate has ended."""
        until = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(end_s))
        if time.time() >= end_s and not self._expired:
            self._expired = True
            self._rank.log(
                "certificate-expired",
                error=why,
                expired=until,
                advice="no other host reads this rank until the training attaches again",
            )
        elif not self._failing:
            self._rank.log("certificate-not-renewed", error=why, valid_until=until)
        self._failing = why

    def _tell_trainer(self, pems: Pems) -> None:
        """It starts a successor of this process with what it has."""
        if pems is self._trainer_has or self._rank.attached is None:
            return
        message: Mapping[str, Any] = {"op": "certificate", "tls": pems.to_json()}
        with suppress(ParamdError):
            if self._rank.insight.line.tell(message):
                self._trainer_has = pems
