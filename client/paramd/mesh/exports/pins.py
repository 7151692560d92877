"""Pins for exports, and export plans as messages; optimizer state by parameter.

With the optimizer, each rank's parameters, the kinds of its optimizer's state and the state's table
are pinned at one state. A table lists the kinds, so one is pinned first; if the table beside the
state differs, the pins are repeated. `mesh.optimizer` and `mesh.summon(optimizer=True)` read the
same pins.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from paramd.errors import AbortedError, ConflictError, DeadlineError, ParamdError, UsageError
from paramd.layout.exports.extra import ExtraState
from paramd.layout.exports.optimizer import OptimizerTable, optimizer_table, spread
from paramd.layout.exports.plan import ExportPlan, plan_export
from paramd.layout.exports.settings import FORMATS, ExportSettings, NameMap, NameRule
from paramd.layout.plan import plan_read
from paramd.layout.select import SelectedTensor
from paramd.layout.types import Layout, TensorKind
from paramd.memory.left import check_client
from paramd.memory.optimizer_state import parse_table, parse_text, table_text
from paramd.mesh.peers.discovery import SidecarFinder
from paramd.mesh.peers.sidecars import Captured, PinKind, Pinned, RankPin, Sidecars, Spans
from paramd.mesh.reading.pin import Pinner, compared, samples_for
from paramd.mesh.reading.stream import Reading, Transport, read_bytes
from paramd.mesh.reading.transfer import Chosen, Transfer
from paramd.mesh.results import OptimizerState
from paramd.v1 import export_pb2
from paramd.v1 import sidecar_pb2 as pb

if TYPE_CHECKING:
    import torch

    from paramd.mesh.reading.assemble import Targets

FIRST_PATIENCE_S = 2.0
"""How long, in seconds, to wait for a boundary before the optimizer's state is read without one."""

UNSERVED_S = 2.0
"""How long, in seconds, a rank may not serve its parameters before that is the answer, as in reads
of parameters."""

_AGAIN_S = 0.1


def encode_plan(pinned: PinnedExport, layout_digest: str) -> export_pb2.ExportPlan:
    """The message for a plan whose sources are pinned."""
    plan, settings, state = pinned.plan, pinned.plan.settings, pinned.pinned.state
    # Without the optimizer's table the plan is that of the parameters.
    assert plan.optimizer is not None or not plan.needs_optimizer
    optimizer = table_text(plan.optimizer.to_plain()) if plan.optimizer is not None else b""
    extra_state = table_text(plan.extra.table) if plan.extra is not None else b""
    names = [
        export_pb2.ExportNameRule(source=rule.source, target=rule.target)
        for rule in settings.names.rules
    ]
    return export_pb2.ExportPlan(
        incarnation=state.incarnation,
        history=state.history,
        step=state.step,
        edits=state.edits,
        layout_digest=layout_digest,
        format=export_pb2.ExportFormat.ValueType(FORMATS[settings.format].number),
        max_shard_bytes=settings.max_shard_bytes,
        parameters=settings.parameters,
        buffers=settings.buffers,
        keep_tied=settings.keep_tied,
        replica=settings.replica,
        adapter=settings.adapter,
        merge=settings.merge,
        weights_from=settings.weights_from,
        dtype=settings.dtype if settings.dtype is not None else "",
        optimizer=optimizer,
        patterns=settings.patterns,
        names=names,
        digest=plan.digest,
        pins=pinned.pins,
        unsettled=pinned.pinned.unsettled,
        boundary_token=pinned.pinned.boundary_token,
        missing=plan.missing,
        extra_state=extra_state,
        replicas_differ=pinned.replicas_differ or (),
        replicas_compared=pinned.replicas_differ is not None,
    )


