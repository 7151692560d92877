"""Pins for exports, and export plans as messages; optimizer state by parameter.

With the optimizer, the table of each rank's optimizer is pinned with its parameters, at one state
that the sidecars mirror, or at one agreed boundary where the trainers do. The tables tell which
state exists; it is then pinned from the mirrors, at the same step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from paramd.errors import AbortedError, ConflictError, DataLossError, DeadlineError, UsageError
from paramd.layout.exports.formats import FORMATS
from paramd.layout.exports.optimizer import OptimizerTable, optimizer_table
from paramd.layout.exports.plan import ExportPlan, plan_export
from paramd.layout.exports.settings import ExportSettings, NameMap, NameRule
from paramd.layout.types import Layout
from paramd.memory.moments_table import parse_table
from paramd.mesh.peers.sidecars import Captured, PinKind, Pinned, RankPin, Sidecars, Spans
from paramd.mesh.reading.pin import Pinner
from paramd.v1 import export_pb2
from paramd.v1 import sidecar_pb2 as pb
from paramd.wire import LEASE_S

FIRST_PATIENCE_S = 2.0
"""How long to wait for a boundary before the optimizer's state is read without one."""

_AGAIN_S = 0.1


def encode_plan(
    plan: ExportPlan,
    *,
    incarnation: int,
    layout_digest: str,
    step: int,
    edits: int,
    pins: Iterable[export_pb2.ExportPin],
    unsettled: bool = False,
) -> export_pb2.ExportPlan:
    """The message for a plan whose sources are pinned."""
    settings = plan.settings
    return export_pb2.ExportPlan(
        incarnation=incarnation,
        layout_digest=layout_digest,
        step=step,
        edits=edits,
        format=export_pb2.ExportFormat.ValueType(FORMATS[settings.format].number),
        max_shard_bytes=settings.max_shard_bytes,
        dtype=settings.dtype if settings.dtype is not None else "",
        parameters=settings.parameters,
        buffers=settings.buffers,
        optimizer=plan.optimizer.to_json() if plan.optimizer is not None else b"",
        keep_tied=settings.keep_tied,
        names=[
            export_pb2.ExportNameRule(source=rule.source, target=rule.target)
            for rule in settings.names.rules
        ],
        digest=plan.digest,
        pins=pins,
        unsettled=unsettled,
    )


def decode_settings(message: export_pb2.ExportPlan) -> ExportSettings:
    """The settings in a message.

    Raises:
        UsageError: an unknown format.
    """
    formats = {one.number: name for name, one in FORMATS.items()}
    if message.format not in formats:
        raise UsageError(f"format: {message.format} is not an export format")
    rules = tuple(NameRule(rule.source, rule.target) for rule in message.names)
    return ExportSettings(
        format=formats[message.format],
        max_shard_bytes=message.max_shard_bytes,
        dtype=message.dtype or None,
        parameters=message.parameters,
        buffers=message.buffers,
        keep_tied=message.keep_tied,
        names=NameMap(rules),
    )


def decode_plan(message: export_pb2.ExportPlan, layout: Layout) -> ExportPlan:
    """Rebuild the plan of a message from the layout.

    Raises:
        UsageError: as `decode_settings`.
        ConflictError: the digests differ: the sender's version plans differently.
    """
    table = OptimizerTable.from_json(message.optimizer) if message.optimizer else None
    plan = plan_export(layout, decode_settings(message), table)
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
    incarnation: int
    step: int
    edits: int
    pins: tuple[export_pb2.ExportPin, ...]
    unsettled: bool = False
    """Training has not continued since update `step`."""


class _Beside:
    """A PinTransport that also pins optimizer tables: rank -1 - r means the table of rank r."""

    def __init__(self, sidecars: Sidecars, *, with_buffers: bool) -> None:
        self._sidecars = sidecars
        self._with_buffers = with_buffers

    async def pin(
        self, rank: int, spans: Sequence[tuple[int, int]], how: PinKind, timeout_s: float
    ) -> RankPin:
        if rank >= 0:
            kind = replace(how, with_buffers=how.at_boundary and self._with_buffers)
            return await self._sidecars.pin(rank, spans, kind, timeout_s)
        request = pb.PinSnapshotRequest(source=pb.SOURCE_MOMENTS, at_boundary=how.at_boundary)
        return await pin_moments(self._sidecars, -1 - rank, request, timeout_s, number=rank)

    async def schedule(self, pins: Sequence[RankPin], timeout_s: float) -> Captured:
        return await self._sidecars.schedule([_real(pin) for pin in pins], timeout_s)

    async def renew(self, pin: RankPin) -> float:
        return await self._sidecars.renew(_real(pin))

    def release(self, pin: RankPin) -> None:
        self._sidecars.release(_real(pin))


