"""Which ranks only wait for others that are still in their step: they are well, although they pass
no boundary. Pure.

A sidecar knows its own trainer alone, so it reports a trainer that waits for long as stalled, and
that it waits (`RankState.waits_for_others`). Only all states together show that another rank is
busy by itself (`RankState.works`), whether it computes or sleeps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paramd.mesh.peers.grpc import boundary_age_s
from paramd.v1 import common_pb2

MOST_NAMED = 4
"""Most ranks named as those that others wait for."""


@dataclass(frozen=True, slots=True)
class Awaited:
    """The ranks that work while others wait, those furthest behind."""

    ranks: tuple[int, ...] = ()
    """Ordered; empty: no rank visibly works."""
    step: int = -1
    """Their step."""
    age_s: float = 0.0
    """Seconds since the oldest of their last boundaries; infinite before the first."""

    def holds(self, state: common_pb2.RankState) -> bool:
        """Whether a rank that is called stalled in fact waits for these ranks."""
        return (
            bool(self.ranks)
            and state.phase == common_pb2.PHASE_STALLED
            and state.waits_for_others
            and state.step >= self.step
        )

    def text(self) -> str:
        """For example "waits for rank 1, in its step for 70 s"."""
        named = ", ".join(map(str, self.ranks[:MOST_NAMED]))
        more = len(self.ranks) - MOST_NAMED
        who = f"{'rank' if len(self.ranks) == 1 else 'ranks'} {named}"
        if more > 0:
            who += f" and {more:,} more"
        whose = "its" if len(self.ranks) == 1 else "their"
        if self.age_s == float("inf"):
            return f"waits for {who}, in {whose} first step"
        return f"waits for {who}, in {whose} step for {self.age_s:.0f} s"


NOBODY = Awaited()


def awaited_of(states: Iterable[common_pb2.RankState]) -> Awaited:
    """The ranks that others wait for, by the states of all ranks that answer.

    A rank that is ahead of others waits for none of them, so only the lowest step counts.
    """
    working = [one for one in states if one.works and one.phase != common_pb2.PHASE_STALLED]
    if not working:
        return NOBODY
    step = min(one.step for one in working)
    behind = [one for one in working if one.step == step]
    return Awaited(
        tuple(sorted(one.rank for one in behind)), step, max(map(boundary_age_s, behind))
    )


def with_waits(state: common_pb2.RankState, awaited: Awaited) -> common_pb2.RankState:
    """The state of a rank, which is idle and says for whom if it only waits for ranks that work."""
    if not awaited.holds(state):
        return state
    found = common_pb2.RankState()
    found.CopyFrom(state)
    found.phase, found.phase_reason = common_pb2.PHASE_IDLE, awaited.text()
    return found