def decode_settings(message: export_pb2.ExportPlan) -> ExportSettings:
    """The settings in a message; UsageError for an unknown format."""
    formats = {one.number: name for name, one in FORMATS.items()}
    if message.format not in formats:
        raise UsageError(f"format: {message.format} is not an export format")
    rules = tuple(NameRule(rule.source, rule.target) for rule in message.names)
    return ExportSettings(
        format=formats[message.format],
        dtype=message.dtype or None,
        patterns=tuple(message.patterns),
        names=NameMap(rules),
        max_shard_bytes=message.max_shard_bytes,
        parameters=message.parameters,
        buffers=message.buffers,
        keep_tied=message.keep_tied,
        replica=message.replica,
        adapter=message.adapter,
        merge=message.merge,
        weights_from=message.weights_from,
    )


def decode_plan(message: export_pb2.ExportPlan, layout: Layout) -> ExportPlan:
    """Rebuild the plan of a message from the layout.

    Raises:
        UsageError: As `decode_settings`.
        ConflictError: If the digests differ: the sender's version plans differently.
    """
    table = OptimizerTable.from_plain(parse_text(message.optimizer)) if message.optimizer else None
    extra = ExtraState(parse_text(message.extra_state)) if message.extra_state else None
    plan = plan_export(layout, decode_settings(message), table, extra)
    if plan.digest != message.digest:
        raise ConflictError(
            "the export was planned by another version of paramd; use one version in all "
            "processes of a job"
        )
    return plan


@dataclass(frozen=True, slots=True)
class PinnedExport:
    """A plan and its snapshots, all at one state. The caller releases them."""

    plan: ExportPlan
    pinned: Pinned
    """The parameters."""
    pins: Sequence[export_pb2.ExportPin]
    """All pins."""
    replicas_differ: tuple[str, ...] | None = None
    """As `compared`."""


EXTRA = None
"""In place of a state key: extra state."""


class _Beside:
    """A PinTransport that also pins optimizer state: number -1 - n means the nth of `states`."""

    def __init__(
        self, sidecars: Sidecars, states: Sequence[tuple[int, str | None]], *, with_buffers: bool
    ) -> None:
        """`states`: ranks and state keys; an empty key stands for the table, EXTRA for itself."""
        self._sidecars = sidecars
        self._states = states
        self._with_buffers = with_buffers

    async def pin(
        self, rank: int, spans: Sequence[tuple[int, int]], how: PinKind, timeout_s: float
    ) -> RankPin:
        if rank >= 0:
            kind = replace(how, with_buffers=how.at_boundary and self._with_buffers)
            return await self._sidecars.pin(rank, spans, kind, timeout_s)
        holder, key = self._states[-1 - rank]
        source = pb.SOURCE_EXTRA_STATE if key is EXTRA else pb.SOURCE_MOMENTS
        request = self._sidecars.pin_request(
            spans, source=source, state_key=key or "", at_boundary=how.at_boundary
        )
        return RankPin.of(rank, await self._sidecars.pin_step(holder, request, timeout_s))

    async def schedule(self, pins: Sequence[RankPin], timeout_s: float) -> Captured:
        return await self._sidecars.schedule([self.real(pin) for pin in pins], timeout_s)

    async def renew(self, pin: RankPin) -> float:
        return await self._sidecars.renew(self.real(pin))

    def release(self, pin: RankPin) -> None:
        self._sidecars.release(self.real(pin))

    def real(self, pin: RankPin) -> RankPin:
        return pin if pin.rank >= 0 else replace(pin, rank=self._states[-1 - pin.rank][0])


Wanted = Callable[[OptimizerTable], Mapping[str, Spans]]
"""From a table to the spans of each kind of state to be pinned, by rank."""


