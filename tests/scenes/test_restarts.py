"""A site's control plane is started again by what sites run it under: systemd and Slurm themselves.

Ranks train on meanwhile and join it again (`multiprocess/test_control_again.py` has the rest).
"""

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
