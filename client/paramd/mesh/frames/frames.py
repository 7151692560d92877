"""Frames of a stream, and the plans by which gradients are read. Pure.

Gradients are laid out as their parameters, so the layout's read plans apply, except that a
gradient may be the sum over several ranks (Partial). The notes that come with frames report first
which tensors are sums, then which ranks form a group; from then on all of them are read, and
summed by the client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from paramd.errors import UsageError
from paramd.layout.plan import Costs, ReadPlan, holders_of, plan_read
from paramd.layout.select import NameIndex, Pattern, SelectedTensor, select
from paramd.layout.stats import Part, Stats, Summary, merge_all, summarize
from paramd.layout.types import Box, Layout, TensorLayout

if TYPE_CHECKING:
    import torch

MAX_ROWS = 4096


@dataclass(frozen=True, slots=True)
class GradSelection:
    """One requested gradient."""

    name: str
    tensor: TensorLayout
    parts: tuple[SelectedTensor, ...]
    """Boxes that are concatenated along the first dim to form the result."""
    shape: tuple[int, ...]
    rows: tuple[int, ...] | None
    """Sampled rows of the first dim; None for all rows of the slice."""


@dataclass(frozen=True, slots=True)
class GradNote:
    """One rank's note on one gradient."""

    rank: int
    asked: int
    """Index into `GradPlan.asked`."""
    none: int
    """Why there is no gradient, a `NoGradient`; 0 if there is one."""
    group: int
    """Ranks of equal groups sum to the gradient; 0 if it is not Partial."""


@dataclass(frozen=True, slots=True)
class GradPlan:
    """How frames are read, until a frame's notes change."""

    asked: tuple[GradSelection, ...]
    plan: ReadPlan
    numbers: tuple[range, ...]
    """For each of `asked`, its tensors in `plan`, one per part; empty for a sum."""
    sums: ReadPlan
    """Reads of Partial tensors, one per rank of the group; empty without any."""
    layers: tuple[tuple[range, ...], ...]
    """For each of `asked`, its tensors in `sums`: one range per summand."""
    owners: Mapping[tuple[int, int], Sequence[int]]
    """(rank, first arena byte of a piece) -> indexes into `asked`."""
    used: frozenset[tuple[int, int]]
    """(rank, index into `asked`) of every read."""
    probed: frozenset[int]
    """Indexes into `asked` that are read of all holders, only to learn which groups they form."""
    groups: Mapping[int, Mapping[int, int]]
    """The plan's assumptions about the Partial ones: by index into `asked`, by rank."""


@dataclass(slots=True)
class PartialGroups:
    """The known groups of Partial gradients, by index into `GradPlan.asked`.

    Frames are requested ahead, so a frame may follow a plan that was made with less knowledge.
    Whether it may be read therefore depends on its own plan and its own notes, never on what is
    known now.
    """

    probing: set[int] = field(default_factory=set)
    """Known to be Partial; the next frame reads all holders to find their groups."""
    groups: dict[int, Mapping[int, int]] = field(default_factory=dict)
    """The group of each rank that holds a part."""

    def update(self, found: GradPlan, notes: Sequence[GradNote]) -> bool:
        """Take in a frame's notes; False if they contradict its plan: it is not to be read then."""
        said: dict[int, dict[int, int]] = {}
        for rank, asked in found.used:
            said.setdefault(asked, {})[rank] = 0
        for note in notes:
            if (note.rank, note.asked) not in found.used:
                continue
            if note.none:
                # Without a gradient it reports no groups, and nothing is summed either.
                said[note.asked].pop(note.rank, None)
            else:
                said[note.asked][note.rank] = note.group
        right = not found.probed
        for asked, now in said.items():
            if asked in found.probed:
                self.probing.discard(asked)
                self.groups[asked] = now
            elif asked in found.groups:
                known = found.groups[asked]
                if any(group != known.get(rank, 0) for rank, group in now.items()):
                    self._outdated(asked, known)
                    right = False
            elif any(now.values()):
                self._outdated(asked, None)
                right = False
        return right

    def _outdated(self, asked: int, known: Mapping[int, int] | None) -> None:
        """Plan again, unless more is known by now than the plan assumed."""
        if self.groups.get(asked) == known:
            self.groups.pop(asked, None)
            self.probing.add(asked)


