"""Hosts on one machine: own network, host name, mounts, processes and kernel id, on one switch.

    with hosts(2) as (one, two):
        one.run(["paramd", "status"])

Each has an address 10.77.0.N on `eth0`, the names of all in /etc/hosts, and a private folder under
the same path as the others' (`HERE`), so that no file of one is seen by another. All traffic stays
within these namespaces. With `second=True` each has 10.78.0.N on `eth1`, on a second switch: what a
test does to that link does nothing to the first. Needs root: without it a test is skipped, in CI
failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests import longer
from tests.launch import ROOT
from tests.needs import missing, program
from tests.warm import ENTER

NETWORK = "10.77.0"
SECOND = "10.78.0"
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
    switch: int
    """A process in the switch's namespace, where its cables' other ends are `hN` and `hN-1`."""

    @property
    def second_ip(self) -> str:
        """Its address on `eth1`, if it has one."""
        return f"{SECOND}.{self.number}"

    def command(self, arguments: Sequence[str]) -> list[str]:
        """What to run outside so that `arguments` run there."""
        return [program("nsenter"), "-t", str(self.pid), *ENTER, *arguments]

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

    @contextmanager
    def conversation(
        self, code: str, env: Mapping[str, str] | None = None
    ) -> Iterator[Callable[..., str]]:
        """Run a piece of Python there; to be told a line by it, after one is said to it."""
        talker = subprocess.Popen(
            self.command([sys.executable, "-c", code]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self.environment(env),
        )
        assert talker.stdin is not None
        assert talker.stdout is not None
        with talker.stdin as said, talker.stdout as told:

            def ask(line: str = "") -> str:
                if line:
                    print(line, file=said, flush=True)
                return told.readline().strip()

            try:
                yield ask
            finally:
                said.close()
                talker.wait(30.0)

    def link(self, *words: str, device: str = "eth0") -> None:
        """`ip link set dev eth0 ...` there: "down" unplugs it."""
        self.network("ip", "link", "set", "dev", device, *words)

    def network(self, *words: str) -> None:
        """Run `ip`, `tc`, `nft` and the like on its network."""
        program(words[0])
        _outside("nsenter", "-t", str(self.pid), "-n", *words)

    def cable(self, *words: str) -> None:
        """The same on the switch, where the other ends of its cables are."""
        _outside("nsenter", "-t", str(self.switch), "-n", *words)

    def kill(self) -> None:
        """End the whole host at once, as without power."""
        self.process.kill()
        self.process.wait()


@contextmanager
def hosts(
    count: int, folder: Path, *, second: bool = False, ipv6: bool = False
) -> Iterator[list[Host]]:
    """That many hosts, named h1, h2 and so on; `folder` is empty and outside of them.

    Args:
        second: they have a second link, `eth1`.
        ipv6: they have addresses fd77::N instead, and no IPv4 but loopback.
    """
    if os.geteuid() != 0:
        missing("root, which may make hosts")
    for name in ("setpriv", "unshare", "nsenter", "ip"):
        program(name)
    private = folder / "host"
    private.mkdir(mode=0o700)
    numbers = range(1, count + 1)
    names = "".join(f"{_ip(number, ipv6=ipv6)} h{number}\n" for number in numbers)
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n::1 localhost\n{names}")
    with ExitStack() as stack:
        switch = _namespaces(stack, ["--net"], "ip link set lo up; echo ready; exec sleep infinity")
        there = ("nsenter", "-t", str(switch.pid), "-n", "ip", "link")
        for name in ("sw", "sw-1")[: 1 + second]:
            _outside(*there, "add", name, "type", "bridge")
            _outside(*there, "set", name, "up")
        found = [_host(stack, n, private, folder, switch.pid, ipv6=ipv6) for n in numbers]
        for host in found if second else ():
            _plug(host, f"{host.name}-1", "sw-1", "eth1", f"{host.second_ip}/24")
        yield found


def _ip(number: int, *, ipv6: bool) -> str:
    return f"fd77::{number}" if ipv6 else f"{NETWORK}.{number}"


def _plug(host: Host, end: str, switch: str, device: str, address: str) -> None:
    """Lay a cable from a host to a switch."""
    # Made within the switch: names outside never clash with other tests' hosts.
    peer = ("peer", device, "netns", str(host.pid))
    host.cable("ip", "link", "add", end, "type", "veth", *peer)
    host.cable("ip", "link", "set", end, "master", switch, "up")
    # An IPv6 address is of use at once: nobody else can have it.
    host.network("ip", "address", "add", address, "dev", device, *["nodad"] * (":" in address))
    host.network("ip", "link", "set", device, "up")


def _host(
    stack: ExitStack, number: int, private: Path, folder: Path, switch: int, *, ipv6: bool
) -> Host:
    name = f"h{number}"
    boot = folder / f"boot-{number}"
    boot.write_text(f"{uuid.uuid4()}\n")
    spaces = ["--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child=KILL"]
    arguments = [name, str(private), str(folder / "hosts"), str(boot)]
    process = _namespaces(stack, spaces, _HOST, arguments)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    pid = int(children[0])
    ip = _ip(number, ipv6=ipv6)
    made = Host(
        name=name, ip=ip, number=number, folder=private, process=process, pid=pid, switch=switch
    )
    _plug(made, name, "sw", "eth0", f"{ip}/{64 if ipv6 else 24}")
    return made


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
    what: str, true: Callable[[], object], *, timeout_s: float, told: Callable[[], str] = str
) -> None:
    """Wait until `true()` holds; `told` is what a failure shows."""
    longer.wait_until(true, what, timeout_s, told)
