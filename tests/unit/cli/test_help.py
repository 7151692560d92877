"""Help is quick, light and shows examples; what is passed on stays what it is."""

from __future__ import annotations

import subprocess
import sys

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
