"""A site's control plane is started again by what sites run it under: systemd and Slurm themselves.

Ranks train on meanwhile and join it again (`multiprocess/test_control_again.py` has the rest).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import paramd
from tests.hosts import wait_until
from tests.launch import ROOT, free_port
from tests.multiprocess.frozen import edit_to, frozen
from tests.multiprocess.striking import allowed_s, end_well
from tests.multiprocess.test_control_again import BACK_S, check_after, is_whole
from tests.needs import missing, program
from tests.scenes.test_slurm import await_step
from tests.slurm import cluster, logs

UNIT = ROOT / "deploy" / "paramd-control.service"
SYSTEMD = Path("/lib/systemd/systemd")
OWN_MANAGER = """
set -e
mount -t tmpfs tmpfs /run
mkdir -p /run/systemd/system "$XDG_RUNTIME_DIR"
exec "$1" --user --log-target=console
"""
"""A user's manager where none has booted: it looks for the folder alone."""

ROOTS_OWN = ("MemoryMax", "TasksMax", "LimitNOFILE", "LoadCredential")
"""Of the unit, what a user's manager may not promise; so is all from `DynamicUser` on."""


@contextmanager
def manager(folder: Path) -> Iterator[Callable[..., str]]:
    """systemd as a user's own, in a mount namespace; yields what runs `systemctl --user`."""
    if os.geteuid() or not SYSTEMD.exists():
        missing("root, or systemd")
    environment = {
        **os.environ, "HOME": str(folder), "XDG_RUNTIME_DIR": "/run/user/0",
        "XDG_CONFIG_HOME": str(folder / "config"),
    }  # fmt: skip
    command = [program("unshare"), "--mount", "--propagation", "private", "sh", "-c", OWN_MANAGER]
    log = folder / "systemd.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "sh", str(SYSTEMD)], env=environment, stdout=output, stderr=output
        )

    def systemctl(*arguments: str) -> str:
        there = [program("nsenter"), "-t", str(process.pid), "-m", "--", program("systemctl")]
        done = subprocess.run(
            [*there, "--user", *arguments], env=environment, capture_output=True, text=True,
            check=False, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stderr}\n{log.read_text(errors='replace')}"
        return done.stdout.strip()

    def answers() -> bool:
        with suppress(AssertionError):
            systemctl("list-units")
            return True
        return False

    try:
        wait_until("systemd answers", answers, timeout_s=60, told=log.read_text)
        yield systemctl
    finally:
        # Ends all that it started, too.
        process.terminate()
        process.wait(60)


def unit_for_tests(state: Path, token: Path, port: int) -> str:
    """The unit that we ship, with this machine's interpreter, port and folders."""
    before, _, rest = UNIT.read_text().partition("DynamicUser=yes")
    install = rest[rest.index("[Install]") :]
    lines = [one for one in before.splitlines() if one.partition("=")[0] not in ROOTS_OWN]
    return (
        "\n".join([*lines, f"StandardError=append:{state}/control.log", install])
        .replace("/opt/paramd/bin/python", sys.executable)
        .replace("%d/token", str(token))
        .replace("%S/paramd", str(state))
        .replace("127.0.0.1:8470", f"127.0.0.1:{port}")
    )


@pytest.mark.timeout(300)
def test_systemd_starts_a_killed_site_again_and_all_ranks_join_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, token, port = tmp_path / "state", tmp_path / "token", free_port()
    state.mkdir(mode=0o700)
    token.write_text("0123456789abcdef" * 4)
    token.chmod(0o400)
    units = tmp_path / "config" / "systemd" / "user"
    units.mkdir(parents=True)
    (units / UNIT.name).write_text(unit_for_tests(state, token, port))
    url, shown = f"http://127.0.0.1:{port}", token.read_text()
    monkeypatch.setenv("PARAMD_CONTROL", url)
    monkeypatch.setenv("PARAMD_TOKEN", shown)
    with manager(tmp_path) as systemctl:
        systemctl("start", UNIT.name)
        with (
            frozen(tmp_path, "fsdp2", 2) as ranks,
            paramd.connect(url, shown, job="frozen") as mesh,
        ):
            edit = edit_to(mesh, 7)
            step = max(row.step for row in mesh.status())
            began_s = time.monotonic()
            systemctl("kill", "--signal=KILL", UNIT.name)
            wait_until(
                "all ranks", lambda: is_whole(mesh, step), timeout_s=allowed_s(BACK_S),
                told=lambda: systemctl("status", UNIT.name),
            )  # fmt: skip
            print(f"all ranks back after {time.monotonic() - began_s:.1f} s, by systemd")
            assert systemctl("show", "--property=NRestarts", "--value", UNIT.name) == "1"
            check_after(mesh, edit.id)
            end_well(ranks, tmp_path)


