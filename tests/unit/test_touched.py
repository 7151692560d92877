"""A change has the scenes tested that touch it, read from their sources."""

from __future__ import annotations

import pytest

from tests.launch import ROOT
from tests.touched import SCENES, touched

CHANGES = {
    "client/paramd/integrations/hf.py": ["test_integrations", "test_trainers"],
    "deploy/slurm/torchrun.sbatch": ["test_slurm"],
    "tests/multiprocess/workers/under_ray.py": ["test_ray"],
    "docs/integrations/hf.md": ["test_manual_examples", "test_notebook"],
    "deploy/kubernetes/gone.yaml": ["test_kubernetes"],
    "client/paramd/layout/select.py": [],
    # What every test runs with.
    "tests/leaks.py": [scene.stem for scene in SCENES],
}


@pytest.mark.parametrize("changed", CHANGES)
def test_a_change_touches_the_scenes_that_import_or_name_it(changed: str) -> None:
    assert [scene.stem for scene in touched({ROOT / changed})] == CHANGES[changed]
