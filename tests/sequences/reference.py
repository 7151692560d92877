"""What every tensor, gradient and moment of a job is, from a log of what happened to it.

A history is a list of segments: segment j begins with edit j of its incarnation, at the step of the
boundary where that was applied. A state is named by (incarnation, edits, step), and computed from
the segment's beginning. Knows nothing of paramd.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from tests.sequences.model import COUNT, TIED, TRACE, State

KEPT_STATES = 600

Index = tuple[slice, ...]
Values = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Op:
    """What an edit does with one region of one parameter."""

    name: str
    index: Index
    apply: Callable[[torch.Tensor], object]
    """Changes the region in place."""
    undo: Callable[[torch.Tensor], object] | None = None
    """None: the region's former values are put back."""


@dataclass(eq=False)
class Event:
    """Something that began a segment."""

    what: str
    ops: Sequence[Op] = ()
    reset: bool = False
    rates: Mapping[str, float] = field(default_factory=dict)
    back_to: tuple[int, State] | None = None
    """Step and state of a rollback."""
    undoes: Event | None = None
    id: str = ""
    lives: int = 0
    """How many lives of sidecars there were; what undoes it ends with them."""
    before: tuple[int, State] | None = None
    former: list[torch.Tensor] = field(default_factory=list)

    def regions(self) -> dict[str, list[Index]]:
        found: dict[str, list[Index]] = {}
        for op in self.ops:
            found.setdefault(op.name, []).append(op.index)
        return found


def touches(one: Event, other: Event, shapes: Mapping[str, Sequence[int]]) -> bool:
    """Whether two edits change some element both."""
    if one.back_to is not None or other.back_to is not None:
        return True
    if one.rates or other.rates:
        return bool(one.rates and other.rates and set(one.rates) & set(other.rates))
    mine = one.regions()
    for name, regions in other.regions().items():
        marked = torch.zeros(shapes[name], dtype=torch.bool)
        for index in mine.get(name, []):
            marked[index] = True
        if any(bool(marked[index].any()) for index in regions):
            return True
    return False


class Incarnation:
    """The segments of one incarnation."""

    def __init__(self, step: int, state: State) -> None:
        self.begins: list[tuple[int, State]] = [(step, state)]
        self.events: list[Event | None] = [None]
        self._known: OrderedDict[tuple[int, int], State] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def edits(self) -> int:
        return len(self.begins) - 1

    def state(self, edits: int, step: int) -> State:
        """Raises KeyError: there was no such state."""
        begin, state = self.begins[edits]
        if step < begin:
            raise KeyError(f"edit {edits} was applied at step {begin}, after step {step}")
        with self._lock:
            at = next((s for s in range(step, begin, -1) if (edits, s) in self._known), begin)
            state = self._known.get((edits, at), state)
            for number in range(at + 1, step + 1):
                state = self._known[edits, number] = state.updated(number)
            while len(self._known) > KEPT_STATES:
                self._known.popitem(last=False)
        return state

    def forget(self, edits: int) -> None:
        """What was computed of a segment whose beginning was not known yet."""
        with self._lock:
            for key in [key for key in self._known if key[0] == edits]:
                del self._known[key]

    def had(self, edits: int, step: int) -> bool:
        """Whether the training was at that step in that segment."""
        after = self.events[edits + 1] if edits < self.edits else None
        end = after.before[0] if after is not None and after.before is not None else None
        return self.begins[edits][0] <= step and (end is None or step <= end)

    def made(self, edits: int, update: int) -> bool:
        """Whether it made that update in that segment."""
        return self.had(edits, update) and self.begins[edits][0] < update

    def add(self, event: Event, step: int) -> None:
        """An event that was applied at the boundary after update `step`."""
        before = self.state(self.edits, step)
        event.before = (step, before)
        edited = event.back_to if event.back_to is not None else (step, _edited(before, event))
        self.begins.append(edited)
        self.events.append(event)


def _edited(state: State, event: Event) -> State:
    parameters, momentum = dict(state.parameters), dict(state.momentum)
    for op in event.ops:
        value = parameters[op.name] = parameters[op.name].clone()
        event.former.append(value[op.index].clone())
        op.apply(value[op.index])
        if event.reset and op.name in momentum:
            moment = momentum[op.name] = momentum[op.name].clone()
            moment[op.index].zero_()
    return replace(
        state, parameters=parameters, momentum=momentum, rates={**state.rates, **event.rates}
    )


def undone(event: Event) -> Event:
    """The event that undoes one."""
    assert event.before is not None
    if event.back_to is not None:
        return Event(f"undo {event.what}", back_to=event.before, undoes=event)
    if event.rates:
        rates = {name: event.before[1].rates[name] for name in event.rates}
        return Event(f"undo {event.what}", rates=rates, undoes=event)

    def put(former: torch.Tensor) -> Callable[[torch.Tensor], object]:
        return lambda x: x.copy_(former)

    ops = [
        Op(op.name, op.index, op.undo, op.apply)
        if op.undo is not None
        else Op(op.name, op.index, put(former))
        for op, former in zip(event.ops, event.former, strict=True)
    ]
    return Event(f"undo {event.what}", ops=ops[::-1], undoes=event)


class Reference:
    """All incarnations of one job."""

    def __init__(self, first: State) -> None:
        self.first = first
        self.incarnations: dict[int, Incarnation] = {}

    def begin(self, number: int, step: int, state: State) -> Incarnation:
        found = self.incarnations[number] = Incarnation(step, state)
        return found


def value(state: State, name: str) -> torch.Tensor:
    """A parameter or buffer of a state, by any of its names."""
    if name == TRACE:
        return state.trace
    if name == COUNT:
        return torch.tensor(state.count)
    return state.parameters[TIED.get(name, name)]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal in shape, dtype and bits, but for the sign of zero."""
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def differing(got: torch.Tensor, wanted: torch.Tensor) -> str:
    """In words, how they differ; empty if they do not."""
    if same(got, wanted):
        return ""
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return f"{list(got.shape)} {got.dtype}, expected {list(wanted.shape)} {wanted.dtype}"
    bad = (got != wanted).reshape(-1)
    at = int(bad.nonzero()[0])
    zeros = int((got == 0).sum())
    return (
        f"{int(bad.sum())} of {got.numel()} elements differ, first element {at}: got "
        f"{got.reshape(-1)[at].item()!r}, expected {wanted.reshape(-1)[at].item()!r}"
        + (f"; {zeros} zeros" if zeros else "")
    )
