"""What sidecars write, read by its real readers: byte-equal for every way to distribute."""

import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import grpc
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from paramd.layout.exports.settings import ExportSettings
from paramd.v1 import export_pb2
from tests.integration.export_mesh import StillMesh, Tensors, raw, still_mesh

DCP = ExportSettings(format="dcp")


def odd_tensors() -> dict[str, torch.Tensor]:
    """All dtypes, 0-dim, empty, sizes that nothing divides."""
    generator = torch.Generator().manual_seed(1)

    def floats(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "embed.weight": floats(29, 7),
        "a.bf16": floats(5, 6, 7).bfloat16(),
        "a.f16": floats(13).half(),
        "a.f64": floats(3, 11).double(),
        "a.f8": floats(9, 3).to(torch.float8_e4m3fn),
        "a.f8b": floats(2, 5).to(torch.float8_e5m2),
        "a.scalar": torch.tensor(3.5),
        "a.empty": torch.empty(0, 4),
        "i.64": torch.arange(-5, 6),
        "i.32": torch.arange(17, dtype=torch.int32).reshape(17, 1),
        "i.16": torch.arange(7, dtype=torch.int16),
        "i.8": torch.arange(-3, 4, dtype=torch.int8),
        "u.8": torch.arange(250, 256, dtype=torch.uint8),
        "bool": torch.tensor([True, False, True]),
        "bool.scalar": torch.tensor(True),
        "count": torch.tensor(7),
    }


def read_safetensors(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in sorted(folder.glob("model*.safetensors")):
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def assert_equal(ours: Tensors, theirs: Tensors) -> None:
    assert sorted(ours) == sorted(theirs)
    for name, tensor in theirs.items():
        found = ours[name]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name
        assert raw(found) == raw(tensor), name


@pytest.mark.parametrize(
    "way", ["fsdp2", "tensor_parallel", "transposed", "strided", "hybrid", "fsdp1"]
)
def test_every_distribution_is_exported_whole(way: str, tmp_path: Path) -> None:
    tensors, root = odd_tensors(), tmp_path / "out"
    root.mkdir()
    streamed = way in ("fsdp2", "tensor_parallel", "transposed", "fsdp1")
    with still_mesh(tmp_path / "m", tensors, way, ranks=3, same_host=not streamed) as mesh:
        target = mesh.target(root, "run/safetensors")
        files = mesh.export(ExportSettings(max_shard_bytes=700), target)
        folder = root / "run" / "safetensors"
        assert_equal(read_safetensors(folder), tensors)
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert list(index["weight_map"]) == sorted(tensors)
        total = sum(t.numel() * t.element_size() for t in tensors.values())
        assert index["metadata"] == {"total_size": total}
        manifest = json.loads((folder / "paramd-export.json").read_text())
        assert {f["name"] for f in manifest["files"]} | {"paramd-export.json"} == {
            path.name for path in folder.iterdir()
        }
        assert {file.name: mesh.verify(1, target, file.name, finished=True) for file in files} == {
            file.name: file for file in files
        }
        assert mesh.processes[0].process.poll() is None
    assert sorted(os.listdir(root / "run")) == ["safetensors"]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StillMesh]:
    folder = tmp_path_factory.mktemp("export") / "m"
    aliases = {"embed.weight": ["head.weight"]}
    with still_mesh(folder, odd_tensors(), "fsdp1", ranks=3, aliases=aliases) as found:
        yield found


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_dcp_is_loaded_and_saved_by_torch(mesh: StillMesh, tmp_path: Path) -> None:
    tensors = odd_tensors()
    mesh.export(DCP, mesh.target(tmp_path, "dcp"))
    state = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    state["head.weight"] = torch.zeros_like(tensors["embed.weight"])
    dcp.load({"model": state}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert_equal(state, {**tensors, "head.weight": tensors["embed.weight"]})
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert_equal(whole["model"], state)


def refused(code: grpc.StatusCode, call: object, *arguments: object) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments)  # type: ignore[operator]
    assert caught.value.code() is code  # type: ignore[attr-defined]
    return str(caught.value.details())  # type: ignore[attr-defined]


