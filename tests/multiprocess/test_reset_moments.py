"""Edits that reset the optimizer's state: of the edited elements, and of no others."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from paramd.errors import ParamdError
from paramd.mesh.edits.calls import EditState
from paramd.mesh.mesh import Mesh
from tests.launch import start_ranks
from tests.longer import sample
from tests.multiprocess.truth import connect_to, wait_until
from tests.multiprocess.workers.moments_reset import FILL

KINDS = (
    "ddp-odd",
    "fsdp1-full",
    "fsdp1-full-orig",
    "fsdp1-mixed-no-shard",
    "fsdp2-mixed-unsharded",
    "tp",
)


SAMPLE = ("ddp-odd", "fsdp1-full-orig", "fsdp2-mixed-unsharded")


def slices_of(mesh: Mesh) -> list[str]:
    """Of most parameters a part, of some all, of some nothing."""
    found = []
    for index, info in enumerate(mesh.params("*")):
        if index % 5 == 4 or 0 in info.shape:
            continue
        rows = info.shape[0] if info.shape else 1
        if index % 5 == 3 or rows < 2:
            found.append(info.name)
        elif len(info.shape) == 1:
            found.append(f"{info.name}[1:]")
        else:
            found.append(f"{info.name}[{index % 2}:{rows - 1},1:]")
    return found


def reachable(mesh: Mesh) -> bool:
    """Whether all sidecars have joined; attaching does not wait for that."""
    try:
        return bool(mesh.summon("*"))
    except ParamdError:
        return False


def assert_moments_are_reset(folder: Path, kinds: Sequence[str]) -> None:
    """Edits of slices zero the moments of exactly those elements, for each kind."""
    arguments = ["--kinds", ",".join(kinds), "--folder", str(folder)]
    with start_ranks("tests.multiprocess.workers.moments_reset", 2, args=arguments) as ranks:
        for kind in kinds:
            ranks.wait_for_text(f"attached {kind}.", rank=0)
            with connect_to(ranks.state_dir, kind) as mesh:
                wait_until(partial(reachable, mesh), "sidecars join")
                edit = mesh.edit(*slices_of(mesh), fill=FILL, reset_moments=True, timeout=60)
                assert edit.state is EditState.APPLIED
            (folder / f"{kind}.seen").touch()
        for result in ranks.wait(timeout_s=60):
            assert result.returncode == 0, ranks.outputs()
            assert result.stdout.count("ok ") == len(kinds), result.stdout


@pytest.mark.timeout(150)
def test_moments_of_exactly_the_edited_elements_are_zeroed(tmp_path: Path) -> None:
    assert_moments_are_reset(tmp_path, sample(KINDS, SAMPLE))
