"""Megatron-Core's DistributedDataParallel and its optimizers: `attach(model, optimizer, job=...)`.

A parameter's name serves the values that the optimizer updates: with the distributed optimizer the
ranges of Megatron-Core's buffers that the ranks own, in float32, joined. An edit changes
these, and the model's copies are made from them at once, as after a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, Any, Unpack

from paramd.errors import UsageError
from paramd.integrations.training import AttachOptions, attach_partitioned, override, refuse
from paramd.integrations.versions import require
from paramd.layout.types import Box, Interval, Region, boxes_of_interval, full_box
from paramd.trainer.attaching.attachment import Attachment
from paramd.trainer.model.partitions import Kept, Part

if TYPE_CHECKING:
    import torch
    from torch import nn

SUPPORTED = (
    "one chunk in Megatron-Core's DistributedDataParallel is, with data, context and tensor "
    "parallelism, under its distributed optimizer or the plain ones"
)


def attach(model: Any, optimizer: Any, *, job: str, **options: Unpack[AttachOptions]) -> Attachment:
    """Serve the parameters that Megatron-Core trains; as `paramd.attach`, on every rank.

    A call of the optimizer's `step` is a step of the job, also one that it skips because of an
    overflow. The parameters stay in Megatron-Core's buffers and are mirrored.

    Args:
        model: its DistributedDataParallel, or a list of one, as Megatron's training has it.
        optimizer: from `get_megatron_optimizer`.
        job: name of the job.
        options: further arguments of `paramd.attach`: step, control, log, settings.

    Raises:
        UsageError: other objects, or an unsupported feature; the message names it.
        ConflictError, DeniedError, ExhaustedError: as `paramd.attach`.
    """
    require("megatron-core", at_least="0.15", below="0.17", extra="megatron")
    module = _module(model)
    partitions = _Partitions(module, _inner(optimizer))
    if options.get("arena") not in (None, "mirror"):
        raise UsageError(
            f"arena={options['arena']!r} is not supported with Megatron-Core, whose parameters are "
            "views of its buffers and cannot be moved; leave arena out"
        )
    attachment = attach_partitioned(
        module,
        partitions.optimizers,
        partitions,
        package="Megatron-Core",
        options={"job": job, **options, "arena": "mirror"},
    )
    update, step = optimizer.step_with_ready_grads, optimizer.step

    def counted_update(*args: Any, **kwargs: Any) -> Any:
        # Not all of `step`: here the gradients are those of the update, unscaled and clipped.
        with attachment.update():
            return update(*args, **kwargs)

    def counted_step(*args: Any, **kwargs: Any) -> Any:
        before = attachment.step
        result = step(*args, **kwargs)
        if attachment.step == before:
            with attachment.update():
                pass
        return result

    override(attachment, optimizer, "step_with_ready_grads", counted_update)
    override(attachment, optimizer, "step", counted_step)
    return attachment


def _module(model: Any) -> Any:
    """The DistributedDataParallel; UsageError if there is none."""
    from megatron.core.distributed import DistributedDataParallel

    chunks = model if isinstance(model, list | tuple) else [model]
    if len(chunks) != 1:
        raise UsageError(f"{len(chunks)} chunks (virtual pipelines) are not supported; {SUPPORTED}")
    (module,) = chunks
    if type(module) is not DistributedDataParallel:
        raise UsageError(
            f"model must be Megatron-Core's DistributedDataParallel, not {_kind(module)}; "
            f"{SUPPORTED}"
        )
    config, buffers = module.config, module.buffers
    unsupported = {
        "pipeline parallelism": _size(module.pp_group) > 1,
        "experts (MoE)": bool(getattr(config, "num_moe_experts", None))
        or bool(module.expert_parallel_buffers),
        "several instances of the distributed optimizer": (
            module.ddp_config.num_distributed_optimizer_instances > 1
        ),
        "parameters in fp8 or fp4": not all(b.param_dtype.is_floating_point for b in buffers),
    }
    refuse(unsupported, SUPPORTED)
    return module


def _inner(optimizer: Any) -> list[Any]:
    """The optimizers that it consists of; UsageError if it is not Megatron-Core's."""
    from megatron.core.optimizer import ChainedOptimizer, DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

    inner = optimizer.chained_optimizers if type(optimizer) is ChainedOptimizer else [optimizer]
    known = (DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer)
    for one in inner:
        if type(one) not in known:
            raise UsageError(
                f"optimizer must be what get_megatron_optimizer returns, not {_kind(one)}; "
                f"{SUPPORTED}"
            )
        unsupported = {
            "the precision-aware optimizer": one.config.use_precision_aware_optimizer,
            "offload of the optimizer": one.config.optimizer_cpu_offload,
        }
        refuse(unsupported, SUPPORTED)
    return [one for one in inner if not one.is_stub_optimizer]


