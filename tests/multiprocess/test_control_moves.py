"""The control plane moves with its store to another host when its own is cut off or lost."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import Host, hosts, wait_until
from tests.integration.test_hosts import PARAMD, Training

MOVED_S = 10.0
BUSY_S = 50.0
"""More than that, for a machine that does much else."""
NUMEL = 1 << 16


class Scene:
    """A training whose process group meets over `eth0`; everything of paramd is on `eth1`."""

    def __init__(self, folder: Path, one: Host, two: Host) -> None:
        self.one, self.two = one, two
        self._progress = folder / "progress"
        self.job = Training(folder, (one, two), arguments=[str(self._progress), str(NUMEL)])
        self.job.start(env=[{"PARAMD_ADDRESS": host.second_ip} for host in (one, two)])
        self.job.wait_attached()

    def end(self) -> None:
        for process in self.job.processes:
            process.kill()
            process.wait()

    def paramd(
        self, host: Host, *arguments: str, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """A command there, which finds the job in that host's own state dir."""
        return host.run([*PARAMD, *arguments, "--job", "far"], check=check)

    def endpoint(self, host: Host) -> dict[str, Any]:
        path = str(host.folder / "state/far/endpoint.json")
        found = host.run(["cat", path], check=False).stdout
        return dict(json.loads(found)) if found else {}

    def wait(self, what: str, true: Callable[[], bool], timeout_s: float) -> float:
        """How long it took."""
        begun_s = time.monotonic()
        wait_until(what, true, timeout_s=timeout_s, told=self.told)
        return time.monotonic() - begun_s

    def wait_moved(self, host: Host, to: Host) -> float:
        """Until `host` is told that the control plane is on the host `to`; how long it took."""

        def moved() -> bool:
            return f"//{to.second_ip}:" in self.endpoint(host).get("url", "")

        return self.wait(f"{host.name} is told {to.name}", moved, MOVED_S + BUSY_S)

    def wait_paused(self, host: Host) -> None:
        """Until all ranks are joined and have agreed on a step to be held at."""

        def paused() -> bool:
            return self.paramd(host, "pause", check=False).returncode == 0

        self.wait("training is paused", paused, BUSY_S)

    def create_token(self, host: Host, name: str) -> None:
        """At once, or as soon as the ranks have come over."""
        words = ("token", "create", "--name", name, "--role", "reader")

        def created() -> bool:
            return self.paramd(host, *words, check=False).returncode == 0

        self.wait(f"token {name}", created, BUSY_S)

    def tokens(self, host: Host) -> str:
        return self.paramd(host, "token", "list").stdout

    def trains(self) -> None:
        at = int(self._progress.read_text())
        self.wait("it trains", lambda: int(self._progress.read_text()) >= at + 20, 60.0)

    def told(self) -> str:
        logs = [
            host.run(["sh", "-c", f"tail -n 60 {host.folder}/state/far/*.log"], check=False).stdout
            for host in (self.one, self.two)
            if host.process.poll() is None
        ]
        return "\n".join([self.job.told(), *logs])


@pytest.mark.timeout(420)
def test_the_control_plane_moves_with_its_store_and_back_and_outlives_its_host(
    tmp_path: Path,
) -> None:
    with hosts(2, tmp_path, second=True) as (one, two), ExitStack() as stack:
        at = Scene(tmp_path, one, two)
        stack.callback(at.end)
        # The standby's host knows where the control plane is.
        at.wait_moved(two, one)
        at.create_token(two, "before")

        # Its process alone: another one is started there, and elected by both.
        before = at.endpoint(one)
        one.run(["kill", "-9", str(before["pid"])])
        at.wait("another process", lambda: at.endpoint(one).get("pid") != before["pid"], BUSY_S)
        # On a busy machine it is late, and comes back from the standby.
        at.wait_moved(one, one)
        at.wait_moved(two, one)
        at.wait_paused(two)
        at.paramd(two, "resume")

        # Cut: each side has half of the ranks. Only the standby may be elected by half.
        two.cable("ip", "link", "set", "h2-1", "down")
        cut_s = at.wait_moved(two, two)
        at.create_token(two, "during")

        def refused() -> bool:
            done = at.paramd(
                one, "token", "create", "--name", "lost", "--role", "reader", check=False
            )
            assert done.returncode != 0, done
            return "may have taken over" in done.stderr

        at.wait("the old one changes nothing", refused, BUSY_S)
        at.trains()

        # Whole again: it goes back to where programs elsewhere look for it, with what was changed.
        two.cable("ip", "link", "set", "h2-1", "up")
        at.wait_moved(one, two)
        at.wait_moved(one, one)
        at.wait_moved(two, one)
        listed = at.tokens(one)
        assert "before" in listed
        assert "during" in listed
        assert "lost" not in listed
        # What needs all ranks at one step is agreed on, under numbers above those of before.
        at.wait_paused(one)
        at.paramd(one, "resume")
        at.trains()

        # Lost, its trainer and sidecar too.
        before = at.endpoint(one)
        one.kill()
        lost_s = at.wait_moved(two, two)
        # Who was given the first one's address is told where the new one is.
        old = {"PARAMD_URL": before["url"], "PARAMD_TOKEN": before["token"]}
        old["PARAMD_TLS_CA"] = before["ca_pin"]
        failed = two.run([*PARAMD, "status", "--job", "far"], env=old, check=False)
        assert failed.returncode == 3, failed
        assert before["url"] in failed.stderr
        assert "new url is in <state dir>/JOB/endpoint.json" in " ".join(failed.stderr.split())
        after = at.endpoint(two)
        assert (after["token"], after["ca_pin"]) == (before["token"], before["ca_pin"])
        assert "during" in at.tokens(two)
        at.paramd(two, "audit", "verify")
        print(f"moved {cut_s:.1f} s after the cut, {lost_s:.1f} s after the loss")
