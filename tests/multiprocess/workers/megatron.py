"""Megatron-Core's buffers and optimizers, read and edited while they train: as shardings.py.

    megatron bf16 --folder F

The package is the real one; only that it allocates on a CUDA device is seen to (cuda_on_host.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module, MegatronModule
from torch import nn

import paramd
from paramd.errors import ConflictError, UsageError
from paramd.integrations.megatron import attach
from paramd.trainer.model import partitions
from tests import cuda_on_host
from tests.ending import end
from tests.multiprocess.workers import shardings
from tests.multiprocess.workers.shardings import CASES, FACTOR, JOB, Values, forget


@dataclass(frozen=True, kw_only=True)
class Case:
    dtype: torch.dtype = torch.float32
    distributed: bool = True
    overlap: bool = False
    """Gradients are reduced, and parameters gathered, beside the computation."""
    tensor_parallel: int = 1
    context_parallel: int = 1
    pipeline: int = 1
    experts: int | None = None


class Network(MegatronModule):  # type: ignore[misc]
    """A layer that is split by rows, one that is split by columns, and one that is not."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        common = {"config": config, "init_method": config.init_method}
        self.up = ColumnParallelLinear(13, 24, gather_output=False, **common)
        self.down = RowParallelLinear(
            24, 6, bias=True, input_is_parallel=True, skip_bias_add=False, **common
        )
        self.norm = nn.LayerNorm(6, dtype=config.params_dtype)
        self.frozen = nn.Parameter(torch.ones(6, dtype=config.params_dtype), requires_grad=False)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.up(numbers)
        found, _ = self.down(torch.tanh(hidden))
        normed: torch.Tensor = self.norm(found)
        return normed * self.frozen


class Megatron:
    """DistributedDataParallel and the optimizer that get_megatron_optimizer makes for it."""

    edited_within_step = True
    has_gradients = True

    def __init__(self, case: Case) -> None:
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=case.tensor_parallel,
                context_parallel_size=case.context_parallel,
                pipeline_model_parallel_size=case.pipeline,
            )
        self.case = case
        half = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(case.dtype)
        precision = {half: True} if half else {}
        config = TransformerConfig(
            num_layers=2, hidden_size=8, num_attention_heads=2, use_cpu_initialization=True,
            params_dtype=case.dtype, num_moe_experts=case.experts,
            tensor_model_parallel_size=case.tensor_parallel, **precision,
        )  # fmt: skip
        torch.manual_seed(0)
        network: Any = Network(config)
        self.ddp = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                use_distributed_optimizer=case.distributed,
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=case.overlap,
                overlap_param_gather=case.overlap and case.distributed,
                # Else there is one bucket, which no parameter lies across.
                bucket_size=60,
            ),
            Float16Module(config, network) if half else network,
        )
        self.ddp.broadcast_params()
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                lr=1e-2,
                clip_grad=0.5,
                params_dtype=case.dtype,
                use_distributed_optimizer=case.distributed,
                overlap_param_gather=case.overlap and case.distributed,
                # In float16 the first steps overflow, and are skipped.
                initial_loss_scale=2.0**24,
                **precision,
            ),
            [self.ddp],
        )
        (self.inner,) = self.optimizer.chained_optimizers
        self.params = {
            name.replace("module.", ""): param for name, param in self.ddp.named_parameters()
        }
        self.names = list(self.params)
        self.skipped = 0

    def attach(self) -> Any:
        return attach([self.ddp], self.optimizer, job=JOB)

    def step(self, number: int) -> Values:
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        # Ranks that share a batch compute the same.
        seed = 8 * number + parallel_state.get_data_parallel_rank(with_context_parallel=True)
        generator = torch.Generator().manual_seed(seed)
        found = self.ddp(torch.randn(3, 13, generator=generator).to(self.case.dtype)).float()
        self.optimizer.scale_loss(found.square().mean() + found.mean()).backward()
        self.ddp.finish_grad_sync()
        updated, _, _ = self.optimizer.step()
        self.skipped += not updated
        return {
            name: self._whole(name, held.grad)
            for name, held in self._held().items()
            if name != "frozen"
        }

    def values(self) -> Values:
        return {name: self._whole(name, held) for name, held in self._held().items()}

    def averages(self) -> Values:
        state = self.inner.optimizer.state
        return {
            name: self._whole(name, state[held].get("exp_avg") if held in state else None)
            for name, held in self._held().items()
            if name != "frozen"
        }

    def edit(self) -> None:
        with torch.no_grad():
            for held in self._held().values():
                held.mul_(FACTOR)
            if self.case.dtype is not torch.float32 or self.case.distributed:
                self.inner._copy_main_params_to_model_params()
            self._gather()
        forget(self.inner.optimizer)

    def state(self) -> list[torch.Tensor]:
        self._gather()
        assert (self.skipped > 0) == (self.case.dtype is torch.float16)
        moments = [v for s in self.inner.optimizer.state.values() for v in s.values()]
        return [*self.params.values(), *self.values().values(), *moments]

    def _gather(self) -> None:
        if self.case.distributed:
            self.ddp.start_param_sync(force_sync=True)

    def _held(self) -> dict[str, torch.Tensor]:
        """What is updated of each parameter on this rank."""
        found = {}
        shards = dict(self._float32_shards())
        for name, param in self.params.items():
            main = getattr(param, "main_param", param)
            if self.case.distributed and name != "frozen":
                main = main if main is not param else shards.get(param)
            found[name] = main if main is not None else torch.empty(0)
        return found

    def _float32_shards(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        if self.case.distributed:
            both = zip(self.inner.model_fp32_groups, self.inner.shard_fp32_groups, strict=True)
            for params, shards in both:
                yield from zip(params, shards, strict=True)

    def _whole(self, name: str, held: torch.Tensor | None) -> torch.Tensor:
        """One parameter, or its gradient, put together from what each rank has. Collective."""
        param: Any = self.params[name]
        flat = torch.zeros(param.numel())
        begin, end = self._range(param)
        if held is not None and held.numel():
            flat[begin:end] = held.detach().view(-1)
        if self.case.distributed and name != "frozen":
            dist.all_reduce(flat, group=self.ddp.intra_dp_cp_group)
        slice_ = flat.view(param.shape)
        if self.case.tensor_parallel == 1 or not getattr(param, "tensor_model_parallel", False):
            return slice_
        slices = [torch.empty_like(slice_) for _ in range(self.case.tensor_parallel)]
        dist.all_gather(slices, slice_, group=self.ddp.tp_group)
        return torch.cat(slices, param.partition_dim)

    def _range(self, param: nn.Parameter) -> tuple[int, int]:
        """The elements of a parameter that this rank's optimizer updates.

        Of each bucket of a buffer, every rank has an equal part.
        """
        for buffer in self.ddp.buffers if self.case.distributed else ():
            if param not in buffer.param_index_map:
                continue
            first, last, number = buffer.param_index_map[param]
            bucket = buffer.buckets[number]
            each = bucket.grad_data.numel() // self.ddp.intra_dp_cp_group.size()
            begin = bucket.offset + each * self.ddp.intra_dp_cp_group.rank()
            low, high = max(first, begin), min(last, begin + each)
            return max(low - first, 0), max(high - first, 0)
        return 0, param.numel()


def training(name: str, **options: Any) -> None:
    CASES[name] = lambda: Megatron(Case(**options))


training("fp32")
training("fp16", dtype=torch.float16, context_parallel=2)
training("plain-bf16", dtype=torch.bfloat16, distributed=False)
training("tp-bf16", dtype=torch.bfloat16, tensor_parallel=2, overlap=True)
training("tp-plain-fp32", distributed=False, tensor_parallel=2)


@contextmanager
def set_to(owner: Any, name: str, value: Any) -> Iterator[None]:
    """For what cannot be made without a GPU: only its setting is there."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    yield
    setattr(owner, name, before)


def check_edit_within_a_gather(training: Megatron) -> None:
    with torch.no_grad():
        for held in training._held().values():
            held.mul_(FACTOR)
    training.ddp.start_param_sync()
    assert all(group.param_gather_handle is not None for group in training.ddp.bucket_groups)
    partitions.refresh(training.ddp)
    for name, value in training.values().items():
        assert torch.equal(training.params[name], value.to(training.case.dtype)), name


def refused() -> None:
    """What attach refuses, on all ranks; the same training is then attached, twice."""
    training = Megatron(Case(dtype=torch.bfloat16, overlap=True))
    ddp, optimizer, inner = training.ddp, training.optimizer, training.inner
    with pytest.raises(UsageError, match=r"be Megatron-Core's DistributedDataParallel, not .*Fl"):
        attach(ddp.module, optimizer, job=JOB)
    with pytest.raises(UsageError, match=r"2 chunks \(virtual pipelines\) are not supported; one"):
        attach([ddp, ddp], optimizer, job=JOB)
    with pytest.raises(UsageError, match=r"get_megatron_optimizer returns, not torch.*AdamW"):
        attach(ddp, inner.optimizer, job=JOB)
    with pytest.raises(UsageError, match="parameters of another model"):
        attach(ddp, Megatron(training.case).optimizer, job=JOB)
    with pytest.raises(UsageError, match="arena='device' is not supported with Megatron-Core"):
        attach(ddp, optimizer, job=JOB, arena="device")
    with pytest.raises(UsageError, match="resume and replicas are not supported"):
        attach(ddp, optimizer, job=JOB, resume="auto")
    with pytest.raises(UsageError, match=r"Core's Distr.*integrations.megatron.attach\(model, opt"):
        paramd.attach(ddp, inner.optimizer, job=JOB)
    with pytest.raises(ConflictError, match=r"up.weight' is in the buffers of Megatron-Core"):
        paramd.attach(ddp.module, inner.optimizer, job=JOB)
    with pytest.raises(ConflictError, match="read the mesh"), paramd.summon_full_params(ddp):
        pass
    settings = [
        (ddp.ddp_config, "num_distributed_optimizer_instances", 2, "several instances"),
        (inner.config, "use_precision_aware_optimizer", True, "the precision-aware optimizer"),
        (inner.config, "optimizer_cpu_offload", True, "offload of the optimizer"),
        (ddp.buffers[0], "param_dtype", torch.uint8, "parameters in fp8 or fp4"),
    ]
    for owner, name, value, said in settings:
        with set_to(owner, name, value), pytest.raises(UsageError, match=f"^{said}.*: not supp"):
            attach(ddp, optimizer, job=JOB)
    for begun in range(2):
        attachment = training.attach()
        assert attachment.step == begun
        with pytest.raises(ConflictError, match="already attached"):
            attach(ddp, optimizer, job="other")
        check_edit_within_a_gather(training)
        training.step(begun + 1)
        assert attachment.step == begun + 1
        attachment.detach()
        assert not {"step", "step_with_ready_grads"} & set(vars(optimizer))
    for case, said in ((Case(pipeline=2), "pipeline parallelism"), (Case(experts=2), "experts")):
        parallel_state.destroy_model_parallel()
        other = Megatron(case)
        with pytest.raises(UsageError, match=said):
            attach(other.ddp, other.optimizer, job=JOB)
    print("all refused", flush=True)


def main() -> None:
    cuda_on_host.enter()
    shardings.main(refused)


if __name__ == "__main__":
    end(main)
