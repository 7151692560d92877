"""The store, the audit and the history as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paramd_service.control.records import Records


class RecordsCollector(Collector):
    """Looked at when it is scraped; asks the store nothing."""

    def __init__(self, records: Records) -> None:
        self._records = records

    def collect(self) -> Iterator[Metric]:
        records = self._records
        yield GaugeMetricFamily(
            "paramd_audit_ok",
            "0 while the audit cannot be written and mutations are refused",
            value=not records.audit.failure,
        )
        yield GaugeMetricFamily(
            "paramd_store_writes_waiting",
            "Writes that the store has not begun",
            value=records.store.waiting_count,
        )
        yield CounterMetricFamily(
            "paramd_history_dropped_samples",
            "Samples of the metric history that were not kept",
            value=records.history.dropped_count,
        )