async def pin_with_optimizer(
    reach: SidecarFinder, sidecars: Sidecars, plan: ExportPlan, *, deadline_s: float
) -> PinnedExport:
    """Pin what `plan` reads and the optimizer's state; return the plan extended by it.

    `sidecars` and `plan` (made without the optimizer) are of one mesh; `deadline_s` is on the
    monotonic clock. Raises as `pin_states`.
    """

    def wanted(table: OptimizerTable) -> Mapping[str, Spans]:
        whole = plan_export(plan.layout, plan.settings, table, plan.extra)
        assert whole.sources[""].spans == plan.sources[""].spans
        return {key: source.spans for key, source in whole.sources.items() if key}

    held = await pin_states(
        sidecars,
        plan.layout,
        plan.sources[""].spans,
        wanted,
        replica=plan.settings.replica,
        deadline_s=deadline_s,
        with_buffers=plan.at_boundary,
        extra=_extra_ranks(plan),
    )
    try:
        whole = await asyncio.to_thread(
            plan_export, plan.layout, plan.settings, held.table, held.extra
        )
        # Buffers of other ranks have not been copied at that boundary.
        params = [one for one in plan.exported if one.kind is TensorKind.PARAMETER]
        samples = samples_for(reach, sidecars, params)
        differ = await compared(reach, sidecars, held.pinned, samples)
    except BaseException:
        held.release()
        raise
    named = [_named(pin, "") for pin in held.pinned.pins.values()]
    named += [_named(pin, key) for key, pins in held.states.items() for pin in pins.values()]
    return PinnedExport(whole, held.pinned, named, differ)


@dataclass(frozen=True, slots=True)
class HeldState:
    """Parameters and optimizer state, pinned at one state."""

    sidecars: Sidecars
    pinned: Pinned
    """The parameters."""
    states: Mapping[str, Mapping[int, RankPin]]
    """By state key and rank, laid out as parameters with the same spans."""
    table: OptimizerTable
    extra: ExtraState | None = None

    def release(self) -> None:
        for pins in (self.pinned.pins, *self.states.values()):
            for pin in pins.values():
                self.sidecars.release(pin)


async def pin_states(
    sidecars: Sidecars,
    layout: Layout,
    spans: Spans,
    wanted: Wanted,
    *,
    replica: int,
    deadline_s: float,
    with_buffers: bool,
    extra: Sequence[int] = (),
) -> HeldState:
    """Pin spans of the ranks' parameters, and of their optimizers' state, at one state.

    `layout`: the tensors to which the table is restricted. `replica`: whose state is read, where
    it has any. `with_buffers`: the spans can only be copied at a boundary. `extra`: the ranks of
    whose extra state is read, the preferred one first. Raises as `Pinner.pin` does, and
    ConflictError if a rank could not provide its optimizer's state, or ranks disagree.
    """
    states = await _serving(sidecars, list(spans), deadline_s, waits=with_buffers)
    # Whether all sidecars have the optimizer's state in their own memory.
    live = all(one.state.optimizer_live for one in states)
    pin = partial(_pinned, sidecars, layout, replica=replica, deadline_s=deadline_s)
    tables = sorted(spans)
    while True:
        first = await pin({}, {}, tables, live=live, with_buffers=False)
        first.release()
        holders = {p.rank for one in layout.tensors for p in one.pieces if p.region.numel}
        if set(tables) == holders or not spread(layout, first.table):
            break
        # Another rank may have state that this replica lacks.
        tables = sorted(holders)
    expected = await asyncio.to_thread(wanted, first.table)
    while True:
        held = await pin(spans, expected, tables, extra, live=live, with_buffers=with_buffers)
        try:
            found = await asyncio.to_thread(wanted, held.table)
        except BaseException:
            held.release()
            raise
        if found == expected:
            return held
        # State appeared or went in between: the first update was made, say.
        held.release()
        if time.monotonic() > deadline_s:
            raise DeadlineError("the optimizer's state kept changing its kinds; try again")
        expected = found


async def _serving(
    sidecars: Sidecars, ranks: Sequence[int], deadline_s: float, *, waits: bool
) -> list[pb.GetStateResponse]:
    """What the ranks report. Raises ConflictError with the reason if one does not serve its
    parameters, and still does not after `UNSERVED_S`.

    `waits`: the caller needs a boundary in any case, which settles what a script at rest has done.
    """
    began_s = time.monotonic()
    # In time for the reason to be the answer, instead of a call without any time left.
    until_s = began_s + min(UNSERVED_S, 0.8 * (deadline_s - began_s))
    first: dict[int, int] = {}
    while True:
        left_s = max(deadline_s - time.monotonic(), 0.0)
        found = await asyncio.gather(*(sidecars.state(rank, left_s) for rank in ranks))
        # Other weights that stand in have a label, and go by themselves.
        why = {
            rank: one
            for rank, one in zip(ranks, found, strict=True)
            if one.state.unserved_reason and not one.header.label
        }
        if not why:
            return found
        first = {rank: first.get(rank, one.header.step) for rank, one in why.items()}
        if time.monotonic() >= until_s:
            for rank, one in why.items():
                if not waits or one.header.step >= first[rank] + 2:
                    raise ConflictError(
                        f"{sidecars.who(rank)}: the parameters cannot be served: "
                        f"{one.state.unserved_reason}"
                    )
            return found
        await asyncio.sleep(_AGAIN_S)


