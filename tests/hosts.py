"""Hosts on one machine: own network, host name, mounts, processes and kernel id, on one switch.

    with hosts(2) as (one, two):
        one.run(["paramd", "status"])

Each has an address 10.77.0.N on `eth0`, the names of all in /etc/hosts, and a private folder under
the same path as the others' (`HERE`), so that no file of one is seen by another. All traffic stays
within these namespaces. Needs root: without it a test is skipped, in CI failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.launch import ROOT
from tests.needs import missing, program

NETWORK = "10.77.0"
READY_S = 10.0

_HOST = """
set -e
hostname "$1"
mount -t tmpfs -o mode=0700 none "$2"
mount --bind "$3" /etc/hosts
mount --bind "$4" /proc/sys/kernel/random/boot_id
ip link set lo up
echo ready
exec sleep infinity
"""


@dataclass(frozen=True, kw_only=True)
class Host:
    """One of them; its processes end with it."""

    name: str
    ip: str
    number: int
    folder: Path
    """Its private folder; the same path as on the others."""
    process: subprocess.Popen[str]
    """Holds its namespaces."""
    pid: int
    """Its process 1, as seen from outside."""

    def command(self, arguments: Sequence[str]) -> list[str]:
        """What to run outside so that `arguments` run there."""
        return [program("nsenter"), "-t", str(self.pid), "-n", "-u", "-m", "-p", "--", *arguments]

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """Of a program there."""
        path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)
        return os.environ | {
            "PYTHONPATH": path,
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "HOME": str(self.folder),
            "TMPDIR": str(self.folder),
            "PARAMD_STATE_DIR": str(self.folder / "state"),
            **(more if more is not None else {}),
        }

    def start(
        self, arguments: Sequence[str], *, output: Path, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a program there; what it prints goes to a file outside."""
        with output.open("wb") as file:
            return subprocess.Popen(
                self.command(arguments),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=self.environment(env),
            )

    def run(
        self,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program there to its end; with `check` a failure shows what it printed."""
        done = subprocess.run(
            self.command(arguments),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=self.environment(env),
            timeout=timeout_s,
            check=False,
        )
        assert not check or done.returncode == 0, f"{arguments}\n{done.stdout}\n{done.stderr}"
        return done

    def python(
        self, code: str, *, env: Mapping[str, str] | None = None, timeout_s: float = 60.0
    ) -> str:
        """What a piece of Python prints there."""
        return self.run([sys.executable, "-c", code], env=env, timeout_s=timeout_s).stdout

    def link(self, *words: str) -> None:
        """`ip link set dev eth0 ...` there: "down" unplugs it."""
        _outside("nsenter", "-t", str(self.pid), "-n", "ip", "link", "set", "dev", "eth0", *words)

    def kill(self) -> None:
        """End the whole host at once, as without power."""
        self.process.kill()
        self.process.wait()


@contextmanager
def hosts(count: int, folder: Path) -> Iterator[list[Host]]:
    """That many hosts, named h1, h2 and so on; `folder` is empty and outside of them."""
    if os.geteuid() != 0:
        missing("root, which may make hosts")
    for name in ("setpriv", "unshare", "nsenter", "ip"):
        program(name)
    private = folder / "host"
    private.mkdir(mode=0o700)
    names = "".join(f"{NETWORK}.{n} h{n}\n" for n in range(1, count + 1))
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n::1 localhost\n{names}")
    with ExitStack() as stack:
        switch = _namespaces(stack, ["--net"], "ip link set lo up; echo ready; exec sleep infinity")
        _outside(
            "nsenter", "-t", str(switch.pid), "-n", "ip", "link", "add", "sw", "type", "bridge"
        )
        _outside("nsenter", "-t", str(switch.pid), "-n", "ip", "link", "set", "sw", "up")
        yield [_host(stack, n, private, folder, switch.pid) for n in range(1, count + 1)]


def _host(stack: ExitStack, number: int, private: Path, folder: Path, switch: int) -> Host:
    name = f"h{number}"
    boot = folder / f"boot-{number}"
    boot.write_text(f"{uuid.uuid4()}\n")
    spaces = ["--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child=KILL"]
    arguments = [name, str(private), str(folder / "hosts"), str(boot)]
    process = _namespaces(stack, spaces, _HOST, arguments)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    pid = int(children[0])
    ip = f"{NETWORK}.{number}"
    inside = ("nsenter", "-t", str(pid), "-n", "ip")
    there = ("nsenter", "-t", str(switch), "-n", "ip")
    # Made within the switch: names outside never clash with other tests' hosts.
    _outside(*there, "link", "add", name, "type", "veth", "peer", "eth0", "netns", str(pid))
    _outside(*there, "link", "set", name, "master", "sw", "up")
    _outside(*inside, "address", "add", f"{ip}/24", "dev", "eth0")
    _outside(*inside, "link", "set", "eth0", "up")
    return Host(name=name, ip=ip, number=number, folder=private, process=process, pid=pid)


def _namespaces(
    stack: ExitStack, spaces: Sequence[str], script: str, arguments: Sequence[str] = ()
) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [
            "setpriv",
            "--pdeathsig",
            "KILL",
            "unshare",
            *spaces,
            "sh",
            "-c",
            script,
            "sh",
            *arguments,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    stack.callback(_end, process)
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        assert process.stderr is not None
        missing(f"the right to make namespaces ({process.stderr.read().strip()})")
    return process


def _end(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        process.kill()
    process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def _outside(*arguments: str) -> None:
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{arguments}: {done.stderr}"


def wait_until(
    what: str, true: Callable[[], bool], *, timeout_s: float, told: Callable[[], str] = str
) -> None:
    """Wait until `true()` holds; `told` is what a failure shows."""
    deadline_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline_s, f"not in {timeout_s} s: {what}\n{told()}"
        time.sleep(0.05)
