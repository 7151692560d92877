"""`python -m tests.mutants.score [WORD...]`: mutmut over the code that decides who, what and when.

mutmut knows one source root; so both of ours are copied into one. Words choose files. Ends with 1
when less than `GOAL` of the mutants were found.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.mutants.__main__ import copy_tree

GOAL = 0.85

_OPS = (
    "unit/layout/test_edits.py",
    "unit/mesh/test_edit_operands.py",
    "unit/control/test_edits_parts.py",
)

SUITES: dict[str, tuple[str, ...]] = {
    "paramd/security/tickets.py": ("unit/test_tickets.py", "unit/sidecar/test_auth.py"),
    "paramd_service/control/access/roles.py": ("unit/control/test_auth_roles.py",),
    "paramd_service/control/access/authority.py": (
        "unit/control/test_auth_tokens.py",
        "unit/control/test_session.py",
    ),
    "paramd_service/sidecar/calls.py": (
        "unit/sidecar/test_auth.py",
        "unit/sidecar/test_sidecar_parts.py",
    ),
    "paramd/layout/edits/ops.py": _OPS,
    "paramd/layout/edits/kinds.py": _OPS,
    "paramd_service/control/mesh/coordinator.py": ("unit/control/test_control_coordinator.py",),
    "paramd/trainer/boundary/agreement.py": (
        "unit/trainer/test_agreement.py",
        "unit/trainer/test_boundary.py",
    ),
    "paramd_service/edits/machine.py": (
        "unit/control/test_edits_machine.py",
        "model/test_edit_machine.py",
    ),
    "paramd_service/exports/machine.py": ("unit/control/test_exports_machine.py",),
}
"""Tests of each file, below `tests/`. What a server of its own shows, mutmut does not see."""


def score(file: str, tests: Sequence[str], *, shown: bool) -> dict[str, int]:
    """How many mutants of a file had each end (killed, survived, ...)."""
    with tempfile.TemporaryDirectory(prefix="paramd-score-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        for package in ("client/paramd", "service/paramd_service"):
            shutil.move(tree / package, tree / "src" / Path(package).name)
        project = tree / "pyproject.toml"
        settings = {
            "source_paths": ["src"],
            "only_mutate": [f"src/{file}"],
            "also_copy": ["protos", "docs", "examples", "benchmarks"],
            "pytest_add_cli_args_test_selection": [f"tests/{test}" for test in tests],
            # What an error says is for people.
            "do_not_mutate_patterns": [r"raise \w+Error\("],
            "pytest_add_cli_args": ["-p", "no:cacheprovider", "-q"],
        }
        lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
        project.write_text(project.read_text() + "\n[tool.mutmut]\n" + "\n".join(lines) + "\n")
        mutmut = [sys.executable, "-m", "mutmut"]
        # Before the paths of the checkout; it exists from the start, or importing would forget it.
        (tree / "mutants" / "src").mkdir(parents=True)
        environment = {**os.environ, "PYTHONPATH": str(tree / "mutants" / "src")}
        done = subprocess.run(
            [*mutmut, "run", "--max-children", "2"],
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        subprocess.run([*mutmut, "export-cicd-stats"], cwd=tree, env=environment, check=False)
        stats = tree / "mutants" / "mutmut-cicd-stats.json"
        found = dict(json.loads(stats.read_text())) if stats.exists() else {}
        ends = sum(n for end, n in found.items() if isinstance(n, int) and end != "total")
        if not ends or ends < found["total"]:
            raise SystemExit(f"{file}: mutmut did not run\n{(done.stdout + done.stderr)[-6000:]}")
        if shown:
            for mutant in _survivors(mutmut, tree, environment):
                subprocess.run(
                    [*mutmut, "show", mutant],
                    cwd=tree,
                    env=environment,
                    stdout=sys.stderr,
                    check=False,
                )
        return found


def _survivors(mutmut: Sequence[str], tree: Path, environment: Mapping[str, str]) -> list[str]:
    results = subprocess.run(
        [*mutmut, "results"], cwd=tree, env=environment, capture_output=True, text=True, check=True
    )
    rows = (line.strip().rpartition(": ") for line in results.stdout.splitlines())
    return [name for name, _, end in rows if end in ("survived", "no tests")]


def main() -> int:
    """Prints a row for each file, and the score of all."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.score")
    parser.add_argument("words", nargs="*", metavar="WORD", help="files with this in their path")
    parser.add_argument("--show", action="store_true", help="diffs of what survived, to stderr")
    options = parser.parse_args()
    found = killed = 0
    print("| file | mutants | killed | |\n|---|---|---|---|")
    for file, tests in SUITES.items():
        if options.words and not any(word in file for word in options.words):
            continue
        stats = score(file, tests, shown=options.show)
        dead = stats["killed"] + stats.get("timeout", 0)
        total = stats["total"] - stats.get("skipped", 0)
        found, killed = found + total, killed + dead
        print(f"| {file} | {total} | {dead} | {dead / max(total, 1):.0%} |", flush=True)
    print(f"| all | {found} | {killed} | {killed / max(found, 1):.0%} |")
    return int(killed < GOAL * found)


if __name__ == "__main__":
    sys.exit(main())
