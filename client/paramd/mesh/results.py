"""Results of a mesh, with tables for terminals and notebooks."""

from __future__ import annotations

import asyncio
import ctypes
import html
import os
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, asdict, dataclass, field, fields
from functools import partial
from importlib import import_module
from pathlib import PurePath
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    NoReturn,
    Self,
    SupportsIndex,
    TypeVar,
    overload,
)

from paramd import gone
from paramd.documents import Shown, plain
from paramd.errors import NotFoundError, ParamdError, UsageError
from paramd.filters import Facts
from paramd.layout.stats import STATISTICS, Statistic, Summary
from paramd.layout.types import TensorKind, TensorLayout, joined
from paramd.mesh.peers.ends import ended_well
from paramd.mesh.peers.grpc import PHASE_NAMES
from paramd.mesh.peers.sidecars import Sidecars
from paramd.mesh.peers.waits import NOBODY, Awaited, awaited_of, with_waits
from paramd.v1 import common_pb2

if TYPE_CHECKING:
    import torch

SHOWN_ROWS = 40
"""Rows that a table prints."""

Item = TypeVar("Item")

UNSETTLED_TEXT = "; not settled: training has not continued since"
"""Printed after the step of unsettled values."""

STATE_TIMEOUT_S = 2.0
"""A sidecar that takes longer to report its state is shown as unreachable."""

_REASONS = {
    "waiting": "no trainer has attached yet",
    "orphaned": "its trainer has ended; its last step is still served",
    "torn": "its trainer ended inside an update; its parameters are refused",
}
_ENDED_WELL = "its script has ended (exit code 0)"


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class ParamInfo(Shown):
    """One parameter or buffer of the mesh."""

    name: str
    """Canonical name, as a user's state_dict has it."""
    names: tuple[str, ...]
    """All its names; more than one for tied tensors."""
    shape: tuple[int, ...]
    """Full shape."""
    dtype: str
    """torch dtype without its prefix."""
    numel: int
    """Elements of the full tensor."""
    placement: str
    """The distribution in words."""
    kind: TensorKind
    """Parameter or buffer."""
    ranks: tuple[int, ...]
    """Ranks that hold a part of it."""
    trainable: bool | None = None
    """Whether it required a gradient, on some rank, when the job was attached; a script may
    freeze and unfreeze parameters later. None for buffers, and where it is not known."""

    @property
    def facts(self) -> Facts:
        """For the terms of a filter."""
        return Facts(
            tensor=self, kind=self.kind.value, names=self.names, ranks=frozenset(self.ranks)
        )

    @classmethod
    def of(cls, tensor: TensorLayout) -> ParamInfo:
        """From the layout."""
        return cls(
            name=tensor.fqn,
            names=(tensor.fqn, *tensor.aliases),
            ranks=tuple(sorted({piece.rank for piece in tensor.pieces if piece.region.numel})),
            shape=tensor.shape,
            dtype=tensor.dtype,
            numel=tensor.numel,
            placement=tensor.placement,
            kind=tensor.kind,
            trainable=tensor.trainable,
        )


