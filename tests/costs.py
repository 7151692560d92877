"""What each folder of tests costs: writes the table in README.md, with the seconds last measured.

    make test && python -m tests.costs

The last column is written by hand and stays: a folder of which it says nothing is one to question.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
README = FOLDER / "README.md"
BEGIN, END = "<!-- costs: python -m tests.costs -->", "<!-- end of costs -->"
HEAD = ("folder", "files", "lines", "seconds", "what would go unnoticed without it")
KEY = "paramd/durations"
"""Under which pytest's cache keeps the seconds of each file."""


class Durations:
    """Plugin of pytest: sums set-up, call and teardown of each file's tests, over all workers."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        cache = getattr(self._config, "cache", None)
        # Workers report to the first process; a part of a file says nothing of all of it.
        ran_all = exitstatus in (0, 1) and not is_partial(self._config)
        if cache is None or hasattr(self._config, "workerinput") or not ran_all:
            return
        rounded = {file: round(took_s, 2) for file, took_s in self._seconds.items()}
        cache.set(KEY, {**cache.get(KEY, {}), **rounded})


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
    lines = [_line(HEAD), "|---|--:|--:|--:|---|", *map(_line, rows)]
    return before + "\n".join((BEGIN, *lines, END)) + after


def _folders(root: Path) -> list[Path]:
    return sorted({path.parent for path in root.rglob("*.py") if path.name != "__init__.py"})


def _row(
    folder: Path, root: Path, seconds: Mapping[str, float], kept: Mapping[str, list[str]]
) -> tuple[str, ...]:
    files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
    lines = sum(path.read_text(encoding="utf-8").count("\n") for path in files)
    name = f"`{folder.relative_to(root).as_posix()}/`"
    _, _, _, took, reason = kept.get(name, ["", "", "", "?", ""])
    names = (path.relative_to(root.parent).as_posix() for path in files)
    measured = [seconds[name] for name in names if name in seconds]
    return name, str(len(files)), str(lines), f"{sum(measured):.0f}" if measured else took, reason


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