def test_what_stands_there_is_replaced_only_when_asked(mesh: StillMesh, tmp_path: Path) -> None:
    settings = ExportSettings()
    first = mesh.target(tmp_path, "key")
    mesh.export(settings, first)
    before = (tmp_path / "key" / "paramd-export.json").read_text()
    precondition = grpc.StatusCode.FAILED_PRECONDITION
    assert "exists" in refused(precondition, mesh.begin, mesh.target(tmp_path, "key"))
    assert (tmp_path / "key" / "paramd-export.json").read_text() == before
    second = mesh.target(tmp_path, "key", overwrite=True)
    mesh.export(settings, second)
    after = json.loads((tmp_path / "key" / "paramd-export.json").read_text())
    assert after["export_id"] == second.export_id
    assert sorted(os.listdir(tmp_path)) == ["key"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("do not lose")
    foreign = mesh.target(tmp_path, "mine", overwrite=True)
    assert "not a paramd export" in refused(precondition, mesh.begin, foreign)
    assert (tmp_path / "mine" / "notes.txt").read_text() == "do not lose"
    mesh.drop(first, finished=True)
    assert (tmp_path / "key").is_dir(), "another export stands there"
    inner = mesh.target(tmp_path, "key/step-1")
    mesh.export(settings, inner)
    third = mesh.target(tmp_path, "key", overwrite=True)
    assert "also holds 'step-1'" in refused(precondition, mesh.begin, third)
    assert "also holds 'step-1'" in refused(precondition, partial(mesh.drop, second, finished=True))
    mesh.drop(inner, finished=True)
    mesh.drop(second, finished=True)
    assert sorted(os.listdir(tmp_path)) == ["mine"]


def test_a_file_that_was_changed_is_not_finished(mesh: StillMesh, tmp_path: Path) -> None:
    plan, message = mesh.pin(ExportSettings())
    target = mesh.target(tmp_path, "key")
    mesh.begin(target)
    done = mesh.write(0, target, message, 0)
    path = tmp_path / f".key.{target.export_id}.part" / plan.files[0].name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert mesh.verify(1, target, done.name).xxh3 != done.xxh3
    path.write_bytes(content[:-1])
    assert "bytes" in refused(grpc.StatusCode.DATA_LOSS, mesh.finish, target, message, [done])
    assert not (tmp_path / "key").exists()
    mesh.drop(target)
    mesh.release()
    assert os.listdir(tmp_path) == []


POINTS = ("file-begun", "chunk", "file-written", "finish", "marker", "renamed")


@pytest.mark.parametrize("point", [f"export-{name}" for name in POINTS])
def test_a_writer_killed_at_any_point_leaves_nothing_visible(point: str, tmp_path: Path) -> None:
    """Or all of it, once it has been renamed; the other rank, which has the same, goes on."""
    tensors, root = odd_tensors(), tmp_path / "out"
    root.mkdir()
    faults = {1: f"{point}:kill"}
    with still_mesh(tmp_path / "m", tensors, "replicated", ranks=2, faults=faults) as mesh:
        _, message = mesh.pin(ExportSettings())
        target = mesh.target(root, "key")
        mesh.begin(target)
        request = export_pb2.FinishExportRequest(target=target, plan=message)
        if point in ("export-finish", "export-marker", "export-renamed"):
            request.files.append(mesh.write(0, target, message, 0))
            refused(grpc.StatusCode.UNAVAILABLE, mesh.call, 1, "FinishExport", request)
        else:
            refused(grpc.StatusCode.UNAVAILABLE, mesh.write, 1, target, message, 0)
            request.files.append(mesh.write(0, target, message, 0))
        mesh.processes[1].process.wait(timeout=60)
        assert (root / "key").exists() is (point == "export-renamed")
        mesh.call(0, "FinishExport", request)
        assert_equal(read_safetensors(root / "key"), tensors)
        assert sorted(os.listdir(root)) == ["key"]
