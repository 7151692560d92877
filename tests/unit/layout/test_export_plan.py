"""Plans of exports: shards, names, writers, chunks; every element once."""

from __future__ import annotations

import pytest

from paramd.errors import ConflictError, UsageError
from paramd.layout.exports.dcp import MAX_CHUNK_BYTES
from paramd.layout.exports.optimizer import OptimizerTable, StateScalar
from paramd.layout.exports.plan import plan_export
from paramd.layout.exports.settings import ExportSettings, NameMap
from paramd.layout.types import Box, Interval, Layout, Piece, TensorKind, TensorLayout


def tensor(
    name: str, rows: int, ranks: int = 2, *, dtype: str = "float32", **fields: object
) -> TensorLayout:
    """`rows` rows of 4, cut evenly over the ranks."""
    cuts = [rows * rank // ranks for rank in range(ranks + 1)]
    pieces = tuple(
        Piece(rank, 4096 * ord(name[0]), Box((cuts[rank], 0), (cuts[rank + 1], 4)))
        for rank in range(ranks)
    )
    fields.setdefault("kind", TensorKind.PARAMETER)
    return TensorLayout(fqn=name, dtype=dtype, shape=(rows, 4), pieces=pieces, **fields)  # type: ignore[arg-type]


def layout(*tensors: TensorLayout, ranks: int = 2) -> Layout:
    return Layout(ranks, (1 << 30,) * ranks, tensors)


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


def test_bytes_are_balanced_over_writers_and_plans_are_equal() -> None:
    tensors = [tensor(f"{chr(97 + n)}", 20 + n, ranks=4) for n in range(16)]
    settings = ExportSettings(max_shard_bytes=350)
    plan = plan_export(layout(*tensors, ranks=4), settings)
    loads = dict.fromkeys(range(4), 0)
    for file in plan.files:
        loads[file.rank] += file.size_bytes
    assert max(loads.values()) < 1.3 * min(loads.values())
    assert plan.digest == plan_export(layout(*tensors, ranks=4), settings).digest
    other = ExportSettings(max_shard_bytes=351 * 2)
    assert plan.digest != plan_export(layout(*tensors, ranks=4), other).digest


def test_replicas_share_the_work_of_dcp() -> None:
    tensors = []
    for n in range(8):
        pieces = tuple(Piece(rank, n * 128, Box((0, 0), (8, 4))) for rank in range(4))
        tensors.append(TensorLayout(f"t{n}", "float32", (8, 4), TensorKind.PARAMETER, pieces))
    plan = plan_export(layout(*tensors, ranks=4), ExportSettings(format="dcp"))
    assert [file.name for file in plan.files] == [f"__{rank}_0.distcp" for rank in range(4)]
    assert {len(file.entries) for file in plan.files} == {2}


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


def test_names_are_mapped_exact_ones_first() -> None:
    rules = NameMap.of({"model.*": "m.*", "model.b": "special", "*.w": "*.weight"})
    assert rules.apply(["model.a", "model.b", "c.w", "d"]) == {
        "model.a": "m.a",
        "model.b": "special",
        "c.w": "c.weight",
        "d": "d",
    }


def test_names_that_collide_and_rules_that_fit_nothing_are_refused() -> None:
    two = layout(tensor("a", 4), tensor("b", 4))
    with pytest.raises(ConflictError, match="'a' and 'b'"):
        plan_export(two, ExportSettings(names=NameMap.of({"a": "b"})))
    with pytest.raises(UsageError, match="matches no exported tensor"):
        plan_export(two, ExportSettings(names=NameMap.of({"zz.*": "y.*"})))


def test_optimizer_state_has_files_of_its_own() -> None:
    table = OptimizerTable(
        {"exp_avg": {"a": "float32", "b": "float32"}, "exp_avg_sq": {"a": "float32"}},
        {"a": (StateScalar("step", "float32", 7.0),)},
        ({"lr": 0.1, "params": ["a", "b"]},),
    )
    assert OptimizerTable.from_json(table.to_json()) == table
    two = layout(tensor("a", 4), tensor("b", 4))
    plan = plan_export(two, ExportSettings(), table)
    files = {file.name: [entry.name for entry in file.entries] for file in plan.files}
    assert sorted(files["optimizer.safetensors"]) == [
        "a.exp_avg",
        "a.exp_avg_sq",
        "a.step",
        "b.exp_avg",
    ]
    assert list(plan.sources) == ["", "exp_avg", "exp_avg_sq"]
    dcp = plan_export(two, ExportSettings(format="dcp"), table)
    names = {entry.name for file in dcp.files for entry in file.entries}
    assert names >= {"model.a", "optim.state.a.exp_avg", "optim.state.a.step"}
