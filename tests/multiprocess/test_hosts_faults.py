"""Faults of the link between two hosts whose training goes over another one.

The process group meets over `eth0`; all of paramd's own connections are on `eth1`, where the faults
are: what delays training then is paramd.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import Host, hosts, wait_until
from tests.launch import ROOT
from tests.longer import sample
from tests.scenes.test_hosts import PARAMD, SLACK_S, Training, client_env

NUMEL = 1 << 19
REFUSED_S = 5.0
NO_ROUTE_S = 3.0
"""So long the kernel asks for a lost neighbour's hardware address before it says "no route": to a
client that had to connect anew it is that much later that it begins to wait for a successor."""
CUT_S = 30.0
HEALED_S = 90.0
"""For a busy machine."""
HOUR_S = 3600.0

# Python imports it at the start of every process that finds it on its path.
SITECUSTOMIZE = """
import sys, time
_real = time.time

def _shifted():
    # gRPC's deadlines are by the kernel's clock, which is right here.
    asks = sys._getframe(1).f_code.co_filename
    if "/grpc/" in asks or asks.endswith("/service.py"):
        return _real()
    return _real() + {by_s}

time.time = _shifted
"""


READ = """
import json, sys, time, paramd
from paramd.errors import ParamdError
with paramd.connect(job="far") as mesh:
    for line in sys.stdin:
        begun_s = time.monotonic()
        try:
            if line == "status\\n":
                found = {"reasons": [row.reason for row in mesh.status()]}
            else:
                full = mesh.summon("*", timeout=60)
                halves = full["0.weight"].flatten().view(2, -1)
                values = [sorted(half.unique().tolist()) for half in halves]
                found = {"step": full.step, "values": values}
        except ParamdError as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(found | {"took_s": time.monotonic() - begun_s}), flush=True)
