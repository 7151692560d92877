"""Finds the rank that keeps the others waiting, by what each rank is doing. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from paramd.mesh.insight.reports import Collective


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """What one rank's sidecar reports about it."""

    rank: int
    step: int = -1
    gone: str = ""
    """Why nothing more is known: its sidecar does not answer, or its trainer has ended."""
    ended_s: float = 0.0
    """Seconds since its trainer's process ended; 0 while it lives or when unknown."""
    ended_well: bool = False
    """Its script ran to its end."""
    stopped: bool = False
    """Its process is stopped by a signal."""
    held: bool = False
    overdue: bool = False
    boundary_age_s: float = -1.0
    """Seconds since its last boundary; -1 before the first."""
    kind: str = ""
    """Kind of activity of the training's thread; empty when unknown."""
    what: str = ""
    where: str = ""
    seen_for_s: float = -1.0
    """How long it has been seen there."""
    open: tuple[Collective, ...] = ()
    """Collectives that it has called and that have not ended."""
    memory: str = ""
    """What its sidecar says about memory that is short; empty when there is enough."""

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks rather than for itself."""
        return self.kind == "collective" or (bool(self.open) and self.kind not in _OWN)


Look = Callable[[], Awaitable[Sequence[Evidence]]]
"""Asks the ranks what they are doing now."""

_OWN = frozenset({"dataloader", "checkpoint", "debugger", "lock"})
"""Activities of a rank by itself, even with an asynchronous collective in progress."""


def verdict_of(ranks: Sequence[Evidence], before: Sequence[Sequence[Evidence]] = ()) -> str:
    """One or a few sentences, beginning with the rank to examine first. `before` has the same ranks
    in samples just before, which distinguish chance from habit."""
    gone = [one for one in ranks if one.gone]
    stopped = [one for one in ranks if one.stopped and not one.gone]
    here = [one for one in ranks if not one.gone and not one.stopped]
    busy = [one for one in here if one.overdue and not one.waits]
    if not (gone or stopped or any(one.overdue for one in here)):
        return _running(here, before)
    # A rank that waits for an overdue one will soon be overdue, too.
    waiting = [one for one in here if one.waits]
    causes = _alike(gone, lambda one: one.gone, lambda who, why, _: f"{who}: {why}")
    causes += [*_stopped(stopped), *_busy(busy)]
    if not waiting:
        return _sentence("; ".join(causes))
    if causes:
        return _sentence(f"{_waiting(waiting)} for {'; and for '.join(causes)}")
    return _sentence(_apart(waiting, len(ranks)))


def _running(here: Sequence[Evidence], before: Sequence[Sequence[Evidence]]) -> str:
    if not here:
        return "No rank is known."
    if all(one.held for one in here):
        return "Training is paused on request; paramd resume continues it."
    if all(one.boundary_age_s < 0 for one in here):
        return "Training has not passed its first boundary yet."
    slowest = max(here, key=lambda one: one.boundary_age_s)
    steps = sorted({one.step for one in here})
    at = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    age = seconds(slowest.boundary_age_s)
    text = f"Nothing is stuck: {at}; the last boundary of rank {slowest.rank} was {age} ago."
    # One sample alone may be chance.
    found = slowing([*before, here], least=max(2, (len(before) + 1) * _HABIT))
    text = f"{text} {found.text}" if found is not None else text
    short = _alike([one for one in here if one.memory], lambda one: one.memory, _short)
    return " ".join([text, *(f"{one}." for one in short)])


def _short(who: str, why: str, _some: Sequence[Evidence]) -> str:
    return f"On {who}: {why}"


@dataclass(frozen=True, slots=True)
class Slowing:
    """The cause of slow training, by several samples."""

    ranks: tuple[int, ...]
    text: str


def slowing(
    looks: Sequence[Sequence[Evidence]], *, least: float, least_reading: float = 0
) -> Slowing | None:
    """The only rank that is elsewhere than the others, which wait for each other, or the data that
    all of them read, in `least` samples or more (the data in `least_reading` or more, too); None
    when there is none.

    Ranks that meet at every step have equal step times, which show nothing about them.
    """
    alone = [one for look in looks if (one := lone(look)) is not None]
    share = f"In {{}} of {len(looks)} looks"
    for rank, count in Counter(one.rank for one in alone).most_common(1):
        if count >= least and len(alone) - count <= count * _CHANCE:
            what = Counter(one.what for one in alone if one.rank == rank).most_common(1)[0][0]
            others = ranks_text(one.rank for one in looks[-1] if one.rank != rank)
            said = f"{share.format(count)} rank {rank} was {what} while {others} waited for it"
            return Slowing((rank,), f"{said}: it slows the others.")
    reading = sum(bool(look) and all(one.kind == "dataloader" for one in look) for look in looks)
    if reading >= max(least, least_reading):
        ranks = tuple(one.rank for one in looks[-1])
        said = f"{share.format(reading)} {ranks_text(ranks)} waited for data"
        return Slowing(ranks, f"{said}: reading it slows training.")
    return None


_HABIT = 0.6
"""A share of samples that is a habit ..."""
_CHANCE = 0.2
"""... unless other ranks are seen there in this share of them: then all of them jitter."""


def culprits(ranks: Sequence[Evidence]) -> tuple[int, ...]:
    """The stuck ranks that the others wait for; all, when all wait."""
    busy = [one.rank for one in ranks if one.gone or one.stopped or (one.overdue and not one.waits)]
    return tuple(busy or [one.rank for one in ranks if one.overdue])


def lone(look: Sequence[Evidence]) -> Evidence | None:
    """The only rank that is apart from those that meet, unless deliberately so for a while."""
    apart = [one for one in look if not (one.waits or one.kind == "backward")]
    one = apart[0] if len(apart) == 1 < len(look) else None
    return one if one is not None and one.what and one.kind not in WILFUL else None


WILFUL = frozenset({"checkpoint", "debugger"})
"""Activities of a rank that others are meant to wait for: it is neither slow nor stuck by them."""


def _stopped(found: Sequence[Evidence]) -> list[str]:
    if not found:
        return []
    who, verb = ranks_text(one.rank for one in found), "is" if len(found) == 1 else "are"
    return [f"{who}, which {verb} stopped by a signal (kill -CONT continues)"]


def _busy(found: Sequence[Evidence]) -> list[str]:
    def text(who: str, what: str, some: Sequence[Evidence]) -> str:
        verb = "is" if len(some) == 1 else "are"
        where = f" ({some[0].where})" if some[0].where and some[0].where not in what else ""
        return f"{who}, which {verb} {what}{where}{_since(some)}"

    return _alike(found, lambda one: one.what, text)


def _since(some: Sequence[Evidence]) -> str:
    seen_s = min(one.seen_for_s for one in some)
    passed_s = min(one.boundary_age_s for one in some)
    if seen_s < 1:
        return f", {seconds(passed_s)} after its last boundary" if passed_s >= 0 else ""
    return f" since at least {seconds(seen_s)}"


def _waiting(found: Sequence[Evidence]) -> str:
    verb = "waits" if len(found) == 1 else "wait"
    names = sorted({_collective(one) for one in found})
    return f"{ranks_text(one.rank for one in found)} {verb} in {' and '.join(names)}"


def _collective(one: Evidence) -> str:
    if one.open:
        first = min(one.open, key=lambda made: made.sequence)
        return f"{first.name.rpartition(':')[2]} #{first.sequence}"
    return one.what.removeprefix("in ")


def _apart(waiting: Sequence[Evidence], count: int) -> str:
    """Text for overdue ranks that all wait in collectives: the same one, or different ones."""
    groups: dict[str, list[Evidence]] = {}
    for one in waiting:
        groups.setdefault(_collective(one), []).append(one)
    if len(groups) > 1:
        parts = [f"{_waiting(some)}" for some in groups.values()]
        return (
            f"{'; '.join(parts)}: the ranks do not call the same collectives in the same order "
            "(compare their stacks)"
        )
    name = next(iter(groups))
    if len(waiting) == count:
        return f"all ranks wait in {name}{_since(waiting)}: look at the network between them"
    return f"{_waiting(waiting)}{_since(waiting)}; no other rank is overdue yet"


def _alike(
    found: Sequence[Evidence],
    key: Callable[[Evidence], str],
    text: Callable[[str, str, Sequence[Evidence]], str],
) -> list[str]:
    ordered = sorted(found, key=lambda one: (key(one), one.rank))
    groups = [(what, list(some)) for what, some in groupby(ordered, key)]
    groups.sort(key=lambda pair: (-max(one.ended_s for one in pair[1]), pair[1][0].rank))
    return [text(ranks_text(one.rank for one in some), what, some) for what, some in groups]


def ranks_text(ranks: Iterable[int]) -> str:
    """ "rank 3", "ranks 0 to 2 and 5"."""
    ordered = sorted(ranks)
    parts: list[str] = []
    for _, run in groupby(enumerate(ordered), lambda pair: pair[1] - pair[0]):
        numbers = [rank for _, rank in run]
        first, last = numbers[0], numbers[-1]
        parts += [f"{first} to {last}"] if last - first > 1 else map(str, numbers)
    listed = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {listed}"


def seconds(value_s: float) -> str:
    """A duration for people."""
    if value_s >= 120:
        return f"{value_s / 60:.0f} min"
    return f"{value_s:.0f} s" if value_s >= 1 else f"{value_s * 1000:.0f} ms"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
