"""Edits and holds as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paramd_service.control.edits.book import Edits


class EditsCollector(Collector):
    """Made from the book when it is scraped."""

    def __init__(self, edits: Edits) -> None:
        self._edits = edits

    def collect(self) -> Iterator[Metric]:
        labels = ["job", "state"]
        under_way = GaugeMetricFamily("paramd_edits_open", "Edits under way", labels=labels)
        for (job, state), count in sorted(self._edits.open_counts().items()):
            under_way.add_metric([job, state], count)
        ended = CounterMetricFamily("paramd_edits", "Edits that ended here", labels=labels)
        for (job, state), count in sorted(self._edits.ended.items()):
            ended.add_metric([job, state], count)
        seconds = CounterMetricFamily(
            "paramd_edit_seconds", "From creation to APPLIED, all together", labels=["job"]
        )
        for job, taken_s in sorted(self._edits.seconds.items()):
            seconds.add_metric([job], taken_s)
        holds = CounterMetricFamily("paramd_holds", "Holds begun here", labels=["job"])
        for job, count in sorted(self._edits.hold_counts().items()):
            holds.add_metric([job], count)
        yield from (under_way, ended, seconds, holds)
