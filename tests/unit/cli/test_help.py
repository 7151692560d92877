"""Help is quick, light and shows examples; what is passed on stays what it is."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from paramd.cli.main import main

PROBE = """
import sys
from paramd.cli.main import main
code = main(["--help"])
heavy = ("torch", "numpy", "grpc", "google", "httpx2", "textual")
print([name for name in heavy if name in sys.modules], file=sys.stderr)
raise SystemExit(code)
"""


def test_help_loads_neither_torch_nor_grpc() -> None:
    found = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stderr == "[]\n"
    assert "Usage: paramd" in found.stdout


@pytest.mark.parametrize("module", ["control", "sidecar"])
def test_serve_becomes_the_service_itself_with_its_arguments(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, arguments: started.append([path, *arguments]))
    assert main([module, "serve", "--job", "x", "--listen", "127.0.0.1:0", "-o", "-y"]) == 0
    passed_on = ["--job", "x", "--listen", "127.0.0.1:0", "-o", "-y"]
    assert started == [
        [sys.executable, sys.executable, "-m", f"paramd_service.{module}", *passed_on]
    ]
