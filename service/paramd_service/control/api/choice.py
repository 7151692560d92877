"""What a filter chooses of a layout, and which of it the ranks that are there can give. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paramd.errors import DeniedError, NotFoundError, UsageError
from paramd.filters import Facts, Filter
from paramd.layout.regions import full_box
from paramd.layout.select import NameIndex, SelectedTensor, select
from paramd.layout.types import TensorLayout
from paramd.v1 import common_pb2
from paramd_service.control.access.roles import SMALL_NUMEL
from paramd_service.control.mesh.view import MeshView


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