def _kind(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _size(group: Any) -> int:
    return sum(one.size() for one in group) if isinstance(group, list) else int(group.size())


class _Partitions:
    """The parameters of one DistributedDataParallel, as its optimizers have them."""

    def __init__(self, module: Any, inner: list[Any]) -> None:
        self.dtype = "float32"
        self._module = module
        self._inner = inner
        self.optimizers: list[torch.optim.Optimizer] = [one.optimizer for one in inner]
        self._tp = module.tp_group
        self._names = {id(param): name for name, param in module.named_parameters()}
        held = {
            id(param): (index, begin, begin + tensor.numel())
            for index, (param, tensor, begin) in enumerate(self._held())
        }
        params = [param for buffer in module.buffers for param in buffer.params]
        if held.keys() - {id(param) for param in params}:
            raise UsageError(
                "this optimizer updates parameters of another model; pass the one that "
                "get_megatron_optimizer made for this model"
            )
        self._kept_by_id = {id(p): self._described(p, *held.get(id(p), (0, 0, 0))) for p in params}

    def tensors(self) -> list[torch.Tensor]:
        return [tensor for _, tensor, _ in self._held()]

    def kept(self, param: nn.Parameter) -> Kept | None:
        return self._kept_by_id.get(id(param))

    def unlisted(self, optimizer: torch.optim.Optimizer) -> list[tuple[int, torch.Tensor]]:
        return []

    def refresh(self) -> None:
        distributed = self._module.ddp_config.use_distributed_optimizer
        groups = self._module.bucket_groups if distributed else ()
        for group in groups:
            if group.param_gather_handle is not None:
                # Waits for the gather under way, which would write older values over the copies.
                group.start_param_sync(force_sync=True)
        for one in self._inner:
            if hasattr(one, "_copy_main_params_to_model_params"):
                one._copy_main_params_to_model_params()
        if distributed:
            self._module.start_param_sync(force_sync=True)

    def _held(self) -> Iterator[tuple[nn.Parameter, torch.Tensor, int]]:
        """Each parameter, the part that the optimizer updates on this rank, and its begin."""
        for one in self._inner:
            if hasattr(one, "model_param_gbuf_map"):
                models = one.model_float16_groups + one.model_fp32_groups
                shards = one.shard_fp32_from_float16_groups + one.shard_fp32_groups
                for param, tensor in _pairs(models, shards):
                    yield param, tensor, one._get_model_param_range_map(param)["param"].start
            elif hasattr(one, "float16_groups"):
                models = one.float16_groups + one.fp32_from_fp32_groups
                mains = one.fp32_from_float16_groups + one.fp32_from_fp32_groups
                for param, tensor in _pairs(models, mains):
                    yield param, tensor, 0
            else:
                for param in one.get_parameters():
                    yield param, param, 0

    def _split(self, param: Any) -> int | None:
        """The dim that tensor parallelism splits; None for a parameter that every rank has."""
        if self._tp.size() == 1 or not getattr(param, "tensor_model_parallel", False):
            return None
        if param.partition_stride != 1:
            raise UsageError(
                f"parameter {self._names[id(param)]!r} is split with stride "
                f"{param.partition_stride}: not supported; {SUPPORTED}"
            )
        return int(param.partition_dim)

    def _described(self, param: Any, index: int, begin: int, end: int) -> Kept:
        """The parameter, whose flattened slice `[begin, end)` is in partition `index`."""
        size, split, said = self._tp.size(), self._split(param), []
        if self._module.ddp_config.use_distributed_optimizer:
            said.append(f"distributed optimizer over {self._module.intra_dp_cp_group.size()}")
        if split is not None:
            said.append(f"Shard({split}) over {size}")
        parts, offset = [], 0
        for region in regions(begin, end, tuple(param.shape), split, self._tp.rank()):
            parts.append(Part(index, offset, region))
            offset += region.numel
        return Kept(
            shape=tuple(n * size if dim == split else n for dim, n in enumerate(param.shape)),
            placement=", ".join(said) or "replicated",
            parts=tuple(parts),
        )


def _pairs(ones: list[list[Any]], others: list[list[Any]]) -> Iterator[tuple[Any, Any]]:
    for group, beside in zip(ones, others, strict=True):
        yield from zip(group, beside, strict=True)


def regions(
    begin: int, end: int, shape: tuple[int, ...], split: int | None, rank: int
) -> list[Region]:
    """Elements `[begin, end)` of `rank`'s flattened slice of this shape, as regions of the whole,
    in order.

    `split` is the dim along which the slices of all ranks lie; None if there is only one.
    """
    if begin >= end:
        return []
    if (begin, end) != (0, prod(shape)) and not split:
        first = rank * prod(shape) if split == 0 else 0
        return [Interval(first + begin, first + end)]
    whole = (begin, end) == (0, prod(shape))
    boxes = [full_box(shape)] if whole else boxes_of_interval(Interval(begin, end), shape)
    by = [rank * size if dim == split else 0 for dim, size in enumerate(shape)]
    return [Box(_moved(box.begin, by), _moved(box.end, by)) for box in boxes]


def _moved(corner: tuple[int, ...], by: list[int]) -> tuple[int, ...]:
    return tuple(at + more for at, more in zip(corner, by, strict=True))