@gone.tells
class Table(tuple[Item, ...], Generic[Item]):
    """An immutable list of rows that prints as a table."""

    columns: Sequence[tuple[str, Callable[[Any], str]]] = ()
    """Header and text of each column."""
    row_type: type
    """Dataclass of the rows."""
    about: Sequence[str] = ()
    """Attributes that describe all rows."""
    key = "name"
    """Attribute of a row that finds it, as in `table["head.weight"]`."""

    def __new__(cls, rows: Iterable[Item] = (), **about: object) -> Self:
        """`about`: values of the attributes that a class declares beside its rows."""
        self = super().__new__(cls, rows)
        vars(self).update(about)
        return self

    @overload
    def __getitem__(self, at: SupportsIndex | str) -> Item: ...
    @overload
    def __getitem__(self, at: slice) -> Self: ...
    def __getitem__(self, at: SupportsIndex | slice | str) -> Item | Self:
        """A row by its place or its name; a slice is a table of what this one is of."""
        if isinstance(at, str):
            for row in self:
                if self._key_of(row) == at:
                    return row
            raise NotFoundError(f"no row is called {at!r}; this table has {len(self)} rows")
        if isinstance(at, slice):
            return type(self)(super().__getitem__(at), **vars(self))
        return super().__getitem__(at)

    def __contains__(self, item: object) -> bool:
        """Whether it is a row, or the name of one."""
        named = isinstance(item, str) and any(self._key_of(row) == item for row in self)
        return named or super().__contains__(item)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, texts and numbers, for `json.dumps`.

        "rows" has what `to_pandas` has; beside it stands what describes all rows, such as job and
        step. NaN and infinities, which JSON lacks, are None.
        """
        return dict(plain({**self._told_of_all(), "rows": [self._record(row) for row in self]}))

    def _told_of_all(self) -> dict[str, Any]:
        """What describes all rows, by name."""
        return {name: getattr(self, name) for name in self.about}

    def _key_of(self, row: Any) -> Any:
        return row.get(self.key) if isinstance(row, Mapping) else getattr(row, self.key, None)

    def cells(self) -> list[list[str]]:
        """Cell texts of the first `SHOWN_ROWS` rows."""
        return [[text(row) for _, text in self.columns] for row in self[:SHOWN_ROWS]]

    def summary(self) -> str:
        """The line below the table."""
        return f"{len(self)} rows"

    def to_pandas(self) -> Any:
        """The rows, in order, as a new `pandas.DataFrame`; pandas is imported here only.

        Columns are the rows' fields, with their values rather than the printed texts; an empty
        table has them too. `DataFrame.attrs` describes all rows, with job and step for example.
        Totals are left out.

        Raises:
            UsageError: pandas cannot be imported.
        """
        try:
            pandas = import_module("pandas")
        except ImportError as error:
            raise UsageError(
                f"to_pandas needs pandas, which cannot be imported here ({error}); "
                "run: pip install pandas"
            ) from error
        # By name: from no rows at all pandas would make no columns.
        rows = [self._record(row) for row in self]
        frame = pandas.DataFrame(rows, columns=list(self._names()) or None)
        frame.attrs.update(self._told_of_all())
        return frame

    @classmethod
    def _names(cls) -> Sequence[str]:
        """Names of the values in `_record`."""
        return [one.name for one in fields(cls.row_type)]

    @classmethod
    def _record(cls, row: Any) -> dict[str, Any]:
        """One row's values by name."""
        return {name: getattr(row, name) for name in cls._names()}

    def __repr__(self) -> str:
        return text_table([name for name, _ in self.columns], self.cells(), self._below())

    def _repr_html_(self) -> str:
        return html_table([name for name, _ in self.columns], self.cells(), self._below())

    def _below(self) -> str:
        hidden = len(self) - SHOWN_ROWS
        return self.summary() + (f" ({hidden} not shown)" if hidden > 0 else "")


class Records(Table[Item]):
    """Dataclasses, or documents as REST sends them; each of their fields is a column."""

    def __new__(cls, rows: Iterable[Item] = (), **about: object) -> Self:
        self = super().__new__(cls, rows, **about)
        names = cls._record(self[0]) if self else ()
        vars(self)["columns"] = [(name, partial(cls._cell, name)) for name in names]
        return self

    @classmethod
    def _names(cls) -> Sequence[str]:
        return ()

    @classmethod
    def _record(cls, row: Any) -> dict[str, Any]:
        return dict(row) if isinstance(row, Mapping) else asdict(row)

    @classmethod
    def _cell(cls, name: str, row: Any) -> str:
        return str(cls._record(row).get(name, ""))


class Params(Table[ParamInfo]):
    """Parameters, and buffers if requested, that match the patterns."""

    step: int = -1
    """Step of the statistics that terms compared; -1 without such terms."""
    unsettled: bool = False
    """As in `Summoned`, of those statistics."""

    columns = (
        ("name", lambda row: row.name),
        ("shape", lambda row: shape_text(row.shape)),
        ("dtype", lambda row: row.dtype),
        ("numel", lambda row: f"{row.numel:,}"),
        ("placement", lambda row: row.placement),
        ("ranks", lambda row: ranks_text(row.ranks)),
        ("trainable", lambda row: {None: "-", True: "yes", False: "no"}[row.trainable]),
    )
    row_type = ParamInfo

    @classmethod
    def _record(cls, row: Any) -> dict[str, Any]:
        """As `Table._record`, with the kind as text."""
        return {**super()._record(row), "kind": row.kind.value}

    def summary(self) -> str:
        return f"{len(self)} tensors, {sum(row.numel for row in self):,} elements"


