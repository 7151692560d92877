"""Names, facts and statistics of tensors."""

# `timeout=` as in other clients; it bounds the whole call with its retries, not one await.
# ruff: noqa: ASYNC109

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from paramd.errors import NotFoundError
from paramd.filters import Filter, filter_of
from paramd.layout.select import Pattern, SelectedTensor, each_pattern, select
from paramd.mesh.loop import UNSET, Timeout
from paramd.mesh.parts.host import MeshPart
from paramd.mesh.peers.sidecars import Sidecars
from paramd.mesh.reading.pin import while_pinned
from paramd.mesh.reading.reductions import compute_stats
from paramd.mesh.results import ParamInfo, Params, StatsTable


class StatisticsPart(MeshPart):
    """What tensors there are, and their numbers, without their values."""

    async def names(self, *patterns: Pattern, buffers: bool = False) -> list[str]:
        """Names of the parameters that match any pattern; all without patterns. As `params`."""
        return [row.name for row in await self.params(*patterns, buffers=buffers)]

    async def params(
        self,
        *patterns: Pattern,
        buffers: bool = False,
        trainable: bool | None = None,
        timeout: Timeout = UNSET,
    ) -> Params:
        """The parameters that match any pattern; all without patterns.

            mesh.params("layers.*", "numel>1M", "norm>10")

        Args:
            patterns: Globs over names, and terms that must all hold, as of `paramd params`.
            buffers: List buffers too.
            trainable: True or False lists only the parameters that did or did not require a
                gradient when the job was attached (`ParamInfo.trainable`), and no buffers.

        Raises:
            NotFoundError: a pattern matches nothing; the message suggests similar names.
        """

        wanted, deadline_s = filter_of(each_pattern(patterns)), self._host.deadline(timeout)
        chosen = await self._chosen(wanted, buffers=buffers, deadline_s=deadline_s)
        rows = [(ParamInfo.of(item.tensor), item.pattern) for item in chosen]
        if trainable is not None:
            rows = [(row, part) for row, part in rows if row.trainable is trainable]
        if not wanted.statistics or not rows:
            return Params(row for row, _ in rows)
        parts = [part for _, part in rows]
        numbers = await self._numbers(parts, buffers=buffers, deadline_s=deadline_s)
        pairs = zip(rows, numbers, strict=True)
        right = (row for (row, _), one in pairs if wanted.matches_numbers(one.summary))
        return Params(right, step=numbers.step, unsettled=numbers.unsettled)

    async def _chosen(
        self, wanted: Filter, *, buffers: bool, deadline_s: float
    ) -> list[SelectedTensor]:
        """What patterns and terms about facts choose, with its slices."""

        async def attempt(sidecars: Sidecars) -> list[SelectedTensor]:
            index = await self._host.reach.index(sidecars)
            found = select(index, wanted.patterns, with_buffers=buffers)
            return [one for one in found if wanted.matches(ParamInfo.of(one.tensor).facts)]

        return await self._host.reach.attempts(attempt, deadline_s)

    async def _numbers(
        self,
        patterns: Sequence[str],
        *,
        buffers: bool,
        deadline_s: float,
        histogram: bool = False,
        unsettled: bool = False,
    ) -> StatsTable:
        return await while_pinned(
            self._host.reach,
            patterns,
            partial(compute_stats, with_exponents=histogram),
            deadline_s,
            buffers=buffers,
            unsettled=unsettled,
        )

    async def stats(
        self,
        *patterns: Pattern,
        buffers: bool = False,
        histogram: bool = False,
        unsettled: bool = False,
        timeout: Timeout = UNSET,
    ) -> StatsTable:
        """Statistics of full tensors, computed by the sidecars; replicas count once.

        Args:
            patterns: Globs and terms, as in `params`; none means all parameters.
            buffers: Match buffers too.
            histogram: Also count binary exponents, at several times the cost of the rest.
            unsettled: As in `summon`.

        Raises: as `summon`.
        """
        wanted, deadline_s = filter_of(each_pattern(patterns)), self._host.deadline(timeout)
        names: Sequence[str] = wanted.patterns
        if wanted.facts:
            chosen = await self._chosen(wanted, buffers=buffers, deadline_s=deadline_s)
            names = [one.pattern for one in chosen]
            if not names:
                raise NotFoundError(f"no tensor satisfies {' '.join(map(str, wanted.facts))}")
        found = await self._numbers(
            names, buffers=buffers, deadline_s=deadline_s, histogram=histogram, unsettled=unsettled
        )
        if not wanted.statistics:
            return found
        right = (row for row in found if wanted.matches_numbers(row.summary))
        return StatsTable(right, **vars(found))
