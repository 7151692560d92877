"""Slurm on one machine: a login node and compute nodes, each a host of its own (`hosts.py`).

    with cluster(tmp_path, nodes=2) as slurm:
        job = slurm.submit(ROOT / "deploy/slurm/srun.sbatch", "python", "train.py")
        slurm.run("scontrol", "requeue", job)

Debian's packages, with munge between the nodes and accounting left out. `proctrack/linuxproc`
finds a job's processes by their parents, since not every machine lets tests make control groups.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.hosts import Host, hosts, wait_until
from tests.needs import program

DEADLINE_S = 60.0
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "scontrol", "sinfo", "squeue")

_CONFIG = """
ClusterName=tests
SlurmctldHost={login}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={own}/munge.sock,cred_expire=5
CredType=cred/munge
StateSaveLocation={own}/controller
SlurmdSpoolDir={own}/spool
SlurmctldPidFile={own}/slurmctld.pid
SlurmdPidFile={own}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
KillWait=10
SlurmdParameters=config_overrides
NodeName={nodes} CPUs=2
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster whose nodes are up. Its daemons and jobs end with its hosts."""

    login: Host
    """Runs slurmctld; jobs are submitted here."""
    nodes: list[Host]
    shared: Path
    """A folder that all hosts see; jobs begin there and write `slurm-JOB.out` to it."""

    def run(
        self, *command: str, env: Mapping[str, str] | None = None, timeout_s: float = 60.0
    ) -> str:
        """What a command on the login node prints; a failure shows all of it."""
        # The hosts' own working directory is the caller's.
        there = ["sh", "-c", 'cd "$1" && shift && exec "$@"', "sh", str(self.shared), *command]
        return self.login.run(there, env=self.environment(env), timeout_s=timeout_s).stdout

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """What a user of the cluster has set; jobs inherit it."""
        return {
            "SLURM_CONF": str(self.shared / "slurm.conf"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            **(more if more is not None else {}),
        }

    def submit(self, *command: str, env: Mapping[str, str] | None = None) -> str:
        """Number of a job that `sbatch` was given."""
        return self.run("sbatch", "--parsable", *command, env=env).strip()

    def state(self, job: str) -> str:
        """RUNNING, COMPLETED and so on."""
        return self._told(job, "JobState")

    def minutes(self, job: str) -> int:
        """Whole minutes since its start."""
        hours, minutes, _ = self._told(job, "RunTime").split(":")
        return 60 * int(hours) + int(minutes)

    def _told(self, job: str, name: str) -> str:
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))

    def output(self, job: str) -> str:
        """What a job has printed, over all its starts."""
        path = self.shared / f"slurm-{job}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def processes(self) -> list[str]:
        """Command lines on all nodes of what is not the cluster's own, zombies left out."""
        daemons = ("slurmd", "munged", "sleep infinity")
        return [
            f"{node.name}: {line}"
            for node in self.nodes
            for line in node.run(["ps", "-eo", "stat=,args="]).stdout.splitlines()
            if not line.startswith("Z") and "ps -eo" not in line
            if not any(name in line for name in daemons)
        ]


@contextmanager
def cluster(folder: Path, *, nodes: int) -> Iterator[Cluster]:
    """A cluster with that many nodes of two CPUs, in `folder`, which is empty."""
    for name in PROGRAMS:
        program(name)
    shared = folder / "shared"
    shared.mkdir()
    (folder / "hosts").mkdir()
    with hosts(nodes + 1, folder / "hosts") as (login, *found):
        slurm = Cluster(login=login, nodes=found, shared=shared)
        names = ",".join(node.name for node in found)
        (shared / "slurm.conf").write_text(
            _CONFIG.format(login=login.name, nodes=names, own=login.folder)
        )
        key = shared / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        for host in (login, *found):
            own = host.folder
            places = [
                f"--key-file={key}", f"--socket={own}/munge.sock", f"--pid-file={own}/munged.pid",
                f"--log-file={own}/munged.log", f"--seed-file={own}/munge.seed",
            ]  # fmt: skip
            host.run([program("munged"), "--force", *places])
        environment = slurm.environment()
        login.run(["mkdir", str(login.folder / "controller")])
        login.run([program("slurmctld"), "-L", str(shared / "slurmctld.log")], env=environment)
        for node in found:
            log = str(shared / f"{node.name}.log")
            node.run([program("slurmd"), "-N", node.name, "-L", log], env=environment)

        def idle() -> bool:
            told = slurm.run("sinfo", "--noheader", "--Node", "--format=%t")
            return told.split() == ["idle"] * nodes

        wait_until("nodes are idle", idle, timeout_s=DEADLINE_S, told=lambda: logs(shared))
        yield slurm


def logs(shared: Path) -> str:
    """The daemons' logs and the jobs' output, for a failure's message."""
    return "\n".join(
        f"===== {path.name}\n{path.read_text(errors='replace')[-6000:]}"
        for path in sorted([*shared.glob("*.log"), *shared.glob("*.out")])
    )
