"""What we write is what the safetensors library reads."""

import ctypes
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paramd.errors import UsageError
from paramd.layout.dtypes import SAFETENSORS_NAMES
from paramd.layout.exports.safetensors import TensorSpec, encode_header, file_order

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


def write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    specs = file_order(
        TensorSpec(name=n, dtype=str(t.dtype).removeprefix("torch."), shape=tuple(t.shape))
        for n, t in tensors.items()
    )
    header = encode_header(specs, {"format": "pt"})
    path.write_bytes(b"".join([header, *(bytes_of(tensors[spec.name]) for spec in specs)]))


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


def test_complex128_and_doubled_names_are_refused() -> None:
    with pytest.raises(UsageError, match="complex128"):
        encode_header([TensorSpec(name="z", dtype="complex128", shape=(1,))], {})
    spec = TensorSpec(name="w", dtype="uint8", shape=(1,))
    with pytest.raises(UsageError, match="'w'"):
        encode_header([spec, spec], {})


def test_odd_names_stay_what_they_are(tmp_path: Path) -> None:
    names = ['a"b', "a\\b", "sp ace", "\u96ea", "x" * 500, ""]
    path = tmp_path / "odd.safetensors"
    write(path, {name: torch.tensor([float(i)]) for i, name in enumerate(names)})
    assert {n: t.item() for n, t in load_file(path).items()} == {n: i for i, n in enumerate(names)}
    header = path.read_bytes()[8:]
    assert json.loads(header[: int.from_bytes(path.read_bytes()[:8], "little")])
