"""What each folder of tests costs, and may cost: writes the table in README.md, with the seconds
last measured, and says which file took more seconds than it has.

    make test && python -m tests.costs

The last column is written by hand and stays: a folder of which it says nothing is one to question.
Whoever needs more than a budget raises it here, and says in the commit what for.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests import longer

FOLDER = Path(__file__).parent
README = FOLDER / "README.md"
BEGIN, END = "<!-- costs: python -m tests.costs -->", "<!-- end of costs -->"
HEAD = ("folder", "files", "seconds", "what would go unnoticed without it")
KEY = "paramd/durations"
"""Under which pytest's cache keeps the seconds of each file."""

FILE_S = 300.0
"""What a file may take, all its tests together, where `SECONDS` says nothing else."""
SECONDS = {
    # Random sequences over every kind of model, for minutes by design.
    "tests/sequences/test_sequences.py": 240.0
}


class Durations:
    """Plugin of pytest: sums set-up, call and teardown of each file's tests, over all workers.

    A run without pytest's cache, as planted bugs have it, is neither measured nor has a budget.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._seconds: dict[str, float] = defaultdict(float)
        self._quiet_s: dict[str, float] = defaultdict(float)
        """What they would have taken had nothing else run."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self._seconds[file] += report.duration
        self._quiet_s[file] += report.duration / longer.busy()

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        # Workers report to the first process; a part of a file says nothing of all of it.
        cache = getattr(self._config, "cache", None)
        if cache is None or hasattr(self._config, "workerinput") or exitstatus not in (0, 1):
            return
        if not is_partial(self._config):
            rounded = {file: round(took_s, 2) for file, took_s in self._seconds.items()}
            cache.set(KEY, {**cache.get(KEY, {}), **rounded})

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if getattr(self._config, "cache", None) is not None:
            for line in self._too_slow():
                terminalreporter.write_line(line, red=True)

    def _too_slow(self) -> list[str]:
        return [] if longer.takes_more() else too_slow(self._quiet_s)


def too_slow(quiet_s: Mapping[str, float]) -> list[str]:
    """A line for each file that took more seconds than it may, load taken out."""
    return [
        f"{file} took {took_s:.0f} s, load taken out, of {SECONDS.get(file, FILE_S):.0f} s: "
        "share set-up, ask less, or raise its budget in tests/costs.py"
        for file, took_s in sorted(quiet_s.items())
        if took_s > SECONDS.get(file, FILE_S)
    ]


def is_partial(config: pytest.Config) -> bool:
    """Whether the run leaves out tests of its files, or stops at a failure."""
    chosen = ("keyword", "markexpr", "lf", "deselect", "maxfail")
    named = any("::" in argument for argument in config.args)
    return named or any(config.getoption(name, default=None) for name in chosen)


def table(text: str, seconds: Mapping[str, float], root: Path = FOLDER) -> str:
    """`text` with the table between the marks written again, and its hand-written column kept.

    Args:
        seconds: by file, as pytest names it from the folder above `root`; a folder of which none
            was measured keeps what its row has.
    """
    before, _, rest = text.partition(BEGIN)
    old, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"expected {BEGIN} and {END}, in lines of their own")
    kept = {row[0]: row for row in map(_cells, old.splitlines()) if len(row) == len(HEAD)}
    rows = [_row(folder, root, seconds, kept) for folder in _folders(root)]
    lines = [_line(HEAD), "|---|--:|--:|---|", *map(_line, rows)]
    return before + "\n".join((BEGIN, *lines, END)) + after


def _folders(root: Path) -> list[Path]:
    return sorted({path.parent for path in root.rglob("*.py") if path.name != "__init__.py"})


def _row(
    folder: Path, root: Path, seconds: Mapping[str, float], kept: Mapping[str, list[str]]
) -> tuple[str, ...]:
    files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
    name = f"`{folder.relative_to(root).as_posix()}/`"
    _, _, took, reason = kept.get(name, ["", "", "?", ""])
    names = (path.relative_to(root.parent).as_posix() for path in files)
    measured = [seconds[name] for name in names if name in seconds]
    return name, str(len(files)), f"{sum(measured):.0f}" if measured else took, reason


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Write the table; without a measurement its seconds stay."""
    measured = FOLDER.parent / ".pytest_cache/v" / KEY
    seconds = json.loads(measured.read_text()) if measured.exists() else {}
    README.write_text(table(README.read_text(encoding="utf-8"), seconds), encoding="utf-8")


if __name__ == "__main__":
    main()
