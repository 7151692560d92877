"""A change has the scenes tested that touch it, read from their sources."""

from __future__ import annotations

import pytest

from tests.launch import ROOT
from tests.touched import SCENES, touched


@pytest.mark.parametrize(
    ("changed", "scenes"),
    [
        ("client/paramd/integrations/hf.py", {"test_trainers", "test_integrations"}),
        (
            "client/paramd/integrations/engines.py",
            {"test_engines", "test_integrations", "test_vllm_source"},
        ),
        ("deploy/slurm/torchrun.sbatch", {"test_slurm", "test_restarts"}),
        ("tests/slurm.py", {"test_slurm", "test_restarts"}),
        ("tests/multiprocess/workers/under_ray.py", {"test_ray"}),
        ("docs/integrations/hf.md", {"test_manual_examples", "test_notebook"}),
        ("service/paramd_service/destinations/object_store.py", {"test_export_s3"}),
        ("deploy/kubernetes/gone.yaml", {"test_kubernetes"}),
        ("client/paramd/layout/select.py", set()),
        ("README.md", set()),
    ],
)
def test_a_change_touches_the_scenes_that_import_or_name_it(changed: str, scenes: set[str]) -> None:
    assert {scene.stem for scene in touched({ROOT / changed})} == scenes


@pytest.mark.parametrize("changed", ["constraints.txt", "tests/conftest.py", "tests/leaks.py"])
def test_what_every_test_runs_with_touches_all_of_them(changed: str) -> None:
    assert touched({ROOT / changed}) == SCENES
