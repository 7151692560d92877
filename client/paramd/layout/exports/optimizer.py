"""Merge the ranks' optimizer tables into one table of state by parameter name. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import isfinite
from typing import Any

from paramd.errors import ConflictError, UsageError
from paramd.layout.dtypes import ITEM_BYTES
from paramd.layout.exports.files import piece_bytes
from paramd.layout.plan import Replica
from paramd.layout.types import Layout, Piece, TensorKind, TensorLayout

_INFINITE = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


@dataclass(frozen=True, slots=True)
class StateScalar:
    """A 0-dim state such as Adam's "step"; the same on all ranks."""

    key: str
    dtype: str
    value: float


@dataclass(frozen=True, slots=True)
class OptimizerTable:
    """The optimizer state of a job at one step, by parameter name."""

    states: Mapping[str, Mapping[str, str]]
    """State key -> fqn -> dtype of that state, which has the parameter's shape."""
    scalars: Mapping[str, tuple[StateScalar, ...]]
    """fqn -> its 0-dim states."""
    groups: tuple[Mapping[str, Any], ...]
    """Parameter groups: settings, and the fqns of their parameters under "params"."""
    replicas: Mapping[str, int] = field(default_factory=dict)
    """fqn -> the replica that has its state, where it is not the one that parameters are of: an
    optimizer may keep each state on one rank (ZeroRedundancyOptimizer)."""

    @property
    def keys(self) -> tuple[str, ...]:
        """State keys of tensors, in order."""
        return tuple(self.states)

    def tensors(self, key: str) -> Iterator[tuple[str, str]]:
        """(fqn, dtype of its state) for one key."""
        return iter(self.states[key].items())

    def of(self, names: Collection[str]) -> OptimizerTable:
        """The part for these parameters."""
        states = {
            key: {fqn: dtype for fqn, dtype in found.items() if fqn in names}
            for key, found in self.states.items()
        }
        groups = tuple(
            {**group, "params": [fqn for fqn in group.get("params", ()) if fqn in names]}
            for group in self.groups
        )
        scalars = {fqn: found for fqn, found in self.scalars.items() if fqn in names}
        replicas = {fqn: rank for fqn, rank in self.replicas.items() if fqn in names}
        return OptimizerTable(
            {key: found for key, found in states.items() if found}, scalars, groups, replicas
        )

    def to_plain(self) -> dict[str, Any]:
        """The table as plain JSON, to travel in a message; equal tables are equal."""
        return {
            "states": {key: dict(names) for key, names in self.states.items()},
            "scalars": {
                fqn: [[s.key, s.dtype, s.value if isfinite(s.value) else str(s.value)] for s in of]
                for fqn, of in self.scalars.items()
            },
            "groups": [dict(group) for group in self.groups],
            "replicas": dict(self.replicas),
        }

    @classmethod
    def from_plain(cls, found: Mapping[str, Any]) -> OptimizerTable:
        """The inverse of `to_plain`; UsageError if malformed."""
        try:
            states = {str(k): _names(v) for k, v in found["states"].items()}
            scalars = {
                str(fqn): tuple(
                    StateScalar(str(key), str(dtype), _INFINITE.get(value, value))
                    for key, dtype, value in of
                )
                for fqn, of in found["scalars"].items()
            }
            replicas = {str(fqn): int(rank) for fqn, rank in found.get("replicas", {}).items()}
            return cls(states, scalars, tuple(map(dict, found["groups"])), replicas)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"the optimizer's table cannot be read: {error!r}") from None


def _names(table: Mapping[str, str]) -> dict[str, str]:
    for fqn, dtype in table.items():
        if dtype not in ITEM_BYTES:
            raise ValueError(f"{fqn}: dtype {dtype!r}")
    return dict(table)


@dataclass(frozen=True, slots=True)
class _Param:
    """One rank's optimizer state of the bytes [begin, end) of its arena."""

    begin: int
    end: int
    dtypes: Mapping[str, str]
    scalars: Mapping[str, Any]
    left_out: Mapping[str, str]
    place: tuple[int, int]
    """Index of its optimizer, and of its group there."""

    @property
    def has_state(self) -> bool:
        return bool(self.dtypes or self.scalars or self.left_out)


