"""`python -m benchmarks [NAME ...]`: Markdown on stdout, JSON in benchmarks/results.

Each benchmark runs in a process of its own, so that none warms memory for the next.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.report import RESULTS, Goal, Report, goals_table, machine

NAMES = (
    "summon",
    "wait",
    "idle",
    "insight",
    "serving",
    "stats",
    "select",
    "names",
    "local_summon",
    "local_summon_cells",
    "tp_ddp",
    "edits",
    "export",
    "download",
    "resume",
    "gradients",
    "followers",
    "store",
    "meeting",
    "hosts",
    "control_scale",
    "control_requests",
    "flood",
    "dashboard",
    "verdicts",
    "gpu",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 also when goals are missed: the table says which."""
    given = list(arguments) if arguments is not None else sys.argv[1:]
    if given[:1] == ["verdicts"] and given[1:] != ["--quick"]:
        # Its cases are chosen one by one.
        return importlib.import_module("benchmarks.verdicts.run").main(given[1:])
    if given[:1] == ["idle"] and "--watch" in given:
        others = [one for one in given[1:] if one != "--watch"]
        return importlib.import_module("benchmarks.watching").main(others)
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *NAMES], help="default: all of them")
    parser.add_argument("--quick", action="store_true", help="smaller and shorter; no verdicts")
    options = parser.parse_args(given)
    names = options.names if options.names else list(NAMES)
    if len(names) == 1:
        report = _run(names[0], quick=options.quick)
        print(report.markdown())
        print(goals_table([report]).markdown())
        return 0
    return _run_all(names, quick=options.quick)


def _run(name: str, *, quick: bool) -> Report:
    report: Report = importlib.import_module(f"benchmarks.{name}").run(quick=quick)
    report.save()
    return report


def _run_all(names: Sequence[str], *, quick: bool) -> int:
    for key, value in machine().items():
        print(f"* {key}: {value}")
    print(flush=True)
    failed = []
    for name in names:
        command = [sys.executable, "-m", "benchmarks", name, *(["--quick"] if quick else [])]
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
    goals = [_goal(found) for name in names if name not in failed for found in _saved(name)]
    print(goals_table([Report(name="all", tables=[], goals=goals)]).markdown())
    for name in failed:
        print(f"benchmarks: {name} failed", file=sys.stderr)
    return 1 if failed else 0


def _saved(name: str) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads((RESULTS / f"{name}.json").read_text())["goals"]
    return found


def _goal(found: dict[str, object]) -> Goal:
    return Goal(**{key: value for key, value in found.items() if key != "met"})  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main())