@dataclass(frozen=True, kw_only=True, repr=False)
class TensorStats:
    """Statistics of one full tensor; replicas count once. All but the counts are over the finite
    elements alone."""

    name: str
    """The matching name, or "total"."""
    dtype: str
    shape: tuple[int, ...]
    whole: InitVar[Summary]
    count: int = field(init=False)
    """Elements."""
    zero_count: int = field(init=False)
    nan_count: int = field(init=False)
    inf_count: int = field(init=False)
    norm: float = field(init=False)
    """Square root of the sum of squares; NaN if there are elements and none is finite."""
    mean: float = field(init=False)
    """NaN without finite elements."""
    std: float = field(init=False)
    """Unbiased, as `torch.Tensor.std()`; NaN with fewer than two finite elements."""
    min: float = field(init=False)
    """NaN without finite elements."""
    max: float = field(init=False)
    """NaN without finite elements."""

    def __post_init__(self, whole: Summary) -> None:
        # In one call: a table may have 100,000 rows.
        vars(self).update(zip(_NUMBERS, whole, strict=False), _summary=whole)

    @property
    def summary(self) -> Summary:
        """The same numbers, with the histogram if there is one."""
        found: Summary = vars(self)["_summary"]
        return found

    @property
    def exponents(self) -> tuple[tuple[int, int], ...]:
        """Pairs (e, count) of elements with 2**e <= abs(x) < 2**(e+1), e ascending; needs
        `stats(histogram=True)`."""
        return self.summary.exponents

    def to_dict(self) -> dict[str, Any]:
        """As `Table.to_dict`, of this row."""
        return dict(plain(self))

    def __repr__(self) -> str:
        numbers = ", ".join(f"{one.title} {_shown(one)(self)}" for one in STATISTICS)
        return f"<paramd.TensorStats {self.name} {shape_text(self.shape)} {self.dtype}: {numbers}>"

    def _repr_html_(self) -> str:
        shown = StatsTable.columns
        return html_table([name for name, _ in shown], [[text(self) for _, text in shown]], "")


def _shown(one: Statistic) -> Callable[[TensorStats], str]:
    return lambda row: format(getattr(row.summary, one.name), one.form)


_NUMBERS: Sequence[str] = tuple(one.name for one in fields(TensorStats))[3:]
"""The numbers of a row, in the order of `Summary`."""


