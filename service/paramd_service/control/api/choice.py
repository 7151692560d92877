"""What a filter chooses of a layout, and which of it the ranks that are there can give. Pure.

Norms of gradients into the metric history, as far as somebody follows them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paramd.clock import now_s
from paramd.errors import DeniedError, NotFoundError, UsageError
from paramd.filters import Facts, Filter
from paramd.layout.select import NameIndex, SelectedTensor, select
from paramd.layout.types import TensorLayout, full_box
from paramd.v1 import common_pb2
from paramd_service.control.access.roles import SMALL_NUMEL
from paramd_service.control.alerts.book import series_name
from paramd_service.control.mesh.registry import MeshView
from paramd_service.control.store.history import Sample, SeriesKey

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
                    incarnation=document["incarnation"],
                    name=series_name("grad_norm", row["fqn"]),
                ),
                time_s=now_s,
                step=document["step"],
                value=row["norm"] if row["norm"] is not None else math.nan,
            )
            for row in (*rows, {**document["total"], "fqn": "total"})
        )


@dataclass(frozen=True, slots=True)
class Missing:
    """A tensor that cannot be had now."""

    name: str
    ranks: tuple[int, ...]
    """Ranks that alone hold a part of it and cannot give it."""
    reason: str


def choose(index: NameIndex, wanted: Filter, *, with_buffers: bool) -> list[SelectedTensor]:
    """What the globs and the terms about facts choose, in the order of the layout.

    Raises:
        NotFoundError: a glob matches no name, or no tensor meets the terms.
        UsageError: a slice does not fit.
    """
    found = list(select(index, wanted.patterns, with_buffers=with_buffers))
    if not wanted.facts:
        return found
    chosen = [item for item in found if wanted.matches(facts_of(item.tensor))]
    if not chosen:
        terms = " ".join(map(str, wanted.facts))
        raise NotFoundError(
            f"none of {len(found):,} tensors meets {terms}; leave out a term to see more"
        )
    return chosen


def choose_one(index: NameIndex, name: str) -> SelectedTensor:
    """The one tensor of a name or a pattern, with its slice.

    Raises:
        NotFoundError: no tensor matches. UsageError: several do.
    """
    found = select(index, name, with_buffers=True)
    if len(found) != 1:
        raise UsageError(f"name: {len(found):,} tensors match {name[:100]!r}; name exactly one")
    return found[0]


def facts_of(tensor: TensorLayout) -> Facts:
    """What filters compare."""
    return Facts(
        tensor=tensor,
        kind=tensor.kind.value,
        names=(tensor.fqn, *tensor.aliases),
        ranks=frozenset(piece.rank for piece in tensor.pieces if piece.region.numel),
    )


def pattern_of(item: SelectedTensor) -> str:
    """A pattern that chooses exactly this part of this tensor."""
    if item.box == full_box(item.tensor.shape):
        return item.name
    bounds = zip(item.box.begin, item.box.end, strict=True)
    return f"{item.name}[{', '.join(f'{begin}:{end}' for begin, end in bounds)}]"


def split(
    chosen: Sequence[SelectedTensor], view: MeshView
) -> tuple[list[SelectedTensor], list[Missing]]:
    """Which tensors the ranks can give now, and which not, with the reason.

    A tensor is missing when some region of it is held only by ranks whose sidecar is not
    there, or whose trainer ended inside an update.
    """
    absent = _absent(view)
    if not absent:
        return list(chosen), []
    present: list[SelectedTensor] = []
    missing: list[Missing] = []
    for item in chosen:
        lost = sorted(_lost(item, absent))
        if lost:
            reason = "; ".join(f"rank {rank}: {absent[rank]}" for rank in lost[:4])
            missing.append(Missing(item.name, tuple(lost), reason))
        else:
            present.append(item)
    return present, missing


_SMALL = f"fewer than {SMALL_NUMEL} elements: their statistics tell values, which needs a reader"


def without_small(
    chosen: Sequence[SelectedTensor], *, may_read: bool
) -> tuple[list[SelectedTensor], list[Missing]]:
    """What the caller may have statistics of, and what only readers may.

    Left out before anything is summed up: a total tells what was added to it.

    Raises:
        DeniedError: nothing is left of what was chosen.
    """
    if may_read:
        return list(chosen), []
    seen = [item for item in chosen if item.box.numel >= SMALL_NUMEL]
    small = [Missing(item.name, (), _SMALL) for item in chosen if item.box.numel < SMALL_NUMEL]
    if small and not seen:
        check_large(small[0].name, 0)
    return seen, small


def check_large(name: str, numel: int) -> None:
    """Raises DeniedError when statistics of so few elements tell their values."""
    if numel < SMALL_NUMEL:
        raise DeniedError(f"{name}: {_SMALL}'s token")


def _absent(view: MeshView) -> dict[int, str]:
    """Why ranks can give nothing."""
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
