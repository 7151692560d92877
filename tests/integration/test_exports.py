"""Exports of real sidecars through a real control plane: whole, or failed with the cause."""

import json
import signal
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from safetensors.torch import load_file

from paramd.errors import ConflictError, ExistsError, UsageError
from paramd.mesh.exports.calls import ExportInfo, ExportState
from paramd.mesh.mesh import Mesh
from tests.integration.client_job import JOB, compared
from tests.integration.export_job import ExportingJob, exporting_job, is_stopped, until

# Buffers need a boundary, and a job at rest has none.
PARAMETERS = ("parameters",)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExportingJob]:
    folder = tmp_path_factory.mktemp("exports")
    places = {name: str(folder / name) for name in ("tiny", "few", "forbidden")}
    with exporting_job(folder, of=None, **places) as found:
        found.job.train(lambda rank, step: None, 0.02)
        yield found


def failed(mesh: Mesh, destination: str, **options: object) -> str:
    """The reason of an export that must fail."""
    export = mesh.export(destination, **options)  # type: ignore[arg-type]
    with pytest.raises(ConflictError, match="failed"):
        export.wait(30)
    assert export.info.state is ExportState.FAILED
    return export.info.reason


def test_a_running_job_is_exported_whole_and_followed(site: ExportingJob, mesh: Mesh) -> None:
    seen: list[ExportInfo] = []
    begun = mesh.export("checkpoints/whole", max_shard_size=200, assets=None)
    done = begun.wait(30, progress=seen.append)
    assert done.state is ExportState.DONE
    assert done.written_bytes == done.size_bytes > 0
    assert [one.state for one in done.files] == ["VERIFIED"] * len(done.files)
    assert seen[-1] == done
    manifest = site.check_whole("whole")
    assert manifest["step"] == done.step
    # What the control plane tells is what lies there.
    sizes = {p.name: p.stat().st_size for p in (site.folder / "whole").iterdir()}
    assert {one.name: one.size_bytes for one in done.files} == sizes
    ranks = {one.rank for one in done.files if one.name.endswith(".safetensors")}
    assert ranks == {0, 1}, "both sidecars write"