async def pin_with_optimizer(
    sidecars: Sidecars, plan: ExportPlan, *, deadline_s: float
) -> PinnedExport:
    """Pin what `plan` reads and the optimizer's state; return the plan extended by it.

    Args:
        sidecars: of the mesh that the plan was made for.
        plan: made without the optimizer.
        deadline_s: on the monotonic clock.

    Raises:
        ConflictError: a rank could not provide its optimizer's state, or ranks disagree.
        ParamdError: as `Pinner.pin`.
    """
    held = await pin_tables(
        sidecars,
        plan.layout,
        plan.sources[""].spans,
        deadline_s=deadline_s,
        with_buffers=plan.at_boundary,
    )
    try:
        whole = await asyncio.to_thread(plan_export, plan.layout, plan.settings, held.table)
        assert whole.sources[""].spans == plan.sources[""].spans
        wanted = {key: source.spans for key, source in whole.sources.items() if key}
        states = await held.pin_states(wanted, deadline_s)
    except BaseException:
        held.release()
        raise
    finally:
        # Read by now; only parameters and state stay pinned for the export.
        held.release_tables()
    named = [_named(pin, "") for pin in held.pinned.pins.values()]
    named += [_named(pin, key) for key, pins in states.items() for pin in pins.values()]
    pinned = held.pinned
    return PinnedExport(
        whole,
        pinned.incarnation,
        pinned.step,
        pinned.edits,
        tuple(named),
        unsettled=pinned.unsettled,
    )


async def pin_tables(
    sidecars: Sidecars,
    layout: Layout,
    spans: Spans,
    *,
    deadline_s: float,
    with_buffers: bool,
) -> HeldState:
    """Pin spans of the ranks' parameters, and the tables of their optimizers, at one state.

    Args:
        layout: what the table is to be about; other tensors are not.
        with_buffers: the spans can only be copied at a boundary.

    Raises:
        ConflictError: a rank could not provide its optimizer's state, or ranks disagree.
        ParamdError: as `Pinner.pin`.
    """
    transport = _Beside(sidecars, with_buffers=with_buffers)
    live = await _are_live(sidecars, spans, deadline_s)
    both = {**spans, **{-1 - rank: () for rank in spans}}
    pinner = Pinner(transport)
    if live and not with_buffers:
        pinned = await _soon_or_now(pinner, both, deadline_s)
    else:
        pinned = await pinner.pin(both, deadline_s=deadline_s, with_buffers=True)
    params = {rank: pin for rank, pin in pinned.pins.items() if rank >= 0}
    held = HeldState(
        sidecars,
        replace(pinned, pins=params),
        [pin for rank, pin in pinned.pins.items() if rank < 0],
        OptimizerTable({}, {}, ()),
    )
    try:
        found = await _tables(sidecars, pinned, deadline_s)
        table = await asyncio.to_thread(optimizer_table, layout, found)
    except BaseException:
        held.release()
        held.release_tables()
        raise
    return replace(held, table=table)


async def _soon_or_now(pinner: Pinner, spans: Spans, deadline_s: float) -> Pinned:
    """Pin at a boundary if one comes soon, else what there is: training hangs, or has ended."""
    patience_s = FIRST_PATIENCE_S
    while True:
        soon_s = min(deadline_s, time.monotonic() + patience_s)
        try:
            return await pinner.pin(spans, deadline_s=soon_s, with_buffers=True)
        except (DeadlineError, ConflictError) as error:
            missed = error
        if time.monotonic() > deadline_s:
            raise missed
        # The boundary's own mirrors may not be released yet, which a rank calls a conflict.
        until_s = min(deadline_s, time.monotonic() + FIRST_PATIENCE_S)
        while True:
            try:
                found, _ = await pinner.try_now(spans, deadline_s - time.monotonic())
                if found is not None:
                    return found
                break
            except (ConflictError, AbortedError, DeadlineError) as error:
                if time.monotonic() > until_s:
                    if time.monotonic() > deadline_s or isinstance(missed, ConflictError):
                        raise error from missed
                    break
            await asyncio.sleep(_AGAIN_S)
        patience_s = 2 * patience_s


async def _are_live(sidecars: Sidecars, ranks: Iterable[int], deadline_s: float) -> bool:
    """Whether all sidecars have the optimizer's state in their own memory."""
    left_s = max(deadline_s - time.monotonic(), 0.0)
    states = await asyncio.gather(*(sidecars.state(rank, left_s) for rank in ranks))
    return all(one.state.optimizer_live for one in states)


