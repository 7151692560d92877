"""Norms of gradients into the metric history, as far as somebody follows them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from paramd.clock import now_s
from paramd_service.control.alerts.kept import series_name
from paramd_service.control.store.points import Sample, SeriesKey

PERIOD_S = 1.0
"""Time between two samples of one job; several readers bring the same frames."""

MAX_SERIES = 200
"""Gradients of one frame that are noted, beside the total."""

Offer = Callable[[Iterable[Sample]], None]


class NormHistory:
    """Notes frames that pass by. Used on the event loop only."""

    def __init__(self, offer: Offer, *, clock: Callable[[], float] = now_s) -> None:
        self._offer = offer
        self._clock = clock
        self._noted_s: dict[tuple[str, str], float] = {}

    def take(self, document: Mapping[str, Any]) -> None:
        """Notes the norms of a frame, unless it is too early for the next ones."""
        now_s = self._clock()
        names = [row["fqn"] for row in document["params"]]
        # Readers of other names have series of their own.
        key = (document["job"], names[0] if names else "")
        if now_s - self._noted_s.get(key, -math.inf) < PERIOD_S:
            return
        self._noted_s = {k: at_s for k, at_s in self._noted_s.items() if now_s - at_s < 60.0}
        self._noted_s[key] = now_s
        rows = [row for row in document["params"] if row["none"] is None][:MAX_SERIES]
        self._offer(
            Sample(
                series=SeriesKey(
                    job=document["job"],
                    epoch=document["epoch"],
                    name=series_name("grad_norm", row["fqn"]),
                ),
                time_s=now_s,
                step=document["step"],
                value=row["norm"] if row["norm"] is not None else math.nan,
            )
            for row in (*rows, {**document["total"], "fqn": "total"})
        )
