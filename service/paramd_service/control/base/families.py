"""Families of Prometheus metrics, for the kernel and for parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from prometheus_client.core import CounterMetricFamily as Counted
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import Metric

Row: TypeAlias = tuple[Sequence[object], float]
"""Values of the labels, and the number."""


def family(
    kind: type[Gauge | Counted], name: str, text: str, labels: str, rows: Iterable[Row]
) -> Metric:
    """A metric with labels, whose names are in `labels`, separated by spaces."""
    made = kind(name, text, labels=labels.split())
    for values, number in rows:
        made.add_metric([str(value) for value in values], number)
    return made


def by_job(numbers: Mapping[str, float]) -> list[Row]:
    """Rows of numbers that are labelled with the job alone."""
    return [((job,), number) for job, number in sorted(numbers.items())]
