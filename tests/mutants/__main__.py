"""`python -m tests.mutants [WORD...]`: plants each bug in a copy, and runs the tests to see it.

Words choose bugs by their names. Ends with 1 when a bug survives, stands nowhere any more, or
when a test fails without any bug.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.bugs import BUGS, Bug

ROOT = Path(__file__).parents[2]
PATIENCE_S = 900
FAILED = 1
"""pytest's exit code when tests ran and some failed; 2 to 5: they did not run."""


def copy_tree(target: Path) -> None:
    """What git knows of, and what it does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    ).stdout
    for name in filter(None, listed.decode().split("\0")):
        source = ROOT / name
        if source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes(source.read_bytes())


def run_tests(tree: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Exit code and output of pytest, over the copy's code."""
    paths = [str(tree / "client"), str(tree / "service"), str(tree)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *(f"tests/{test}" for test in tests)], cwd=tree, env=environment,
        capture_output=True, text=True, check=False, timeout=PATIENCE_S,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def verdict_on(bug: Bug, tree: Path) -> str:
    """What became of a bug: "" when a test has seen it."""
    path = tree / bug.file
    text = path.read_text()
    if text.count(bug.old) != 1:
        return f"BROKEN: what it changes stands {text.count(bug.old)} times in {bug.file}"
    path.write_text(text.replace(bug.old, bug.new))
    try:
        # One after the other: the fast ones stand first, and one is enough.
        for test in bug.tests:
            code, output = run_tests(tree, [test])
            if code == FAILED:
                return ""
            if code:
                return f"BROKEN: pytest ended with {code}\n{output[-2000:]}"
        return "SURVIVED"
    finally:
        path.write_text(text)


def main() -> int:
    """Prints a line for each bug."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("words", nargs="*", metavar="WORD", help="bugs with this in their name")
    options = parser.parse_args()
    chosen = [b for b in BUGS if not options.words or any(w in b.name for w in options.words)]
    with tempfile.TemporaryDirectory(prefix="paramd-mutants-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        tests = sorted({test for bug in chosen for test in bug.tests})
        code, output = run_tests(tree, tests)
        if code:
            print(output[-4000:], "\nthe tests fail without any bug", sep="")
            return 1
        bad = 0
        for bug in chosen:
            begin_s = time.monotonic()
            verdict = verdict_on(bug, tree)
            bad += bool(verdict)
            took_s = time.monotonic() - begin_s
            print(f"{took_s:5.0f} s  {bug.name}: {verdict or 'caught'}", flush=True)
    print(f"{len(chosen) - bad} of {len(chosen)} caught")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
