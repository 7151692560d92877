"""The command line as a user meets it: another process, and a training that goes on."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.request import Request, urlopen

import psutil
import pytest

import paramd
from paramd.errors import NotFoundError
from paramd.mesh.exports.calls import ExportState
from paramd.places import read_endpoint
from tests.integration.client_job import demo_training, wait_for

JOB = "live"
INTERRUPTED = 130


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with demo_training(tmp_path_factory.mktemp("live"), JOB) as found:
        yield found


@pytest.fixture(autouse=True)
def the_live_job(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARAMD_STATE_DIR", str(state))
    monkeypatch.delenv("COLUMNS", raising=False)


def begun(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "paramd.cli", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ran(*arguments: str, code: int = 0) -> tuple[str, str]:
    """What a command printed to stdout and stderr, once it has ended with `code`."""
    with begun(*arguments) as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    return out, err


def interrupted(process: subprocess.Popen[str], *, twice: bool = False) -> str:
    """What a command says on Ctrl-C; `twice` as when the whole foreground group gets it, too."""
    with process:
        process.send_signal(signal.SIGINT)
        if twice:
            process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == INTERRUPTED, err
    assert "bug" not in err
    assert "Traceback" not in err
    return err


def read_line(process: subprocess.Popen[str]) -> str:
    """The next line of stdout, within a deadline."""
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], 60)[0]
    return process.stdout.readline()


def test_the_ids_that_are_printed_are_taken_everywhere() -> None:
    listed = ran("edit", "layers.0.up.bias", "--add", "0.25")[0].splitlines()
    short = listed[1].split()[0]
    assert len(short) == 8
    (edit,) = json.loads(ran("edits", short, "-o", "json")[0])["edits"]
    assert edit["id"].startswith(short)
    with paramd.connect(job=JOB) as mesh:
        assert mesh.get_edit(short).id == edit["id"]
        assert short in repr(mesh.get_edit(short))
        with pytest.raises(NotFoundError, match="no id begins with 'xyz'; see: paramd edits"):
            mesh.get_edit("xyz")
        with pytest.raises(NotFoundError, match="paramd exports"):
            mesh.get_export("ffffffff")
    endpoint = read_endpoint(JOB)
    assert endpoint is not None
    headers = {"authorization": f"Bearer {endpoint.token}"}
    asked = Request(f"{endpoint.url}/api/v1/jobs/{JOB}/edits/{short}", headers=headers)
    with urlopen(asked, timeout=30) as answer:
        assert json.load(answer)["id"] == edit["id"]
    out, _ = ran("undo", short)
    assert f"undo {short}" in out
    assert "no id begins with" in ran("undo", "0123456789", code=4)[1]


@pytest.mark.parametrize("twice", [False, True])
def test_ctrl_c_ends_grads_without_a_word(twice: bool) -> None:
    process = begun("grads", "*", "-o", "jsonl")
    assert json.loads(read_line(process))["job"] == JOB
    assert interrupted(process, twice=twice) == ""


def the_sidecar() -> psutil.Process:
    """The training's only one; what it stands still for cannot end before an interrupt."""
    return next(
        process
        for process in psutil.Process().children(recursive=True)
        if "paramd_service.sidecar" in process.cmdline()
    )


def test_ctrl_c_while_waiting_for_an_export_says_that_it_goes_on() -> None:
    sidecar = the_sidecar()
    with paramd.connect(job=JOB) as mesh:
        sidecar.suspend()
        try:
            process = begun("export", "checkpoints/interrupted", "--wait")
            wait_for(lambda: bool(mesh.exports()), "the export's begin")
            time.sleep(0.5)  # until the command waits for it
            err = interrupted(process)
        finally:
            sidecar.resume()
        found = mesh.exports()[0]
    assert f"export {found.id[:8]} continues" in err
    assert f"paramd exports {found.id[:8]} --cancel" in err
    with paramd.connect(job=JOB) as mesh:
        # It may fail for the sidecar that stood still; the interrupt did not cancel it.
        assert mesh.export_ended(found, timeout=60).state is not ExportState.CANCELLED


