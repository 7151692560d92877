"""Help is quick, light and shows examples; what is passed on stays what it is."""

from __future__ import annotations

import inspect
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from paramd.cli.main import app, main

COMMANDS = [
    "status",
    "top",
    "alerts",
    "params",
    "stats",
    "summon",
    "export",
    "exports",
    "doctor",
    "demo",
]
HELP_COLUMNS = 77
"""Of a body's line: longer ones are broken again at 80 columns."""

HELP_IN_TYPERS = 6
"""CPU time of `paramd --help`, in times that of importing typer."""

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


def test_help_takes_little_time_of_the_cpu(tmp_path: Path) -> None:
    # Compiled once, as installed programs are.
    compiled = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}

    def cpu_s(*arguments: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, *arguments],
            stdout=subprocess.DEVNULL,
            env=os.environ | compiled,
            check=True,
            timeout=60,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime)

    # The least of five, beside what typer alone takes, by turns: machines and moments differ.
    taken = [(cpu_s("-m", "paramd.cli", "--help"), cpu_s("-c", "import typer")) for _ in range(5)]
    helping, typers = (min(seconds) for seconds in zip(*taken, strict=True))
    assert helping < HELP_IN_TYPERS * typers


@pytest.mark.parametrize(
    "command",
    [
        *([c] for c in COMMANDS),
        ["control", "serve"],
        ["sidecar", "serve"],
        ["export-schedule", "create"],
        ["context", "list"],
        ["context", "show"],
    ],
    ids=" ".join,
)
def test_every_command_ends_its_help_with_examples(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--help"]) == 0
    captured = capsys.readouterr()
    text = " ".join(captured.out.split())
    assert f"Examples paramd {' '.join(command)}" in text


def test_the_shell_is_offered_commands() -> None:
    environment = os.environ | {
        "_PARAMD_COMPLETE": "complete_bash",
        "COMP_WORDS": "paramd stat",
        "COMP_CWORD": "1",
    }
    found = subprocess.run(
        [sys.executable, "-m", "paramd.cli"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert found.stdout.split() == ["status", "stats"]


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


@pytest.mark.parametrize("module", ["control", "sidecar"])
def test_the_service_itself_answers_help(module: str) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "paramd.cli", module, "serve", "--", "--help"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert found.returncode == 0, found.stderr
    assert "--job" in found.stdout


def test_no_text_of_help_is_broken_at_80_columns_or_taken_for_markup() -> None:
    for path, text in texts(typer.main.get_command(app), "paramd"):
        for line in inspect.cleandoc(text).split("\n")[1:]:
            assert len(line) <= HELP_COLUMNS, (path, line)
        # "[top]" would be taken for a style, and left out.
        assert not re.search(r"(?<!\\)\[[a-z]", text), (path, text)


def texts(command: Any, path: str) -> Iterator[tuple[str, str]]:
    """The help of a command and of all below it, by path."""
    yield path, command.help or ""
    for name, below in getattr(command, "commands", {}).items():
        yield from texts(below, f"{path} {name}")