"""


class Reader:
    """A client that stays connected."""

    def __init__(self, host: Host, env: dict[str, str]) -> None:
        self.host = host
        self._process = subprocess.Popen(
            host.command([sys.executable, "-c", READ]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=host.environment(env),
        )

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def ask(self, line: str = "summon") -> dict[str, Any]:
        self.tell(line)
        return self.answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60.0)
        self._process.stdout.close()


def is_right(found: dict[str, Any]) -> bool:
    """Whether every value is that of the step it came with; a wrong one is no answer at all."""
    if "error" in found:
        return False
    step = found["step"]
    assert found["values"] == [[2.0 * step], [2.0 * step + 1]], found
    return True


@dataclass
class Scene:
    """A training on two hosts, and a reader on each that was connected before the fault."""

    one: Host
    two: Host
    readers: Sequence[Reader]
    progress: Path
    endpoint: dict[str, Any]
    told: Callable[[], str]

    def step(self) -> int:
        return int(self.progress.read_text())

    def trains(self, name: str) -> None:
        """It goes on while the fault stands."""
        at = self.step()
        wait_until(
            f"{name}: training goes on",
            lambda: self.step() >= at + 20,
            timeout_s=60,
            told=self.told,
        )

    def ask_all(self) -> list[dict[str, Any]]:
        """Both at once."""
        for reader in self.readers:
            reader.tell("summon")
        return [reader.answer() for reader in self.readers]

    def refused_and_named(self, name: str, *, own: Host | None = None) -> None:
        """Nobody gets a wrong value; who is refused is told why, and soon.

        Readers on the host `own` reach the rank of that host no more than the other one.
        """
        for reader, found in zip(self.readers, self.ask_all(), strict=True):
            if is_right(found):
                continue
            assert found["took_s"] < REFUSED_S + NO_ROUTE_S + SLACK_S, (name, found)
            lost = {0, 1} if reader.host is own else {1 if reader.host is self.one else 0}
            assert any(f"rank {one}" in found["error"] for one in lost), (name, found)

    def all_right(self, name: str) -> None:
        """Slow, but right."""
        for found in self.ask_all():
            assert is_right(found), (name, found)

    def healed(self, name: str) -> None:
        """By itself: bits, and the status."""
        last: list[Any] = []

        def well() -> bool:
            last[:] = self.ask_all()
            if not all(map(is_right, last)):
                return False
            last[:] = [self.readers[0].ask("status")]
            return last[0].get("reasons") == ["", ""]

        wait_until(
            f"{name}: healed", well, timeout_s=HEALED_S, told=lambda: f"{last}\n{self.told()}"
        )


@contextmanager
def scene(folder: Path, *, second: Mapping[str, str] | None = None) -> Iterator[Scene]:
    """`second` is what the second host adds to its environment."""
    more = dict(second) if second is not None else {}
    progress = folder / "progress"
    with hosts(2, folder, second=True) as (one, two), ExitStack() as stack:
        job = Training(folder, (one, two), arguments=[str(progress), str(NUMEL)])
        stack.callback(_kill, job)
        address = [{"PARAMD_ADDRESS": host.second_ip} for host in (one, two)]
        job.start(env=[address[0], address[1] | more])
        endpoint = job.wait_attached()
        assert one.second_ip in endpoint["url"], endpoint["url"]
        env = client_env(endpoint)
        readers = []
        for host in (one, two):
            readers.append(Reader(host, env | more if host is two else env))
            stack.callback(readers[-1].close)
        found = Scene(one, two, readers, progress, endpoint, job.told)
        found.healed("before any fault")
        yield found
        job.stop()


def _kill(job: Training) -> None:
    for process in job.processes:
        process.kill()
        process.wait()


@contextmanager
def unplugged(scene: Scene) -> Iterator[None]:
    """The cable of the second host is out."""
    scene.two.cable("ip", "link", "set", "h2-1", "down")
    try:
        yield
    finally:
        scene.two.cable("ip", "link", "set", "h2-1", "up")


@contextmanager
def filtered(host: Host, chain: str, rule: str) -> Iterator[None]:
    """A rule on what a host receives (`input`) or sends (`output`) on `eth1`."""
    host.network("nft", "add", "table", "inet", "fault")
    hook = f"{{ type filter hook {chain} priority 0; policy accept; }}"
    host.network("nft", "add", "chain", "inet", "fault", "here", hook)
    host.network("nft", "add", "rule", "inet", "fault", "here", *rule.split())
    try:
        yield
    finally:
        host.network("nft", "delete", "table", "inet", "fault")


def one_way(scene: Scene) -> AbstractContextManager[None]:
    """What the first host sends is lost, what the second sends arrives."""
    return filtered(scene.two, "input", "iifname eth1 drop")


@contextmanager
def elsewhere(scene: Scene) -> Iterator[None]:
    """The second host has another address than the one it told."""
    address = f"{scene.two.second_ip}/24"
    scene.two.network("ip", "address", "del", address, "dev", "eth1")
    scene.two.network("ip", "address", "add", "10.78.0.99/24", "dev", "eth1")
    try:
        yield
    finally:
        scene.two.network("ip", "address", "del", "10.78.0.99/24", "dev", "eth1")
        scene.two.network("ip", "address", "add", address, "dev", "eth1")


@contextmanager
def nameless(scene: Scene) -> Iterator[None]:
    """The name server is gone: questions to it are never answered."""
    with ExitStack() as stack:
        for host in (scene.one, scene.two):
            path = scene.progress.parent / f"resolv-{host.name}"
            path.write_text("nameserver 10.78.0.53\noptions timeout:30\n")
            host.run(["mount", "--bind", str(path), "/etc/resolv.conf"])
            stack.callback(host.run, ["umount", "/etc/resolv.conf"])
        yield


def half_cut(at: Scene) -> None:
    with one_way(at):
        at.refused_and_named("one_way")
        at.trains("one_way")
        at.refused_and_named("one_way")


def cut(at: Scene) -> None:
    with unplugged(at):
        # The whole time: a connection that says nothing is given up only after 25 s of it.
        begun_s = time.monotonic()
        while time.monotonic() < begun_s + CUT_S:
            at.refused_and_named("cut")
            at.trains("cut")
        told = at.one.run([*PARAMD, "doctor", "--job", "far", "-o", "json"], check=False).stdout
        found = {one["check"]: one for one in json.loads(told)["checks"]}
        row = found["job far, host of rank 0 to rank 1"]
        assert (row["verdict"], at.two.second_ip in row["detail"]) == ("failed", True), row
        assert "PARAMD_ADDRESS" in row["advice"]


def no_names(at: Scene) -> None:
    with nameless(at):
        at.trains("no name server")
        at.all_right("no name server")
        for host in (at.one, at.two):
            fresh = Reader(host, client_env(at.endpoint))
            try:
                found = fresh.ask()
                assert is_right(found), found
            finally:
                fresh.close()


def moved(at: Scene) -> None:
    with elsewhere(at):
        at.refused_and_named("elsewhere", own=at.two)
        at.trains("elsewhere")


FAULTS = {one.__name__: one for one in (half_cut, cut, no_names, moved)}


@pytest.mark.in_turns
@pytest.mark.timeout(420)
def test_with_a_broken_link_reads_are_right_or_refused_and_training_goes_on(tmp_path: Path) -> None:
    """Between hosts of which one has a clock that is an hour off."""
    by_s = sample([HOUR_S, -HOUR_S], [HOUR_S])[-1]
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE.format(by_s=by_s))
    more = {"PYTHONPATH": f"{tmp_path}:{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    folder = tmp_path / "hosts"
    folder.mkdir()
    with scene(folder, second=more) as at:
        at.all_right("clock")
        at.trains("clock")
        log = at.two.run(["cat", str(at.two.folder / "state/far/rank-1.log")]).stdout
        assert "clock-differs" in log
        for name in sample(list(FAULTS), ["half_cut"]):
            FAULTS[name](at)
            at.healed(name)
