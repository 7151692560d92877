"""A sidecar's metrics as Prometheus text, written by hand.

prometheus-client costs 5 MiB, a sixth of the sidecar, for two dozen numbers. A scrape port would
not require tickets as the gRPC port does; the control plane serves the text at
/api/v1/jobs/{job}/ranks/{rank}/metrics.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

Row: TypeAlias = tuple[str, str, float | Mapping[str, float]]
"""A metric's name without "paramd_sidecar_", its text, its value or values by cause."""


def render(rows: Iterable[Row], *, job: str, rank: int) -> str:
    """Text format 0.0.4; a name that ends in _total is a counter. The labels are job and rank."""
    labels = f'job="{_escaped(job)}",rank="{rank}"'
    lines: list[str] = []
    for name, text, value in rows:
        full, kind = f"paramd_sidecar_{name}", "counter" if name.endswith("_total") else "gauge"
        lines.append(f"# HELP {full} {text}")
        lines.append(f"# TYPE {full} {kind}")
        by_cause = value if isinstance(value, Mapping) else {"": value}
        for cause, one in by_cause.items():
            more = f',cause="{cause}"' if cause else ""
            lines.append(f"{full}{{{labels}{more}}} {_number(one)}")
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    return repr(float(value)) if value != int(value) else str(int(value))


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
