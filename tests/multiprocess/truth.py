"""What a client summons, compared byte by byte with what torch gathered in the trainers."""

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open

import paramd
from paramd import places
from paramd.mesh.mesh import Mesh
from tests.longer import wait_until as wait_until

Tensors = Mapping[str, torch.Tensor]


def read_truth(path: Path) -> tuple[int, dict[str, torch.Tensor]]:
    """The step and the full parameters that a trainer wrote."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        return int(metadata["step"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def connect_to(state_dir: Path, job: str) -> Mesh:
    """A client of a job in a launch's own state dir."""
    endpoint = places._load(state_dir / job / places.ENDPOINT_FILE)
    assert endpoint is not None, f"job {job} has no endpoint"
    return paramd.connect(endpoint.url, endpoint.token, job=job)


def step_of(mesh: Mesh) -> int:
    """The last step of the rank that is furthest behind."""
    return min(row.step for row in mesh.status())


def assert_same_bytes(ours: Tensors, theirs: Tensors) -> None:
    """Same names, shapes, dtypes and bytes."""
    assert sorted(ours) == sorted(theirs)
    bad = [name for name in ours if not same_bytes(ours[name], theirs[name])]
    assert not bad, f"differ: {bad}"


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    flat = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*flat)


def assert_slices_equal(mesh: Mesh, truth: Tensors) -> int:
    """Summons slices of every tensor that has a dim to slice. Returns how many it compared."""
    compared = 0
    for index, (name, whole) in enumerate(sorted(truth.items())):
        if whole.ndim == 0 or whole.numel() == 0:
            continue
        rows = whole.shape[0]
        begin, end = min(index % 3, rows - 1), rows - (index % 2 if rows > 3 else 0)
        text, expected = f"{begin}:{end}", whole[begin:end]
        if whole.ndim > 1:
            text, expected = text + ",1:", expected[:, 1:]
        (found,) = mesh.summon(f"{name}[{text}]").values()
        assert same_bytes(found, expected), f"{name}[{text}]"
        compared += 1
    return compared


def assert_stats_equal(mesh: Mesh, truth: Tensors, step: int) -> None:
    """Counts exact, sums as float64 sums them; the total counts tied tensors once."""
    table = mesh.stats("*")
    assert table.step == step
    seen = 0
    for row in table:
        whole, found = truth[row.name].double(), row.summary
        assert found.count == whole.numel(), row.name
        assert found.zero_count == int((whole == 0).sum()), row.name
        assert (found.nan_count, found.inf_count) == (0, 0), row.name
        if whole.numel():
            assert (found.min, found.max) == (whole.min().item(), whole.max().item()), row.name
            assert math.isclose(found.norm, whole.norm().item(), rel_tol=1e-9), row.name
            assert math.isclose(found.mean, whole.mean().item(), rel_tol=1e-9, abs_tol=1e-12), (
                row.name
            )
        if whole.numel() > 1:
            assert math.isclose(found.std, whole.std().item(), rel_tol=1e-7, abs_tol=1e-12), (
                row.name
            )
        seen += found.count
    assert table.total.summary.count == seen


def assert_spectra_equal(mesh: Mesh, truth: Tensors) -> None:
    """Of every matrix, what torch finds in the gathered one; these are small, so all is exact."""
    compared = 0
    for name, whole in sorted(truth.items()):
        if whole.ndim < 2 or not whole.numel():
            continue
        matrix = whole.double().flatten(1)
        wanted = torch.linalg.svdvals(matrix)
        found = mesh.spectrum(name, k=3)
        assert found.condition_exact
        assert found.error == 0.0
        close = torch.tensor(found.singular_values, dtype=torch.float64)
        torch.testing.assert_close(close, wanted[:3], rtol=1e-9, atol=1e-12, msg=name)
        assert math.isclose(found.norm, float(matrix.norm()), rel_tol=1e-9), name
        if wanted[-1] > 1e-6 * wanted[0]:
            assert math.isclose(found.condition, float(wanted[0] / wanted[-1]), rel_tol=1e-6), name
        assert found.dead_row_count == int((matrix == 0).all(1).sum()), name
        assert found.dead_column_count == int((matrix == 0).all(0).sum()), name
        alive = matrix[~(matrix == 0).all(1)]
        assert found.duplicate_row_count == len(alive) - len(alive.unique(dim=0)), name
        compared += 1
    assert compared
