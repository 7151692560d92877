"""torchrun with fewer or more nodes than before, and several jobs on one host."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import psutil
import pytest

import paramd
from paramd.errors import ParamdError
from paramd.mesh.mesh import Mesh
from tests.launch import ROOT, free_port
from tests.multiprocess.truth import wait_until

WORKER = "tests.integration.far_trainer"
JOB = "far"
DEADLINE_S = 240.0

# Or an agent waits 30 s for nodes that might still come, and for those that are gone.
CONF = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Agents that were started; they and what they started are gone afterwards."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for agent in started:
        with ExitStack() as stack:
            stack.callback(agent.wait)
            for process in family(agent.pid):
                process.kill()
    state = str(tmp_path / "state")
    for process in psutil.process_iter():
        try:
            if process.environ().get("PARAMD_STATE_DIR") == state:
                process.kill()
        except psutil.Error:
            continue


def family(pid: int) -> list[psutil.Process]:
    try:
        agent = psutil.Process(pid)
        return [agent, *agent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def agent(folder: Path, port: int, name: str) -> subprocess.Popen[bytes]:
    """A node of one worker, in a training of one or two."""
    launch = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "elastic",
        "--rdzv-conf", CONF, "--max-restarts", "5",
    ]  # fmt: skip
    with (folder / f"{name}.out").open("ab") as out:
        return subprocess.Popen(
            [*launch, "-m", WORKER, str(folder / "stop")],
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=ROOT,
            env={
                **os.environ,
                "PARAMD_STATE_DIR": str(folder / "state"),
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            },
        )


def mesh_of(world_size: int) -> Mesh:
    """The job, once it trains with so many ranks."""
    found: list[Mesh] = []

    def there() -> bool:
        try:
            mesh = paramd.connect(job=JOB)
        except ParamdError:
            return False
        try:
            status = mesh.status()
            if status.world_size == world_size and all(row.step > 1 for row in status):
                found.append(mesh)
                return True
        except ParamdError:
            pass
        mesh.close()
        return False

    wait_until(there, f"it trains with {world_size} ranks", timeout_s=DEADLINE_S)
    return found[0]


@pytest.mark.in_turns
@pytest.mark.timeout(400)
def test_a_job_goes_on_with_fewer_nodes_and_with_more_again(
    tmp_path: Path, agents: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARAMD_STATE_DIR", str(tmp_path / "state"))
    (tmp_path / "state").mkdir(mode=0o700)
    port = free_port()
    try:
        agents.append(agent(tmp_path, port, "one"))
        # The agent that comes first keeps the rendezvous, and has to outlive the other.
        wait_until(partial(listens, port), "the first agent is there", timeout_s=DEADLINE_S)
        agents.append(agent(tmp_path, port, "two"))
        with mesh_of(2) as mesh:
            first = mesh.incarnation
            assert values(mesh) == [1.0, 2.0]
            stale = sidecars(tmp_path)
            assert len(stale) == 2
        # A node is lost, with its agent and trainer; its sidecar is left behind on this host.
        for process in family(agents[1].pid):
            if process.pid not in stale:
                process.send_signal(signal.SIGKILL)
        agents[1].wait()
        with mesh_of(1) as mesh:
            second = mesh.incarnation
            assert second > first
            assert values(mesh) == [1.0]
            assert [row.rank for row in mesh.status()] == [0]
        # Nobody serves what is over, or is in the way of the rank that comes back.
        agents.append(agent(tmp_path, port, "three"))
        with mesh_of(2) as mesh:
            assert mesh.incarnation > second
            assert values(mesh) == [1.0, 2.0]
            assert len(sidecars(tmp_path)) == 2
        (tmp_path / "stop").touch()
        assert agents[0].wait(DEADLINE_S) == 0
        assert agents[2].wait(DEADLINE_S) == 0
    except BaseException:
        for path in sorted(tmp_path.glob("*.out")):
            print(f"===== {path.name}\n{path.read_text()[-6000:]}")
        raise


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True


def values(mesh: Mesh) -> list[float]:
    found: list[float] = sorted(mesh.summon("*", timeout=30.0)["0.weight"].unique().tolist())
    return found


def sidecars(folder: Path) -> set[int]:
    """The sidecars of this state dir."""
    found = set()
    for process in psutil.process_iter(["pid", "cmdline"]):
        line = process.info["cmdline"] or []
        if "paramd_service.sidecar" in line and any(str(folder) in word for word in line):
            found.add(process.info["pid"])
    return found
