"""Plans of exports as messages: what is asked for, from which the files follow."""

from __future__ import annotations

from collections.abc import Iterable

from paramd.errors import ConflictError, UsageError
from paramd.layout.exports.formats import FORMATS
from paramd.layout.exports.optimizer import OptimizerTable
from paramd.layout.exports.plan import ExportPlan, plan_export
from paramd.layout.exports.settings import ExportSettings, NameMap, NameRule
from paramd.layout.types import Layout
from paramd.v1 import export_pb2


def encode_plan(
    plan: ExportPlan,
    *,
    epoch: int,
    layout_digest: str,
    step: int,
    edits: int,
    pins: Iterable[export_pb2.ExportPin],
    unsettled: bool = False,
) -> export_pb2.ExportPlan:
    """The message of a plan whose sources are pinned."""
    settings = plan.settings
    return export_pb2.ExportPlan(
        epoch=epoch,
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
    """What a message asks for.

    Raises:
        UsageError: it asks for something that there is not.
    """
    formats = {one.number: name for name, one in FORMATS.items()}
    if message.format not in formats:
        raise UsageError(f"format: {message.format} is no format of exports")
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
    """The plan that a message stands for.

    Raises:
        UsageError: as `decode_settings`.
        ConflictError: it was made by a program that plans otherwise.
    """
    table = OptimizerTable.from_json(message.optimizer) if message.optimizer else None
    plan = plan_export(layout, decode_settings(message), table)
    if plan.digest != message.digest:
        raise ConflictError(
            "the export was planned by another version of paramd; use one version in all "
            "processes of a job"
        )
    return plan
