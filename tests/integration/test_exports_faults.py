"""Exports while parts die: whole or nowhere, whatever was killed and when."""

import signal
from pathlib import Path
from typing import Any

import pytest

from paramd.errors import ParamdError
from paramd.layout.types import Box, Layout, Piece, TensorKind, TensorLayout
from paramd.mesh.exports.calls import ExportState
from paramd.mesh.mesh import Mesh
from tests.integration.export_job import MANIFEST, ExportingJob, exporting_job, is_stopped, until
from tests.longer import share

POINTS = {
    "export-begun": ExportState.FAILED,
    "export-file-done": None,
    "export-stored": ExportState.DONE,
    "export-verify": ExportState.DONE,
    "export-renamed": ExportState.DONE,
    "export-dropped": ExportState.FAILED,
}
"""Where rank 0 is killed, and how the export must end then; None: either way. The sidecar's own
tests have the other points."""


def all_joined(site: ExportingJob) -> bool:
    """Whether the control plane has all ranks."""
    try:
        with site.connect() as mesh:
            return not any(row.reason for row in mesh.status())
    except ParamdError:
        return False


def test_a_sidecar_killed_anywhere_leaves_an_export_whole_or_nowhere(tmp_path: Path) -> None:
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "notes.txt").write_text("beside")
    with exporting_job(tmp_path) as site, site.connect() as mesh:
        site.job.train(lambda rank, step: None, 0.02)
        for point in share(list(POINTS), 2):
            until(lambda: all_joined(site), "a whole mesh")
            strike(site, mesh, point, POINTS[point])


def strike(site: ExportingJob, mesh: Mesh, point: str, expected: ExportState | None) -> None:
    site.arm(0, f"{point}:kill")
    if point == "export-dropped":
        site.arm(1, "export-file-begun:kill")
    key, beside = point.replace("-", "_"), site.faults.parent / "beside"
    export = mesh.export(f"checkpoints/{key}", max_shard_size=200, assets=beside)
    ended = mesh.export_ended(export.info, 40)
    assert expected in (None, ended.state), (point, ended)
    if ended.state is ExportState.DONE:
        manifest = site.check_whole(key)
        assert manifest["step"] == ended.step
        assert (site.folder / key / "notes.txt").read_text() == "beside"
    else:
        assert ended.state is ExportState.FAILED
        assert "rank " in ended.reason, ended
        # Removed after the end is told: an export that failed is known at once.
        until(lambda: not [one for one in site.left() if key in one], "nothing left, even hidden")
    assert site.job.ranks[0].process.wait(10) == -signal.SIGKILL, f"{point} was passed"
    site.disarm()
    for rank in site.job.ranks:
        if rank.process.poll() is not None:
            site.job.respawn(rank)


def test_files_of_a_killed_sidecar_go_to_another_that_has_their_bytes(tmp_path: Path) -> None:
    held = tuple(
        TensorLayout(
            f"w{n}", "float32", (16,), TensorKind.PARAMETER, (Piece(0, 64 * n, Box((0,), (16,))),)
        )
        for n in range(6)
    )
    only_rank_0 = Layout(world_size=2, arena_bytes=(1024, 1024), tensors=held)
    with exporting_job(tmp_path, of=only_rank_0) as site, site.connect() as mesh:
        until(lambda: all_joined(site), "a whole mesh")
        site.arm(1, "export-chunk:kill")
        done = mesh.export("checkpoints/on", max_shard_size=64).wait(30)
        assert site.job.ranks[1].process.wait(10) == -signal.SIGKILL
        site.check_whole("on")
        written = [one for one in done.files if one.name.endswith(".safetensors")]
        assert len(written) == 6
        assert {one.rank for one in written} <= {0, 1}
        assert sum(one.rank == 0 for one in written) > 3, "rank 0 took over what rank 1 was given"


@pytest.mark.in_turns
def test_a_control_plane_killed_in_the_middle_goes_on_or_fails_cleanly(tmp_path: Path) -> None:
    with exporting_job(tmp_path) as site:
        site.job.train(lambda rank, step: None, 0.02)
        with site.connect() as mesh:
            rhythm = mesh.create_export_schedule("checkpoints/{step}", every_steps=10**9)
            mesh.add_destination("added", str(tmp_path))
        body = {"destination": "checkpoints/on", "max_shard_size": "200"}
        # Killed while a sidecar writes: the snapshot lives, so its successor goes on.
        killed_in_the_middle(site, body, "cd" * 16)
        site.restart_control()
        assert ended(site, "cd" * 16)["state"] == "DONE"
        site.check_whole("on")
        # Killed after the commit: it is there, and is told so.
        killed_in_the_middle(site, {**body, "destination": "checkpoints/last"}, "ab" * 16, 0)
        site.restart_control()
        assert ended(site, "ab" * 16)["state"] == "DONE"
        site.check_whole("last")
        # Killed, and a sidecar with a part of the step, too: it ends, and nothing is left.
        killed_in_the_middle(site, {**body, "destination": "checkpoints/off"}, "ef" * 16)
        site.job.ranks[1].process.kill()
        site.job.respawn(site.job.ranks[1])
        site.restart_control()
        found = ended(site, "ef" * 16)
        assert found["state"] == "FAILED"
        assert found["reason"]
        until(lambda: not [one for one in site.left() if "off" in one], "the removal")
        # It is as good as new.
        with site.connect() as mesh:
            assert mesh.export("again").wait(30).destination == "checkpoints/again"
            assert mesh.export("added").wait(30).destination.startswith("added/step-")
            assert [one["id"] for one in mesh.export_schedules()] == [rhythm["id"]]
            states = {one.destination: one.state for one in mesh.exports()}
        assert states["checkpoints/on"] is ExportState.DONE
        assert not (site.folder / "off" / MANIFEST).exists()


def killed_in_the_middle(
    site: ExportingJob, body: dict[str, str], export_id: str, rank: int = 1
) -> None:
    """Begins an export, and kills the control plane while rank 1 writes a file, or rank 0 ends."""
    until(lambda: all_joined(site), "a whole mesh")
    writer = site.job.ranks[rank].process
    site.arm(rank, "export-chunk:stop" if rank else "export-renamed:stop")
    answer = site.job.ask("POST", "/exports", json={**body, "id": export_id})
    assert answer.status_code == 202, answer.text
    until(lambda: is_stopped(writer.pid), "the writing")
    site.kill_control()
    writer.send_signal(signal.SIGCONT)


def ended(site: ExportingJob, export_id: str) -> Any:
    """An export once it has ended."""

    def now() -> Any:
        return site.job.ask("GET", f"/exports/{export_id}").json()

    until(lambda: now()["ended_s"] is not None, "the end of the export")
    return now()
