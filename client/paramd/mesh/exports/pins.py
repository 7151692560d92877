"""Pins for exports, and export plans as messages.

With the optimizer, the table of each rank's optimizer is pinned with its parameters, at one
agreed boundary where the trainers mirror their state. The tables tell which state exists; it is
then pinned from the mirrors, at the same step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from paramd.errors import ConflictError, DataLossError, UsageError
from paramd.layout.exports.formats import FORMATS
from paramd.layout.exports.optimizer import OptimizerTable, optimizer_table
from paramd.layout.exports.plan import ExportPlan, plan_export
from paramd.layout.exports.settings import ExportSettings, NameMap, NameRule
from paramd.layout.types import Layout
from paramd.memory.moments_table import parse_table
from paramd.mesh.peers.sidecars import Captured, PinKind, Pinned, RankPin, Sidecars
from paramd.mesh.reading.pin import Pinner
from paramd.v1 import export_pb2
from paramd.v1 import sidecar_pb2 as pb
from paramd.wire import LEASE_S


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
        writers=settings.writers,
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
        writers=tuple(message.writers),
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
            kind = replace(how, with_buffers=self._with_buffers)
            return await self._sidecars.pin(rank, spans, kind, timeout_s)
        request = pb.PinSnapshotRequest(source=pb.SOURCE_MOMENTS, at_boundary=True)
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
    transport = _Beside(sidecars, with_buffers=plan.at_boundary)
    spans = dict(plan.sources[""].spans)
    tables = {-1 - rank: () for rank in spans}
    pinned = await Pinner(transport).pin(
        {**spans, **tables}, deadline_s=deadline_s, with_buffers=True
    )
    held = {rank: pin for rank, pin in pinned.pins.items() if rank >= 0}
    named = [_named(pin, "") for pin in held.values()]
    try:
        found = await _tables(sidecars, pinned, deadline_s)
        table = await asyncio.to_thread(optimizer_table, plan.layout, found)
        whole = await asyncio.to_thread(plan_export, plan.layout, plan.settings, table)
        assert whole.sources[""].spans == plan.sources[""].spans
        named += await _states(sidecars, whole, pinned.step, held, deadline_s)
    except BaseException:
        for pin in held.values():
            sidecars.release(pin)
        raise
    finally:
        # The tables are read by now; only parameters and state stay pinned for the export.
        for rank, pin in pinned.pins.items():
            if rank < 0:
                transport.release(pin)
    return PinnedExport(whole, pinned.incarnation, pinned.step, pinned.edits, tuple(named))


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


async def _states(
    sidecars: Sidecars,
    plan: ExportPlan,
    step: int,
    held: Mapping[int, RankPin],
    deadline_s: float,
) -> list[export_pb2.ExportPin]:
    """Pin every key on every rank, or none."""

    async def one(key: str, rank: int, spans: Sequence[tuple[int, int]]) -> export_pb2.ExportPin:
        request = pb.PinSnapshotRequest(
            source=pb.SOURCE_MOMENTS,
            state_key=key,
            at_step=step,
            spans=[pb.Span(begin=begin, end=end) for begin, end in spans],
        )
        left_s = deadline_s - time.monotonic()
        return _named(await pin_moments(sidecars, rank, request, left_s, number=rank), key)

    wanted = [
        asyncio.ensure_future(one(key, rank, spans))
        for key, source in plan.sources.items()
        if key
        for rank, spans in source.spans.items()
    ]
    found = await asyncio.gather(*wanted, return_exceptions=True)
    failed = next((error for error in found if isinstance(error, BaseException)), None)
    pins = [pin for pin in found if isinstance(pin, export_pb2.ExportPin)]
    if failed is not None:
        for pin in pins:
            sidecars.release(replace(held[pin.rank], snapshot_id=pin.snapshot_id))
        raise failed
    return pins


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
