"""Chooses the state to resume from, by the sidecars' offers; the same on all ranks. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from paramd.errors import ConflictError

How = Literal["live", "snapshot", "fresh"]


@dataclass(frozen=True, slots=True, order=True)
class Mark:
    """Names a state: the same mark on all ranks is one state of the training."""

    step: int
    lineage: int
    edits: int


@dataclass(frozen=True, slots=True)
class HeldCopy:
    """A copy of a standing snapshot on another host than its rank's."""

    rank: int
    mark: Mark
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RankOffer:
    """The states that one rank's sidecar holds."""

    absent: str = ""
    """Why nothing is known; empty if a sidecar answered."""
    living_pid: int = 0
    """The former trainer, if it still lives."""
    refusal: str = ""
    """How this script differs from the memory's; empty if it fits."""
    step: int = -1
    """Step its parameters are at, whole or not."""
    lineage: int = 0
    """The lineage that its trainer was in; a rollback leaves one for another."""
    live: Mark | None = None
    why_not_live: str = ""
    snapshots: tuple[Mark, ...] = field(default=())
    copies: tuple[HeldCopy, ...] = field(default=())
    """Snapshots of other ranks that its sidecar keeps."""
    incarnation: int = 0
    """The last one that its sidecar served."""

    def to_message(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> RankOffer:
        live = message["live"]
        copies = tuple(
            HeldCopy(one["rank"], Mark(**one["mark"]), one["size_bytes"])
            for one in message["copies"]
        )
        marks = {
            "live": Mark(**live) if live is not None else None,
            "snapshots": tuple(Mark(**mark) for mark in message["snapshots"]),
            "copies": copies,
        }
        return cls(**(message | marks))


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The state from which the training continues."""

    how: How
    mark: Mark
    """The state to continue from; after a fresh start only its step means anything."""
    lost_steps: int
    """Steps that some rank had made and that are repeated."""
    reason: str
    common_step: int = 0
    """Step of the newest standing snapshot that all ranks have; 0 none."""


FRESH = Mark(-1, 0, 0)
OVER_AN_EXPORT = (
    "start it as it was, export the state (paramd export) and load that into the changed script, "
    "or give the state up with resume='never'"
)


def choose(offers: Sequence[RankOffer], damaged: Collection[tuple[How, Mark]] = ()) -> Choice:
    """Choose the newest state that all ranks have, and that was found damaged on none.

    Args:
        offers: Each rank's states, in the order of ranks.
        damaged: States that were found damaged on some rank.

    Raises:
        ConflictError: A former trainer lives, or the script differs from the memory's.
    """
    _check_fit(offers)
    kept = [copy.mark.step for offer in offers for copy in offer.copies]
    newest = max((*(offer.step for offer in offers), *kept), default=-1)
    why_not = _why_not_live(offers)
    lineages = {offer.lineage for offer in offers if offer.lineage}
    usable = _common_snapshots(offers, damaged, lineages)
    live = offers[0].live
    if not why_not and live is not None and ("live", live) not in damaged:
        reason = "all ranks stand at the same step"
        common_step = max((m.step for m in usable if m.lineage == live.lineage), default=0)
        return Choice(how="live", mark=live, lost_steps=0, reason=reason, common_step=common_step)
    why_not = why_not or "the memory of a rank is damaged"
    if usable:
        mark = usable[-1]
        if len(lineages) == 1 and mark.lineage not in lineages:
            why_not = f"{why_not}; nothing was kept since the rollback, which is undone by that"
        lost = max(newest - mark.step, 0)
        return Choice(
            how="snapshot", mark=mark, lost_steps=lost, reason=why_not, common_step=mark.step
        )
    if all(offer.absent for offer in offers) and not kept:
        return Choice(how="fresh", mark=FRESH, lost_steps=0, reason=offers[0].absent)
    return _lost(newest, why_not, copied=bool(kept))


def _lost(newest: int, why_not: str, *, copied: bool) -> Choice:
    """A fresh start, after which all steps are repeated."""
    copies = ", nor are the copies that others have kept whole and undamaged" if copied else ""
    reason = f"{why_not}, and no standing snapshot is whole on all ranks{copies}"
    return Choice(how="fresh", mark=FRESH, lost_steps=max(newest, 0), reason=reason)


def _check_fit(offers: Sequence[RankOffer]) -> None:
    """Raise ConflictError if a former trainer lives, or the script differs from the memory's."""
    for rank, offer in enumerate(offers):
        if offer.living_pid:
            raise ConflictError(
                f"resume: the former trainer of rank {rank} still runs (pid {offer.living_pid}); "
                "end it first, or attach under another job name"
            )
    for rank, offer in enumerate(offers):
        if offer.refusal:
            raise ConflictError(f"resume: on rank {rank} {offer.refusal}; {OVER_AN_EXPORT}")


def _common_snapshots(
    offers: Sequence[RankOffer], damaged: Collection[tuple[How, Mark]], lineages: Collection[int]
) -> list[Mark]:
    """The undamaged snapshots that all ranks have, the best one last."""
    common = set.intersection(*(set(offer.snapshots) for offer in offers))
    usable = sorted(mark for mark in common if ("snapshot", mark) not in damaged)
    # Steps that a rollback discarded come back only if there is nothing else.
    usable.sort(key=lambda mark: lineages == {mark.lineage})
    return usable


def _why_not_live(offers: Sequence[RankOffer]) -> str:
    for rank, offer in enumerate(offers):
        if offer.live is None:
            return f"rank {rank}: {offer.absent or offer.why_not_live}"
    marks = [offer.live for offer in offers if offer.live is not None]
    if len(set(marks)) > 1:
        steps = sorted({mark.step for mark in marks})
        if len(steps) > 1:
            return f"the ranks stand at steps {', '.join(map(str, steps))}"
        return "the ranks stand at different edits or histories"
    return ""


def signature_difference(was: list[Any], now: list[Any]) -> str:
    """The difference between two signatures of optimizers, in words; empty if none."""
    if len(was) != len(now):
        return f"there were {len(was)} optimizers and are {len(now)}"
    for number, ((old_class, old_groups), (new_class, new_groups)) in enumerate(
        zip(was, now, strict=True)
    ):
        if old_class != new_class:
            return f"optimizer {number} was {old_class} and is {new_class}"
        if len(old_groups) != len(new_groups):
            return (
                f"optimizer {number} ({new_class}) had {len(old_groups)} parameter groups and has "
                f"{len(new_groups)}"
            )
        for group, (old, new) in enumerate(zip(old_groups, new_groups, strict=True)):
            where = f"group {group} of optimizer {number} ({new_class})"
            if len(old) != len(new):
                return f"{where} had {len(old)} parameters and has {len(new)}"
            for index, (a, b) in enumerate(zip(old, new, strict=True)):
                if a != b:
                    return f"parameter {index} in {where} was {a[0]} {a[1]} and is {b[0]} {b[1]}"
    return ""
