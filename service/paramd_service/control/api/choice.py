"""Which tensors a filter selects, which of them are available, and to whom.

Pure, but for `NormHistory`, which samples gradient norms from streams into the history.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

from paramd.clock import now_s
from paramd.errors import DeniedError, NotFoundError, UnreachableError, UsageError
from paramd.filters import Facts, Filter
from paramd.layout.select import NameIndex, SelectedTensor, select
from paramd.layout.types import TensorLayout
from paramd.v1 import common_pb2
from paramd_service.control.access.roles import SMALL_NUMEL
from paramd_service.control.api.models import MissingDocument
from paramd_service.control.mesh.registry import MeshView
from paramd_service.control.store.history import Sample, SeriesKey, series_name

PERIOD_S = 1.0
"""Least time between two samples of one job; several readers deliver the same frames."""

MAX_SERIES = 200
"""Gradients sampled from one frame, besides the total."""

MAX_STATS = 1000
MAX_ORDERED = 100_000
"""Tensors that statistics choose or order, without being sent."""

Picked: TypeAlias = tuple[list[SelectedTensor], list[MissingDocument]]
Offer = Callable[[Iterable[Sample]], None]


class NormHistory:
    """Samples gradient norms from followed streams. Event loop only."""

    def __init__(self, offer: Offer, *, clock: Callable[[], float] = now_s) -> None:
        self._offer = offer
        self._clock = clock
        self._noted_s: dict[tuple[str, str], float] = {}

    def take(self, document: Mapping[str, Any], *, whole: bool) -> None:
        """Record the norms of a frame, at most once per `PERIOD_S`; its total if it is `whole`."""
        now_s = self._clock()
        names = [row["name"] for row in document["params"]]
        # Streams of other parameters are sampled separately.
        key = (document["job"], names[0] if names else "")
        if now_s - self._noted_s.get(key, -math.inf) < PERIOD_S:
            return
        self._noted_s = {k: at_s for k, at_s in self._noted_s.items() if now_s - at_s < 60.0}
        self._noted_s[key] = now_s
        rows = [row for row in document["params"] if row["none"] is None][:MAX_SERIES]
        if whole:
            rows.append({**document["total"], "name": "total"})
        self._offer(
            Sample(
                series=SeriesKey(
                    job=document["job"],
                    incarnation=document["incarnation"],
                    name=series_name("grad_norm", row["name"]),
                ),
                time_s=now_s,
                step=document["step"],
                value=row["norm"] if row["norm"] is not None else math.nan,
            )
            for row in rows
        )


def choose(index: NameIndex, wanted: Filter, *, with_buffers: bool) -> list[SelectedTensor]:
    """Tensors selected by globs and by terms about facts, in layout order.

    Raises:
        NotFoundError: If a glob matches no name, or no tensor meets the terms.
        UsageError: If a slice is out of bounds.
    """
    found = list(select(index, wanted.patterns, with_buffers=with_buffers))
    if not wanted.facts:
        return found
    chosen = [item for item in found if wanted.matches(facts_of(item.tensor))]
    return chosen or _none_meets(wanted, len(found))


def choose_whole(index: NameIndex, wanted: Filter) -> tuple[TensorLayout, ...]:
    """As `choose`, buffers included, but without slices: a list of 50,000 tensors costs 1 ms
    instead of 100, and no memory instead of 15 MiB while it is made."""
    found = select(index, wanted.patterns, with_buffers=True).tensors
    if not wanted.facts:
        return found
    chosen = tuple(tensor for tensor in found if wanted.matches(facts_of(tensor)))
    return chosen or _none_meets(wanted, len(found))


def _none_meets(wanted: Filter, count: int) -> NoReturn:
    terms = " ".join(map(str, wanted.facts))
    raise NotFoundError(f"none of {count:,} tensors meets {terms}; drop a term to match more")


def choose_one(index: NameIndex, name: str) -> SelectedTensor:
    """The only tensor that a name or pattern matches, with its slice.

    Raises:
        NotFoundError: If no tensor matches.
        UsageError: If several do.
    """
    found = select(index, name, with_buffers=True)
    if len(found) != 1:
        raise UsageError(f"name: {len(found):,} tensors match {name[:100]!r}; name exactly one")
    return found[0]


def facts_of(tensor: TensorLayout) -> Facts:
    """The facts of a tensor that filters compare."""
    return Facts(
        tensor=tensor,
        kind=tensor.kind.value,
        names=(tensor.fqn, *tensor.aliases),
        ranks=frozenset(piece.rank for piece in tensor.pieces if piece.region.numel),
    )


def split(
    chosen: Sequence[SelectedTensor], view: MeshView
) -> tuple[list[SelectedTensor], list[MissingDocument]]:
    """Split tensors into available and missing ones: some region is held only by ranks without a
    sidecar or with a torn trainer."""
    absent = absent_ranks(view)
    if not absent:
        return list(chosen), []
    present: list[SelectedTensor] = []
    missing: list[MissingDocument] = []
    for item in chosen:
        lost = sorted(_lost(item, absent))
        if lost:
            reason = "; ".join(f"rank {rank}: {absent[rank]}" for rank in lost[:4])
            missing.append(MissingDocument(name=item.name, ranks=lost, reason=reason))
        else:
            present.append(item)
    return present, missing


_SMALL = f"fewer than {SMALL_NUMEL} elements: their statistics reveal values, which needs a reader"


def without_small(
    chosen: Sequence[SelectedTensor], *, may_read: bool
) -> tuple[list[SelectedTensor], list[MissingDocument]]:
    """Split off small tensors, whose statistics only readers may see: before anything is summed, as
    a total would reveal what it includes.

    Raises:
        DeniedError: All selected tensors are small.
    """
    if may_read:
        return list(chosen), []
    seen = [item for item in chosen if item.box.numel >= SMALL_NUMEL]
    small = [
        MissingDocument(name=item.name, ranks=[], reason=_SMALL)
        for item in chosen
        if item.box.numel < SMALL_NUMEL
    ]
    if small and not seen:
        check_large(small[0].name, 0)
    return seen, small


def check_large(name: str, numel: int) -> None:
    """Raise DeniedError when there are so few elements that statistics reveal their values."""
    if numel < SMALL_NUMEL:
        raise DeniedError(f"{name}: {_SMALL}'s token")


def check_few(chosen: Sequence[object], most: int = MAX_STATS) -> None:
    """Raise UsageError if these are more than one answer may take."""
    if len(chosen) > most:
        raise UsageError(
            f"filter: {len(chosen):,} tensors match; statistics of at most {most:,} at once, "
            "narrow it with globs or terms about facts"
        )


def available(view: MeshView, chosen: list[SelectedTensor], *, few: bool = True) -> Picked:
    """Split tensors into those available from the sidecars now and missing ones.

    Raises:
        UsageError: Too many tensors.
        UnreachableError: None is available.
    """
    check_few(chosen, MAX_STATS if few else MAX_ORDERED)
    present, missing = split(chosen, view)
    if not present:
        raise UnreachableError(
            f"none of {len(missing)} tensors is available now; {missing[0].name}: "
            f"{missing[0].reason}; try again in a few seconds"
        )
    return present, missing


def picked(
    view: MeshView,
    index: NameIndex,
    wanted: Filter,
    *,
    reads: bool,
    buffers: bool = False,
    few: bool = False,
) -> Picked:
    """What a filter selects and may be read now, and what is missing. Raises as `available`."""
    chosen, small = without_small(choose(index, wanted, with_buffers=buffers), may_read=reads)
    present, missing = available(view, chosen, few=few)
    return present, [*missing, *small]


def absent_ranks(view: MeshView) -> dict[int, str]:
    """Unavailable ranks, with the reason."""
    found = {rank.rank: rank.reason for rank in view.absent}
    for report in view.joined:
        if report.state.phase == common_pb2.PHASE_TORN:
            found[report.rank] = "its trainer ended inside an update; its parameters are refused"
    return found


def _lost(item: SelectedTensor, absent: Iterable[int]) -> set[int]:
    gone = frozenset(absent)
    holders: dict[object, set[int]] = {}
    for piece in item.tensor.pieces:
        if piece.region.numel:
            holders.setdefault(piece.region, set()).add(piece.rank)
    return {rank for ranks in holders.values() if ranks <= gone for rank in ranks}
