"""A step that has two states, since the script changes its weights late: no answer mixes them."""

from pathlib import Path

import pytest
import torch

import paramd
from paramd.errors import DeadlineError
from paramd.mesh.mesh import Mesh
from tests.launch import start_ranks
from tests.longer import wait_until
from tests.multiprocess.workers.late_changes import APART, HALVED


def read(mesh: Mesh, step: int, *, unsettled: bool) -> set[float]:
    """The values of all weights, which have to be of that step."""
    found = mesh.summon("*", unsettled=unsettled, timeout=30.0)
    assert found.step == step
    return {value for one in found.values() for value in torch.unique(one).tolist()}


@pytest.mark.in_turns
def test_no_answer_has_one_rank_before_a_late_change_and_one_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--folder", str(tmp_path)]
    with start_ranks("tests.multiprocess.workers.late_changes", 2, args=arguments) as ranks:
        ranks.wait_for_text("attached", rank=0)
        monkeypatch.setenv("PARAMD_STATE_DIR", str(ranks.state_dir))
        with paramd.connect(job="late-changes", timeout=60) as mesh:
            for step in APART:
                wait_until((tmp_path / f"at-{step}").exists, f"step {step} settled on rank 1")
                for unsettled in (False, True):
                    if step not in HALVED:
                        assert read(mesh, step, unsettled=unsettled) == {float(step)}
                        continue
                    # Without `unsettled` the next boundary was asked for, too.
                    apart = f"rank 0 at {step}, as its update left it, rank 1 at {step}, as changed"
                    why = apart if unsettled else "no common step"
                    with pytest.raises(DeadlineError, match=why):
                        mesh.summon("*", unsettled=unsettled, timeout=4.0)
                (tmp_path / f"go-{step}").touch()
        ended = ranks.wait(timeout_s=60)
        assert [one.returncode for one in ended] == [0, 0], ended
