"""The launcher of ranks shows what failed and leaves nothing running."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests import launch
from tests.launch import RanksError, run_ranks

Script = Callable[[str], Path]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Writes a program that knows `rank` and returns its path."""

    def write(body: str) -> Path:
        path = tmp_path / "program.py"
        head = "import os, subprocess, sys, time\nrank = int(os.environ['RANK'])\n"
        path.write_text(head + textwrap.dedent(body))
        return path

    return write


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "GRACE_S", 0.3)


@pytest.mark.usefixtures("short_grace")
def test_a_failing_rank_ends_the_others_and_its_output_is_shown(script: Script) -> None:
    program = script("""
        if rank == 1:
            sys.exit("what went wrong")
        while True:
            time.sleep(60)
    """)
    with pytest.raises(RanksError, match=r"ranks \[0, 1\] failed or hung(.|\n)*what went wrong"):
        run_ranks(program, 2)


@pytest.mark.usefixtures("short_grace")
def test_a_process_in_a_session_of_its_own_is_found_named_and_ended(script: Script) -> None:
    program = script("""
        left = [sys.executable, "-c", "import time; time.sleep(600)"]
        print(subprocess.Popen(left, stdout=subprocess.DEVNULL, start_new_session=True).pid)
    """)
    with pytest.raises(RanksError, match=r"left behind: \['\d+ .*time.sleep\(600\)'") as caught:
        run_ranks(program, 1)
    pid = int(str(caught.value).split("left behind: ['")[1].split()[0])
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