class _Rank:
    """One rank's table, by place in the arena."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        self.failure = str(table.get("failure", ""))
        self.step = int(table["step"])
        self.keys = [str(key) for key in table["keys"]]
        self.groups = [list(groups) for groups in table["groups"]] if not self.failure else []
        params = table["params"] if not self.failure else ()
        self._params = sorted((_param(one) for one in params), key=lambda one: one.begin)

    def find(self, begin: int, end: int) -> _Param | None:
        at = bisect_right(self._params, begin, key=lambda one: one.begin) - 1
        if at < 0 or end > self._params[at].end:
            return None
        return self._params[at]


def optimizer_table(
    layout: Layout, tables: Mapping[int, Mapping[str, Any]], replica: int = 0
) -> OptimizerTable:
    """The state of all of the job's optimizers, from the read ranks' tables
    (memory/optimizer_state.py).

    `replica`: preferred source of state; otherwise another one of these ranks.

    Raises:
        ConflictError: If a rank could not tell its state, ranks disagree, or a state cannot be
            exported.
        UsageError: If a table is malformed, or no holder of some parameter has one.
    """
    try:
        ranks = {rank: _Rank(table) for rank, table in tables.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"a table of optimizer state is malformed: {error!r}") from None
    for rank, found in ranks.items():
        if found.failure:
            raise ConflictError(f"rank {rank}: no optimizer state can be read: {found.failure}")
    if len({found.step for found in ranks.values()}) > 1:
        raise ConflictError("the ranks' optimizer states are of different steps; try again")
    replica_of = cache(partial(Replica, layout))
    params: dict[str, _Param] = {}
    replicas: dict[str, int] = {}
    for tensor in layout.tensors:
        if tensor.kind is not TensorKind.PARAMETER or not tensor.numel:
            continue
        rank, param = _of_tensor(tensor, ranks, replica, replica_of)
        if param is not None:
            params[tensor.fqn] = param
        if rank != replica:
            replicas[tensor.fqn] = rank
    return replace(_table(params, ranks), replicas=replicas)


def spread(layout: Layout, table: OptimizerTable) -> bool:
    """Whether a parameter without state has a replica that was perhaps not asked."""
    having = {fqn for names in table.states.values() for fqn in names} | set(table.scalars)
    return any(
        tensor.kind is TensorKind.PARAMETER
        and tensor.fqn not in having
        and len({piece.region for piece in tensor.pieces}) < len(tensor.pieces)
        for tensor in layout.tensors
    )


def _of_tensor(
    tensor: TensorLayout,
    ranks: Mapping[int, _Rank],
    preferred: int,
    replica_of: Callable[[int], Replica],
) -> tuple[int, _Param | None]:
    """The optimizer state of a tensor, and its replica; None if it has none.

    All that have state must agree on its kinds and numbers.
    """
    pieces = [piece for piece in tensor.pieces if piece.region.numel and piece.rank in ranks]
    found = {piece.rank: _of_piece(tensor, piece, ranks) for piece in pieces}
    if not found:
        raise UsageError(f"no holder of {tensor.fqn!r} sent a table of optimizer state")
    having = {rank: one for rank, one in found.items() if one is not None and one.has_state}
    if not having:
        return preferred, next(iter(found.values()))
    first = next(iter(having.values()))
    if first.left_out:
        key, reason = next(iter(first.left_out.items()))
        raise ConflictError(
            f"state {key!r} of {tensor.fqn!r} cannot be exported: {reason}; export without the "
            "optimizer"
        )
    if all(_facts(first) == _facts(other) for other in having.values()):
        for rank in dict.fromkeys([preferred, *having]):
            if all(piece.rank in having for piece in replica_of(rank).pieces(tensor)):
                return rank, first
    raise ConflictError(
        f"the ranks disagree on the optimizer state of {tensor.fqn!r}; export without it"
    )


def _of_piece(tensor: TensorLayout, piece: Piece, ranks: Mapping[int, _Rank]) -> _Param | None:
    begin = piece.arena_begin
    return ranks[piece.rank].find(begin, begin + piece_bytes(piece, tensor.dtype))


def _facts(param: _Param) -> object:
    return dict(param.dtypes), dict(param.scalars), param.place


def _table(params: Mapping[str, _Param], ranks: Mapping[int, _Rank]) -> OptimizerTable:
    keys = list(dict.fromkeys(key for found in ranks.values() for key in found.keys))
    states = {
        key: {fqn: param.dtypes[key] for fqn, param in params.items() if key in param.dtypes}
        for key in keys
    }
    scalars = {
        fqn: tuple(StateScalar(key, *_typed(value)) for key, value in param.scalars.items())
        for fqn, param in params.items()
        if param.scalars
    }
    return OptimizerTable(
        {key: names for key, names in states.items() if names}, scalars, _groups(params, ranks)
    )


def _typed(value: Any) -> tuple[str, float]:
    """A scalar's dtype and value; floats are float32, as in torch's own optimizers."""
    if isinstance(value, bool):
        return "bool", value
    if isinstance(value, int):
        return "int64", value
    return "float32", _INFINITE[value] if isinstance(value, str) else float(value)


def _groups(params: Mapping[str, _Param], ranks: Mapping[int, _Rank]) -> tuple[dict[str, Any], ...]:
    found: dict[tuple[int, int], list[str]] = {}
    for fqn, param in params.items():
        found.setdefault(param.place, []).append(fqn)
    return tuple(
        {**settings, "params": found.get((optimizer, number), [])}
        for optimizer, groups in enumerate(ranks[min(ranks)].groups)
        for number, settings in enumerate(groups)
    )


def _param(one: Mapping[str, Any]) -> _Param:
    others = one["others"].items()
    return _Param(
        begin=int(one["begin"]),
        end=int(one["end"]),
        dtypes=dict.fromkeys(one["keys"], one["dtype"]),
        scalars={**one["scalars"], **{key: value for key, value in others if value is not None}},
        left_out={key: why for key, why in one["left_out"].items() if key not in one["others"]},
        place=(int(one["optimizer"]), int(one["group"])),
    )
