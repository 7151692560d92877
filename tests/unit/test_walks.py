"""Every name in docs/walks.md exists, and what counts the files of a walk can tell them."""

from __future__ import annotations

import ast
import re

import pytest

from tests.launch import ROOT

NAMES = sorted(
    set(
        re.findall(
            r"`(paramd(?:_service)?/[\w/]+\.py):([\w.]+)`", (ROOT / "docs/walks.md").read_text()
        )
    )
)


@pytest.mark.parametrize(("path", "name"), NAMES, ids=lambda found: found)
def test_what_a_walk_names_exists(path: str, name: str) -> None:
    room = "client" if path.startswith("paramd/") else "service"
    body: list[ast.stmt] = ast.parse((ROOT / room / path).read_text()).body
    for part in name.split("."):
        found = [
            node
            for node in body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            and node.name == part
        ]
        assert found, f"{path} has no {name}"
        body = found[0].body


def test_all_walks_are_written_down() -> None:
    assert len(NAMES) > 40