async def _pinned(
    sidecars: Sidecars,
    layout: Layout,
    spans: Spans,
    wanted: Mapping[str, Spans],
    told: Sequence[int],
    extra: Sequence[int] = (),
    *,
    replica: int,
    deadline_s: float,
    live: bool,
    with_buffers: bool,
) -> HeldState:
    """Pin parameters, the wanted state and the tables of the ranks `told`, and read these."""
    places: list[tuple[int, str | None]] = [(rank, "") for rank in told]
    places += [(rank, EXTRA) for rank in extra]
    places += [(rank, key) for key, of in wanted.items() for rank in of]
    transport = _Beside(sidecars, places, with_buffers=with_buffers)
    asked = dict(spans)
    for number, (rank, key) in enumerate(places):
        asked[-1 - number] = wanted[key][rank] if key else ()
    pinner = Pinner(transport)
    if live and not with_buffers:
        pinned = await _soon_or_now(pinner, asked, deadline_s)
    else:
        pinned = await pinner.pin(asked, deadline_s=deadline_s, with_buffers=True)
    params = {number: pin for number, pin in pinned.pins.items() if number >= 0}
    states: dict[str, dict[int, RankPin]] = {key: {} for key in wanted}
    tables: dict[int, RankPin] = {}
    extras: dict[int, RankPin] = {}
    for number, (rank, key) in enumerate(places):
        pin = transport.real(pinned.pins[-1 - number])
        (states[key] if key else extras if key is EXTRA else tables)[rank] = pin
    held = HeldState(sidecars, replace(pinned, pins=params), states, OptimizerTable({}, {}, ()))
    try:
        found = await _tables(sidecars, replace(pinned, pins=tables), deadline_s)
        table = await asyncio.to_thread(optimizer_table, layout, found, replica)
        beside = await _extra(sidecars, pinned, extras, deadline_s)
    except BaseException:
        held.release()
        raise
    finally:
        for one in (*tables.values(), *extras.values()):
            sidecars.release(one)
    return replace(held, table=table, extra=beside)


def _extra_ranks(plan: ExportPlan) -> Sequence[int]:
    """The ranks that are asked for extra state, the preferred one first."""
    ranks = sorted(plan.sources[""].spans) or [0]
    return sorted(ranks, key=lambda rank: rank != plan.settings.replica) if plan.with_extra else ()


async def _extra(
    sidecars: Sidecars, pinned: Pinned, pins: Mapping[int, RankPin], deadline_s: float
) -> ExtraState | None:
    if not pins:
        return None
    found = await _tables(sidecars, replace(pinned, pins=pins), deadline_s)
    return ExtraState.merged(found[rank] for rank in pins)


async def optimizer_groups(
    sidecars: Sidecars, deadline_s: float
) -> tuple[int, Sequence[Sequence[Mapping[str, Any]]]]:
    """(step, parameter groups of each optimizer of rank 0). Raises as `pin_with_optimizer`."""
    transport = _Beside(sidecars, [(0, "")], with_buffers=False)
    pinned = await _soon_or_now(Pinner(transport), {-1: ()}, deadline_s)
    pin = transport.real(pinned.pins[-1])
    try:
        (found,) = (await _tables(sidecars, replace(pinned, pins={0: pin}), deadline_s)).values()
    finally:
        sidecars.release(pin)
    if failure := found.get("failure"):
        raise ConflictError(f"rank 0 cannot report its hyper-parameters: {failure}")
    return int(found["step"]), found["groups"]


