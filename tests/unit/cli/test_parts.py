"""The command line is a list of parts: one is imported when it is wanted, and packages add some."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paramd.cli.commands import OWN, PartCommands
from paramd.cli.parts import CommandPart, Commands
from paramd.parts import installed, loaded
from tests.added import package

ADDING = """
from typing import Annotated

from typer import Option

from paramd.cli.options import Target, with_output
from paramd.cli.output import Column
from paramd.cli.parts import LOOK, CommandPart, Commands


@with_output
def greet(target: Target, name: Annotated[str, Option("--name")] = "you") -> None:
    \"\"\"Greet somebody.\"\"\"
    target.show("greetings", [{"name": name}], [Column("name", "NAME")])


def status() -> None:
    \"\"\"Taken already.\"\"\"


class Greetings(CommandPart):
    name = "greetings"

    def add_to(self, commands: Commands) -> None:
        commands.add(LOOK, greet, "", "--name me")
        commands.add(LOOK, status)


NO_PART = 1
"""


def paramd(*arguments: str, path: Path | None = None, **environment: str) -> tuple[str, str]:
    """What a command prints, to stdout and to stderr; it succeeds."""
    given = os.environ | environment | {"COLUMNS": "100"}
    if path is not None:
        given["PYTHONPATH"] = os.pathsep.join(filter(None, [str(path), given.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "paramd.cli", *arguments],
        env=given,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize("part", OWN)
def test_a_part_adds_the_commands_that_the_list_says(part: str) -> None:
    commands = Commands()
    loaded(part, CommandPart)().add_to(commands)
    assert set(commands.made().commands) == set(OWN[part])


def test_a_command_imports_its_own_part_alone() -> None:
    code = (
        "import sys; from paramd.cli.main import main; main(['status', '--help']);"
        "print([name for name in sys.modules if name.startswith('paramd.cli.')], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "'paramd.cli.status'" in done.stderr
    for other in ("doctor", "demo", "exports", "insight", "tensors", "connect"):
        assert f"'paramd.cli.{other}'" not in done.stderr


def test_an_installed_package_adds_a_command(tmp_path: Path) -> None:
    folder = package(tmp_path / "site", ADDING, **{"command.greetings": "greeting:Greetings"})
    table, _ = paramd("greet", "--name", "me", "-o", "json", path=folder)
    assert '"name": "me"' in table
    listed, said = paramd("--help", path=folder)
    assert "Greet somebody." in listed
    assert "paramd greet --name me" in paramd("greet", "--help", path=folder)[0]
    # Its other command has a name of ours, which stays ours.
    assert "greetings of greeting adds no command status, which there is already" in said
    assert "Taken already." not in listed


def test_a_package_that_cannot_be_imported_is_named_and_leaves_our_commands(tmp_path: Path) -> None:
    folder = package(tmp_path / "site", "import nowhere", **{"command.broken": "greeting:Broken"})
    listed, said = paramd("--help", path=folder)
    assert "Show the state of every rank of a job." in listed
    assert "broken of greeting adds no commands: ModuleNotFoundError" in said
    # Our own commands do not even look.
    assert paramd("status", "--help", path=folder)[1] == ""


def test_what_is_no_part_of_the_command_line_is_named(tmp_path: Path) -> None:
    folder = package(tmp_path / "site", ADDING, **{"command.one": "greeting:NO_PART"})
    assert "greeting:NO_PART is no CommandPart" in paramd("--help", path=folder)[1]


def test_each_process_finds_its_own_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {"command.a": "greeting:A", "sidecar.b": "greeting:B", "sidecar.a": "greeting:C"}
    monkeypatch.syspath_prepend(str(package(tmp_path / "site", "", **entries)))
    assert [(part.name, part.value) for part in installed("sidecar")] == [
        ("a", "greeting:C"),
        ("b", "greeting:B"),
    ]
    assert [part.package for part in installed("command")] == ["greeting"]


def test_calls_of_parts_are_told_when_asked_for() -> None:
    said = paramd("status", "--help", PARAMD_TRACE_PARTS="1")[1]
    assert "part status: add_to took" in said


def test_commands_are_not_taken_away() -> None:
    commands = PartCommands()
    with pytest.raises(TypeError, match="status"):
        del commands["status"]
