"""The project without some subjects: `python -m tests.without SUBJECT... [--whole]`.

Copies what git tracks, deletes each subject's folder, its parts from the lists and the tests that
import it, and runs what is left of the suites there: attach, prove a step, read on every lane, kill
a sidecar. `--whole` runs the unit tests and those of sidecars as well. A subject is what has a part
in `paramd_service/parts.py`; `all` stands for every one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from paramd_service.parts import CONTROL, SIDECAR

ROOT = Path(__file__).resolve().parent.parent
SUBJECTS = tuple(sorted({name.split(".")[1] for name in (*SIDECAR, *CONTROL)}))

BY_NAME = ("tests/warm_server.py", "docs/from_code.py")
"""Files that stay, although they may name a subject: they lose those lines."""

QUICK = (
    "tests/integration/test_sidecar_without.py::test_what_is_left_attaches_and_is_read_and_says_"
    "what_is_missing[nothing]",
    "tests/integration/test_control_without.py::test_what_is_left_serves_and_says_what_is_missing"
    "[nothing]",
    "tests/integration/test_client.py::test_every_kind_of_piece_is_byte_equal",
    "tests/integration/test_client_faults.py::test_a_dead_sidecar_is_refused_but_replicas_stand_in",
)
WHOLE = ("tests/unit/memory", "tests/unit/layout", "tests/unit/sidecar", "tests/unit/trainer")


def copied(target: Path) -> None:
    """What git tracks, as it is in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        source = ROOT / name
        if source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name, follow_symlinks=False)


def without(tree: Path, subjects: Sequence[str]) -> list[Path]:
    """Take the subjects out of a copy. Returns the tests that went with them."""
    named = re.compile(rf"paramd_service\.({'|'.join(subjects)})\b")
    for subject in subjects:
        shutil.rmtree(tree / "service" / "paramd_service" / subject)
    for name in ("service/paramd_service/parts.py", *BY_NAME):
        lines = (tree / name).read_text().splitlines(keepends=True)
        (tree / name).write_text("".join(line for line in lines if not named.search(line)))
    gone = {file for file in tests_of(tree) if named.search(file.read_text())}
    while more := {file for file in tests_of(tree) - gone if imports(tree, file, gone)}:
        # A helper has gone, and so does what imports it.
        gone |= more
    for file in gone:
        file.unlink()
    return sorted(file.relative_to(tree) for file in gone)


def tests_of(tree: Path) -> set[Path]:
    return set((tree / "tests").rglob("*.py"))


def imports(tree: Path, file: Path, others: set[Path]) -> bool:
    """Whether a test imports one of the others."""
    source = file.read_text()
    for other in others:
        *parents, name = other.relative_to(tree).with_suffix("").parts
        parent = re.escape(".".join(parents))
        if re.search(rf"\b{parent}\.{name}\b|from {parent} import [^\n]*\b{name}\b", source):
            return True
    return False


def main(arguments: Sequence[str]) -> int:
    """Returns what pytest returns."""
    chosen = [one for one in arguments if not one.startswith("-")]
    subjects = SUBJECTS if chosen == ["all"] else tuple(chosen)
    unknown = set(subjects) - set(SUBJECTS)
    if unknown or not subjects:
        print(f"expected some of {', '.join(SUBJECTS)}, or all", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="paramd-without-") as folder:
        tree = Path(folder)
        copied(tree)
        gone = without(tree, subjects)
        print(f"without {', '.join(subjects)}, and {len(gone)} tests and helpers:", flush=True)
        print(*(f"  {file}" for file in gone), sep="\n", flush=True)
        path = [str(tree / "client"), str(tree / "service"), os.environ.get("PYTHONPATH", "")]
        # Cold: what starts warm imports the subjects' own modules, and so fails there.
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, path)), "PARAMD_TESTS_COLD": "1"}
        tests = (*QUICK, *(WHOLE if "--whole" in arguments else ()))
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
            cwd=tree,
            env=os.environ | environment,
            check=False,
        )
        return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
