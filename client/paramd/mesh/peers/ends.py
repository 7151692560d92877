"""Which trainers' ends are no trouble. Pure."""

from __future__ import annotations

from paramd.v1 import common_pb2


def ended_well(state: common_pb2.RankState) -> bool:
    """Whether the trainer ended with exit code 0, outside an update: no trouble, but an end."""
    return state.phase == common_pb2.PHASE_ORPHANED and state.trainer_ended_well
