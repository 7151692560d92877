"""Tables of optimizer state, merged by names of parameters."""

import math
from dataclasses import replace
from typing import Any

import pytest

from paramd.errors import ConflictError
from paramd.layout.exports.optimizer import OptimizerTable, StateScalar, optimizer_table, spread
from paramd.layout.exports.plan import plan_export
from paramd.layout.exports.settings import ExportSettings
from paramd.layout.types import Box, Interval, Layout, Piece, TensorKind, TensorLayout
from paramd.memory.optimizer_state import parse_text, table_text


def table(*params: dict[str, Any], **fields: Any) -> dict[str, Any]:
    groups = [[{"lr": 0.1, "betas": [0.9, 0.99]}, {"lr": 0.2}]]
    found = {"step": 7, "keys": ["exp_avg"], "params": [*params], "groups": groups, "failure": ""}
    return {**found, **fields}


def param(begin: int, end: int, **fields: Any) -> dict[str, Any]:
    found = {"begin": begin, "end": end, "keys": ["exp_avg"], "dtype": "float32"}
    found |= {"scalars": {"step": 7.0}, "left_out": {}, "others": {}, "optimizer": 0, "group": 0}
    return {**found, **fields}


def same(name: str, begin: int) -> TensorLayout:
    """Whole on both ranks."""
    pieces = tuple(Piece(rank, begin, Box((0,), (4,))) for rank in range(2))
    return TensorLayout(name, "float32", (4,), TensorKind.PARAMETER, pieces)


def layout() -> Layout:
    """`a` and `b` lie in one flat parameter on both ranks; `c` has no optimizer; `d` is whole."""

    def flat(name: str, begin: int, cut: int, numel: int) -> TensorLayout:
        pieces = (Piece(0, begin, Interval(0, cut)), Piece(1, begin, Interval(cut, numel)))
        return TensorLayout(name, "float32", (numel,), TensorKind.PARAMETER, pieces)

    tensors = (flat("a", 0, 4, 10), flat("b", 64, 3, 5), same("c", 8192), same("d", 4096))
    return Layout(2, (1 << 20,) * 2, tensors)


def ranks(**fields: Any) -> dict[int, dict[str, Any]]:
    one = table(param(0, 1024), param(4096, 4112, group=1))
    return {0: one, 1: table(param(0, 1024), param(4096, 4112, group=1, **fields))}


def test_state_of_flat_parameters_is_named_by_what_lies_in_them() -> None:
    found = optimizer_table(layout(), ranks())
    assert found.states == {"exp_avg": {"a": "float32", "b": "float32", "d": "float32"}}
    assert found.scalars["b"] == (StateScalar("step", "float32", 7.0),)
    assert found.groups == (
        {"lr": 0.1, "betas": [0.9, 0.99], "params": ["a", "b"]},
        {"lr": 0.2, "params": ["d"]},
    )


def test_what_cannot_be_given_is_refused_with_its_reason() -> None:
    tables = ranks()
    tables[1]["failure"] = "no room"
    with pytest.raises(ConflictError, match="rank 1: no optimizer state can be read: no room"):
        optimizer_table(layout(), tables)
    tables = {rank: table(param(0, 1024, left_out={"row": "odd"})) for rank in range(2)}
    with pytest.raises(ConflictError, match="'row' of 'a' cannot be exported: odd"):
        optimizer_table(layout(), tables)
    other = ranks()
    other[1]["step"] = 8
    with pytest.raises(ConflictError, match="different steps"):
        optimizer_table(layout(), other)


def test_state_that_one_rank_has_is_taken_from_it_and_where_none_has_it_there_is_none() -> None:
    kept = Layout(2, (1 << 20,) * 2, (same("a", 0), same("b", 64)))
    tables = {0: table(param(0, 16)), 1: table(param(64, 80))}
    assert spread(kept, optimizer_table(kept, {0: tables[0]}))
    found = optimizer_table(kept, tables)
    assert found.states == {"exp_avg": {"a": "float32", "b": "float32"}}
    assert found.replicas == {"b": 1}
    assert not spread(kept, found)
    for name in ("safetensors", "dcp"):
        plan = plan_export(kept, ExportSettings(format=name, patterns=("a", "b")), found)
        assert dict(plan.sources[""].spans) == {0: ((0, 80),)}
        assert dict(plan.sources["exp_avg"].spans) == {0: ((0, 16),), 1: ((64, 80),)}
    odd = {"a": (StateScalar("mu", "float32", -math.inf), StateScalar("on", "bool", True))}
    found = replace(found, scalars=odd)
    assert OptimizerTable.from_plain(parse_text(table_text(found.to_plain()))) == found
    # Muon for one, AdamW for the other: each has the state of its own optimizer.
    muon = param(0, 16, keys=["momentum_buffer"])
    both = table(muon, param(64, 80), keys=["momentum_buffer", "exp_avg"])
    states = optimizer_table(kept, {0: both, 1: both}).states
    assert states == {"momentum_buffer": {"a": "float32"}, "exp_avg": {"b": "float32"}}
    differing = {**tables, 1: table(param(0, 16, keys=["row"]), param(64, 80))}
    with pytest.raises(ConflictError, match="the ranks disagree on the optimizer state of 'a'"):
        optimizer_table(kept, differing)