def test_ctrl_c_while_waiting_for_an_edit_says_what_may_have_happened() -> None:
    # The edit waits for the trainer to go on. A sidecar that stands still would not do: after
    # some seconds its rank is taken for lost, and no edit begins.
    trainer = psutil.Process(the_sidecar().ppid())
    with paramd.connect(job=JOB) as mesh:
        known = len(mesh.edits(limit=1000))
        trainer.suspend()
        try:
            process = begun("edit", "layers.0.up.bias", "--add", "0.25", "--timeout", "60")
            wait_for(lambda: len(mesh.edits(limit=1000)) > known, "the edit's begin")
            err = interrupted(process)
        finally:
            trainer.resume()
    assert "if the edit was committed already it is applied all the same" in err
    assert "paramd edits" in err


def on_terminal(*arguments: str, columns: int = 80) -> str:
    """What a command prints on a terminal of that width."""
    screen, shell = pty.openpty()
    termios.tcsetwinsize(shell, (24, columns))
    try:
        with subprocess.Popen(
            [sys.executable, "-m", "paramd.cli", *arguments],
            stdin=subprocess.DEVNULL, stdout=shell, stderr=subprocess.DEVNULL,
        ) as process:  # fmt: skip
            os.close(shell)
            found = b""
            with suppress(OSError):  # how a terminal ends
                while part := os.read(screen, 65536):
                    found += part
            assert process.wait(60) == 0
    finally:
        os.close(screen)
    text = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", found.decode())
    # A return without a newline begins a line that is drawn again.
    return text.replace("\r\n", "\n").replace("\r", "\n")


def test_a_pause_is_a_block_and_an_edit_is_undone_by_itself(
    capfd: pytest.CaptureFixture[str],
) -> None:
    name, count = "layers.0.norm1.bias", 0
    with paramd.connect(JOB) as mesh:
        with mesh.pause(lease_s="1m") as pause:
            assert pause.paused
            before = mesh[name].summon()
            tried = mesh.edit(name, mul=2, dry_run=True)
            assert "DRY RUN, mul 2 " in repr(tried)
            edit = mesh.edit(name, set=[7.0] * before.numel())
            assert mesh[name].summon().tolist() == [7.0] * before.numel()
            assert mesh.undo(edit).state == "APPLIED"
            assert mesh[name].summon().equal(before)
        assert mesh.pause_state().state == "running"
        for _ in mesh.grads(name, dtype="float64"):
            count += 1
            break
        with suppress(KeyError):
            for _ in mesh.follow(name):
                raise KeyError
    assert count == 1
    assert capfd.readouterr() == ("", "")


def test_what_people_type_first_runs_or_names_what_does() -> None:
    assert ran("jobs", "-o", "name")[0] == f"{JOB}\n"
    for typed, meant in (
        (("ls",), "paramd jobs"),
        (("stop",), "paramd pause"),
        (("status", "--json"), "-o json"),
        (("status", JOB), f"--job {JOB}"),
        (("edit", "x", "--scale", "2"), "--mul 2"),
    ):
        assert meant in ran(*typed, code=2)[1]
    assert "LEASE" in ran("pause", "--lease", "1m")[0]
    ran("resume")


@pytest.mark.parametrize(
    "command",
    [("params",), ("stats", "*"), ("edits",), ("audit",), ("alerts",), ("grads", "*", "-n", "1")],
)
def test_tables_fit_a_terminal_of_80_columns(command: tuple[str, ...]) -> None:
    # Each line once: some are drawn again.
    lines = list(dict.fromkeys(on_terminal(*command).splitlines()))
    assert max(map(len, lines)) <= 80, lines
    names = [line.split()[0] for line in lines if line.startswith("layers.")]
    assert len(set(names)) == len(names)