SERVE = "until paramd control serve --listen 127.0.0.1:8470; do sleep 2; done"
"""As the manual has it, for one node."""
TRAIN = [str(ROOT / "examples" / "train_gpt.py"), "--keep", "--job", "gpt"]
LOOK = """
import json, sys, paramd
with paramd.connect("http://127.0.0.1:8470", sys.argv[1], job="gpt") as mesh:
    if sys.argv[2] == "edit":
        mesh.edit("layers.0.norm1.weight", fill=0.25)
    rows = mesh.status()
    print(json.dumps([[row.step if not row.reason else -1 for row in rows], len(mesh.edits())]))
"""


@pytest.mark.timeout(600)
def test_slurm_starts_a_killed_site_again_and_all_ranks_join_it(tmp_path: Path) -> None:
    with cluster(tmp_path, nodes=1) as slurm:
        (node,) = slurm.nodes
        there = {"PARAMD_STATE_DIR": str(node.folder / "site")}
        site = slurm.submit("--requeue", "--open-mode=append", "--wrap", SERVE, env=there)
        token = node.folder / "site" / "_site" / "token"

        def is_served() -> bool:
            return node.run(["cat", str(token)], check=False).stdout.strip() != ""

        wait_until("the site has a token", is_served, timeout_s=100, told=lambda: logs(tmp_path))
        shown = node.run(["cat", str(token)]).stdout.strip()
        env = {"PARAMD_CONTROL": "http://127.0.0.1:8470", "PARAMD_TOKEN": shown}
        env["RANKS_PER_HOST"] = "2"
        batch = str(ROOT / "deploy" / "slurm" / "torchrun.sbatch")
        job = slurm.submit("--nodes=1", batch, *TRAIN, env=env)
        await_step(slurm, job, 10)

        def looked(what: str = "look") -> tuple[list[int], int]:
            program = [sys.executable, "-c", LOOK, shown, what]
            told = node.run(program, env=slurm.environment(), check=False).stdout
            steps, edits = json.loads(told) if told else ([], 0)
            return steps, edits

        steps, edits = looked("edit")
        assert (len(steps), edits) == (2, 1)

        def back_after(fault: Callable[[], object]) -> float:
            (step, *_), _ = looked()
            fault()
            began_s = time.monotonic()

            def is_back() -> bool:
                steps, edits = looked()
                return len(steps) == 2 and min(steps) > step and edits == 1

            wait_until("all ranks", is_back, timeout_s=allowed_s(60), told=lambda: logs(tmp_path))
            return time.monotonic() - began_s

        def requeue() -> None:
            slurm.run("scontrol", "requeue", site)
            wait_until(
                "it waits", lambda: slurm.state(site) == "PENDING", timeout_s=100,
                told=lambda: logs(tmp_path),
            )  # fmt: skip
            wait_until(
                "it has ended", lambda: not any("control serve" in p for p in slurm.processes()),
                timeout_s=100, told=lambda: logs(tmp_path),
            )  # fmt: skip
            # What Slurm revoked at the requeue must be older, by its clock of whole seconds.
            time.sleep(2.0)
            # Else Slurm waits two minutes before it starts what was requeued.
            slurm.run("scontrol", "update", f"JobId={site}", "StartTime=now")

        killed = ["pkill", "--signal", "KILL", "-f", "paramd control serve|paramd_service.control"]
        print(
            f"all ranks back after {back_after(lambda: node.run(killed)):.1f} s, by the batch job"
        )
        print(f"all ranks back after {back_after(requeue):.1f} s, requeued by Slurm")
        assert slurm.state(job) == "RUNNING"