async def _soon_or_now(pinner: Pinner, spans: Spans, deadline_s: float) -> Pinned:
    """Pin at a boundary if one comes soon, else the present state: training hangs, or has ended."""
    patience_s = FIRST_PATIENCE_S
    while True:
        soon_s = min(deadline_s, time.monotonic() + patience_s)
        try:
            return await pinner.pin(spans, deadline_s=soon_s, with_buffers=True)
        except (DeadlineError, ConflictError) as error:
            missed = error
        if time.monotonic() > deadline_s:
            raise missed
        # While training moves, a copy without a boundary may never succeed: then wait for one
        # again.
        until_s = min(deadline_s, time.monotonic() + patience_s)
        while True:
            try:
                found, _ = await pinner.try_now(spans, until_s - time.monotonic())
                if found is not None:
                    return found
                break
            except (ConflictError, AbortedError, DeadlineError) as error:
                if time.monotonic() > until_s:
                    if isinstance(missed, ConflictError):
                        raise missed if not isinstance(error, ConflictError) else error from missed
                    if time.monotonic() > deadline_s:
                        raise _neither(missed, error) from missed
                    break
            await asyncio.sleep(_AGAIN_S)
        patience_s = 2 * patience_s


def _neither(boundary: ParamdError, present: ParamdError) -> ParamdError:
    """The error when there was neither a boundary nor a copy without one, in time."""
    kind = ConflictError if isinstance(present, ConflictError) else DeadlineError
    return kind(f"{present}; and before that at a boundary: {boundary}")


async def pin_parameters(
    reach: SidecarFinder, sidecars: Sidecars, plan: ExportPlan, *, deadline_s: float
) -> PinnedExport:
    """Pin what a plan without the optimizer reads. Raises as `Pinner.pin`."""
    spans = plan.sources[""].spans
    samples = samples_for(reach, sidecars, plan.exported)
    ranks = _extra_ranks(plan)
    transport = _Beside(sidecars, [(rank, EXTRA) for rank in ranks], with_buffers=plan.at_boundary)
    asked = dict(spans) if spans else {0: ()}
    asked |= {-1 - number: () for number in range(len(ranks))}
    pinned = await Pinner(transport, backoff=reach.backoff, samples=samples).pin(
        asked, deadline_s=deadline_s, with_buffers=plan.at_boundary
    )
    model = {number: pin for number, pin in pinned.pins.items() if number >= 0}
    extras = {rank: transport.real(pinned.pins[-1 - n]) for n, rank in enumerate(ranks)}
    pinned = replace(pinned, pins=model)
    try:
        extra = await _extra(sidecars, pinned, extras, deadline_s)
        if extra is not None:
            plan = await asyncio.to_thread(
                plan_export, plan.layout, plan.settings, plan.optimizer, extra
            )
        differ = await compared(reach, sidecars, pinned, samples)
    except BaseException:
        for pin in (*model.values(), *pinned.beside.values()):
            sidecars.release(pin)
        raise
    finally:
        for pin in extras.values():
            sidecars.release(pin)
    named = [_named(pin, "") for pin in model.values()]
    return PinnedExport(plan, pinned, named, differ)


async def _tables(
    sidecars: Sidecars, pinned: Pinned, deadline_s: float
) -> dict[int, dict[str, Any]]:
    # Of the state of all pins: one that a boundary has filled was pinned before there was any.
    reading = Reading(sidecars, pinned, deadline_s, "grpc")

    async def one(pin: RankPin) -> dict[str, Any]:
        return parse_table(bytes(await read_bytes(reading, pin.rank, 0, pin.size_bytes)))

    found = await asyncio.gather(*map(one, pinned.pins.values()))
    return dict(zip(pinned.pins, found, strict=True))


def _named(pin: RankPin, state_key: str) -> export_pb2.ExportPin:
    return export_pb2.ExportPin(rank=pin.rank, state_key=state_key, snapshot_id=pin.snapshot_id)


@dataclass(frozen=True, slots=True)
class OptimizerRead:
    """The content and the terms of a read."""

    reach: SidecarFinder
    sidecars: Sidecars
    chosen: Chosen
    device: torch.device | str | None
    transport: Transport
    deadline_s: float


