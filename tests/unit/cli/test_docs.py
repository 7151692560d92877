"""What the documents name exists."""

import ast
import inspect
import json
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

import paramd
from docs import from_code
from paramd.cli import demo
from paramd.cli.main import app
from paramd.memory.control_page import Word
from paramd.mesh.mesh import Mesh
from paramd.trainer.attaching.attachment import Attachment

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
FOR_USERS = [path for path in PAGES if path.parent.name != "decisions" and path.stem != "faults"]


@cache
def functions_in(path: Path) -> set[str]:
    """Names of the test functions in a file."""
    found = ast.walk(ast.parse(path.read_text()))
    return {n.name for n in found if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize(("page", "least"), [("faults", 31), ("step", 20)])
def test_every_test_that_a_page_names_exists(page: str, least: int) -> None:
    named, file = re.findall(r"`([\w/]+\.py)?::(\w+)`", (DOCS / f"{page}.md").read_text()), ""
    assert len(named) >= least
    for given, test in named:
        file = given or file  # "`::name`" is of the file before it
        assert test in functions_in(ROOT / "tests" / file), f"{file}::{test}"


def test_the_words_of_the_step_protocol_are_those_of_the_page() -> None:
    table = (DOCS / "step.md").read_text().partition("## Words")[2].partition("\n## ")[0]
    named = set(re.findall(r"\b[A-Z][A-Z_]{3,}[0-9]?\b", table))
    assert len(named) > 50
    assert named <= set(Word.__members__)


@cache
def texts_of_the_code() -> list[str]:
    """Texts in our Python, with {} for what is filled in."""
    found = []
    for folder in ("client/paramd", "service/paramd_service"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = [
                        part.value if isinstance(part, ast.Constant) else "{}"
                        for part in node.values
                    ]
                    found.append("".join(str(part) for part in parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return found


def test_every_error_text_that_the_manual_explains_is_one_of_ours() -> None:
    said = texts_of_the_code()
    page = (DOCS / "troubleshooting.md").read_text()
    headings = re.findall(r"^### (.+)$", page, re.MULTILINE)
    quoted = [text for heading in headings for text in re.findall("`(.+?)`", heading)]
    assert len(quoted) > 20
    for text in quoted:
        parts = [part.strip() for part in text.split("...") if part.strip()]
        assert any(all(part in one for part in parts) for one in said), text


INTERNAL = {
    "PARAMD_FAULTS", "PARAMD_FAULTS_DIR", "PARAMD_TRAINER_FAULTS", "PARAMD_TRAINER_FAULTS_DIR",
    "PARAMD_GLANCES", "PARAMD_PAGE",
}  # fmt: skip
"""Read by tests and by the build alone."""


def test_every_variable_that_the_code_reads_is_in_the_table_of_settings() -> None:
    shown = set(re.findall(r"PARAMD_[A-Z_]+", from_code.settings()))
    read = {
        name
        for text in texts_of_the_code()
        for name in re.findall(r"PARAMD_[A-Z_]*[A-Z]", text)
        if name == text
    }
    assert len(read) > 15
    assert read - INTERNAL <= shown


def test_the_reference_has_every_command_and_every_route() -> None:
    commands = set(getattr(typer.main.get_command(app), "commands", {}))
    shown = set(re.findall(r"^## paramd ([a-z-]+)$", from_code.cli(), re.MULTILINE))
    assert shown == commands
    assert "--max-shard-size" in from_code.cli()
    document = json.loads((ROOT / "client/web/openapi.json").read_text())
    routes = [f"### {m.upper()} {path}" for path, ways in document["paths"].items() for m in ways]
    written = from_code.rest().splitlines()
    assert not [route for route in routes if route not in written]


CALL = re.compile(r"(?<![\w.])(mesh|attachment|paramd)\.(\w+)")
OBJECTS = {"mesh": Mesh, "attachment": Attachment, "paramd": paramd}


def calls_in(text: str) -> Iterator[ast.Call]:
    """Calls of mesh, attachment and paramd in the code of a page: its blocks and spans."""
    code = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    for piece in (*code, *re.findall(r"`([^`\n]+)`", text)):
        try:
            nodes = ast.walk(ast.parse(piece.replace("...", "*x").strip().rstrip(":") + "\n"))
        except SyntaxError:
            continue
        yield from (node for node in nodes if isinstance(node, ast.Call))


@pytest.mark.parametrize("path", FOR_USERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_page_calls_exists_and_takes_these_arguments(path: Path) -> None:
    for call in calls_in(path.read_text()):
        found = CALL.fullmatch(ast.unparse(call.func))
        if found is None or (found[1] == "paramd" and found[2] not in paramd.__all__):
            continue
        called = getattr(OBJECTS[found[1]], found[2])
        bound = [None] * (found[1] != "paramd") + [None for one in call.args]
        named = {one.arg: None for one in call.keywords if one.arg}
        if not any(isinstance(one, ast.Starred) for one in call.args):
            inspect.signature(called).bind(*bound, **named)


def test_the_reference_has_an_example_of_everything_that_a_mesh_does() -> None:
    shown = {name for _, name in CALL.findall((DOCS / "reference" / "python.md").read_text())}
    assert {name for name in dir(Mesh) if not name.startswith("_")} <= shown


def commands_in(text: str) -> set[str]:
    """The lines that call paramd in a page's blocks and spans."""
    lines = re.findall(r"^(?:\$ | {4})(paramd [a-z].*)$", text, re.MULTILINE)
    return {line.split("  ")[0] for line in (*lines, *re.findall(r"`(paramd [a-z][^`\n]*)`", text))}


@pytest.mark.parametrize("path", FOR_USERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_page_types_exists_with_these_options(path: Path) -> None:
    root = typer.main.get_command(app)
    for line in commands_in(path.read_text()):
        words = re.split(r"[\s|;=]+", line.partition("#")[0].partition(" -- ")[0])[1:]
        command = root
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        assert command is not root, f"{path.name}: {line}"
        if command.context_settings.get("ignore_unknown_options"):
            continue
        known = {name for one in (*root.params, *command.params) for name in one.opts}
        known |= {name for one in command.params for name in one.secondary_opts} | {"--help", "--"}
        flags = {word for word in words if re.fullmatch("--[a-z][a-z-]+", word)}
        assert flags <= known, f"{path.name}: {line}: {flags - known}"


def test_every_example_of_the_help_and_of_the_demo_is_a_command_line() -> None:
    root: Any = typer.main.get_command(app)
    lines = re.findall(r'"(paramd [a-z][^";]*)"', Path(demo.__file__).read_text())
    for one in root.commands.values():
        lines += re.findall(r"^  (paramd .+)$", one.epilog or "", re.MULTILINE)
    assert len(lines) > 60
    for line in lines:
        _, name, *words = shlex.split(line)
        assert root.commands[name].make_context(name, words), line
