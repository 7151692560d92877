"""What we write without torch, as torch itself would: casts, and archives of tensors."""

import io
import itertools
import os
import stat
import zipfile
from pathlib import Path
from zlib import crc32

import pytest
import torch

from paramd.layout.dtypes import ITEM_BYTES
from paramd.layout.exports.dcp import TorchArchive
from paramd.layout.exports.settings import CAST_DTYPES
from paramd.v1.export_pb2 import ExportTarget
from paramd_service.destinations.directory import DirectorySink
from paramd_service.formats.cast import cast_into
from tests.integration.export_mesh import raw

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_HARD = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, 65504, 65520, 1e300, 3.4e38]


def hard_numbers(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(50_000, dtype=torch.float64, generator=generator)
    spread = torch.exp(20 * torch.randn(50_000, dtype=torch.float64, generator=generator))
    numbers = torch.cat([wide * spread, wide, torch.tensor(_HARD)]).to(dtype)
    # NaNs of every sign and payload; a whole number of vectors, as torch casts a tail differently.
    ones = torch.tensor(float("-inf"), dtype=dtype).view(_BITS[dtype.itemsize])
    payloads = torch.randint(0, 2**63 - 1, (4096,), generator=generator).to(ones.dtype)
    nans = (payloads | (ones & ~torch.iinfo(ones.dtype).min) | 1).view(dtype)
    return torch.cat([nans, numbers[: len(numbers) // 64 * 64]])


@pytest.mark.parametrize(("dtype", "wanted"), list(itertools.permutations(CAST_DTYPES, 2)))
def test_casts_are_those_of_torch_bit_by_bit(dtype: str, wanted: str) -> None:
    values = hard_numbers(getattr(torch, dtype))
    theirs = values.to(getattr(torch, wanted))
    target = bytearray(theirs.numel() * theirs.element_size())
    cast_into(memoryview(raw(values)), dtype, memoryview(target), wanted)
    ours = torch.frombuffer(target, dtype=theirs.dtype)
    bits = _BITS[theirs.element_size()]
    assert torch.equal(ours.view(bits), theirs.view(bits))


@pytest.mark.parametrize("dtype", list(ITEM_BYTES))
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3), (300, 7), (1, 1, 70_000)])
def test_torch_loads_our_archives(dtype: str, shape: tuple[int, ...]) -> None:
    numel = torch.Size(shape).numel()
    data = bytes(torch.randint(0, 2, (numel * ITEM_BYTES[dtype],), dtype=torch.uint8).tolist())
    archive = TorchArchive(dtype, shape)
    file = archive.before + data + archive.after(crc32(data))
    assert len(file) == archive.size_bytes
    assert zipfile.ZipFile(io.BytesIO(file)).testzip() is None
    found = torch.load(io.BytesIO(file), weights_only=True)
    assert (found.dtype, tuple(found.shape)) == (getattr(torch, dtype), shape)
    assert found.is_contiguous()
    assert raw(found) == data


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_exported_files_have_the_mode_that_the_umask_leaves(
    tmp_path: Path, umask: int, mode: int
) -> None:
    before = os.umask(umask)
    try:
        sink = DirectorySink(os.open(tmp_path, os.O_RDONLY), "file", ExportTarget())
        sink.write(memoryview(b"x"))
        sink.finish()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode
