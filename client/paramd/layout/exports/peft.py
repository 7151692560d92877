"""Exports of an adapter as PEFT loads it: `PeftModel.from_pretrained(base, folder)`. Pure.

Names and configuration are PEFT's own, found when the training attached (layout/adapters.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from paramd.layout.exports.files import ExportFile, Format, Reads, TorchFiles
from paramd.layout.exports.optimizer import OptimizerTable
from paramd.layout.exports.safetensors import assign, file_of, model_items
from paramd.layout.types import TensorLayout

if TYPE_CHECKING:
    from paramd.layout.exports.plan import ExportPlan
    from paramd.layout.exports.settings import ExportSettings

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"


def adapter_files(
    tensors: Sequence[TensorLayout],
    names: Mapping[str, str],
    settings: ExportSettings,
    reads: Reads,
    optimizer: OptimizerTable | None,
) -> list[ExportFile]:
    """One file: PEFT reads no shards."""
    items = list(model_items(tensors, names, settings, reads, optimizer))
    loads = dict.fromkeys(range(reads.world_size), 0)
    (rank,) = assign([items], loads, reads.model)
    return [file_of(ADAPTER_FILE, rank, items)]


def _finish(plan: ExportPlan, _: TorchFiles) -> dict[str, bytes]:
    return {ADAPTER_CONFIG: plan.config.encode()}


PEFT = Format(
    name="peft",
    number=3,
    # Not that of its configuration: with another format it may be one of the user's assets.
    endings=(ADAPTER_FILE,),
    plan=adapter_files,
    finish=_finish,
)
