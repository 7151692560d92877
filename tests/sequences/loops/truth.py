"""What all ranks have recorded, joined to whole tensors, by the names of states."""

from __future__ import annotations

import pickle
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from tests.sequences.model import State
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
Rows = dict[int, list[Any]]
"""By rank, in the order of recording."""


class Truth:
    """Reads the records of the ranks as they grow."""

    def __init__(self, folder: Path, world_size: int, *, how: str) -> None:
        """`how`: what ranks have of a tensor: "whole", "dim 0" or "other tensors"."""
        self._folder, self._world_size, self._how = folder, world_size, how
        self._at = dict.fromkeys(range(world_size), (0, 0))
        self.states: OrderedDict[Name, dict[str, Rows]] = OrderedDict()
        self._updates: OrderedDict[Update, Rows] = OrderedDict()
        self._lock = threading.RLock()

    def read(self) -> None:
        """What was recorded since. Raises DefectError: a rank has seen something wrong itself."""
        with self._lock:
            for rank in range(self._world_size):
                for row in self._rows(rank):
                    self._take(rank, row)
            for known, most in ((self.states, KEPT_STATES), (self._updates, KEPT_UPDATES)):
                while len(known) > most:
                    known.popitem(last=False)

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
        kinds = self.states.setdefault(name, {"settled": {}, "resting": {}})
        rows = kinds[kind].setdefault(rank, [])
        # Once for equal ones, so that those of all ranks belong together by their order.
        if not rows or not _equal(rows[-1], rest[4:]):
            rows.append(rest[4:])
        self.states.move_to_end(name)

    def variants(self, fits: Callable[[Name], bool], *, resting: bool) -> list[tuple[Name, State]]:
        """States of such names that were published as settled; `resting`: or as resting."""
        with self._lock:
            found = []
            for name in reversed(self.states):
                if fits(name):
                    kinds = self.states[name]
                    rows = kinds["settled"]
                    found += [(name, one) for one in self._joined(rows)]
                    if resting:
                        found += [(name, one) for one in self._joined(kinds["resting"])]
            return found

    def names(self) -> list[Name]:
        """All states that are kept, in the order of recording."""
        with self._lock:
            return list(self.states)

    def state(self, incarnation: int, edits: int, step: int) -> State:
        """The one that was published last under this name. Raises KeyError: there was none."""

        def fits(name: Name) -> bool:
            return (name.incarnation, name.edits, name.step) == (incarnation, edits, step)

        found = self.wait(lambda: self.variants(fits, resting=False))
        if not found:
            raise KeyError(f"no state of incarnation {incarnation}, step {step}, edits {edits}")
        return found[-1][1]

    def gradients(self, update: Update) -> list[dict[str, torch.Tensor | None]]:
        """What optimizers consumed in that update, whose own they were; empty: not recorded."""

        def look() -> list[dict[str, torch.Tensor | None]]:
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

    def _joined(self, rows: Rows) -> Iterable[State]:
        for parts in self._parts(rows):
            parameters, moments = (
                self._tensors([part[place] for part in parts]) for place in (0, 1)
            )
            traces = [part[2] for part in parts if part[2] is not None]
            counts = [part[3] for part in parts if part[3] is not None]
            yield State(
                _whole(parameters), _whole(moments), traces[0] if traces else torch.zeros(0),
                counts[0] if counts else 0, parts[0][4],
            )  # fmt: skip

    def _tensors(self, parts: list[Mapping[str, Any]]) -> dict[str, torch.Tensor | None]:
        if self._how == "dim 0":
            names = {name for part in parts for name in part}
            return {name: _concatenated([part.get(name) for part in parts]) for name in names}
        found: dict[str, torch.Tensor | None] = {}
        for part in parts:
            found |= part
        return found


def _concatenated(parts: list[torch.Tensor | None]) -> torch.Tensor | None:
    there = [part for part in parts if part is not None]
    # A rank without elements of it has no gradient of it either.
    return torch.cat(there) if there else None


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return all(map(_equal, one, other))
    return bool(one == other)


def _whole(found: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
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
        return any(
            (name.incarnation, name.edits, name.step) == (self._number, edits, step)
            for name in self._truth.names()
        )

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
