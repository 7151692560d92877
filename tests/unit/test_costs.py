"""What tests cost is measured over all workers, and what people wrote of them stays."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.costs import BEGIN, END, KEY, table
from tests.launch import ROOT

CONFTEST = """
from tests.costs import Durations
def pytest_configure(config):
    config.pluginmanager.register(Durations(config))
"""
TESTS = """
import pytest, time
@pytest.fixture
def slow():
    time.sleep(0.05)
    yield
    time.sleep(0.05)
@pytest.mark.parametrize("n", range(4))
def test_sum(n, slow): time.sleep(0.05)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for name in ("test_a", "test_b"):
        (tmp_path / f"{name}.py").write_text(TESTS)
    return tmp_path


def measured(folder: Path, *options: str) -> dict[str, float]:
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "--rootdir", str(folder), *options]
    environment = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    kept = folder / ".pytest_cache/v" / KEY
    found: dict[str, float] = json.loads(kept.read_text()) if kept.exists() else {}
    return found


@pytest.mark.parametrize("workers", ["0", "2"])
def test_the_seconds_of_a_file_are_those_of_all_its_tests(folder: Path, workers: str) -> None:
    found = measured(folder, "-n", workers, ".")
    assert found.keys() == {"test_a.py", "test_b.py"}
    assert all(0.6 <= took_s < 12 for took_s in found.values()), found


def test_a_part_of_a_file_is_not_taken_for_all_of_it(folder: Path) -> None:
    assert measured(folder, "test_a.py::test_sum") == {}
    whole = measured(folder, "test_a.py")
    assert measured(folder, "test_a.py", "-k", "0") == whole
    assert measured(folder, "test_b.py").keys() == {"test_a.py", "test_b.py"}


def test_the_table_is_written_and_the_last_column_stays(tmp_path: Path) -> None:
    root = tmp_path / "tests"
    for name in ("unit", "soak"):
        (root / name).mkdir(parents=True)
        (root / name / "__init__.py").write_text("")
        (root / name / "test_one.py").write_text("a = 1\nb = 2\n")
    row = "| `soak/` | 9 | 99 | 33 | faults together |"
    old = f"before\n{BEGIN}\n{row}\n| `left/` | 1 | 1 | 1 | x |\n{END}\nafter\n"
    first = table(old, {"tests/unit/test_one.py": 4.4}, root)
    assert first.startswith(f"before\n{BEGIN}\n| folder |")
    assert first.endswith(
        f"| `soak/` | 1 | 2 | 33 | faults together |\n| `unit/` | 1 | 2 | 4 |  |\n{END}\nafter\n"
    )
    assert table(first, {"tests/unit/test_one.py": 4.4}, root) == first
    with pytest.raises(ValueError, match="in lines of their own"):
        table("no table here", {}, root)
