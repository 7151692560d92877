"""The demo and its training: what a newcomer runs first."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from safetensors import safe_open

from paramd.cli.main import main
from paramd.places import running_jobs
from tests.integration.client_job import wait_for
from tests.launch import ROOT

DEADLINE_S = 110.0


@pytest.fixture(autouse=True)
def any_free_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARAMD_LISTEN", "127.0.0.1:0")


def readme_reader() -> str:
    """The program that the README shows to those who read a running job."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (found,) = [block for block in blocks if "paramd.connect" in block]
    return found


@pytest.mark.timeout(300)
def test_the_demo_shows_a_running_training_and_ends_it_on_ctrl_c(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out_path, err_path = tmp_path / "out", tmp_path / "err"
    with out_path.open("wb") as out, err_path.open("wb") as err:
        demo = subprocess.Popen(
            [sys.executable, "-m", "paramd.cli", "demo", "--keep", "--job", "my-run"],
            stdout=out,
            stderr=err,
        )
    try:
        told = err_path.read_text
        wait_for(lambda: demo.poll() or "Ctrl-C stops it" in told(), "its tour", DEADLINE_S, told)
        assert demo.poll() is None, told()
        # One of the commands that it tells the user to try.
        file = tmp_path / "model.safetensors"
        assert main(["summon", "*", "-f", str(file), "--job", "my-run"]) == 0
        with safe_open(file, framework="pt") as opened:
            assert opened.get_slice("layers.3.down.weight").get_shape() == [128, 512]
            saved_step = int(opened.metadata()["paramd_step"])
        shown = subprocess.run(
            [sys.executable, "-m", "tests.program", readme_reader()],
            capture_output=True,
            text=True,
            check=False,
            timeout=DEADLINE_S,
        )
        assert shown.returncode == 0, shown.stderr
        assert "layers.0.norm1.weight" in shown.stdout
    finally:
        demo.send_signal(signal.SIGINT)
        code = demo.wait(60)
    assert code == 0, err_path.read_text()
    assert running_jobs() == []
    shown = out_path.read_text()
    assert "layers.0.up.weight" in shown
    assert "the safetensors library reads 12 tensors, all equal" in shown
    # Step, loss, norm, moved by: of the table of losses, not of the one of gradients below it.
    row = r"^ +(\d+)  +(\d+\.\d{4})  +\d+\.\d{5}  +\d+\.\d{5}  "
    found = re.findall(row, shown, re.MULTILINE)
    steps, losses = [int(step) for step, _ in found], [float(loss) for _, loss in found]
    assert len(steps) == 6
    assert steps[0] < steps[-1] < saved_step
    assert losses[0] > losses[-1]


def command_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []  # it has ended meanwhile


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM], ids=lambda n: n.name)
def test_a_demo_that_is_told_to_end_takes_its_training_with_it(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "paramd.cli", "demo"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as demo:
        assert demo.stderr is not None
        assert demo.stderr.readline().startswith("Two ranks train")
        # Another child of it may be what forks its children, in these tests.
        below = psutil.Process(demo.pid)
        wait_for(
            lambda: any("train_gpt" in " ".join(command_of(p)) for p in below.children(True)),
            "the training's start",
        )
        demo.send_signal(number)
        # That no process is left, whatever its parent, is what the leak check looks at.
        assert demo.wait(60) == 130


def test_a_training_that_cannot_start_fails_the_demo_with_its_last_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PARAMD_STALL_BUDGET_MS", "much")
    assert main(["demo"]) == 3
    err = capsys.readouterr().err
    assert "PARAMD_STALL_BUDGET_MS must be a number" in err
    assert err.splitlines()[-1].startswith("paramd: the training exited with code 1")


def test_the_example_in_the_repository_is_the_one_in_the_package() -> None:
    packaged = ROOT / "client" / "paramd" / "examples" / "train_gpt.py"
    assert (ROOT / "examples" / "train_gpt.py").resolve() == packaged