class StatsTable(Table[TensorStats]):
    """Statistics per tensor, all of one state; `total` is over all tensors that patterns
    and terms about facts chose."""

    columns = (
        ("name", lambda row: row.name),
        ("shape", lambda row: shape_text(row.shape)),
        ("dtype", lambda row: row.dtype),
        *((one.title, _shown(one)) for one in STATISTICS),
    )
    row_type = TensorStats
    about = ("job", "incarnation", "step", "unsettled", "label")
    total: TensorStats
    replica: int = 0
    """As in `Summoned`."""
    job: str
    incarnation: int
    history: int = 0
    """As in `Summoned`."""
    step: int
    unsettled: bool = False
    """As in `Summoned`."""
    label: str = ""
    """As in `Summoned`."""

    def to_pandas(self) -> Any:
        """As `Table.to_pandas`; with a column `exponents` if the histogram was asked for."""
        frame = super().to_pandas()
        if any(row.exponents for row in self):
            frame["exponents"] = [row.exponents for row in self]
        return frame

    def to_dict(self) -> dict[str, Any]:
        """As `Table.to_dict`, with "total"."""
        return {**super().to_dict(), "total": self.total.to_dict()}

    @property
    def whole(self) -> bool:
        """Whether `total` is of these rows, not of a part of the table or of other terms."""
        return sum(row.summary.count for row in self) == self.total.summary.count

    def cells(self) -> list[list[str]]:
        """As `Table.cells`; the last row is the total, if it is of these rows."""
        last = [text(self.total) for _, text in self.columns]
        return [*super().cells(), *([last] if self.whole else [])]

    def summary(self) -> str:
        rests = unsettled_text(unsettled=self.unsettled, label=self.label)
        return (
            f"{len(self)} tensors of {self.job!r} at step {self.step} (run "
            f"{self.incarnation}{rests})"
        )


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class RankStatus(Shown):
    """State of one rank."""

    rank: int
    phase: str
    """For example "constant", "update", "torn", or "unreachable"."""
    step: int = -1
    """Finished updates; -1 when unknown."""
    step_time_s: float = 0.0
    """Smoothed time between two boundaries; 0 when unknown."""
    stall_total_s: float = 0.0
    """Total time updates waited for copies."""
    stall_count: int = 0
    snapshot_bytes: int = 0
    arena_bytes: int = 0
    address: str
    reason: str
    """The problem; empty for a healthy rank that waits for no other."""
    awaits: tuple[int, ...] = ()
    """Ranks that this healthy one has long been waiting for, and that work; empty: none."""

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong with the rank. One that is paused on request is healthy, and so
        is one whose script ran to its end (exit code 0)."""
        told = self.phase == "paused" or self.reason == _ENDED_WELL
        return not self.reason or told or bool(self.awaits)


class MeshStatus(Table[RankStatus]):
    """`job`, `incarnation` and `world_size`; one row per rank."""

    columns = (
        ("rank", lambda row: str(row.rank)),
        ("phase", lambda row: row.phase),
        ("step", lambda row: str(row.step) if row.step >= 0 else "-"),
        ("step time", lambda row: f"{1e3 * row.step_time_s:.1f} ms" if row.step_time_s else "-"),
        ("stalls", lambda row: f"{row.stall_count} ({1e3 * row.stall_total_s:.1f} ms)"),
        ("arena", lambda row: bytes_text(row.arena_bytes)),
        ("snapshots", lambda row: bytes_text(row.snapshot_bytes)),
        ("note", lambda row: row.reason),
    )
    row_type = RankStatus
    about = ("job", "incarnation", "world_size", "step")
    job: str
    incarnation: int
    world_size: int

    @property
    def step(self) -> int:
        """Lowest step reported by a rank; -1 when none reports one."""
        return min((row.step for row in self if row.step >= 0), default=-1)

    def summary(self) -> str:
        return (
            f"job {self.job!r}, run {self.incarnation}, step {self.step}, "
            f"{sum(row.healthy for row in self)} of {self.world_size} ranks healthy"
        )


@dataclass(kw_only=True, eq=False, repr=False)
class _OneStep(dict[str, Item]):
    """Values by name, all of one step; prints as a table."""

    job: str
    """Name of the job."""
    incarnation: int
    """Incarnation of the job."""
    step: int
    """Number of finished updates that every value here is of."""
    seconds: float
    """Duration of the call."""
    bytes: int
    """Bytes read from the sidecars."""

    def __repr__(self) -> str:
        return text_table(*self._table())

    def _repr_html_(self) -> str:
        return html_table(*self._table())

    def _table(self) -> tuple[Sequence[str], list[list[str]], str]:
        header, what, rests = self._about()
        hidden = len(self) - SHOWN_ROWS
        below = (
            f"{what} of {self.job!r} at step {self.step} (run {self.incarnation}{rests}), "
            f"{bytes_text(self.bytes)} in {self.seconds:.3f} s"
            + (f" ({hidden} not shown)" if hidden > 0 else "")
        )
        rows = [[name, *self._cells(one)] for name, one in list(self.items())[:SHOWN_ROWS]]
        return header, rows, below

    def _about(self) -> tuple[Sequence[str], str, str]:
        """The columns, the name of the rows, and the text after the step."""
        raise NotImplementedError

    def _cells(self, value: Item) -> list[str]:
        """The texts beside a name."""
        raise NotImplementedError


@dataclass(kw_only=True, eq=False, repr=False)
class OptimizerState(_OneStep["dict[str, torch.Tensor | float]"]):
    """An optimizer's state by parameter name and kind ("exp_avg"), all of one step.

    Tensors have the parameter's full shape, or that of the slice; state of one number, such as
    "step", is a number. A parameter without state, or without elements, has an empty dict.
    """

    states: InitVar[Mapping[str, dict[str, torch.Tensor | float]]] = field(kw_only=False)
    groups: Sequence[Mapping[str, Any]]
    """Parameter groups of all optimizers: their hyper-parameters, and under "params" the names
    of the requested parameters in each."""
    edits: int
    """Edits applied in this run."""

    def __post_init__(self, states: Mapping[str, dict[str, torch.Tensor | float]]) -> None:
        self.update(states)
        self.groups = tuple(self.groups)

    def _about(self) -> tuple[Sequence[str], str, str]:
        return ("name", "state"), f"optimizer state of {len(self)} parameters", ""

    def _cells(self, value: dict[str, torch.Tensor | float]) -> list[str]:
        return [", ".join(f"{key} {_told(one)}" for key, one in value.items()) or "none"]


def _told(value: torch.Tensor | float) -> str:
    return f"{value:g}" if isinstance(value, int | float) else shape_text(value.shape)


@gone.tells
@dataclass(kw_only=True, eq=False, repr=False)
class Summoned(_OneStep["torch.Tensor"]):
    """Full tensors by name, all at one step. Tied names are keys of the same tensor object."""

    tensors: InitVar[Mapping[str, torch.Tensor]] = field(kw_only=False)
    edits: int = 0
    """Edits applied in this run."""
    history: int = 0
    """Rollbacks in this run: steps come again after each, so that `incarnation`,
    `history`, `step` and `edits` together name the state."""
    unsettled: bool = False
    """Training has not continued since update `step`, so the script may still change these
    values (clamp or average them, say) before it does."""
    label: str = ""
    """With `unsettled=True` asked for: the label of weights that the training marked as not its own
    (`attachment.swapped_weights`), such as "ema"; empty: unmarked."""
    replica: int = 0
    """A rank of the replica that all values come from. Ranks that hold the same tensors may still
    have different values: buffers, local SGD, parameters left out of DDP."""
    replicas_differ: tuple[str, ...] | None = None
    """The tensors of which samples on up to eight ranks were not equal at this step. None: not
    compared, because no other rank had this step at once."""
    optimizer: OptimizerState | None = None
    """With `optimizer=True`: the optimizer's state of the same step."""

    def __post_init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.update(tensors)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """A new plain dict for `module.load_state_dict`; its tensors are these, not copies.

        It has the summoned names: every name of a tied tensor that matched, and buffers with
        `summon(..., buffers=True)`. So `summon("*", buffers=True)` loads strictly, unless the
        module has persistent state other than tensors; without buffers, or from other patterns,
        give `strict=False`. Names are those of the unwrapped module (no "module." of DDP).
        """
        return dict(self)

    def numpy(self) -> dict[str, Any]:
        """NumPy arrays by name, which share the tensors' memory. NumPy has no bfloat16."""
        return {name: tensor.numpy() for name, tensor in self.items()}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file with every name, in the format that its own name says.

        Takes no memory beside the tensors, except for one that is on a device or not contiguous.
        For tensors that do not fit into memory see `download`.

        Args:
            path: "x.safetensors", or without a suffix: a safetensors file, whose metadata has job
                and step. "x.pt", "x.pth" or "x.bin": the `state_dict` as torch.save writes it, for
                torch.load.

        Raises:
            UsageError: the name says another format. OSError: it cannot be written.
        """
        if file_format(path) == "torch":
            import_module("torch").save(self.state_dict(), path)
            return
        from paramd.layout.exports.safetensors import TensorSpec, encode_header, file_order

        about = {"job": self.job, "incarnation": str(self.incarnation), "step": str(self.step)}
        specs = file_order(
            TensorSpec(
                name=name,
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=tuple(tensor.shape),
            )
            for name, tensor in self.items()
        )
        with open(path, "wb") as file:
            file.write(encode_header(specs, about))
            # The format has no shared memory: every name has its own bytes.
            for spec in specs:
                own = self[spec.name].detach().cpu().resolve_conj().resolve_neg().contiguous()
                if own.nbytes:
                    file.write((ctypes.c_char * own.nbytes).from_address(own.data_ptr()))

    def __eq__(self, other: object) -> bool:
        """Whether names, devices and values are those of another mapping; NaN is unlike NaN."""
        if not isinstance(other, Mapping) or self.keys() != other.keys():
            return False
        pairs = ((one, other[name]) for name, one in self.items())
        # What is no tensor has no such device.
        return all(getattr(b, "device", None) == a.device and a.equal(b) for a, b in pairs)

    def __ne__(self, other: object) -> bool:
        # A dict's own would compare the tensors one element at a time.
        return not self == other

    __hash__ = None  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        # With protocol 2 torch.save pickles, and torch.load by default takes no class of ours.
        if protocol == 2:
            return OrderedDict, (), None, None, iter(self.items())
        return super().__reduce_ex__(protocol)

    def __enter__(self) -> NoReturn:
        raise UsageError(
            "these are copies: summon(..., writeback=True) is the block to change them"
        )

    def __exit__(self, *_: object) -> None: ...

    def _about(self) -> tuple[Sequence[str], str, str]:
        rests = unsettled_text(unsettled=self.unsettled, label=self.label)
        rests += differ_text(self.replicas_differ)
        return ("name", "shape", "dtype", "device"), f"{len(self)} tensors", rests

    def _cells(self, value: torch.Tensor) -> list[str]:
        dtype = str(value.dtype).removeprefix("torch.")
        return [shape_text(value.shape), dtype, str(value.device)]


_SAFETENSORS = ("", ".safetensors")
_TORCH = (".pt", ".pth", ".bin")


def file_format(path: str | os.PathLike[str]) -> Literal["safetensors", "torch"]:
    """The format of a file of tensors, by its suffix.

    Raises:
        UsageError: For other formats.
    """
    suffix = PurePath(path).suffix.lower()
    if suffix in _TORCH:
        return "torch"
    # "model.v2" and "step-0.5" say nothing of a format.
    if suffix in _SAFETENSORS or re.fullmatch(r"\.v?[0-9]+", suffix):
        return "safetensors"
    raise UsageError(
        f"path: {os.fspath(path)!r} has the suffix {suffix!r}; expected .safetensors, or for "
        f"torch.load {', '.join(_TORCH)}"
    )


def differ_text(names: Sequence[str] | None) -> str:
    """How other replicas differ; empty if they do not."""
    more = f" and {len(names) - 3:,} more" if names and len(names) > 3 else ""
    return f"; other replicas differ in {', '.join(names[:3])}{more}" if names else ""


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], below: str) -> str:
    """A table in plain text, with a line below it."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    ]
    return "\n".join([*lines, below])


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]], below: str) -> str:
    """As `text_table`, in HTML. Names come from the training script, so everything is escaped."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        f"<p>{html.escape(below)}</p>"
    )


def shape_text(shape: Iterable[int]) -> str:
    """For example "[4, 8]"."""
    return "[" + ", ".join(map(str, shape)) + "]"


def ranks_text(ranks: Sequence[int]) -> str:
    """For example "0-3, 6"."""
    runs = joined(((rank, rank + 1) for rank in ranks), 0)
    return ", ".join(str(b) if e == b + 1 else f"{b}-{e - 1}" for b, e in runs)


def unsettled_text(*, unsettled: bool, label: str) -> str:
    """The text after the step of unsettled values; empty for settled ones."""
    if label:
        return f"; not the training's weights: {label!r}"
    return UNSETTLED_TEXT if unsettled else ""


def bytes_text(size_bytes: int) -> str:
    """For example "1.5 MiB"."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


