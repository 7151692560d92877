"""A job of `client_job` that exports into a directory, and what tests look at there."""

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from safetensors.torch import load_file

import paramd
from paramd.layout.types import Layout
from paramd.mesh.mesh import Mesh
from paramd.places import job_dir
from paramd.security.tickets import Role
from paramd.v1 import export_pb2, sidecar_pb2, sidecar_pb2_grpc
from tests.integration.client_job import JOB, Job, running_job
from tests.integration.test_client import layout, write_arenas
from tests.longer import wait_until as until  # noqa: F401
from tests.orders import bound

DEADLINE_S = 60.0
MANIFEST = "paramd-export.json"


class ExportingJob:
    """A job whose control plane knows the destination "checkpoints", and a mesh client."""

    def __init__(self, job: Job, folder: Path, stack: ExitStack) -> None:
        self.job = job
        self.folder = folder
        self.faults = Path(os.environ["PARAMD_FAULTS_DIR"])
        self.whole = write_arenas(job)
        job.update()
        self._stack = stack
        self._environment = dict(os.environ)
        self._log = job_dir(JOB) / "control.log"

    def connect(self) -> Mesh:
        """A client, to be closed by the caller."""
        return paramd.connect(self.job.url, self.job.token, job=JOB)

    def arm(self, rank: int, rule: str) -> None:
        """Has a rank's sidecar strike itself at a named point."""
        path = self.faults / f"rank-{rank}.sock"
        part = path.with_suffix(".part")
        part.write_text(rule)
        part.replace(path)

    def disarm(self) -> None:
        """Takes back what has not struck."""
        for path in self.faults.iterdir():
            path.unlink()

    def left(self) -> list[str]:
        """Everything below the destination, hidden files too."""
        return sorted(
            str(p.relative_to(self.folder)) for p in self.folder.rglob("*") if p.is_file()
        )

    def check_whole(self, key: str) -> Mapping[str, Any]:
        """An export at `key` is there with all its files; its manifest."""
        found = json.loads((self.folder / key / MANIFEST).read_text())
        tensors: dict[str, torch.Tensor] = {}
        for path in (self.folder / key).glob("*.safetensors"):
            tensors |= load_file(path)
        assert set(tensors) == set(self.whole)
        for name, tensor in tensors.items():
            assert torch.equal(tensor, self.whole[name]), name
        assert isinstance(found, dict)
        return found

    def release_snapshots(self, export_id: str, *, rank: int) -> None:
        """Ends the leases of an export's snapshots at one rank, as their time would."""
        store = self._log.parent / "control.sqlite"
        with closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as opened:
            query = "SELECT plan FROM exports WHERE id = ?"
            ((plan,),) = opened.execute(query, (export_id,)).fetchall()
        for pin in export_pb2.ExportPlan.FromString(plan).pins:
            if pin.rank == rank:
                self.release(rank, pin.snapshot_id)

    def release(self, rank: int, snapshot_id: str) -> None:
        """Ends one lease."""
        job = self.job
        ticket = bound(job.signer, Role.READER, rank, job=JOB, incarnation=job.incarnation)
        with grpc.insecure_channel(job.ranks[rank].address) as channel:
            stub: Any = sidecar_pb2_grpc.SidecarServiceStub(channel)
            request = sidecar_pb2.ReleaseSnapshotRequest(snapshot_id=snapshot_id)
            allowed = (("authorization", f"Bearer {ticket}"),)
            stub.ReleaseSnapshot(request, timeout=5, metadata=allowed)

    def kill_control(self) -> None:
        """SIGKILL."""
        self.job.control.kill()
        self.job.control.wait()

    def restart_control(self) -> None:
        """Another one at the same addresses."""
        url, grpc = self.job.url.removeprefix("http://"), self.job.control_address
        with self._log.open("ab") as log:
            command = [sys.executable, "-m", "paramd_service.control", "--job", JOB]
            control = subprocess.Popen(
                [*command, "--listen", url, "--grpc-listen", grpc],
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._stack.enter_context(control)
        self._stack.callback(control.kill)
        assert control.stdin is not None
        assert control.stdout is not None
        self.job.tell(control.stdin)
        assert json.loads(control.stdout.readline())["url"] == self.job.url
        self.job.control = control


@contextmanager
def exporting_job(
    tmp_path: Path, *, of: Layout | None = None, **destinations: str | Mapping[str, str]
) -> Iterator[ExportingJob]:
    """The job (with the layout `of`); everything it started ends with the block. Without
    `destinations` it has its own."""
    folder, faults = tmp_path / "checkpoints", tmp_path / "faults"
    for path in (folder, faults, tmp_path / "state"):
        path.mkdir()
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("PARAMD_STATE_DIR", str(tmp_path / "state"))
        patch.setenv("PARAMD_FAULTS_DIR", str(faults))
        if destinations:
            table = {"checkpoints": str(folder), **destinations}
            patch.setenv("PARAMD_DESTINATIONS", json.dumps(table))
        else:
            folder = job_dir(JOB) / "checkpoints"
        job = stack.enter_context(running_job(of if of is not None else layout()))
        try:
            yield ExportingJob(job, folder, stack)
        except BaseException:
            print((job_dir(JOB) / "control.log").read_text()[-6000:])
            raise


def is_stopped(pid: int) -> bool:
    """Whether a process has been stopped by a signal."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
