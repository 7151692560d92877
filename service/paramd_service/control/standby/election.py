"""Who is to be a job's control plane, when the one that was is gone: its ranks decide.

Each rank's sidecar follows one control plane, and none of a lower generation than the highest it
has met. A candidate first asks all of them; it stands when enough of them say that they reach none.
Those that follow it then refuse its predecessor. The standby needs half of the ranks, since with
two hosts no more are left of them when one is lost; the first control plane, started again, more
than half. So of the two sides of a network that is cut in the middle only one is elected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from paramd.errors import ParamdError
from paramd.v1 import sidecar_pb2
from paramd_service.control.base.config import Bootstrap
from paramd_service.control.mesh.registry import MeshView
from paramd_service.control.mesh.sidecars import SidecarCalls

ASK_S = 3.0
"""How long a rank may take to say whom it reaches; it tries for up to 2 s."""

ASK_UNSPECIFIED = sidecar_pb2.FOLLOW_PURPOSE_UNSPECIFIED
STAND = sidecar_pb2.FOLLOW_PURPOSE_STAND
ELECTED = sidecar_pb2.FOLLOW_PURPOSE_ELECTED


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What one rank says."""

    follows: bool
    """It follows the caller from now on."""
    control_address: str
    generation: int
    reached: bool
    """A control plane answers there."""


class Step(Enum):
    """What a candidate does next."""

    FOLLOW = "follow"
    STAND = "stand"
    WAIT = "wait"


@dataclass(frozen=True, slots=True)
class Decision:
    """And why."""

    step: Step
    reason: str
    address: str = ""
    """Whom to follow."""


def is_enough(count: int, world_size: int, *, at_home: bool) -> bool:
    """Whether that many ranks elect a candidate; `at_home`: it is the first control plane again."""
    return 2 * count > world_size if at_home else 2 * count >= world_size


def decide(
    answers: Sequence[Answer], world_size: int, *, at_home: bool, mine: str = ""
) -> Decision:
    """What a candidate does after it has asked; ranks that did not answer count for nobody.

    Args:
        mine: The address that it stood with before, if it did: who follows that follows nobody.
    """
    reached = [answer for answer in answers if answer.reached and answer.control_address != mine]
    if reached:
        newest = max(reached, key=lambda answer: answer.generation)
        return Decision(Step.FOLLOW, "ranks reach another control plane", newest.control_address)
    told = f"{len(answers)} of {world_size} ranks answer and reach no control plane"
    if is_enough(len(answers), world_size, at_home=at_home):
        return Decision(Step.STAND, told)
    return Decision(Step.WAIT, f"{told}: too few")


class Voters:
    """The ranks' sidecars, as attaching told where they are. Event loop; `close` it."""

    def __init__(self, bootstrap: Bootstrap, peers: Mapping[int, str]) -> None:
        """No I/O. `peers` is address by rank."""
        self._bootstrap, self._peers = bootstrap, peers
        self._calls = SidecarCalls(bootstrap)

    async def ask(
        self,
        purpose: sidecar_pb2.FollowPurpose.ValueType = ASK_UNSPECIFIED,
        *,
        generation: int = 0,
        control_address: str = "",
        ranks: Sequence[int] | None = None,
    ) -> list[Answer]:
        """The answers of those that answer in time."""
        request = sidecar_pb2.FollowControlRequest(
            incarnation=self._bootstrap.incarnation,
            purpose=purpose,
            generation=generation,
            control_address=control_address,
        )
        asked = ranks if ranks is not None else sorted(self._peers)
        found = await asyncio.gather(*(self._ask(rank, request) for rank in asked))
        return [answer for answer in found if answer is not None]

    async def _ask(self, rank: int, request: sidecar_pb2.FollowControlRequest) -> Answer | None:
        address = self._peers[rank]
        try:
            # A sidecar that was away may be back.
            await self._calls.is_back(address)
            told = await self._calls.ask(rank, address, "FollowControl", request, timeout_s=ASK_S)
        except ParamdError:
            return None
        return Answer(
            follows=told.follows,
            control_address=told.control_address,
            generation=told.generation,
            reached=told.reached,
        )

    async def gather(self, view: MeshView, *, generation: int, control_address: str) -> int:
        """Have the ranks that are not joined follow the elected control plane.

        Returns:
            The highest generation that they have met; above `generation`, another control plane
            has been elected since.
        """
        joined = {report.rank for report in view.joined}
        absent = [rank for rank in self._peers if rank not in joined]
        answers = await self.ask(
            ELECTED, generation=generation, control_address=control_address, ranks=absent
        )
        return max((answer.generation for answer in answers), default=generation)

    async def close(self) -> None:
        """Close the connections."""
        await self._calls.close()