def ask_for(
    index: NameIndex, patterns: Sequence[Pattern], rows: int | None
) -> tuple[GradSelection, ...]:
    """The gradients that match. Raises as `select`; UsageError if `rows` is out of range, too."""
    if rows is not None and not 1 <= rows <= MAX_ROWS:
        raise UsageError(f"rows: {rows}; expected 1 to {MAX_ROWS:,}")
    return tuple(_asked(item, rows) for item in select(index, patterns, with_buffers=False))


def _asked(item: SelectedTensor, rows: int | None) -> GradSelection:
    sizes = item.box.sizes
    if rows is None or not sizes or sizes[0] <= rows:
        return GradSelection(item.name, item.tensor, (item,), sizes, None)
    begin = item.box.begin[0]
    chosen = tuple(begin + number * sizes[0] // rows for number in range(rows))
    parts = tuple(
        replace(item, box=Box((row, *item.box.begin[1:]), (row + 1, *item.box.end[1:])))
        for row in chosen
    )
    return GradSelection(item.name, item.tensor, parts, (rows, *sizes[1:]), chosen)


def make_plan(
    layout: Layout, asked: Sequence[GradSelection], learnt: PartialGroups, *, costs: Costs | None
) -> GradPlan:
    """Plan the reads of `asked`, by what is known of Partial gradients. As `plan_read`."""
    plain: list[SelectedTensor] = []
    summed: list[SelectedTensor] = []
    numbers: list[range] = []
    layers: list[tuple[range, ...]] = []
    for index, one in enumerate(asked):
        begin, found = len(plain), []
        if index in learnt.probing or index in learnt.groups:
            for layer in _layers(one.tensor, learnt.groups.get(index)):
                found.append(range(len(summed), len(summed) + len(one.parts)))
                summed.extend(replace(part, tensor=layer) for part in one.parts)
        else:
            plain.extend(one.parts)
        numbers.append(range(begin, len(plain)))
        layers.append(tuple(found))
    plan, sums = plan_read(layout, plain, costs=costs), plan_read(layout, summed)
    used = {
        *_used(plan, [number for number, of in enumerate(numbers) for _ in of]),
        *_used(sums, [number for number, of in enumerate(layers) for one in of for _ in one]),
    }
    return GradPlan(
        asked=tuple(asked),
        plan=plan,
        numbers=tuple(numbers),
        sums=sums,
        layers=tuple(layers),
        owners=_owners(asked),
        used=frozenset(used),
        probed=frozenset(learnt.probing - learnt.groups.keys()),
        groups=dict(learnt.groups),
    )


def _owners(asked: Sequence[GradSelection]) -> dict[tuple[int, int], list[int]]:
    found: dict[tuple[int, int], list[int]] = {}
    for index, one in enumerate(asked):
        for piece in one.tensor.pieces:
            found.setdefault((piece.rank, piece.arena_begin), []).append(index)
    return found


def _used(plan: ReadPlan, owners: Sequence[int]) -> Iterator[tuple[int, int]]:
    for read in plan.ranks:
        for number in {landing.tensor for landing in read.landings}:
            yield read.rank, owners[number]


def _layers(tensor: TensorLayout, groups: Mapping[int, int] | None) -> Iterator[TensorLayout]:
    """Split a Partial tensor into its summands, each a tensor with one holder per region.

    `groups` None means that all holders of a region form one group. A region with fewer holders
    is missing in later layers.
    """
    holders = holders_of(tensor.pieces)
    if groups is not None:
        for index, pieces in enumerate(holders):
            group = groups.get(pieces[0].rank, 0)
            same = [piece for piece in pieces if groups.get(piece.rank, 0) == group]
            # Group 0: every holder has the full gradient, so read just one.
            holders[index] = same if group else same[:1]
    for layer in range(max(map(len, holders), default=0)):
        found = [pieces[layer] for pieces in holders if layer < len(pieces)]
        yield replace(tensor, pieces=tuple(found))


Kind = Literal["full", "stats", "histogram"]
KINDS: tuple[Kind, ...] = ("full", "stats", "histogram")

Value = TypeVar("Value", covariant=True)


@dataclass(kw_only=True, eq=False, repr=False)
class Frame(Mapping[str, Value], Generic[Value]):
    """Values by name, all at one step of one run."""

    job: str
    """Name of the job."""
    incarnation: int
    """Incarnation of the job; the same in all frames of a stream."""
    history: int
    """Rollbacks in this run: steps come again after each."""
    step: int
    """Gradients: number of the update that consumes them. Parameters: finished updates."""
    dropped: int
    """Frames skipped since the last one."""
    replica: int = 0
    """As in `Summoned`."""
    _made: Mapping[str, Any] = field(init=False)

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)