def test_options_reach_the_files(site: ExportingJob, mesh: Mesh, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    arena = torch.frombuffer(site.job.ranks[1].arena.buffer, dtype=torch.float32)
    arena[64] = -1  # of `both`
    options: Any = {"include": PARAMETERS, "replica": 1, "overwrite": True}
    other = compared(lambda: mesh.export("checkpoints/other", **options).wait(30))
    manifest = json.loads((site.folder / "other" / "paramd-export.json").read_text())
    assert load_file(site.folder / "other" / "model.safetensors")["both"][0] == -1
    assert other.replicas_differ == tuple(manifest["replicas_differ"]) == ("both",)
    arena[64] = site.whole["both"][0]
    more: Any = {"dtype": "bfloat16", "tied": "keep", "name_map": {"rows": "lines"}}
    more |= {"include": PARAMETERS, "assets": tmp_path}
    done = mesh.export("checkpoints/options-{step}", **more).wait(30)
    assert done.replicas_differ in ((), None), "equal, or not compared in time"
    folder = site.folder / f"options-{done.step}"
    assert done.destination == f"checkpoints/options-{done.step}"
    tensors = load_file(folder / "model.safetensors")
    assert torch.equal(tensors["lines"], site.whole["rows"].bfloat16())
    assert "running" not in tensors, "buffers were not wanted"
    assert torch.equal(tensors["tied"], tensors["lines"])
    assert (folder / "config.json").read_text() == "{}"
    assert "config.json" in {one.name for one in done.files}
    audit = site.job.ask("GET", "/audit?limit=200").json()["records"]
    stored = [one for one in audit if one["method"] == "export-asset.store"]
    assert [one["kind"] for one in stored] == ["outcome", "intent"], "newest first"
    assert stored[1]["detail"]["name"] == "config.json"


@pytest.fixture
def disks(site: ExportingJob) -> Iterator[Path]:
    """File systems: one too small, one that runs full in the middle, one for reading only."""
    folder = site.folder.parent
    options = {"tiny": "size=4k", "few": "size=1m,nr_inodes=6", "forbidden": "ro"}
    mounted = []
    try:
        for name, option in options.items():
            path = folder / name
            path.mkdir(exist_ok=True)
            command = ["mount", "-t", "tmpfs", "-o", option, "tmpfs", str(path)]
            if subprocess.run(command, capture_output=True, check=False).returncode:
                pytest.skip("small file systems need the right to mount")
            mounted.append(path)
        yield folder
    finally:
        for path in mounted:
            subprocess.run(["umount", str(path)], check=True)


def test_a_place_that_forbids_it_fails_with_the_cause(
    site: ExportingJob, mesh: Mesh, disks: Path
) -> None:
    reason = failed(mesh, "forbidden/x")
    assert "Read-only" in reason, reason
    mesh.add_destination("away", str(disks / "away"))
    assert "away" in failed(mesh, "away/x"), "a root that is no more"
    with pytest.raises(ExistsError, match="for good"):
        mesh.add_destination("away", "/tmp")
    with pytest.raises(UsageError, match="expected an absolute path"):
        mesh.add_destination("leak", "s3://KEY:SECRET@bucket/x")
    assert "SECRET" not in site.job.ask("GET", "/audit").text


def test_a_full_disk_fails_it_and_leaves_nothing(
    site: ExportingJob, mesh: Mesh, disks: Path
) -> None:
    (disks / "tiny" / "filler").write_bytes(bytes(4096))
    assert "free" in failed(mesh, "tiny/x")
    reason = failed(mesh, "few/x", max_shard_size=16)
    assert "space" in reason or "full" in reason, reason
    for name in ("tiny", "few"):
        # The end is told first, then its files are removed.
        until(partial(only_filler, disks / name), f"{name} has nothing of it")


def only_filler(folder: Path) -> bool:
    return all(path.name == "filler" for path in folder.rglob("*") if path.is_file())


def test_an_export_is_cancelled_and_leaves_nothing(site: ExportingJob, mesh: Mesh) -> None:
    process = site.job.ranks[1].process
    site.arm(1, "export-chunk:stop")
    export = mesh.export("checkpoints/cancelled", max_shard_size=200)
    until(lambda: is_stopped(process.pid), "the stop")
    try:
        # One that waits for its turn behind two others need not wait for its end, too.
        behind = [mesh.export(f"checkpoints/cancelled-{n}", include=PARAMETERS) for n in range(2)]
        waiting = behind[1].cancel()
        assert (waiting.state, waiting.step) == (ExportState.CANCELLED, -1)
        ended = export.cancel()
    finally:
        process.send_signal(signal.SIGCONT)
    assert (ended.state, ended.reason) == (ExportState.CANCELLED, "cancelled by owner")
    mesh.export_ended(behind[0].info, 30)
    # What the stopped one goes on with finds its place gone.
    until(lambda: not [one for one in site.left() if ".cancelled." in one], "the removal")
    assert not (site.folder / "cancelled").exists()
    done = mesh.export("checkpoints/over").wait(30)
    with pytest.raises(ConflictError):
        mesh.cancel_export(done.id)


def test_a_lease_that_ends_fails_it_with_the_cause(site: ExportingJob, mesh: Mesh) -> None:
    process = site.job.ranks[0].process
    site.arm(0, "export-file-begun:stop")
    export = mesh.export("checkpoints/lost", include=PARAMETERS, max_shard_size=200)
    until(lambda: is_stopped(process.pid), "the stop")
    try:
        site.release_snapshots(export.id, rank=1)
    finally:
        process.send_signal(signal.SIGCONT)
    ended = mesh.export_ended(export.info, 30)
    assert ended.state is ExportState.FAILED
    assert "snapshot" in ended.reason or "lease" in ended.reason, ended.reason
    # The rank that was stopped removes its own once it is told.
    until(lambda: not [one for one in site.left() if "lost" in one], "what it wrote is removed")


def test_one_id_is_begun_once(site: ExportingJob, mesh: Mesh) -> None:
    body = {"id": "ab" * 16, "destination": "checkpoints/once"}
    answers = [site.job.ask("POST", "/exports", json=body) for _ in range(2)]
    assert [one.status_code for one in answers] == [202, 202]
    other = {**body, "destination": "checkpoints/another"}
    assert site.job.ask("POST", "/exports", json=other).status_code == 409
    until(lambda: mesh.get_export("ab" * 16).ended, "the end")
    assert [one.id for one in mesh.exports()].count("ab" * 16) == 1


def test_files_of_an_export_can_be_read_and_nothing_beside_them(
    site: ExportingJob, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh.export("checkpoints/readable", include=PARAMETERS).wait(30)
    (site.folder / "readable" / "secret.txt").write_text("mine")

    def read(name: str, destination: str = "checkpoints/readable") -> httpx2.Response:
        asked = {"destination": destination, "name": name, "offset_bytes": "0"}
        return site.job.ask("GET", "/export-file", params=asked)

    found = read("model.safetensors")
    assert found.content == (site.folder / "readable" / "model.safetensors").read_bytes()
    assert found.headers["paramd-file-bytes"] == str(len(found.content))
    assert read("secret.txt").status_code == 404
    assert read("../readable/secret.txt").status_code == 404
    assert read("model.safetensors", "checkpoints/nowhere").status_code == 404
    assert read("paramd-export.json", "checkpoints/../x").status_code == 422
    path = site.folder / "readable" / "paramd-export.json"
    headers, own = {"authorization": f"Bearer {site.job.token}"}, path.read_text()
    body = {"role": "editor", "jobs": JOB}
    made = httpx2.post(f"{site.job.url}/api/v1/tokens", json=body, headers=headers, trust_env=False)
    path.write_text("{}")
    assert read("model.safetensors").status_code == 500, "its manifest cannot be read"
    monkeypatch.setattr(site.job, "token", made.json()["token"])
    # Whose export it is, and not whose job is asked, decides who reads it.
    for text, status in ((own, 200), (own.replace(f'"{JOB}"', '"b-one"'), 404), ("{}", 404)):
        path.write_text(text)
        assert read("model.safetensors").status_code == status
        assert read(path.name).status_code == status
