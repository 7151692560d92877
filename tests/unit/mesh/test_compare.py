"""Differences of tensors, against torch; states on disk."""

import math

import pytest
import torch

from paramd.errors import UsageError
from paramd.mesh.insight import compare as module
from paramd.mesh.insight.compare import compare
from paramd_service.insight.diff import state_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
@pytest.mark.parametrize("shape", [(7, 5), (64,), (3, 4, 5), ()])
def test_a_difference_is_what_torch_computes(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    monkeypatch.setattr(module, "BLOCK_NUMEL", 11)
    a = (torch.randn(shape) * 8).to(dtype)
    b = a.clone()
    if shape:
        b[1:3] = (torch.randn(b[1:3].shape) * 8).to(dtype)
    else:
        b += 3
    row = compare("w", a, b)
    one, other = a.double().flatten(), b.double().flatten()
    assert row.norm == pytest.approx(float((other - one).norm()))
    assert row.norm_a == pytest.approx(float(one.norm()))
    assert row.max_abs == pytest.approx(float((other - one).abs().max()))
    if float(one.norm()) and float(other.norm()):
        cosine = float(torch.nn.functional.cosine_similarity(one, other, dim=0))
        assert row.cosine == pytest.approx(cosine, abs=1e-12)
    assert row.changed == int((one != other).sum())
    if len(shape) > 1:
        norms = (b.double() - a.double()).flatten(1).norm(dim=1)
        best = [r for r in norms.argsort(descending=True).tolist()[:5] if norms[r]]
        assert [number for number, _ in row.largest_rows] == best
    else:
        assert row.largest_rows == ()


def test_equal_tensors_have_no_difference_nan_and_infinity_included() -> None:
    a = torch.tensor([[1.0, math.nan], [math.inf, 0.0]])
    row = compare("w", a, a.clone())
    assert (row.changed, row.norm, row.largest_rows) == (0, 0.0, ())
    changed = compare("w", torch.zeros(2, 2), torch.tensor([[0.0, 0.0], [math.nan, 1.0]]))
    assert changed.changed == 2
    assert [number for number, _ in changed.largest_rows] == [1]
    empty = compare("e", torch.empty(0, 3), torch.empty(0, 3))
    assert (empty.changed, empty.norm, empty.numel) == (0, 0.0, 0)


@pytest.mark.parametrize("shape", [(40, 48), (3, 5, 7), (100,), (2, 3)])
def test_cells_are_the_means_of_their_elements(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    monkeypatch.setattr(module, "BLOCK_NUMEL", 11)
    a, b = torch.zeros(shape), torch.randn(shape)
    most = 8
    matrix = b.double().reshape(shape[0] if len(shape) > 1 else 1, -1)
    rows, columns = matrix.shape
    height, width = min(rows, most), min(columns, most)
    cells: dict[tuple[int, int], list[float]] = {}
    for row in range(rows):
        for column in range(columns):
            at = row * height // rows, column * width // columns
            cells.setdefault(at, []).append(float(matrix[row, column]))
    found = compare("w", a, b, most).cells
    assert (len(found), len(found[0])) == (height, width)
    for (row, column), values in cells.items():
        assert found[row][column] == pytest.approx(sum(values) / len(values), abs=1e-9)
    b.view(-1)[0] = math.nan
    assert math.isnan(compare("w", a, b, most).cells[0][0])
    assert compare("w", a, b).cells == ()


def test_rest_takes_states_and_never_paths() -> None:
    texts = ("now", "+10", "mark:before the bump")
    assert [state_of(text) for text in texts] == [("text", text) for text in texts]
    assert state_of("export:3f2a") == ("export", "3f2a")
    assert state_of("job:a:b") == ("job", "a:b")
    for wrong in ("", "/etc/passwd", "mark:", "export:", "job:", "+", "812", "file:///x", "./now"):
        with pytest.raises(UsageError, match="expected now"):
            state_of(wrong)
