"""What we write is what the safetensors library reads."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from paramd.errors import ConflictError, ExhaustedError, UsageError
from paramd.layout.dtypes import SAFETENSORS_NAMES
from paramd.safetensors_file import SafetensorsWriter, TensorSpec

SHAPES = [(), (0,), (3, 0), (1,), (3,), (5, 7)]
# The library's torch reader knows these; the other names have no torch counterpart there.
DTYPES = [name for name in SAFETENSORS_NAMES if name != "float8_e5m2fnuz"]


def bytes_of(tensor: torch.Tensor) -> bytes:
    size = tensor.numel() * tensor.element_size()
    return ctypes.string_at(tensor.data_ptr(), size) if size else b""


def tensor_of(dtype: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    if dtype == "bool":
        return torch.randint(0, 2, shape, generator=made).to(torch.bool)
    wide = torch.randint(0, 100, shape, generator=made)
    return wide.to(torch.float32).to(getattr(torch, dtype))


def write(path: Path, tensors: dict[str, torch.Tensor], *, replace: bool = False) -> None:
    specs = [
        TensorSpec(name=n, dtype=str(t.dtype).removeprefix("torch."), shape=tuple(t.shape))
        for n, t in tensors.items()
    ]
    with SafetensorsWriter(path, specs, metadata={"format": "pt"}, replace=replace) as writer:
        for spec in writer.specs:
            writer.append(bytes_of(tensors[spec.name]))


def write_byte(
    path: Path, *, shape: tuple[int, ...] = (1,), then: Callable[[], None] = lambda: None
) -> None:
    """One byte of a tensor of bytes."""
    spec = TensorSpec(name="w", dtype="uint8", shape=shape)
    with SafetensorsWriter(path, [spec], metadata={}) as writer:
        writer.append(b"\0")
        then()


def test_every_dtype_and_shape_reads_back_equal(tmp_path: Path) -> None:
    tensors = {
        f"{dtype}.{index}": tensor_of(dtype, shape, index)
        for dtype in DTYPES
        for index, shape in enumerate(SHAPES)
    }
    write(tmp_path / "all.safetensors", tensors)
    read = load_file(tmp_path / "all.safetensors")
    assert read.keys() == tensors.keys()
    for name, expected in tensors.items():
        assert read[name].dtype == expected.dtype, name
        assert read[name].shape == expected.shape, name
        assert bytes_of(read[name].contiguous()) == bytes_of(expected), name


def test_metadata_is_read_back_and_data_begins_aligned(tmp_path: Path) -> None:
    path = tmp_path / "one.safetensors"
    spec = TensorSpec(name="w", dtype="float32", shape=(2,))
    with SafetensorsWriter(path, [spec], metadata={"paramd_step": "7", "name": "\u00e9"}) as writer:
        writer.append(bytes(8))
    with safe_open(path, framework="pt") as opened:
        assert opened.metadata() == {"paramd_step": "7", "name": "\u00e9"}
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0
    assert path.stat().st_size == writer.size_bytes


def test_an_existing_file_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "one.safetensors"
    path.write_text("mine")
    with pytest.raises(ConflictError, match="--force"):
        write(path, {"w": torch.ones(2)})
    assert path.read_text() == "mine"
    write(path, {"w": torch.ones(2)}, replace=True)
    assert load_file(path)["w"].tolist() == [1.0, 1.0]
    assert [p.name for p in tmp_path.iterdir() if "one" in p.name] == ["one.safetensors"]


def test_a_file_that_appears_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "one.safetensors"

    def meanwhile() -> None:
        path.write_text("somebody else's")

    with pytest.raises(ConflictError):
        write_byte(path, then=meanwhile)
    assert path.read_text() == "somebody else's"
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == [path.name]


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()

    def fail() -> None:
        raise RuntimeError("the reader broke")

    with pytest.raises(RuntimeError, match="the reader broke"):
        write_byte(folder / "a.safetensors", then=fail)
    with pytest.raises(UsageError, match="header promises"):
        write_byte(folder / "a.safetensors", shape=(2,))
    assert list(folder.iterdir()) == []


def test_complex128_and_doubled_names_are_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.safetensors"
    wide = TensorSpec(name="z", dtype="complex128", shape=(1,))
    with pytest.raises(UsageError, match="complex128"):
        SafetensorsWriter(path, [wide], metadata={})
    spec = TensorSpec(name="w", dtype="uint8", shape=(1,))
    with pytest.raises(UsageError, match="'w'"):
        SafetensorsWriter(path, [spec, spec], metadata={})
    assert not path.exists()


def test_a_disk_without_room_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    huge = TensorSpec(name="w", dtype="uint8", shape=(1 << 60,))
    with (
        pytest.raises(ExhaustedError, match="free on that disk"),
        SafetensorsWriter(folder / "a.safetensors", [huge], metadata={}),
    ):
        pytest.fail("it was opened")
    assert list(folder.iterdir()) == []


def test_odd_names_stay_what_they_are(tmp_path: Path) -> None:
    names = ['a"b', "a\\b", "sp ace", "\u96ea", "x" * 500, ""]
    path = tmp_path / "odd.safetensors"
    write(path, {name: torch.tensor([float(i)]) for i, name in enumerate(names)})
    assert {n: t.item() for n, t in load_file(path).items()} == {n: i for i, n in enumerate(names)}
    header = path.read_bytes()[8:]
    assert json.loads(header[: int.from_bytes(path.read_bytes()[:8], "little")])
