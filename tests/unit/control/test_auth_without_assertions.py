"""The same is refused under `python -O`: `assert` keeps nobody out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SUITES = (
    HERE.parent / "test_tickets.py",
    HERE / "test_auth_guard.py",
    HERE / "test_auth_tokens.py",
    HERE / "test_auth_roles.py",
)


@pytest.mark.timeout(300)
def test_the_security_tests_pass_when_python_drops_assertions() -> None:
    command = [sys.executable, "-O", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    # pytest warns that assertions outside of tests are dropped: that is what is wanted.
    # The rest of test_auth_roles.py is about what is wrong, not about who gets in.
    command += ["-k", "not cannot_be"]
    command += ["-W", "ignore::pytest.PytestConfigWarning", *map(str, SUITES)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
