"""What sidecars are asked of one update's gradients, and the statistics that they answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paramd.errors import ConflictError
from paramd.layout.plan import ReadPlan
from paramd.layout.stats import Part, StatsItem
from paramd.mesh.grad_plan import GradPlan
from paramd.mesh.grad_request import GradRequest
from paramd.mesh.held_step import LEASE_S, HeldStep
from paramd.mesh.pin import Pinned
from paramd.mesh.sidecars import Sidecars
from paramd.mesh.summary import compute_parts
from paramd.v1 import sidecar_pb2 as pb

MAX_ITEMS = 20_000
"""More items than that on one rank are reduced from a snapshot, in several calls."""

Items = Mapping[int, Sequence[StatsItem]]
"""What each rank reduces; of no rank, when whole gradients are wanted."""


def pin_requests(
    sidecars: Sidecars, plan: ReadPlan, wanted: GradRequest, items: Items
) -> dict[int, pb.PinSnapshotRequest]:
    """What each rank of a plan is asked for; `at_step` makes it one of some step."""
    found = {read.rank: pin_request(sidecars, wanted, read.spans) for read in plan.ranks}
    if not items or any(len(of_rank) > MAX_ITEMS for of_rank in items.values()):
        return found
    for rank, request in found.items():
        request.reduction.with_exponents = wanted.kind == "histogram"
        request.reduction.items.extend(
            pb.StatsItem(begin_bytes=item.begin_bytes, numel=item.numel, dtype=item.dtype)
            for item in items[rank]
        )
    return found


def pin_request(
    sidecars: Sidecars, wanted: GradRequest, spans: Sequence[tuple[int, int]]
) -> pb.PinSnapshotRequest:
    """What one rank is asked for."""
    return pb.PinSnapshotRequest(
        epoch=sidecars.document.epoch,
        layout_digest=sidecars.document.layout_digest,
        spans=[pb.Span(begin=begin, end=end) for begin, end in spans],
        lease_ms=int(1000 * LEASE_S),
        source=pb.SOURCE_GRADIENTS,
        lossless_every=wanted.every if wanted.lossless else 0,
    )


def at_step(
    requests: Mapping[int, pb.PinSnapshotRequest], step: int
) -> dict[int, pb.PinSnapshotRequest]:
    """The requests, of one step."""
    found = {}
    for rank, template in requests.items():
        request = pb.PinSnapshotRequest()
        request.CopyFrom(template)
        request.at_step = step
        found[rank] = request
    return found


async def read_parts(
    sidecars: Sidecars,
    plan: GradPlan,
    held: HeldStep,
    items: Mapping[int, tuple[StatsItem, ...]],
    deadline_s: float,
    bad: dict[str, list[int]],
    *,
    with_exponents: bool,
) -> list[list[Part]]:
    """Statistics of what each rank holds, by index into what was asked for.

    `bad` gets the ranks whose part is not finite, by name.

    Raises:
        ConflictError: a rank answered other statistics than were asked.
    """
    owner = [index for index, of in enumerate(plan.numbers) for _ in of]
    found: list[list[Part]] = [[] for _ in plan.asked]

    def note(rank: int, item: StatsItem, part: Part) -> None:
        index = owner[item.tensor]
        found[index].append(part)
        if part.nan_count or part.inf_count:
            ranks = bad.setdefault(plan.asked[index].name, [])
            if rank not in ranks:
                ranks.append(rank)

    if held.pins and plan.plan.tensors:
        pinned = Pinned(held.epoch, _step_of(held), held.pins)
        parts = await compute_parts(
            sidecars, pinned, items, deadline_s, with_exponents=with_exponents
        )
        ranks = (rank for rank, asked in items.items() for _ in asked)
        for rank, (item, stats) in zip(ranks, parts, strict=True):
            note(rank, item, stats)
        return found
    for rank, answer in held.answers.items():
        asked = items.get(rank, ())
        if [item.numel for item in asked] != [one.count for one in answer.stats]:
            raise ConflictError(
                f"{sidecars.who(rank)} answered other statistics than were asked; try again"
            )
        for item, message in zip(asked, answer.stats, strict=True):
            note(rank, item, message)
    return found


def _step_of(held: HeldStep) -> int:
    return next(iter(held.pins.values())).step
