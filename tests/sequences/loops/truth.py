"""What all ranks have recorded, joined to whole tensors, by the names of states."""

from __future__ import annotations

import pickle
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch

from tests.sequences.loops.packing import Packed, unpacked
from tests.sequences.model import TRACE, State
from tests.sequences.reference import Event, _edited, differing
from tests.sequences.session import DefectError, patience_s

KEPT_STATES = 1500
KEPT_UPDATES = 1500
LATE_S = 5.0
"""How much later than an answer a rank may record what it is of."""
LOOK_S = 0.02


class Name(NamedTuple):
    """Of a state."""

    incarnation: int
    history: int
    step: int
    edits: int


class Update(NamedTuple):
    """Of the gradients of an update."""

    incarnation: int
    history: int
    step: int


Found = TypeVar("Found")
Kind = Literal["settled", "resting"]
Rows = dict[int, list[Any]]
"""By rank, in the order of recording."""
Gradients = dict[str, torch.Tensor | None]


@dataclass(eq=False)
class Kept:
    """What was recorded under the name of a state."""

    rows: dict[Kind, Rows] = field(default_factory=lambda: {"settled": {}, "resting": {}})
    joined: dict[tuple[Kind, int], State] = field(default_factory=dict)
    """Those that were asked for. What ranks record later comes behind, and changes none of them."""


class Truth:
    """Reads the records of the ranks as they grow."""

    def __init__(self, folder: Path, world_size: int, *, how: str) -> None:
        """`how`: what ranks have of a tensor: "whole", "dim 0" or "other tensors"."""
        self._folder, self._world_size, self._how = folder, world_size, how
        self._at = dict.fromkeys(range(world_size), (0, 0))
        self.states: OrderedDict[Name, Kept] = OrderedDict()
        self._of_step: dict[tuple[int, int], list[Name]] = {}
        """By incarnation and step, in the order of recording."""
        self._updates: OrderedDict[Update, Rows] = OrderedDict()
        self.count = 0
        """States that were recorded so far, under other names each."""
        self._lock = threading.RLock()

    def read(self) -> None:
        """What was recorded since. Raises DefectError: a rank has seen something wrong itself."""
        with self._lock:
            for rank in range(self._world_size):
                for row in self._rows(rank):
                    self._take(rank, row)
            while len(self._updates) > KEPT_UPDATES:
                self._updates.popitem(last=False)
            while len(self.states) > KEPT_STATES:
                name, _ = self.states.popitem(last=False)
                self._names(name).remove(name)
                if not self._names(name):
                    del self._of_step[name.incarnation, name.step]

    def _names(self, like: Name) -> list[Name]:
        """Those of its incarnation and step."""
        return self._of_step.setdefault((like.incarnation, like.step), [])

    def _rows(self, rank: int) -> Iterator[tuple[Any, ...]]:
        while True:
            number, at = self._at[rank]
            path = self._folder / f"truth-{rank}-{number:06}"
            if not path.exists():
                return
            # Looked for before it is read: what is read then is all of it.
            ended = (self._folder / f"truth-{rank}-{number + 1:06}").exists()
            with path.open("rb") as file:
                file.seek(at)
                data = file.read()
            place = 0
            while len(data) - place >= 8:
                size = int.from_bytes(data[place : place + 8], "little")
                if len(data) - place - 8 < size:
                    break
                yield pickle.loads(data[place + 8 : place + 8 + size])  # noqa: S301 (written by our ranks)
                place += 8 + size
            self._at[rank] = (number, at + place)
            if not ended:
                return
            path.unlink()
            self._at[rank] = (number + 1, 0)

    def _take(self, rank: int, row: tuple[Any, ...]) -> None:
        kind, *rest = row
        if kind == "wrong":
            raise DefectError(f"rank {rank}: {rest[0]}")
        if kind == "gradients":
            # An update that is made again under its old name has the later ones.
            update = Update(*rest[:3])
            self._updates.setdefault(update, {}).setdefault(rank, []).append(rest[3])
            self._updates.move_to_end(update)
            return
        name = Name(*rest[:4])
        self.count += name not in self.states
        kept = self.states.setdefault(name, Kept())
        rows = kept.rows["settled" if kind == "settled" else "resting"].setdefault(rank, [])
        # Once for equal ones, so that those of all ranks belong together by their order.
        if not rows or rows[-1] != rest[4:]:
            rows.append(rest[4:])
        self.states.move_to_end(name)
        names = self._names(name)
        if name in names:
            names.remove(name)
        names.append(name)

    def variants(
        self, incarnation: int, step: int, fits: Callable[[Name], bool], *, resting: bool
    ) -> list[tuple[Name, State]]:
        """States of such names that were published as settled; `resting`: or as resting."""
        with self._lock:
            found = []
            for name in reversed(self._of_step.get((incarnation, step), [])):
                if fits(name):
                    kept = self.states[name]
                    found += [(name, one) for one in self._joined(kept, "settled")]
                    if resting:
                        found += [(name, one) for one in self._joined(kept, "resting")]
            return found

    def names(self) -> list[Name]:
        """All states that are kept, in the order of recording."""
        with self._lock:
            return list(self.states)

    def state(self, incarnation: int, edits: int, step: int) -> State:
        """The one that was published last under this name. Raises KeyError: there was none."""

        def look() -> list[tuple[Name, State]]:
            return self.variants(incarnation, step, lambda n: n.edits == edits, resting=False)

        found = self.wait(look)
        if not found:
            raise KeyError(f"no state of incarnation {incarnation}, step {step}, edits {edits}")
        return found[-1][1]

    def had(self, incarnation: int, edits: int, step: int) -> bool:
        """Whether any rank has recorded such a state."""
        with self._lock:
            names = self._of_step.get((incarnation, step), [])
            return any(name.edits == edits for name in names)

    def gradients(self, update: Update) -> list[Gradients]:
        """What optimizers consumed in that update, whose own they were; empty: not recorded."""

        def look() -> list[Gradients]:
            with self._lock:
                rows = self._updates.get(update, {})
                return [self._tensors(parts) for parts in self._parts(rows)]

        return self.wait(look)

    def wait(self, look: Callable[[], Found], seconds: float = LATE_S) -> Found:
        """What `look` finds, once it finds something."""
        until_s = time.monotonic() + patience_s(seconds)
        while True:
            self.read()
            if (found := look()) or time.monotonic() > until_s:
                return found
            time.sleep(LOOK_S)

    def _parts(self, rows: Rows) -> Iterator[list[Any]]:
        """What the ranks have recorded of one thing, as often as all of them have."""
        ranks = range(self._world_size) if self._how != "whole" else range(1)
        if all(rank in rows for rank in ranks):
            for index in range(min(len(rows[rank]) for rank in ranks)):
                yield [rows[rank][index] for rank in ranks]

    def _joined(self, kept: Kept, kind: Kind) -> Iterator[State]:
        for index, parts in enumerate(self._parts(kept.rows[kind])):
            if (kind, index) not in kept.joined:
                kept.joined[kind, index] = self._state(parts)
            yield kept.joined[kind, index]

    def _state(self, parts: list[Any]) -> State:
        parameters, moments = (
            _whole(self._tensors([part[place] for part in parts])) for place in (0, 1)
        )
        traces = [dict(unpacked(part[2]))[TRACE] for part in parts if part[2].specs]
        counts = [part[3] for part in parts if part[3] is not None]
        trace = traces[0] if traces else None
        return State(
            parameters, moments, trace if trace is not None else torch.zeros(0),
            counts[0] if counts else 0, parts[0][4],
        )  # fmt: skip

    def _tensors(self, parts: list[Packed]) -> Gradients:
        given = [dict(unpacked(part)) for part in parts]
        if self._how == "dim 0":
            names = {name for part in given for name in part}
            return {name: _concatenated([part.get(name) for part in given]) for name in names}
        found: Gradients = {}
        for part in given:
            found |= part
        return found


