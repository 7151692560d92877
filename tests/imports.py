"""Whether tests, benchmarks, docs and examples import only what there is: mypy does not look there.

    python -m tests.imports

Sources are read, and run only where a module makes names as it runs. A module of ours that is
imported has to exist, and so has each name that is taken from it: by `from`, by a dot from a module
that was imported (`longer.seconds`), or in a text that names what is to be started
(`"tests.multiprocess.workers.trainers"`).
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple, TypeGuard

ROOT = Path(__file__).resolve().parent.parent
PLACES = {
    "paramd": ROOT / "client",
    "paramd_service": ROOT / "service",
    "tests": ROOT,
    "benchmarks": ROOT,
    "docs": ROOT,
    "examples": ROOT,
    "deploy": ROOT,
    "protos": ROOT,
}
"""Our packages, and the folder that each stands in."""

READ = ("tests", "benchmarks", "docs", "examples", "deploy")
"""The folders whose files are looked at."""

STARTED = re.compile(r"(tests|benchmarks|paramd_service)(\.[a-z_]\w*)+", re.ASCII)
"""A text that names a module, to be started by `-m`, or something in one, to be replaced."""

OWN_MAKING = ("__getattr__", "globals")
"""What a module that makes names as it runs has in its source."""

DEFINED = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
NAMED = DEFINED | ast.ExceptHandler | ast.MatchAs | ast.MatchStar
"""Nodes that give their name to something."""

BLOCK = re.compile(r"^( *)```python\n(.*?)^ *```", re.DOTALL | re.MULTILINE)


class Taken(NamedTuple):
    """What a line of a source takes from a module."""

    line: int
    module: str
    name: str = ""
    """Of what stands in it; empty for the module itself."""


def missing(path: Path) -> Iterator[str]:
    """A line for each thing that a file takes and that is nowhere.

    Args:
        path: a Python file, or a page of the manual, whose blocks of Python are read.
    """
    text = path.read_text(encoding="utf-8")
    for first_line, source in [(1, text)] if path.suffix == ".py" else blocks(text):
        for taken in taken_by(source):
            reason = why_not(taken)
            if reason:
                yield f"{path.relative_to(ROOT)}:{first_line + taken.line - 1}: {reason}"


def blocks(page: str) -> Iterator[tuple[int, str]]:
    """The blocks of Python in a page that can be parsed, each with the line it begins at."""
    for found in BLOCK.finditer(page):
        source = dedent(found[2])
        try:
            ast.parse(source)
        except SyntaxError:  # an excerpt with words in it, or a session with its answers
            continue
        yield page.count("\n", 0, found.start()) + 2, source


def taken_by(source: str) -> Iterator[Taken]:
    """What a source takes from modules of ours."""
    nodes = list(ast.walk(ast.parse(source)))
    modules: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            ours = [one for one in node.names if _is_ours(one.name)]
            yield from (Taken(node.lineno, one.name) for one in ours)
            modules |= {one.asname: one.name for one in ours if one.asname is not None}
        elif isinstance(node, ast.ImportFrom) and _is_ours(node.module or "") and not node.level:
            module = str(node.module)
            for one in node.names:
                yield Taken(node.lineno, module, "" if one.name == "*" else one.name)
                if file_of(f"{module}.{one.name}") is not None and one.name not in names_in(module):
                    modules[one.asname or one.name] = f"{module}.{one.name}"
        elif isinstance(node, ast.Constant) and _is_started(node.value):
            yield Taken(node.lineno, *_split(node.value))
    yield from _by_a_dot(nodes, modules)


def _by_a_dot(nodes: list[ast.AST], modules: dict[str, str]) -> Iterator[Taken]:
    """What is taken from imported modules, under names that the source gives to nothing else."""
    bound = Counter(name for node in nodes for name in _bound_by(node))
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = modules.get(node.value.id)
            is_read = isinstance(node.ctx, ast.Load)
            if module is not None and is_read and not bound[node.value.id]:
                yield Taken(node.lineno, module, node.attr)


def _bound_by(node: ast.AST) -> Iterator[str]:
    """Names that a node gives to something else than a module."""
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        yield node.id
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, NAMED) and node.name:
        yield node.name


def why_not(taken: Taken) -> str:
    """What is wrong with it; empty where it exists."""
    if file_of(taken.module) is None:
        return f"there is no module {taken.module}"
    whole = f"{taken.module}.{taken.name}"
    if not taken.name or taken.name in names_in(taken.module) or file_of(whole) is not None:
        return ""
    if taken.name.startswith("__") or (_makes_names(taken.module) and _has(taken)):
        return ""
    return f"{taken.module} has no {taken.name}"


def _has(taken: Taken) -> bool:
    """Asks the module itself, which is imported for it."""
    return hasattr(importlib.import_module(taken.module), taken.name)


@cache
def _makes_names(module: str) -> bool:
    path = file_of(module)
    return (
        path is not None
        and path.is_file()
        and any(word in path.read_text(encoding="utf-8") for word in OWN_MAKING)
    )


@cache
def names_in(module: str) -> frozenset[str]:
    """What stands at the top of a module, also within an `if`, a `try` or a `with`."""
    path = file_of(module)
    if path is None or path.is_dir():
        return frozenset()
    stub = path.with_suffix(".pyi")
    text = (stub if stub.exists() else path).read_text(encoding="utf-8")
    return frozenset(_tops(ast.parse(text).body))


def _tops(body: list[ast.stmt]) -> Iterator[str]:
    for statement in body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            yield from (one.asname or one.name.partition(".")[0] for one in statement.names)
            continue
        yield from _bound_by(statement)
        if isinstance(statement, DEFINED):
            continue
        for child in ast.iter_child_nodes(statement):
            if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
                continue
            yield from (name for node in ast.walk(child) for name in _bound_by(node))
        for _, value in ast.iter_fields(statement):
            yield from _inner(value)


def _inner(value: object) -> Iterator[str]:
    """The names of the statements that a statement is made of."""
    if not isinstance(value, list):
        return
    for one in value:
        if isinstance(one, ast.stmt):
            yield from _tops([one])
        elif isinstance(one, ast.ExceptHandler | ast.match_case):
            yield from _tops(one.body)


@cache
def file_of(module: str) -> Path | None:
    """The file of a module of ours, or the folder of a package without one; None: there is none."""
    if not _is_ours(module):
        return None
    at = PLACES[module.partition(".")[0]] / module.replace(".", "/")
    choices = (at / "__init__.py", at.with_suffix(".py"), at)
    return next((path for path in choices if path.is_file() or (path == at and at.is_dir())), None)


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in PLACES


def _is_started(value: object) -> TypeGuard[str]:
    """Whether a text names a module of ours, or something in one, that is not there as a module."""
    is_name = isinstance(value, str) and STARTED.fullmatch(value) is not None
    return is_name and file_of(str(value)) is None


def _split(whole: str) -> tuple[str, str]:
    """A name with dots as the longest module that exists, and the next word after it."""
    words = whole.split(".")
    known = max(at for at in range(1, len(words) + 1) if file_of(".".join(words[:at])) is not None)
    return ".".join(words[:known]), words[known] if known < len(words) else ""


def main() -> int:
    """Print what is missing; returns 1 where something is."""
    paths = [path for folder in READ for path in sorted((ROOT / folder).rglob("*.py"))]
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    lines = [line for path in (*paths, *pages) for line in missing(path)]
    print("\n".join(lines) if lines else f"{len(paths) + len(pages)} files import what there is")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
