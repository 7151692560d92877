"""The rounds that look at parameters: statistics, and digests of replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paramd.layout.types import Layout
from paramd_service.control.alerts.book import Alert, Book, Finding
from paramd_service.control.alerts.config import AlertConfig, Rule
from paramd_service.control.alerts.drift import (
    ReplicaGroup,
    Sample,
    choose_holders,
    drift_findings,
    next_sample,
    replica_groups,
)
from paramd_service.control.alerts.sampling import Sampler
from paramd_service.control.alerts.store import Point
from paramd_service.control.alerts.tensors import TENSOR_RULES, NormHistory, tensor_findings
from paramd_service.control.view import MeshView

_DRIFT = frozenset({Rule.REPLICA_DRIFT})


class Rounds:
    """Each round samples other parameters, and again those that something is wrong with."""

    def __init__(
        self,
        config: AlertConfig,
        *,
        job: str,
        epoch: int,
        view: Callable[[], MeshView],
        sampler: Sampler,
        book: Book,
        told: Callable[[Sequence[Alert]], None],
        offer: Callable[[Sequence[Point]], None],
        clock: Callable[[], float],
    ) -> None:
        """No I/O. `told` gets what changed in the book, `offer` what the history shall keep."""
        self._config = config
        self._job = job
        self._epoch = epoch
        self._view = view
        self._sampler = sampler
        self._book = book
        self._told = told
        self._offer = offer
        self._clock = clock
        self._norms = NormHistory(config.norm_window)
        self._stats_begin = 0
        self._digests_begin = 0
        self._turn = 0

    async def stats(self) -> None:
        """Statistics of the next parameters. Raises ParamdErrors."""
        if not any(self._config.looks_for(rule) for rule in TENSOR_RULES):
            return
        layout = await self._sampler.layout()
        self._norms.keep_only(tensor.fqn for tensor in layout.tensors)
        sample = self._next(layout, self._stats_begin, TENSOR_RULES)
        if not sample.tensors:
            return
        found = await self._sampler.stats(sample.tensors, timeout_s=self._config.sample_timeout_s)
        self._stats_begin = sample.next_begin
        findings = tensor_findings(found.tensors, self._norms, found.step, self._config)
        self._norms.seen(found.tensors)
        now_s = self._clock()
        seen = {tensor.fqn for tensor in found.tensors}
        covered = _covers(TENSOR_RULES, seen)
        self._told(self._book.observe(findings, covered=covered, now_s=now_s))
        self._offer(
            [
                Point(
                    job=self._job,
                    epoch=self._epoch,
                    name="norm",
                    subject=tensor.fqn,
                    step=found.step,
                    time_s=now_s,
                    value=tensor.norm,
                )
                for tensor in found.tensors
            ]
        )

    async def digests(self) -> None:
        """Compares replicas of the next parameters. Raises ParamdErrors."""
        if not self._config.looks_for(Rule.REPLICA_DRIFT):
            return
        layout = await self._sampler.layout()
        sample = self._next(layout, self._digests_begin, _DRIFT)
        groups = self._groups(sample)
        self._digests_begin = sample.next_begin
        if not groups:
            return
        found = await self._sampler.digests(groups, timeout_s=self._config.sample_timeout_s)
        self._turn += 1
        findings = drift_findings(found.differences, found.places, found.step)
        covered = _covers(_DRIFT, {group.fqn for group in groups})
        self._told(self._book.observe(findings, covered=covered, now_s=self._clock()))

    def _groups(self, sample: Sample) -> list[ReplicaGroup]:
        joined = {report.rank for report in self._view().joined}
        groups = [
            group.on(joined.intersection(group.begins))
            for tensor in sample.tensors
            for group in replica_groups(tensor)
            if len(joined.intersection(group.begins)) > 1
        ]
        return choose_holders(groups, most_ranks=self._config.sample_ranks, turn=self._turn)

    def _next(self, layout: Layout, begin: int, rules: frozenset[Rule]) -> Sample:
        again = [a.finding.fqn for a in self._book.firing if a.finding.rule in rules]
        return next_sample(layout, begin, most_bytes=self._config.sample_bytes, first=again)


def _covers(rules: frozenset[Rule], fqns: set[str]) -> Callable[[Finding], bool]:
    """Whether a look at these tensors would find a finding again."""
    return lambda finding: finding.rule in rules and (not finding.fqn or finding.fqn in fqns)
