"""Optimizer state as tensors, by parameter: `mesh.optimizer`, and `mesh.summon(optimizer=True)`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paramd.errors import UsageError
from paramd.layout.exports.optimizer import OptimizerTable
from paramd.layout.types import Layout
from paramd.mesh.exports.pins import HeldState, pin_states
from paramd.mesh.peers.sidecars import Pinned, Sidecars, Spans
from paramd.mesh.reading.stream import Transport
from paramd.mesh.reading.transfer import Chosen, Transfer
from paramd.mesh.results import OptimizerState

if TYPE_CHECKING:
    import torch

    from paramd.mesh.reading.assemble import Targets


@dataclass(frozen=True, slots=True)
class OptimizerRead:
    """What is read, and how."""

    sidecars: Sidecars
    layout: Layout
    chosen: Chosen
    device: torch.device | str | None
    transport: Transport
    deadline_s: float


async def read_states(
    read: OptimizerRead, transfer: Transfer, targets: Targets | None
) -> tuple[Pinned, OptimizerState]:
    """The chosen parameters' optimizer state; with `targets` these filled too, of the same state.

    Raises:
        UsageError: nothing but buffers was chosen.
        ConflictError: a rank cannot provide its state.
        ParamdError: as `AsyncMesh.summon`.
    """
    began_s = time.monotonic()
    plan = read.chosen.plan
    fqns = {tensor.fqn for tensor in plan.tensors}
    layout = replace(
        read.layout, tensors=tuple(one for one in read.layout.tensors if one.fqn in fqns)
    )
    spans = {one.rank: one.spans for one in plan.ranks}
    if not spans:
        raise UsageError("nothing that matches has elements, and so no optimizer state")

    def wanted(table: OptimizerTable) -> Mapping[str, Spans]:
        plans = {key: _plan_of(read.chosen, table, key).plan for key in table.keys}
        found = {key: {one.rank: one.spans for one in of.ranks} for key, of in plans.items()}
        return {key: ranks for key, ranks in found.items() if ranks}

    held = await pin_states(
        read.sidecars,
        layout,
        # Without targets only the state is wanted.
        spans if targets is not None else dict.fromkeys(spans, ()),
        wanted,
        deadline_s=read.deadline_s,
        with_buffers=read.chosen.at_boundary,
    )
    try:
        return held.pinned, await _read(read, transfer, held, targets, began_s)
    finally:
        held.release()


async def _read(
    read: OptimizerRead,
    transfer: Transfer,
    held: HeldState,
    targets: Targets | None,
    began_s: float,
) -> OptimizerState:
    read_bytes = 0
    if targets is not None:
        await transfer.read(
            read.sidecars, read.chosen.plan, held.pinned, targets, read.transport, read.deadline_s
        )
    found: dict[str, dict[str, torch.Tensor | float]] = {
        name: {scalar.key: scalar.value for scalar in held.table.scalars.get(tensor.fqn, ())}
        for tensor, names in zip(read.chosen.plan.tensors, read.chosen.names, strict=True)
        for name in names
    }
    for key in held.table.keys:
        chosen = _plan_of(read.chosen, held.table, key)
        into = transfer.targets(chosen, dtype=None, device=read.device, into=None)
        pinned = replace(held.pinned, pins=held.states.get(key, {}))
        await transfer.read(
            read.sidecars, chosen.plan, pinned, into, read.transport, read.deadline_s
        )
        read_bytes += chosen.plan.size_bytes
        for name, tensor in into.results().items():
            found[name][key] = tensor
    return OptimizerState(
        found,
        groups=held.table.groups,
        job=read.sidecars.document.job,
        incarnation=held.pinned.incarnation,
        step=held.pinned.step,
        edits=held.pinned.edits,
        seconds=time.monotonic() - began_s,
        bytes=read_bytes,
    )


def _plan_of(chosen: Chosen, table: OptimizerTable, key: str) -> Chosen:
    """The part of a plan that has state of one kind, with the dtypes of that state."""
    dtypes: Mapping[str, str] = table.states[key]
    numbers = [i for i, tensor in enumerate(chosen.plan.tensors) if tensor.fqn in dtypes]
    plan = chosen.plan.only(numbers)
    typed = tuple(replace(one, dtype=dtypes[one.fqn]) for one in plan.tensors)
    return Chosen(
        names=[chosen.names[number] for number in numbers],
        plan=replace(plan, tensors=typed),
        at_boundary=chosen.at_boundary,
    )
