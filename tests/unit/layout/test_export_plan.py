"""Plans of exports: shards, names, writers, chunks; every element once."""

import math
from typing import Any

import pytest

from paramd.errors import ConflictError, NotFoundError, UsageError
from paramd.layout.exports.dcp import MAX_CHUNK_BYTES
from paramd.layout.exports.extra import EXTRA_STATE_BYTES, ExtraState
from paramd.layout.exports.optimizer import OptimizerTable, StateScalar
from paramd.layout.exports.plan import plan_export
from paramd.layout.exports.settings import ExportSettings, NameMap
from paramd.layout.types import Box, Interval, Layout, Piece, TensorKind, TensorLayout


def tensor(name: str, rows: int) -> TensorLayout:
    """`rows` rows of 4, cut evenly over two ranks."""
    begin, half = 4096 * ord(name[0]), rows // 2
    pieces = (Piece(0, begin, Box((0, 0), (half, 4))), Piece(1, begin, Box((half, 0), (rows, 4))))
    return TensorLayout(name, "float32", (rows, 4), TensorKind.PARAMETER, pieces)


def layout(*tensors: TensorLayout) -> Layout:
    return Layout(2, (1 << 30,) * 2, tensors)


def test_cutting_equals_that_of_huggingface_hub() -> None:
    hub = pytest.importorskip("huggingface_hub")
    torch = pytest.importorskip("torch")
    sizes = [10, 3, 100, 7, 12, 80, 1, 1, 40]
    state = {f"{chr(97 + i)}": torch.zeros(size, 4) for i, size in enumerate(sizes)}
    theirs = hub.split_torch_state_dict_into_shards(state, max_shard_size=400)
    tensors = [tensor(name, value.shape[0]) for name, value in state.items()]
    plan = plan_export(layout(*tensors), ExportSettings(max_shard_bytes=400))
    ours = {file.name: [entry.name for entry in file.entries] for file in plan.files}
    assert ours == {name: list(names) for name, names in theirs.filename_to_tensors.items()}


def test_chunks_of_dcp_are_boxes_of_bounded_size_that_cover_all() -> None:
    rows = 5 * MAX_CHUNK_BYTES // 4000 + 3
    flat = (Piece(0, 0, Interval(0, 1_000_001)), Piece(1, 0, Interval(1_000_001, rows * 1000)))
    a = TensorLayout("a", "float32", (rows, 1000), TensorKind.PARAMETER, flat)
    plan = plan_export(layout(a), ExportSettings(format="dcp"))
    entries = [entry for file in plan.files for entry in file.entries]
    assert sum(entry.box.numel for entry in entries) == rows * 1000
    assert max(entry.data_bytes for entry in entries) <= MAX_CHUNK_BYTES
    for file in plan.files:
        ends = [entry.begin_bytes + entry.size_bytes for entry in file.entries]
        assert [entry.begin_bytes for entry in file.entries] == [0, *ends[:-1]]


def test_only_what_is_named_is_written_with_its_optimizer_state() -> None:
    both = layout(tensor("a", 4), tensor("b", 4))
    states = {"exp_avg": {"a": "float32", "b": "float32"}, "momentum": {"b": "float32"}}
    scalars = {name: (StateScalar("step", "float32", 3.0),) for name in ("a", "b")}
    table = OptimizerTable(states, scalars, ({"lr": 0.1, "params": ["a", "b"]},))
    settings = ExportSettings(patterns=("a*",), names=NameMap.of({"a": "adapter"}))
    plan = plan_export(both, settings, table)
    assert plan.names == {"a": "adapter"}
    assert plan.optimizer == OptimizerTable(
        {"exp_avg": {"a": "float32"}}, {"a": scalars["a"]}, ({"lr": 0.1, "params": ["a"]},)
    )
    with pytest.raises(NotFoundError, match="c"):
        plan_export(both, ExportSettings(patterns=("a", "c")))
    with pytest.raises(UsageError, match="in part"):
        plan_export(both, ExportSettings(patterns=("a[0:2]",)))


def test_names_that_collide_and_rules_that_fit_nothing_are_refused() -> None:
    two = layout(tensor("a", 4), tensor("b", 4))
    with pytest.raises(ConflictError, match="'a' and 'b'"):
        plan_export(two, ExportSettings(names=NameMap.of({"a": "b"})))
    with pytest.raises(UsageError, match="matches no exported tensor"):
        plan_export(two, ExportSettings(names=NameMap.of({"zz.*": "y.*"})))
    peft = NameMap.of({"*.lora_A.default.weight": "base_model.model.*.lora_A.weight"})
    found = peft.apply(["q.lora_A.default.weight", "q.weight"])
    assert list(found.values()) == ["base_model.model.q.lora_A.weight", "q.weight"]
    odd = NameMap.of({"a.*": "star", "a.[0]": "row", "b.*": "c.*"})
    assert odd.apply(["a.*", "a.x", "a.[0]", "b.*", "b.x"]) == {
        "a.*": "star", "a.x": "a.x", "a.[0]": "row", "b.*": "c.*", "b.x": "b.x",
    }  # fmt: skip
    with pytest.raises(UsageError, match="or one on each side"):
        odd.apply(["a.x"])


def test_a_digest_tells_apart_what_differs_in_numbers_alone() -> None:
    def digest(lr: float = 0.1, value: int = 1, **settings: Any) -> bytes:
        table = OptimizerTable({}, {}, ({"lr": lr, "params": ["a"]},))
        extra = ExtraState({"a._extra_state": {"value": value}})
        return plan_export(layout(tensor("a", 4)), ExportSettings(**settings), table, extra).digest

    assert digest() == digest()
    assert len({digest(), digest(0.2), digest(value=2), digest(max_shard_bytes=1 << 20)}) == 4


def test_extra_state_that_a_rank_makes_up_is_refused_and_json_counts_with_all_its_bytes() -> None:
    three, told = {"data": "AAAA", "dtype": "int8"}, layout(tensor("a", 4))
    for name, one, match in (
        ("x", [1], "'x' is malformed"),
        ("x", {"data": 3}, "'x' is malformed"),
        ("x", {"value": 3, "why": ""}, "'x' is malformed"),
        ("x", {**three, "shape": [math.inf]}, "'x' is malformed"),
        ("x", {**three, "shape": [-1, -3]}, "'x' has 3 bytes"),
        ("a", {**three, "shape": [3]}, "'a' has the name of a parameter"),
    ):
        with pytest.raises(UsageError, match=f"extra state {match}"):
            plan_export(told, ExportSettings(), None, ExtraState.merged([{name: one}]))
    assert not ExtraState.merged([{"x": {"value": "v" * (EXTRA_STATE_BYTES - 1)}}]).kept
