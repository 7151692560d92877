"""Which scenes a change may break: one path a line, for `make integrations SCENES=...`.

    BASE=v0.1.0 python -m tests.touched

CI takes a share of them, and commits take turns: with PARAMD_TESTS_EIGHTH, which names the eighth
of other tests' cases too (`longer.py`), every fourth scene counts. `make integrations` has all.

A change is what differs from BASE, by default from the last tag, without tags from 20 commits ago.
What a test touches is read from its source, and nothing is kept by hand: the files that it and its
workers import or name (`ROOT / "deploy"`, `"tests.multiprocess.workers.trainers"`), the modules of
paramd among them, and what modules of `paramd.integrations` import in turn. Deeper lies what `make
test` claims by itself. Other versions of packages, and a base that is not here, touch all.
"""

import ast
import os
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests import longer

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "client/web/src"
"""What a browser shows, which no import says."""
SCENES = sorted(
    {*(ROOT / "tests/scenes").glob("test_*.py"), *(ROOT / "tests/web").glob("test_*.py")}
    - {ROOT / "tests/web/test_page.py"}  # `make test` has this one
)
SHARES = 4
"""Each scene is in one of so many: CI has five minutes for one share."""
SOURCES = (ROOT, ROOT / "client", ROOT / "service")
CONFTEST = ROOT / "tests/conftest.py"


def touched(changed: set[Path]) -> list[Path]:
    """The scenes that touch one of the changed files, which may be gone."""
    if changed & _everywhere():
        return SCENES
    return [scene for scene in SCENES if any(_within(path, files(scene)) for path in changed)]


def in_turn(eighth: int | None) -> list[Path]:
    """The scenes of one share; all of them when no turn is named."""
    return SCENES if eighth is None else SCENES[eighth % SHARES :: SHARES]


def files(scene: Path) -> set[Path]:
    """The files and folders that a scene touches, itself among them."""
    found, ahead = {scene, *([PAGE] if scene.parent.name == "web" else ())}, [scene]
    while ahead:
        path = ahead.pop()
        if not _is_followed(path):
            continue
        new = set(named_in(path)) - found - _everywhere()
        found |= new
        ahead += new
    return found


@cache
def _everywhere() -> frozenset[Path]:
    """What every test runs with: a change of it touches all scenes."""
    return named_in(CONFTEST) | {CONFTEST, ROOT / "constraints.txt"}


def _is_followed(path: Path) -> bool:
    """Whether what a file names belongs to the scene as well."""
    is_product = any(path.is_relative_to(source) for source in SOURCES[1:])
    return path.suffix == ".py" and (not is_product or path.parent.name == "integrations")


def _within(path: Path, places: set[Path]) -> bool:
    return not places.isdisjoint((path, *path.parents))


@cache
def named_in(path: Path) -> frozenset[Path]:
    """Files and folders of the repository that a Python file imports or names."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {"ROOT": ROOT}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            place = _place(node.value, names)
            if place is not None:
                names[node.targets[0].id] = place
    return frozenset(_named(tree, path.parent, names))


def _named(node: ast.AST, folder: Path, names: dict[str, Path]) -> Iterator[Path]:
    place = _place(node, names)
    if place is not None:
        # The root itself is named to start programs there, and says nothing.
        if place != ROOT and place.exists():
            yield place
        return
    if isinstance(node, ast.Assign) and _place(node.value, names) is not None:
        return
    if isinstance(node, ast.Import):
        yield from (found for name in node.names for found in _module(name.name))
    elif isinstance(node, ast.ImportFrom) and node.module is not None:
        yield from _module(node.module)
        yield from (found for name in node.names for found in _module(f"{node.module}.{name.name}"))
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from _text(node.value, folder)
    for child in ast.iter_child_nodes(node):
        yield from _named(child, folder, names)


def _place(node: ast.AST, names: dict[str, Path]) -> Path | None:
    """The path that an expression such as `ROOT / "examples" / name` has, as far as it is known."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        above = _place(node.left, names)
        if above is None or not isinstance(node.right, ast.Constant):
            return above
        return above / str(node.right.value)
    return None


def _text(text: str, folder: Path) -> Iterator[Path]:
    """A module that is started by its name, or a file beside the one that names it."""
    if text.replace(".", "").replace("_", "").isalnum() and "." in text:
        yield from _module(text)
        yield from (path for path in [folder / text] if path.is_file())


def _module(name: str) -> Iterator[Path]:
    """The file of a module of ours; a package has its own alone, a stranger none."""
    for source in SOURCES:
        at = source / name.replace(".", "/")
        for path in (at.with_suffix(".py") if at.name else at, at / "__init__.py"):
            if path.is_file() and path.stat().st_size:
                yield path


def changed() -> set[Path] | None:
    """Files that differ from the base, uncommitted ones included; None without a base."""
    base = os.environ.get("BASE") or _git("describe", "--tags", "--abbrev=0") or "HEAD~20"
    told = _git("diff", "--name-only", "--no-renames", base.strip(), "--")
    return None if told is None else {ROOT / line for line in told.splitlines()}


def _git(*arguments: str) -> str | None:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout if done.returncode == 0 else None


def main() -> None:
    """Print them, as pytest takes them."""
    differ, turn = changed(), in_turn(longer.eighth())
    for scene in SCENES if differ is None else touched(differ):
        if scene in turn:
            print(scene.relative_to(ROOT))


if __name__ == "__main__":
    main()
