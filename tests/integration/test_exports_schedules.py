"""Schedules: exports that begin by themselves, and what of them is kept; the command line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from paramd.cli.main import main
from paramd.errors import NotFoundError, UsageError
from paramd.mesh.exports.calls import ExportState
from paramd.mesh.mesh import Mesh
from tests.integration.client_job import JOB
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
    ids = done()
    by_id = {one.id: one for one in mesh.exports()}
    gone = [one for one in ids if by_id[one].raw["removed"]]
    # The first, fourth ... stay by number; the second is removed once the third is there.
    assert ids[1] in gone
    assert ids[0] not in gone
    expected = sorted({1} | {by_id[one].step for one in ids if one not in gone})
    assert steps_at(site, "run") == expected
    assert foreign.read_text() == "mine"
    last = site.folder / "run" / f"step-{expected[-1]}" / "model.safetensors"
    assert set(load_file(last)) == {"rows", "columns"}


def test_what_cannot_be_a_schedule_is_refused(mesh: Mesh) -> None:
    with pytest.raises(UsageError, match="every_steps"):
        mesh.create_export_schedule("checkpoints/x", every_steps=0)
    with pytest.raises(NotFoundError):
        mesh.create_export_schedule("elsewhere/x", every_steps=5)


def answer(capsys: Capture, site: ExportingJob, *command: str, code: int = 0) -> tuple[str, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARAMD_TOKEN", site.job.token)
        patch.setenv("PARAMD_URL", site.job.url)
        assert main([*command, "--job", JOB]) == code
    found = capsys.readouterr()
    return found.out, found.err


def test_the_command_line(site: ExportingJob, tmp_path: Path, capsys: Capture) -> None:
    names = tmp_path / "names.json"
    names.write_text('{"rows": "lines"}')
    out, err = answer(
        capsys, site, "export", "checkpoints/cli", "--wait", "--name-map", str(names), "-o", "json"
    )
    (found,) = json.loads(out)["exports"]
    assert found["state"] == "DONE"
    assert "checkpoints/cli" in err
    assert (site.folder / "cli" / "model.safetensors").exists()
    out, _ = answer(capsys, site, "exports", found["id"][:8], "-o", "name")
    assert "model.safetensors" in out.split()
    out, _ = answer(capsys, site, "exports", "--destinations", "-o", "name")
    assert out.split() == ["checkpoints"]
    _, err = answer(capsys, site, "export", "checkpoints/cli", "--wait", code=5)
    assert "overwrite=True" in err
    file = tmp_path / "here.safetensors"
    answer(capsys, site, "export", "--to-client", str(file), "--replica", "1")
    assert file.exists()
    answer(capsys, site, "export", "--to-client", str(file), "--format", "dcp", code=2)
    answer(capsys, site, "export", code=2)
    answer(capsys, site, "exports", found["id"][:8], "--cancel", code=5)
    every = ("--every-steps", "1000000", "--keep-last", "2", "--names", "rows", "-o", "json")
    out, _ = answer(capsys, site, "export-schedule", "create", "checkpoints/every", *every)
    (made,) = json.loads(out)["schedules"]
    assert made["destination"] == "checkpoints/every/step-{step}"
    out, _ = answer(capsys, site, "export-schedule", "list", "-o", "name")
    assert out.split() == [made["id"]]
    answer(capsys, site, "export-schedule", "delete", made["id"][:8])
    answer(capsys, site, "export-schedule", "delete", made["id"][:8], code=4)