@dataclass(frozen=True, slots=True)
class HeldState:
    """Parameters pinned at one state, and mirrors of the optimizer's from which to pin."""

    sidecars: Sidecars
    pinned: Pinned
    """The parameters."""
    tables: Sequence[RankPin]
    table: OptimizerTable

    async def pin_states(
        self,
        wanted: Mapping[str, Spans],
        deadline_s: float,
    ) -> dict[str, dict[int, RankPin]]:
        """Pin spans of the state of each key on each rank, or none; the caller releases them.

        Bytes are laid out as those of parameters with the same spans, and can be had once.
        """
        step = self.pinned.step

        async def one(rank: int, key: str, spans: Sequence[tuple[int, int]]) -> RankPin:
            request = pb.PinSnapshotRequest(
                source=pb.SOURCE_MOMENTS,
                state_key=key,
                at_step=step,
                spans=[pb.Span(begin=begin, end=end) for begin, end in spans],
            )
            left_s = deadline_s - time.monotonic()
            return await pin_moments(self.sidecars, rank, request, left_s, number=rank)

        asked = [(key, rank, spans) for key, of in wanted.items() for rank, spans in of.items()]
        found = await asyncio.gather(
            *(one(rank, key, spans) for key, rank, spans in asked), return_exceptions=True
        )
        failed = next((error for error in found if isinstance(error, BaseException)), None)
        pins: dict[str, dict[int, RankPin]] = {key: {} for key in wanted}
        for (key, rank, _), pin in zip(asked, found, strict=True):
            if isinstance(pin, RankPin):
                pins[key][rank] = pin
        if failed is not None:
            for pin in (pin for of in pins.values() for pin in of.values()):
                self.sidecars.release(pin)
            raise failed
        return pins

    def release(self) -> None:
        """Release the parameters."""
        for pin in self.pinned.pins.values():
            self.sidecars.release(pin)

    def release_tables(self) -> None:
        """Release the mirrors; what is pinned from them stays."""
        for pin in self.tables:
            self.sidecars.release(_real(pin))


async def pin_parameters(pinner: Pinner, plan: ExportPlan, *, deadline_s: float) -> PinnedExport:
    """Pin what a plan without the optimizer reads. Raises as `Pinner.pin`."""
    spans = plan.sources[""].spans
    pinned = await pinner.pin(
        spans if spans else {0: ()}, deadline_s=deadline_s, with_buffers=plan.at_boundary
    )
    pins = tuple(_named(pin, "") for pin in pinned.pins.values())
    return PinnedExport(
        plan, pinned.incarnation, pinned.step, pinned.edits, pins, unsettled=pinned.unsettled
    )


async def pin_moments(
    sidecars: Sidecars,
    rank: int,
    request: pb.PinSnapshotRequest,
    timeout_s: float,
    *,
    number: int,
) -> RankPin:
    """Pin a rank's optimizer state or table; the pin's `rank` is `number`."""
    request.incarnation = sidecars.document.incarnation
    request.layout_digest = sidecars.document.layout_digest
    request.lease_ms = int(1000 * LEASE_S)
    found = await sidecars.pin_step(rank, request, timeout_s)
    return RankPin.of(number, found)


async def _tables(
    sidecars: Sidecars, pinned: Pinned, deadline_s: float
) -> dict[int, dict[str, Any]]:
    async def one(pin: RankPin) -> dict[str, Any]:
        data = bytearray()
        source = sidecars.source(_real(pin))
        chunks: Any = source.chunks(0, deadline_s - time.monotonic())
        async with aclosing(chunks):
            async for chunk in chunks:
                if chunk.size_bytes:
                    chunk.check()
                    data += chunk.data
        if len(data) != pin.size_bytes:
            raise DataLossError(f"{source.who}: got {len(data)} of {pin.size_bytes} bytes")
        return parse_table(bytes(data))

    pins = [pin for rank, pin in pinned.pins.items() if rank < 0]
    found = await asyncio.gather(*(one(pin) for pin in pins))
    return {-1 - pin.rank: table for pin, table in zip(pins, found, strict=True)}


def _real(pin: RankPin) -> RankPin:
    return pin if pin.rank >= 0 else replace(pin, rank=-1 - pin.rank)


def _named(pin: RankPin, state_key: str) -> export_pb2.ExportPin:
    return export_pb2.ExportPin(rank=pin.rank, state_key=state_key, snapshot_id=pin.snapshot_id)
