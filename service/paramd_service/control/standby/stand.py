"""A standby's life: it follows a control plane, and stands for election when that one is gone."""

from __future__ import annotations

import asyncio
import logging
import time
from importlib import import_module

from paramd import places
from paramd.errors import ConflictError, UsageError
from paramd.places import Endpoint
from paramd.v1 import sidecar_pb2
from paramd_service.control.base.config import Bootstrap, ControlConfig, Stands
from paramd_service.control.base.endpoint import Claim, announce
from paramd_service.control.base.site import next_generation
from paramd_service.control.standby.election import ELECTED, STAND, Step, Voters, decide, is_enough
from paramd_service.control.standby.following import SILENT_S, Following, Outcome
from paramd_service.control.standby.image import Replica
from paramd_service.control.store.engine import parse_store

AGAIN_S = 0.5
"""Pause before the ranks are asked again."""

CONTROL_PLANE = "paramd_service.control.control_plane"

log = logging.getLogger("paramd.control.standby")


class Standing:
    """One process that is to be the control plane only once there is no other."""

    def __init__(self, config: ControlConfig, bootstrap: Bootstrap) -> None:
        """Reads the setting of the store; no other I/O."""
        assert bootstrap.stands is not None
        self._config, self._bootstrap = config, bootstrap
        self._stands: Stands = bootstrap.stands
        directory = places.job_dir(bootstrap.job)
        path = parse_store(config.store, directory=directory).path
        replica = Replica(path, directory, bootstrap.job) if path is not None else None
        self._following = Following(bootstrap, replica, self._announce)
        self._stood = 0
        """The highest generation that it stood with."""
        self._stood_at = ""
        """The address that it stood with last."""
        self._leader = ""
        self._endpoint: Endpoint | None = None

    async def run(self) -> tuple[int, Claim] | None:
        """Return the generation it was elected with and its addresses; None when all is over."""
        # Now, since it takes seconds: who is elected is waited for.
        loading = asyncio.create_task(asyncio.to_thread(import_module, CONTROL_PLANE))
        try:
            return await self._run()
        finally:
            await asyncio.wait({loading})

    async def _run(self) -> tuple[int, Claim] | None:
        voters = Voters(self._bootstrap, self._stands.peers)
        leader, heard_s = self._stands.leader, time.monotonic()
        try:
            while time.monotonic() - heard_s < self._config.empty_end_s:
                if leader:
                    log.info("standing by for the control plane at %s", leader)
                    self._leader = leader
                    outcome = await self._following.follow(leader, stood=self._stood)
                    leader, heard_s = "", time.monotonic()
                    if outcome is Outcome.OVER:
                        return None
                    if outcome is Outcome.HANDED_OVER and (
                        elected := await self._stand(voters, ELECTED)
                    ):
                        return elected
                    # One whose process has ended is started again by its trainer meanwhile.
                    silent_s = time.monotonic() - self._following.heard_s
                    await asyncio.sleep(max(SILENT_S - silent_s, 0.0))
                answers = await voters.ask()
                heard_s = time.monotonic() if answers else heard_s
                decision = decide(
                    answers,
                    self._bootstrap.world_size,
                    at_home=self._stands.at_home,
                    mine=self._stood_at,
                )
                log.info("%s: %s", decision.step.value, decision.reason)
                if decision.step is Step.FOLLOW:
                    leader = decision.address
                elif decision.step is Step.STAND and (elected := await self._stand(voters, STAND)):
                    return elected
                await asyncio.sleep(AGAIN_S)
            log.info("nobody has answered for %.0f s", self._config.empty_end_s)
            return None
        finally:
            await voters.close()

    def _announce(self, url: str) -> None:
        """Tell the programs of this host where the control plane is."""
        try:
            self._endpoint = announce(self._bootstrap, url, self._leader, with_ca=True)
        except (ConflictError, UsageError) as error:
            log.warning("the job's endpoint is not told on this host: %s", error)

    def withdraw(self) -> None:
        """Tell it no more, unless an elected control plane has told its own."""
        if self._endpoint is not None:
            places.remove_endpoint(self._endpoint)

    async def _stand(
        self, voters: Voters, purpose: sidecar_pb2.FollowPurpose.ValueType
    ) -> tuple[int, Claim] | None:
        claim = Claim(self._config, self._bootstrap)
        try:
            generation = self._stood = next_generation(places.job_dir(self._bootstrap.job))
            self._stood_at = claim.whereabouts().grpc_address
            answers = await voters.ask(
                purpose, generation=generation, control_address=self._stood_at
            )
            votes = sum(answer.follows for answer in answers)
            world_size = self._bootstrap.world_size
            log.info("%d of %d ranks follow generation %d", votes, world_size, generation)
            if is_enough(votes, world_size, at_home=self._stands.at_home):
                return generation, claim
        except BaseException:
            claim.close()
            raise
        claim.close()
        return None