async def read_states(
    read: OptimizerRead, transfer: Transfer, targets: Targets | None
) -> tuple[Pinned, OptimizerState]:
    """The chosen parameters' optimizer state; with `targets` these filled too, of the same state.

    Raises:
        UsageError: If only buffers were chosen.
        ConflictError: If a rank cannot provide its state, else as `AsyncMesh.summon`.
    """
    began_s = time.monotonic()
    plan = read.chosen.plan
    fqns = {tensor.fqn for tensor in plan.tensors}
    whole = (await read.reach.index(read.sidecars)).layout
    layout = replace(whole, tensors=tuple(one for one in whole.tensors if one.fqn in fqns))
    spans = {one.rank: one.spans for one in plan.ranks}
    if not spans:
        raise UsageError("all tensors that match are empty, so they have no optimizer state")

    def wanted(table: OptimizerTable) -> Mapping[str, Spans]:
        plans = {key: _plan_of(read.chosen, whole, table, key).plan for key in table.keys}
        # Before it is pinned; its size is known only now.
        check_client(sum(tensor.size_bytes for plan in plans.values() for tensor in plan.tensors))
        found = {key: {one.rank: one.spans for one in of.ranks} for key, of in plans.items()}
        return {key: ranks for key, ranks in found.items() if ranks}

    held = await pin_states(
        read.sidecars,
        layout,
        # Without targets only the state is wanted.
        spans if targets is not None else dict.fromkeys(spans, ()),
        wanted,
        replica=plan.replica,
        deadline_s=read.deadline_s,
        with_buffers=read.chosen.at_boundary,
    )
    try:
        return held.pinned, await _read(read, whole, transfer, held, targets, began_s)
    finally:
        held.release()


async def _read(
    read: OptimizerRead,
    layout: Layout,
    transfer: Transfer,
    held: HeldState,
    targets: Targets | None,
    began_s: float,
) -> OptimizerState:
    read_bytes = 0
    reading = Reading(read.sidecars, held.pinned, read.deadline_s, read.transport)
    if targets is not None:
        await transfer.read(reading, read.chosen.plan, targets)
    found: dict[str, dict[str, torch.Tensor | float]] = {
        name: {scalar.key: scalar.value for scalar in held.table.scalars.get(tensor.fqn, ())}
        for tensor, names in zip(read.chosen.plan.tensors, read.chosen.names, strict=True)
        for name in names
    }
    for key in held.table.keys:
        chosen = _plan_of(read.chosen, layout, held.table, key)
        into = transfer.targets(chosen, dtype=None, device=read.device, into=None)
        pinned = replace(held.pinned, pins=held.states.get(key, {}))
        await transfer.read(replace(reading, pinned=pinned), chosen.plan, into)
        read_bytes += chosen.plan.size_bytes
        for name, tensor in into.results().items():
            found[name][key] = tensor
    return OptimizerState(
        found,
        groups=held.table.groups,
        job=read.sidecars.document.job,
        incarnation=held.pinned.state.incarnation,
        step=held.pinned.state.step,
        edits=held.pinned.state.edits,
        seconds=time.monotonic() - began_s,
        bytes=read_bytes,
    )


def _plan_of(chosen: Chosen, layout: Layout, table: OptimizerTable, key: str) -> Chosen:
    """The part of a plan that has state of one kind, with the dtypes of that state."""
    dtypes: Mapping[str, str] = table.states[key]
    numbers = [i for i, tensor in enumerate(chosen.plan.tensors) if tensor.fqn in dtypes]
    plan = chosen.plan.only(numbers)
    if table.replicas:
        known = {one.fqn: one for one in layout.tensors}
        items = [SelectedTensor(known[one.fqn], one.name, one.box, ()) for one in plan.tensors]
        plan = plan_read(layout, items, replica=plan.replica, others=table.replicas)
    typed = tuple(replace(one, dtype=dtypes[one.fqn]) for one in plan.tensors)
    return Chosen(
        names=[chosen.names[number] for number in numbers],
        plan=replace(plan, tensors=typed),
        at_boundary=chosen.at_boundary,
    )