async def mesh_status(sidecars: Sidecars, deadline_s: float) -> MeshStatus:
    """Query all ranks concurrently; unreachable ranks get a row that says why."""
    document = sidecars.document
    timeout_s = min(STATE_TIMEOUT_S, deadline_s - time.monotonic())
    found = await asyncio.gather(
        *(_rank_state(sidecars, rank, timeout_s) for rank in range(document.world_size))
    )
    awaited = awaited_of(one for one in found if isinstance(one, common_pb2.RankState))
    rows = [
        one
        if isinstance(one, RankStatus)
        else rank_status(rank, document.peers[rank].address, one, awaited)
        for rank, one in enumerate(found)
    ]
    return MeshStatus(
        rows, job=document.job, incarnation=document.incarnation, world_size=document.world_size
    )


async def _rank_state(
    sidecars: Sidecars, rank: int, timeout_s: float
) -> common_pb2.RankState | RankStatus:
    """The rank's state, or the row of a rank that does not answer."""
    peer = sidecars.document.peers.get(rank)
    if peer is None:
        return _silent(rank, "", "its sidecar has not joined")
    try:
        answer = await sidecars.state(rank, timeout_s)
    except ParamdError as error:
        return _silent(rank, peer.address, str(error))
    return answer.state


def rank_status(
    rank: int, address: str, told: common_pb2.RankState, awaited: Awaited = NOBODY
) -> RankStatus:
    """The row of a rank that answers; `awaited`: the ranks that others wait for."""
    state = with_waits(told, awaited)
    phase = PHASE_NAMES.get(state.phase, "unknown")  # from a newer sidecar
    reason = _REASONS.get(phase, state.phase_reason)
    if ended_well(state):
        reason = _ENDED_WELL
    if not reason and state.unserved_reason:
        reason = f"its parameters are not served: {state.unserved_reason}"
    if not reason and not state.agreement_works and state.agreement_reason:
        reason = state.agreement_reason
    return RankStatus(
        rank=rank,
        phase=phase,
        step=state.step,
        step_time_s=state.step_time_ns / 1e9,
        stall_total_s=state.stall_total_ns / 1e9,
        stall_count=state.stall_count,
        snapshot_bytes=state.snapshot_bytes,
        arena_bytes=state.arena_bytes,
        address=address,
        reason=reason,
        awaits=awaited.ranks if state is not told and reason == state.phase_reason else (),
    )


def _silent(rank: int, address: str, reason: str) -> RankStatus:
    return RankStatus(rank=rank, phase="unreachable", address=address, reason=reason)
