"""Faults of the link between two hosts whose training goes over another one.

The process group meets over `eth0`; all of paramd's own connections are on `eth1`, where the faults
are: what delays training then is paramd.
"""

from __future__ import annotations

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
from tests.integration.test_hosts import SLACK_S, Training, client_env
from tests.launch import ROOT

NUMEL = 1 << 19
REFUSED_S = 5.0
NO_ROUTE_S = 3.0
"""So long the kernel asks for a lost neighbour's hardware address before it says "no route": to a
client that had to connect anew it is that much later that it begins to wait for a successor."""
CUT_S = 30.0
HEALED_S = 90.0
"""For a busy machine."""
DELAY_S = 0.2
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

# Between two ends of cables: what comes in at one leaves by the other, later. There is no netem in
# every kernel. Checksums are made and packets are cut before, since nobody does it behind.
DELAYS = """
import collections, select, socket, sys, time

wait_s, names = float(sys.argv[1]), sys.argv[2:]
# Without a protocol until they are bound: else they would first hear all devices.
ends = [socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0) for _ in names]
for end, name in zip(ends, names):
    end.bind((name, 3))
late = collections.deque()
print("delays", flush=True)
while True:
    patience_s = max(late[0][0] - time.monotonic(), 0) if late else 1.0
    for end in select.select(ends, [], [], patience_s)[0]:
        frame, (_, _, kind, *_) = end.recvfrom(65536)
        if kind != socket.PACKET_OUTGOING:
            late.append((time.monotonic() + wait_s, ends[1 - ends.index(end)], frame))
    while late and late[0][0] <= time.monotonic():
        _, end, frame = late.popleft()
        end.send(frame)
"""

PLAIN_PACKETS = """
import ctypes, fcntl, socket, struct, sys

with socket.socket() as any_socket:
    for command in (0x17, 0x1F, 0x24):  # checksums, TCP's cutting, anybody's cutting: off
        value = ctypes.create_string_buffer(struct.pack("II", command, 0))
        request = struct.pack("16sP", sys.argv[1].encode(), ctypes.addressof(value))
        fcntl.ioctl(any_socket, 0x8946, request)
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
def lossy(scene: Scene) -> Iterator[None]:
    """Of every 100 packets each way 5 are lost."""
    rule = "iifname eth1 numgen random mod 100 < 5 drop"
    # Each packet by itself, instead of up to 64 KiB in one.
    for host in (scene.one, scene.two):
        host.link("gso_max_segs", "1", device="eth1")
    try:
        with filtered(scene.one, "input", rule), filtered(scene.two, "input", rule):
            yield
    finally:
        for host in (scene.one, scene.two):
            host.link("gso_max_segs", "65535", device="eth1")


@contextmanager
def narrow(scene: Scene) -> Iterator[None]:
    """10 Mbit/s each way."""
    rate = ["tbf", "rate", "10mbit", "burst", "32kb", "latency", "400ms"]
    for host in (scene.one, scene.two):
        host.network("tc", "qdisc", "add", "dev", "eth1", "root", *rate)
    try:
        yield
    finally:
        for host in (scene.one, scene.two):
            host.network("tc", "qdisc", "del", "dev", "eth1", "root")


@contextmanager
def late(scene: Scene) -> Iterator[None]:
    """Every packet takes 200 ms each way."""
    for host in (scene.one, scene.two):
        host.network(sys.executable, "-c", PLAIN_PACKETS, "eth1")
    cable = scene.two.cable
    cable("ip", "link", "add", "late", "type", "veth", "peer", "late-sw")
    for end in ("late", "late-sw"):
        cable("ip", "link", "set", end, "up")
    cable("ip", "link", "set", "late-sw", "master", "sw-1")
    cable("ip", "link", "set", "h2-1", "nomaster")
    command = ["nsenter", "-t", str(scene.two.switch), "-n", sys.executable, "-c", DELAYS]
    with subprocess.Popen(
        [*command, str(DELAY_S), "h2-1", "late"], stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"delays\n"
            yield
        finally:
            process.kill()
            cable("ip", "link", "set", "h2-1", "master", "sw-1")
            cable("ip", "link", "del", "late")


@contextmanager
def renamed(scene: Scene) -> Iterator[None]:
    """The second host's device has another name; it must be down for that."""
    scene.two.link("down", device="eth1")
    scene.two.link("name", "lan0", device="eth1")
    scene.two.link("up", device="lan0")
    yield


@contextmanager
def elsewhere(scene: Scene) -> Iterator[None]:
    """The second host has another address than the one it told."""
    address = f"{scene.two.second_ip}/24"
    scene.two.network("ip", "address", "del", address, "dev", "lan0")
    scene.two.network("ip", "address", "add", "10.78.0.99/24", "dev", "lan0")
    try:
        yield
    finally:
        scene.two.network("ip", "address", "del", "10.78.0.99/24", "dev", "lan0")
        scene.two.network("ip", "address", "add", address, "dev", "lan0")


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


@pytest.mark.timeout(420)
def test_whatever_is_wrong_with_the_link_reads_are_right_or_refused_and_training_goes_on(
    tmp_path: Path,
) -> None:
    with scene(tmp_path) as at:
        for fault in (lossy, narrow):
            with fault(at):
                at.trains(fault.__name__)
                at.all_right(fault.__name__)
            at.healed(fault.__name__)
        with one_way(at):
            at.refused_and_named("one_way")
            at.trains("one_way")
            at.refused_and_named("one_way")
        at.healed("one_way")


@pytest.mark.timeout(420)
def test_a_link_that_is_cut_for_half_a_minute_is_named_and_heals_by_itself(tmp_path: Path) -> None:
    """The whole time: a connection that says nothing is given up only after 25 s of it."""
    with scene(tmp_path) as at:
        with unplugged(at):
            begun_s = time.monotonic()
            while time.monotonic() < begun_s + CUT_S:
                at.refused_and_named("cut")
                at.trains("cut")
        at.healed("cut")
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
        at.healed("no name server")


@pytest.mark.timeout(420)
def test_a_link_that_is_late_renamed_or_has_another_address(tmp_path: Path) -> None:
    with scene(tmp_path) as at:
        with late(at):
            at.trains("late")
            at.all_right("late")
            fresh = Reader(at.two, client_env(at.endpoint))
            try:
                assert is_right(fresh.ask())
            finally:
                fresh.close()
        at.healed("late")
        with renamed(at):
            at.trains("renamed")
        at.healed("renamed")
        with elsewhere(at):
            at.refused_and_named("elsewhere", own=at.two)
            at.trains("elsewhere")
        at.healed("elsewhere")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("by_s", [HOUR_S, -HOUR_S], ids=["ahead", "behind"])
def test_a_host_whose_clock_is_an_hour_off_is_read_and_reads(tmp_path: Path, by_s: float) -> None:
    shifted = tmp_path / "shifted"
    shifted.mkdir()
    (shifted / "sitecustomize.py").write_text(SITECUSTOMIZE.format(by_s=by_s))
    folder = tmp_path / "hosts"
    folder.mkdir()
    more = {"PYTHONPATH": f"{shifted}:{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    with scene(folder, second=more) as at:
        for _ in range(3):
            at.all_right("clock")
        at.trains("clock")
        log = at.two.run(["cat", str(at.two.folder / "state/far/rank-1.log")]).stdout
        assert "clock-differs" in log
