"""Tests have a budget of lines and of seconds, and a run that takes more than it has fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import costs
from tests.launch import ROOT

SLOW = """
import tests.costs
tests.costs.FILE_S = 0.2
tests.costs.longer.busy = lambda: {busy}
def pytest_configure(config):
    config.pluginmanager.register(tests.costs.Durations(config))
"""
TESTS = "import pytest, time\n@pytest.mark.parametrize('n', range(4))\n"
TESTS += "def test_sum(n): time.sleep(0.1)\n"


def test_no_folder_has_more_lines_than_its_budget() -> None:
    lines, told = costs.lines_of(), costs.told_lines(costs.README.read_text(encoding="utf-8"))
    assert lines.keys() == costs.LINES.keys() == told.keys(), "run: python -m tests.costs"
    for found in (lines, told):
        over = {name: count for name, count in found.items() if count > costs.LINES[name]}
        assert not over, f"{over}: cut, or raise tests/costs.py LINES and say what for"


def test_no_file_is_too_long_to_read() -> None:
    files = {path: path.read_text().count("\n") for path in costs.FOLDER.rglob("*.py")}
    assert not {path: count for path, count in files.items() if count > costs.FILE_LINES}


def test_a_slow_file_has_a_reason() -> None:
    assert all((ROOT / file).is_file() for file in costs.SECONDS)


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize(
    ("busy", "options", "fails"),
    [(1.0, (), True), (100.0, (), False), (1.0, ("-p", "no:cacheprovider"), False)],
    ids=["quiet", "busy", "unmeasured"],
)
def test_a_file_that_takes_more_seconds_than_it_has_fails_the_run(
    tmp_path: Path, workers: str, busy: float, options: tuple[str, ...], fails: bool
) -> None:
    (tmp_path / "conftest.py").write_text(SLOW.format(busy=busy))
    (tmp_path / "test_a.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-n", workers, *options]
    environment = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path)],
        cwd=tmp_path,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
    )
    assert "4 passed" in done.stdout, done.stdout + done.stderr
    assert done.returncode == fails
    assert ("test_a.py took" in done.stdout) == fails
