"""What a benchmark says: tables for people, goals that are met or not, JSON for programs."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """One promise of speed, and whether this run kept it."""

    what: str
    measured: float
    limit: float
    unit: str = ""
    at_least: bool = False
    """The limit is a floor; else a ceiling."""

    @property
    def met(self) -> bool:
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit

    def row(self) -> list[str]:
        sign = "at least" if self.at_least else "at most"
        unit = f" {self.unit}" if self.unit else ""
        return [
            self.what,
            f"{_short(self.measured)}{unit}",
            f"{sign} {_short(self.limit)}{unit}",
            "yes" if self.met else "**no**",
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows of cells under a title."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        lines = [f"### {self.title}", "", _line(self.header), _line(["---"] * len(self.header))]
        lines += [_line(row) for row in self.rows]
        return "\n".join(lines) + "\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The answer of one benchmark."""

    name: str
    tables: Sequence[Table]
    goals: Sequence[Goal]
    notes: Sequence[str] = ()
    numbers: Mapping[str, object] = field(default_factory=dict)
    """Everything that was measured, for the JSON file."""

    def markdown(self) -> str:
        parts = [table.markdown() for table in self.tables]
        if self.notes:
            parts.append("".join(f"{note}\n" for note in self.notes))
        return "\n".join(parts)

    def save(self, directory: Path = RESULTS) -> Path:
        """Writes `<name>.json`, with the machine it was measured on."""
        directory.mkdir(exist_ok=True)
        path = directory / f"{self.name}.json"
        document = {
            "name": self.name,
            "machine": machine(),
            "goals": [asdict(goal) | {"met": goal.met} for goal in self.goals],
            "tables": [asdict(table) for table in self.tables],
            "notes": list(self.notes),
            "numbers": dict(self.numbers),
        }
        path.write_text(json.dumps(document, indent=1) + "\n")
        return path


def goals_table(reports: Iterable[Report]) -> Table:
    """Every goal of every report."""
    return Table(
        title="Goals",
        header=["what", "measured", "goal", "met"],
        rows=[goal.row() for report in reports for goal in report.goals],
    )


def machine() -> dict[str, object]:
    """What the figures depend on."""
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    packages = ("torch", "grpcio", "protobuf", "xxhash", "numpy")
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in packages},
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