@dataclass(kw_only=True, eq=False, repr=False)
class GradFrame(Frame[Value]):
    """Gradients of all ranks before one update, or their statistics.

    `frame[name]` is None if there is no gradient; `frame.none` says why.
    """

    made: InitVar[Mapping[str, Callable[[], Value]]] = field(kw_only=False)
    """Makes the values, on first access."""
    none: Mapping[str, str]
    """Reason why there is no gradient, by name."""
    scale: float
    """Loss scale that the gradients still contain; 1 for none."""
    clip_factor: float | None
    """Factor that clipping applied; None if the trainer did not report it."""
    read_s: float = 0.0
    """Seconds it took to read the frame after all ranks had captured it."""
    parts: InitVar[Mapping[str, Sequence[Part]] | None] = None
    """Parts of each gradient; for statistics only."""
    bad_ranks: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Ranks that hold NaN or infinities, by name; for statistics only."""

    def __post_init__(
        self, made: Mapping[str, Callable[[], Value]], parts: Mapping[str, Sequence[Part]] | None
    ) -> None:
        self._made, self._parts = made, parts
        self._values: dict[str, Value] = {}

    def __getitem__(self, name: str) -> Value:
        if name not in self._values:
            self._values[name] = self._made[name]()
        return self._values[name]

    @cached_property
    def total(self) -> Summary:
        """Statistics over all gradients of the frame; `total.norm` is the global norm.

        Raises:
            AttributeError: the frame is of kind "full".
        """
        if self._parts is None:
            raise AttributeError('frames of kind "full" have no total; use kind="stats"')
        return summarize(merge_all(one for parts in self._parts.values() for one in parts))

    def merged(self, name: str) -> Stats | None:
        """Statistics of one gradient in mergeable form; None without a gradient."""
        if self._parts is None or name not in self._parts:
            return None
        return merge_all(self._parts[name])

    def document(self) -> dict[str, Any]:
        """The JSON document of REST and `paramd grads -o jsonl`; NaN becomes None."""
        rows = []
        for name in self:
            why = self.none.get(name)
            row: dict[str, Any] = {"name": name, "none": why}
            if why is None and self._parts is not None:
                row |= _numbers(summarize(merge_all(self._parts[name])))
                if name in self.bad_ranks:
                    row["bad_ranks"] = list(self.bad_ranks[name])
            rows.append(row)
        return {
            "job": self.job,
            "incarnation": self.incarnation,
            "step": self.step,
            "dropped": self.dropped,
            "clip": {"factor": self.clip_factor},
            "scale": self.scale,
            "total": _numbers(self.total),
            "params": rows,
        }

    def __repr__(self) -> str:
        return (
            f"<paramd.GradFrame of {self.job!r}: {len(self)} gradients that update {self.step} "
            f"consumes (run {self.incarnation}), {len(self.none)} of them None, "
            f"{self.dropped} frames dropped before>"
        )


@dataclass(kw_only=True, eq=False, repr=False)
class ParamFrame(Frame["torch.Tensor"]):
    """Parameters after one update. Unchanged tensors are the last frame's own objects, unless they
    have been written to: those are made again.
    """

    tensors: InitVar[Mapping[str, torch.Tensor]] = field(kw_only=False)
    changed: Sequence[str]
    """Names whose values differ from the last frame; all names in the first one."""
    sent_bytes: int = 0
    """Bytes that came from the ranks for this frame."""
    changed_bytes: int | None = None
    """Bytes of elements that differ from the last frame, once per replica; None without deltas."""

    def __post_init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._made, self.changed = dict(tensors), tuple(self.changed)

    def __getitem__(self, name: str) -> torch.Tensor:
        found: torch.Tensor = self._made[name]
        return found

    def __repr__(self) -> str:
        return (
            f"<paramd.ParamFrame of {self.job!r}: {len(self)} tensors after update {self.step} "
            f"(run {self.incarnation}), {len(self.changed)} of them changed, "
            f"{self.dropped} frames dropped before>"
        )


def _numbers(summary: Summary) -> dict[str, Any]:
    found: dict[str, Any] = summary.document()
    if summary.exponents:
        found["exponents"] = [list(bin_) for bin_ in summary.exponents]
    return found


def lazily_summed(parts: Sequence[Part]) -> Callable[[], Summary]:
    """A function that computes the summary of all parts."""
    return lambda: summarize(merge_all(parts))
