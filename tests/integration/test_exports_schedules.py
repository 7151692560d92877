"""Schedules: exports that begin by themselves, and what of them is kept; the command line."""

import re
from collections.abc import Iterator

import pytest
from safetensors.torch import load_file

from paramd.errors import NotFoundError
from paramd.mesh.exports.calls import ExportState
from paramd.mesh.mesh import Mesh
from tests.integration.export_job import ExportingJob, exporting_job, until

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExportingJob]:
    with exporting_job(tmp_path_factory.mktemp("schedules")) as found:
        found.job.train(lambda rank, step: None, 0.02)
        yield found


def steps_at(site: ExportingJob, key: str) -> list[int]:
    """Steps of the exports below a key, in order."""
    found = [re.fullmatch(r"step-(\d+)", p.name) for p in (site.folder / key).glob("step-*")]
    return sorted(int(one[1]) for one in found if one is not None)


def test_a_schedule_exports_keeps_some_and_removes_only_its_own(
    site: ExportingJob, mesh: Mesh
) -> None:
    mesh.export("checkpoints/run/step-1").wait(30)
    foreign = site.folder / "run" / "notes.txt"
    foreign.write_text("mine")
    made = mesh.create_export_schedule(
        "checkpoints/run", every_steps=20, keep_last=1, keep_every=3, names=["rows", "col*"]
    )
    assert mesh.export_schedules() == (made,)

    def done() -> list[str]:
        found = [one for one in mesh.exports() if one.schedule == made["id"]]
        assert all(one.state is not ExportState.FAILED for one in found), found
        return [one.id for one in reversed(found) if one.state is ExportState.DONE]

    until(lambda: len(done()) >= 4, "four exports")
    mesh.delete_export_schedule(made["id"])
    assert not mesh.export_schedules()
    with pytest.raises(NotFoundError):
        mesh.delete_export_schedule(made["id"])
    ids, by_id = done(), {one.id: one for one in mesh.exports()}
    gone = [one for one in ids if by_id[one].raw["removed"]]
    # The first, fourth ... stay by number; the second is removed once the third is there.
    assert ids[1] in gone
    assert ids[0] not in gone
    expected = sorted({1} | {by_id[one].step for one in ids if one not in gone})
    assert steps_at(site, "run") == expected
    assert foreign.read_text() == "mine"
    last = site.folder / "run" / f"step-{expected[-1]}" / "model.safetensors"
    assert set(load_file(last)) == {"rows", "columns"}
