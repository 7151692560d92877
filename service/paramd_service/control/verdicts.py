"""What all ranks' answers to a boundary request add up to. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paramd.errors import (
    CODES,
    ConflictError,
    DeadlineError,
    DeniedError,
    ParamdError,
    UnreachableError,
)
from paramd_service.control.view import listed


@dataclass(frozen=True, slots=True)
class RankAnswer:
    """What one sidecar says of a boundary: where it was, or why its copy was missed."""

    rank: int
    epoch: int
    step: int
    captured: bool
    reason: str
    edits: int = 0
    """Edits applied in this epoch, once it was done."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """All ranks' answers in one: `step` is -1 and `reason` tells why when not captured."""

    captured: bool
    step: int
    reason: str
    edits: int = -1


def decide(epoch: int, world_size: int, answers: Sequence[RankAnswer]) -> Verdict:
    """Captured only when all ranks filled their snapshots at one step of this epoch."""
    missed = [answer for answer in answers if not answer.captured or answer.step < 0]
    if missed:
        told = "; ".join(f"rank {a.rank}: {a.reason or 'no reason given'}" for a in missed[:8])
        return Verdict(False, -1, told)
    foreign = [answer for answer in answers if answer.epoch != epoch]
    if foreign:
        ranks = listed([answer.rank for answer in foreign])
        return Verdict(False, -1, f"ranks {ranks} answered for another epoch than {epoch}")
    steps = sorted({answer.step for answer in answers})
    if len(steps) > 1:
        told = ", ".join(f"rank {a.rank} at {a.step}" for a in answers[:8])
        return Verdict(False, -1, f"the ranks captured different steps: {told}")
    if len({answer.edits for answer in answers}) > 1:
        told = ", ".join(f"rank {a.rank} after {a.edits}" for a in answers[:8])
        return Verdict(False, -1, f"the ranks captured after different edits: {told}")
    silent = set(range(world_size)) - {answer.rank for answer in answers}
    if silent:
        return Verdict(False, -1, f"ranks {listed(sorted(silent))} have not answered")
    return Verdict(True, steps[0], "", answers[0].edits)


def worst(failures: Mapping[int, ParamdError]) -> ParamdError:
    """One error for all ranks that failed: of the kind that trying again helps least."""
    order: tuple[type[ParamdError], ...] = (
        DeniedError,
        ConflictError,
        UnreachableError,
        DeadlineError,
        ParamdError,
    )
    rank = next(
        rank for wanted in order for rank in sorted(failures) if isinstance(failures[rank], wanted)
    )
    kind = next(kind for kind in type(failures[rank]).__mro__ if kind in CODES)
    others = [str(failures[other]) for other in sorted(failures) if other != rank]
    return kind("; ".join([str(failures[rank]), *others[:7]]))
