"""What the documents name exists."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
import typer

from docs import from_code
from paramd.cli.main import app

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


def functions_in(path: Path) -> set[str]:
    """Names of the test functions in a file."""
    found = ast.walk(ast.parse(path.read_text()))
    return {n.name for n in found if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_test_that_the_ledger_names_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (ROOT / "docs" / "faults.md").read_text())
    assert len(named) > 30
    for file, test in named:
        assert test in functions_in(ROOT / "tests" / file), f"{file}::{test}"


def test_every_row_of_the_ledger_has_a_test_or_says_that_it_has_none() -> None:
    text = (ROOT / "docs" / "faults.md").read_text().split("## Bugs found")[0]
    tables = [part for part in text.split("\n\n") if part.startswith(("| fault ", "| attack "))]
    rows = [line for table in tables for line in table.splitlines()[2:]]
    assert len(rows) > 30
    for row in rows:
        assert "::test_" in row or "**untested**" in row, row


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), target


def test_every_command_that_the_readme_shows_exists() -> None:
    commands = set(getattr(typer.main.get_command(app), "commands", {}))
    shown = re.findall(r"(?:^    |`)paramd (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert {"status", "stats", "summon", "doctor", "demo"} <= set(shown) <= commands


def test_every_make_target_that_the_readme_shows_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make (\w+)", (ROOT / "README.md").read_text()):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


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


def test_the_manual_has_every_page_in_its_contents() -> None:
    contents = set(
        re.findall(r"^(?:[a-z-]+/)?[a-z-]+$", (DOCS / "index.md").read_text(), re.MULTILINE)
    )
    pages = {str(path.relative_to(DOCS).with_suffix("")) for path in DOCS.rglob("*.md")}
    integrations = {name for name in pages if name.startswith("integrations/")}
    assert pages - contents - integrations == {"index"}


INTERNAL = {
    "PARAMD_FAULTS",
    "PARAMD_FAULTS_DIR",
    "PARAMD_TRAINER_FAULTS",
    "PARAMD_GLANCES",
    "PARAMD_TRAINER_FAULTS_DIR",
    "PARAMD_PAGE",
}
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


OLD_READERS = {
    "client/paramd/places.py",
    "service/paramd_service/control/api/routes/audit.py",
    "service/paramd_service/control/base/site.py",
}
"""Files that read what older versions wrote under the old names."""

OTHERS_WORDS = {"client/paramd/integrations/hf.py"}
"""Files that need a word of the framework that they are for: what the Trainer calls an epoch."""


def words_of_the_code() -> dict[str, set[str]]:
    """Words in identifiers and comments of our Python, each with the files it stands in."""
    found: dict[str, set[str]] = {}
    for folder in ("client/paramd", "service/paramd_service"):
        for path in (ROOT / folder).rglob("*.py"):
            name = str(path.relative_to(ROOT))
            if "/v1/" in name or "/migrations/" in name:
                continue
            text = re.sub(r"Unix\s+epoch", "", path.read_text())
            for word in re.findall(r"[A-Z]?[a-z]+", text):
                found.setdefault(word.lower(), set()).add(name)
    return found


def test_the_words_are_those_of_the_code_and_the_retired_ones_are_gone() -> None:
    used = words_of_the_code()
    page = (ROOT / "docs" / "words.md").read_text()
    terms = [line.split("|")[1] for line in page.splitlines() if line.startswith("| **")]
    bold = [word for term in terms for word in re.findall(r"\*\*(.+?)\*\*", term)]
    stems = {part.removesuffix("ing") for word in bold for part in re.findall(r"[a-z]+", word)}
    assert len(stems) > 25
    assert not [stem for stem in stems if not any(word.startswith(stem) for word in used)]
    (retired,) = re.findall(r"^Retired: (.+?)\.$", page, re.MULTILINE | re.DOTALL)
    for word in re.findall(r"\w+", retired):
        assert used.get(word, set()) <= OLD_READERS | OTHERS_WORDS, word
