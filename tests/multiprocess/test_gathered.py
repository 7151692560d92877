"""Evaluations leave FSDP's parameters gathered: reads, edits and rollbacks act on the shards."""

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.launch import start_ranks
from tests.longer import share
from tests.multiprocess.truth import connect_to

WORKER = "tests.multiprocess.workers.gathered"


@pytest.mark.parametrize("kind", share(["fsdp2", "hsdp-ahead", "fsdp1"], 2))
def test_what_an_evaluation_left_gathered_follows_the_shards(tmp_path: Path, kind: str) -> None:
    name, _, ahead = kind.partition("-")
    state_dir = tmp_path / "state"
    args = ["--folder", str(tmp_path), "--kind", name, *(["--ahead"] if ahead else [])]
    with ExitStack() as stack:
        world_size = 4 if name == "hsdp" else 2
        ranks = stack.enter_context(start_ranks(WORKER, world_size, args=args, state_dir=state_dir))
        ranks.wait_for_text("attached", rank=0)
        mesh = stack.enter_context(connect_to(state_dir, "gathered"))
        mesh.summon("*", timeout=20)
        mark = mesh.mark("before")
        assert mark.step >= 0
        mesh.set_hyperparameters(lr=0.02, timeout=20)
        mesh.edit("out.*", set=0.0, timeout=20)
        ranks.wait_for_text("edit 2: zeros", rank=0)
        with mesh.pause(timeout=20):
            back = mesh.rollback("before", timeout=20)
            kept = mesh.summon("*")
            assert bool(kept["out.weight"].any())
        assert back.step > mark.step

        (tmp_path / "rest").touch()
        shown = ranks.wait_for_text("rests", rank=0)
        found = mesh.summon("*", timeout=20)
        assert found.step == int(shown.split("rests")[1])
        if name != "fsdp1":
            truth = load_file(tmp_path / "rest.safetensors")
            assert found.keys() == truth.keys()
            assert all(torch.equal(found[one], truth[one]) for one in truth)
        (tmp_path / "go").touch()
        (tmp_path / "stop").touch()
        ranks.end_well(60)