def _concatenated(parts: list[torch.Tensor | None]) -> torch.Tensor | None:
    there = [part for part in parts if part is not None]
    # A rank without elements of it has no gradient of it either.
    return torch.cat(there) if there else None


def _whole(found: Gradients) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in found.items() if tensor is not None}


class Recorded:
    """The segments of one incarnation, as `reference.Incarnation` has them, from the record."""

    def __init__(self, number: int, truth: Truth, step: int) -> None:
        self._number, self._truth = number, truth
        self.begins: list[tuple[int, State | None]] = [(step, None)]
        self.events: list[Event | None] = [None]

    @property
    def edits(self) -> int:
        return len(self.begins) - 1

    def state(self, edits: int, step: int) -> State:
        """Raises KeyError: there was no such state."""
        return self._truth.state(self._number, edits, step)

    def had(self, edits: int, step: int) -> bool:
        """Whether the training was at that step in that segment."""
        self._truth.read()
        return self._truth.had(self._number, edits, step)

    def add(self, event: Event, step: int) -> None:
        """An event that was applied at the boundary after update `step`.

        Raises:
            DefectError: the training has other values than its effect on the state before.
        """
        where = f"{event.what} at step {step}"
        try:
            before = self.state(self.edits, step)
            event.before = (step, before)
            back, wanted = event.back_to if event.back_to is not None else (
                step, _edited(before, event))  # fmt: skip
            after = self.state(self.edits + 1, back)
        except KeyError as error:
            raise DefectError(f"{where}: {error.args[0]}") from None
        for what, got, expected in (
            ("parameters", after.parameters, wanted.parameters),
            ("momentum", after.momentum, wanted.momentum),
        ):
            if got.keys() != expected.keys():
                raise DefectError(f"{where}: {what} of {sorted(got.keys() ^ expected.keys())[:4]}")
            bad = {n: text for n in got if (text := differing(got[n], expected[n]))}
            if bad:
                raise DefectError(f"{where}: {what} are wrong: {list(bad.items())[:3]}")
        if after.rates != wanted.rates:
            raise DefectError(f"{where}: rates {after.rates}, expected {wanted.rates}")
        self.begins.append((back, after))
        self.events.append(event)
