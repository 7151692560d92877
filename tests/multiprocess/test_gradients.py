"""Frames of gradients are whole, of one update, rightly labelled and rising, for every kind.

In the worker all elements of all gradients are the number of the update that consumes them.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from paramd.mesh.frames.frames import GradFrame
from paramd.mesh.mesh import Mesh
from tests.launch import run_ranks, start_ranks
from tests.longer import sample, share
from tests.multiprocess.kinds import FAMILIES, kinds_for
from tests.multiprocess.truth import connect_to
from tests.multiprocess.workers.gradients import JOB, MODULUS

WORKER = "tests.multiprocess.workers.gradients"
KINDS = [kind.name for kind in kinds_for(2)]
OF_FOUR = ["hsdp", "tp-fsdp2", "fsdp1-hybrid-orig", "tp-ddp"]


def wrong_values(frame: GradFrame[Any]) -> list[str]:
    """What in a frame is not the number of its update."""
    expected, wrong = frame.step % MODULUS, []
    for name, value in frame.items():
        if value is None:
            assert name in frame.none
        elif isinstance(value, torch.Tensor):
            if value.numel() and not bool((value == expected).all()):
                wrong.append(f"update {frame.step}: {name} holds {value.unique()[:4].tolist()}")
        elif value.count and (value.min, value.max) != (expected, expected):
            wrong.append(f"update {frame.step}: {name} is in [{value.min}, {value.max}]")
    return wrong


def check(frames: list[GradFrame[Any]]) -> None:
    steps = [frame.step for frame in frames]
    assert steps == sorted(set(steps)), steps
    assert [w for frame in frames for w in wrong_values(frame)] == []
    for before, frame in itertools.pairwise(frames):
        assert frame.dropped == frame.step - before.step - 1
        assert frame.incarnation == before.incarnation


def take(mesh: Mesh, count: int, *patterns: str, **options: Any) -> list[GradFrame[Any]]:
    found = []
    for frame in mesh.grads(*patterns, **options):
        found.append(frame)
        if len(found) == count:
            break
    return found


@pytest.mark.parametrize(
    ("world_size", "kinds"),
    [
        pytest.param(2, ",".join(sample(KINDS, share(list(FAMILIES), 2))), id="2"),
        pytest.param(4, ",".join(share(OF_FOUR, 2)), id="4"),
    ],
)
def test_every_frame_of_every_kind_is_whole_and_of_its_update(
    world_size: int, kinds: str, tmp_path: Path
) -> None:
    arguments = ["--folder", str(tmp_path), "--only", kinds]
    with start_ranks(WORKER, world_size, args=arguments) as ranks:
        ranks.wait_for_text("attached", rank=0, timeout_s=90)
        with connect_to(ranks.state_dir, JOB) as mesh:
            check(take(mesh, 4, "*", transport="grpc"))
            frames = take(mesh, 3, "*", transport="same-host")
            check(frames)
            check(take(mesh, 2, "*weight", dtype=torch.float64, rows=2))
            if world_size == 2:
                check(take(mesh, 4, "*", kind="stats"))
                check(take(mesh, 2, "*", kind="histogram"))
                held = [name for name in frames[0] if "module." in name]
                assert set(frames[0].none) == {n for n in frames[0] if frames[0][n] is None}
                assert set(frames[0].none) <= {*held, *(n for n in frames[0] if "fsdp1-inner" in n)}
        (tmp_path / "stop").touch()
        ranks.end_well()


def test_odd_placements_dtypes_optimizers_and_habits() -> None:
    results = run_ranks(
        "tests.multiprocess.workers.gradient_cases",
        2,
        env={"PARAMD_LOSSLESS_BUDGET_MS": "500"},
        timeout_s=90,
    )
    assert "passed lossless" in results[0].stdout
