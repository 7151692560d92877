"""Second moments and effective learning rates, read by the sidecars from memory that they share."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.longer import sample
from tests.multiprocess.test_bits import after, training
from tests.multiprocess.truth import wait_until


def lines(folder: Path, rank: int) -> list[dict[str, object]]:
    path = folder / f"moments-{rank}"
    if not path.exists():
        return []
    return [
        json.loads(line) for line in path.read_text().splitlines(keepends=True) if line[-1:] == "\n"
    ]


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("kind", "resume"), sample([("ddp", "never"), ("fsdp2", "auto")], [("fsdp2", "auto")])
)
def test_moments_and_effective_rates_are_those_of_the_trainer(
    kind: str, resume: str, tmp_path: Path
) -> None:
    with training(tmp_path, 2, "--kind", kind, "--resume", resume) as (mesh, _):
        after(mesh, 3)
        found = mesh.updates()
        assert found.moments_missing == ""
        assert len(found) == 6
        step = found[0].step
        wait_until(
            lambda: all(int(lines(tmp_path, r)[-1]["step"]) > step for r in (0, 1)), "they go on"
        )
        for row in found:
            said = [at(tmp_path, rank, row.step) for rank in (0, 1)]
            # Replicas are alike; shards add up.
            parts = [one[row.name] for one in (said if kind == "fsdp2" else said[:1])]
            total, squares, numel = (sum(one[i] for one in parts) for i in range(3))
            assert row.numel == numel
            assert row.moment_rms == pytest.approx(math.sqrt(squares / numel), rel=1e-6)
            corrected = total / numel / (1 - 0.999**row.step)
            expected = said[0]["lr"] / (math.sqrt(corrected) + 1e-8)
            assert row.effective_lr == pytest.approx(expected, rel=1e-6)


def at(folder: Path, rank: int, step: int) -> dict[str, object]:
    return next(one for one in lines(folder, rank) if one["step"] == step)
