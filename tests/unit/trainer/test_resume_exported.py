"""Exports that a training goes on from: each rank's own parts, and what is refused and why."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from xxhash import xxh3_128_hexdigest

from paramd.layout.types import Box, Interval, Layout, Piece, TensorKind, TensorLayout
from paramd.trainer.resume import exported
from paramd.trainer.resume.exported import Exported, Offered, opened

ID = "0" * 32
WEIGHT = torch.arange(12, dtype=torch.float32).view(4, 3)
BIAS = torch.arange(5, dtype=torch.float32) + 100
MEAN = torch.tensor([7.0, 8.0])

Files = dict[str, Any]


def layout() -> Layout:
    """Columns, a flat interval, and a buffer, on rank 1 of two."""
    pieces = {
        "weight": (Piece(0, 0, Box((0, 0), (4, 1))), Piece(1, 0, Box((0, 1), (4, 3)), (1, 4))),
        "bias": (Piece(0, 64, Interval(0, 2)), Piece(1, 64, Interval(2, 5))),
        "mean": (Piece(1, 128, Box((0,), (2,))),),
    }
    kinds = {"mean": TensorKind.BUFFER}
    shapes = {"weight": (4, 3), "bias": (5,), "mean": (2,)}
    tensors = (
        TensorLayout(name, "float32", shapes[name], kinds.get(name, TensorKind.PARAMETER), held)
        for name, held in pieces.items()
    )
    return Layout(2, (192, 192), tuple(tensors))


def made(folder: Path, tensors: Files | None = None, **more: Any) -> Offered:
    """An export as the exporter writes one."""
    whole = {"model.safetensors": {"weight": WEIGHT, "bias": BIAS, "mean": MEAN}}
    for name, content in (whole if tensors is None else tensors).items():
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            save_file(content, folder / name)
    listed = [
        {
            "name": path.name,
            "size_bytes": path.stat().st_size,
            "xxh3": xxh3_128_hexdigest(path.read_bytes()),
        }
        for path in sorted(folder.iterdir())
    ]
    manifest = {"paramd_export": 1, "export_id": ID, "renamed": {}, "files": listed} | more
    (folder / exported.MANIFEST).write_text(json.dumps(manifest))
    return Offered(ID, 7, "safetensors", "backup/one", str(folder), "")


def why_not(offered: Offered, *optimizers: torch.optim.Optimizer) -> str:
    found, told = opened(offered, layout(), 1, optimizers, (0, 1))
    assert (found is None) is bool(told["why"])
    if found is not None:
        found.close()
    return str(told["why"])


@pytest.mark.parametrize("chunk_bytes", [exported.CHUNK_BYTES, 13])
def test_a_rank_gets_its_own_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr(exported, "CHUNK_BYTES", chunk_bytes)
    found, told = opened(made(tmp_path), layout(), 1, [], (0, 1))
    assert (told["why"], found is not None) == ("", True)
    assert isinstance(found, Exported)
    arena = bytearray(192)
    found.fill(memoryview(arena))
    found.close()
    floats = torch.frombuffer(arena, dtype=torch.float32)
    assert torch.equal(floats[:8].as_strided((4, 2), (1, 4)), WEIGHT[:, 1:])
    assert torch.equal(floats[16:19], BIAS[2:])
    assert torch.equal(floats[32:34], MEAN)
    assert not floats[8:16].any()


def test_state_of_a_local_parameter_that_ddp_made_of_a_dtensor(tmp_path: Path) -> None:
    arena = torch.zeros(48)
    param = torch.nn.Parameter(arena[:8].as_strided((4, 2), (1, 4)))
    # What torch's `_pre_dp_module_transform` leaves on it: the spec of the DTensor that it was.
    param._st_info = object()  # type: ignore[attr-defined]
    optimizer = torch.optim.SGD([param], momentum=0.9)
    momentum = torch.arange(12.0).view(4, 3) / 8
    groups = [{key: value for key, value in optimizer.param_groups[0].items() if key != "params"}]
    offered = made(
        tmp_path,
        {
            "model.safetensors": {"weight": WEIGHT, "bias": BIAS, "told._extra_state": MEAN},
            "optimizer.safetensors": {"weight.momentum_buffer": momentum},
            exported.OPTIMIZER_GROUPS: json.dumps({"groups": groups}).encode(),
        },
        extra_state=["told._extra_state"],
    )
    found, told = opened(offered, layout(), 1, [optimizer], (0, 1))
    assert told["why"] == ""
    assert isinstance(found, Exported)
    found.restore([optimizer], arena.data_ptr(), 192)
    found.close()
    assert torch.equal(optimizer.state[param]["momentum_buffer"], momentum[:, 1:])


def damaged(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")


def linked(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.rename(folder.parent / "elsewhere")
    path.symlink_to(folder.parent / "elsewhere")


ESCAPING = {"name": "../elsewhere", "size_bytes": 1, "xxh3": ""}
HARMS: dict[str, Callable[[Path], object]] = {
    "model.safetensors is damaged": damaged,
    "safetensors is damaged": lambda folder: os.truncate(folder / "model.safetensors", 40),
    "has no model.safetensors": lambda folder: (folder / "model.safetensors").unlink(),
    "Too many levels of symbolic links": linked,
    "has no paramd-export.json": lambda folder: (folder / exported.MANIFEST).unlink(),
    "another export has taken its place": lambda folder: made(folder, {}, export_id="1" * 32),
    "names a file '../elsewhere'": lambda folder: made(folder, {}, files=[ESCAPING]),
}


@pytest.mark.parametrize("why", HARMS)
def test_what_is_damaged_or_gone_is_named(tmp_path: Path, why: str) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    offered = made(folder)
    assert why_not(offered) == ""
    HARMS[why](folder)
    assert why in why_not(offered)


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ({"weight": WEIGHT, "mean": MEAN}, "it has no 'bias'"),
        ({"weight": WEIGHT.half(), "bias": BIAS}, "'weight' is float16 [4, 3] there and float32"),
        ({"weight": WEIGHT, "bias": BIAS[:4].clone()}, "'bias' is float32 [4] there and"),
        ({"weight": WEIGHT, "bias": BIAS, "other": MEAN}, "it has 'other', which this model lacks"),
    ],
)
def test_another_model_is_refused(tmp_path: Path, tensors: Files, why: str) -> None:
    assert why in why_not(made(tmp_path, {"model.safetensors": tensors}))


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        ([{"lr": 1, "params": []}, {"lr": 1, "params": []}], "had 2 parameter groups and have 1"),
        ([{"lr": 1, "betas": [0.9, 0.99], "params": []}], "group 0 has 'betas' only in the export"),
    ],
)
def test_state_of_other_optimizers_is_refused(tmp_path: Path, groups: Any, why: str) -> None:
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    settings = {name: 0 for name in sgd.param_groups[0] if name != "params"}
    one = [group if len(groups) > 1 else settings | group for group in groups]
    files: Files = {
        "model.safetensors": {"weight": WEIGHT, "bias": BIAS, "mean": MEAN},
        "optimizer.json": json.dumps({"groups": one}).encode(),
    }
    assert why in why_not(made(tmp_path, files), sgd)
