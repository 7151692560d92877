"""DeepSpeed's engine with ZeRO 1, 2 or 3: `attach(engine, job=...)` after `deepspeed.initialize`.

A parameter's name serves the partition that the optimizer updates (float32 under mixed precision),
not the copy with which the module computes. An edit changes the partitions, and the copies are made
from them at once, as after a step: both have it before the next forward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack, cast

from paramd.errors import UsageError
from paramd.integrations.training import AttachOptions, attach_partitioned, override, refuse
from paramd.integrations.versions import require
from paramd.layout.types import Interval
from paramd.trainer.attaching.attachment import Attachment
from paramd.trainer.model.local_shard import dtype_name
from paramd.trainer.model.partitions import Kept, Part, Partitions

if TYPE_CHECKING:
    import torch
    from torch import nn

SUPPORTED = (
    "ZeRO stages 1, 2 and 3 are, with parameters and optimizer state on the device that computes"
)


def attach(engine: Any, *, job: str, **options: Unpack[AttachOptions]) -> Attachment:
    """Serve the parameters that a DeepSpeed engine trains; as `paramd.attach`, on every rank.

    A step of the engine is a step of the job, also one that it skips because of an overflow.
    Call `attachment.detach()` before the engine is destroyed. Gradients are not served: DeepSpeed
    frees them partition by partition.

    Args:
        engine: from `deepspeed.initialize`.
        job: name of the job.
        options: further arguments of `paramd.attach`: control, arena, settings.

    Raises:
        UsageError: not an engine, or one with an unsupported feature; the message names it.
        ConflictError, DeniedError, ExhaustedError: as `paramd.attach`.
    """
    require("deepspeed", at_least="0.19.8", below="0.20", extra="deepspeed")
    partitions = _partitions(engine)
    optimizer = engine.optimizer
    attachment = attach_partitioned(
        engine.module,
        [optimizer.optimizer],
        partitions,
        package="DeepSpeed",
        options={"job": job, "step": engine.global_steps, **options},
    )
    step = optimizer.step

    def counted_step(*args: Any, **kwargs: Any) -> Any:
        # The optimizer within steps once for each group; this is the whole.
        with attachment.update():
            return step(*args, **kwargs)

    override(attachment, optimizer, "step", counted_step)
    return attachment


def _partitions(engine: Any) -> Partitions:
    """The engine's partitions; UsageError if it is no supported engine."""
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.pipe.engine import PipelineEngine
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    if not isinstance(engine, DeepSpeedEngine):
        raise UsageError(
            f"engine must be a DeepSpeedEngine, not {type(engine).__qualname__}; attach what "
            "deepspeed.initialize returns first, after it has wrapped the model"
        )
    optimizer: Any = engine.optimizer
    unsupported = {
        "pipeline parallelism of DeepSpeed": isinstance(engine, PipelineEngine),
        "offload of the optimizer": engine.zero_offload_optimizer() is not None
        and engine.zero_cpu_offload(),
        "offload of the parameters": bool(getattr(optimizer, "offload_param", False)),
        "ZeRO++ (zero_hpz_partition_size)": engine.zero_hpz_partition_size() > 1,
        "experts (MoE)": bool(getattr(engine, "has_moe_layers", False)),
    }
    refuse(unsupported, SUPPORTED)
    if type(optimizer) is DeepSpeedZeroOptimizer:
        return _Groups(optimizer, engine.zero_optimization_stage())
    if type(optimizer) is DeepSpeedZeroOptimizer_Stage3:
        return _SubGroups(optimizer)
    raise UsageError(
        f"{type(optimizer).__qualname__} (ZeRO stage {engine.zero_optimization_stage()}) is not "
        f"supported; {SUPPORTED}"
    )


class _Groups:
    """Stages 1 and 2: a partition of each parameter group."""

    def __init__(self, optimizer: Any, stage: int) -> None:
        self._optimizer = optimizer
        self.dtype = dtype_name(optimizer.single_partition_of_fp32_groups[0].dtype)
        self._placement = f"ZeRO-{stage} over {optimizer.real_dp_process_group[0].size()}"

    def tensors(self) -> list[torch.Tensor]:
        return list(self._optimizer.single_partition_of_fp32_groups)

    def kept(self, param: nn.Parameter) -> Kept | None:
        if not hasattr(param, "_hp_mapping"):
            return None
        mapping: Any = param._hp_mapping
        parts: tuple[Part, ...] = ()
        if mapping is not None:
            hp, lp = mapping.hp_fragment_address, mapping.lp_fragment_address
            region = Interval(lp.start, lp.start + hp.numel)
            parts = (Part(mapping.param_group_index, hp.start, region),)
        return Kept(shape=tuple(param.shape), placement=self._placement, parts=parts)

    def unlisted(self, optimizer: torch.optim.Optimizer) -> list[tuple[int, torch.Tensor]]:
        return []

    def refresh(self) -> None:
        self._optimizer.update_lp_params()


class _SubGroups:
    """Stage 3: a partition of each parameter, some of which share a flat tensor."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.dtype = dtype_name(optimizer.fp32_partitioned_groups_flat[0].dtype)
        self._placement = f"ZeRO-3 over {optimizer.dp_process_group.size()}"

    def tensors(self) -> list[torch.Tensor]:
        return list(self._optimizer.fp32_partitioned_groups_flat)

    def kept(self, param: nn.Parameter) -> Kept | None:
        if not hasattr(param, "ds_id"):
            return None
        optimizer, partitioned = self._optimizer, cast(Any, param)
        group, offset, padded = optimizer.grad_position[optimizer.get_param_id(param)]
        begin = partitioned.ds_process_group.rank() * padded
        numel = min(padded, partitioned.ds_numel - begin)
        parts = (Part(group, offset, Interval(begin, begin + numel)),) if numel > 0 else ()
        return Kept(shape=tuple(partitioned.ds_shape), placement=self._placement, parts=parts)

    def unlisted(self, optimizer: torch.optim.Optimizer) -> list[tuple[int, torch.Tensor]]:
        if optimizer is not self._optimizer.optimizer:
            return []
        # A group lists one of them while it is stepped, and no other.
        groups = self._optimizer.sub_group_to_group_id
        return [(groups[index], flat) for index, flat in enumerate(self.tensors())]

    def refresh(self) -> None:
        optimizer = self._optimizer
        for index in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
        gathered = optimizer.persistent_parameters
        if gathered:
            gathered[0].partition(gathered)
            gathered[0].all_gather(gathered)
