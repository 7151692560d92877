"""The training of `model.py` by DeepSpeed and by Megatron-Core, whose optimizers keep partitions.

Both take sums of two equal gradients and halve them, and step with torch.optim.SGD: exact.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from tests import cuda_on_host
from tests.sequences.model import MOMENTUM, RATE


class Package(Protocol):
    """A network with its optimizer, as the package has them."""

    optimizer: Any

    def attach(self, job: str, step: int | None) -> Any:
        """Attaches it, `step` after the first time."""

    def update(self, step: int) -> None:
        """Makes update `step`."""


class DeepSpeed:
    """ZeRO stage 1."""

    def __init__(self, net: nn.Module) -> None:
        import deepspeed

        # Else it compiles its operator for shared memory, which takes a minute.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        trained = [p for p in net.parameters() if p.requires_grad]
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 1, "overlap_comm": False},
        }
        self._engine, self.optimizer, *_ = deepspeed.initialize(
            model=net,
            optimizer=torch.optim.SGD(trained, lr=RATE, momentum=MOMENTUM),
            config=config,
            dist_init_required=False,
        )

    def attach(self, job: str, step: int | None) -> Any:
        from paramd.integrations.deepspeed import attach

        assert step in (None, self._engine.global_steps)
        return attach(self._engine, job=job)

    def update(self, step: int) -> None:
        self._engine.backward(self._engine(step))
        self._engine.step()


class Megatron:
    """Its DistributedDataParallel and distributed optimizer."""

    def __init__(self, net: nn.Module) -> None:
        cuda_on_host.enter()
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer import TransformerConfig

        parallel_state.initialize_model_parallel()
        config = TransformerConfig(
            num_layers=1, hidden_size=8, num_attention_heads=1, use_cpu_initialization=True
        )
        # One bucket holds less than a parameter, so parameters lie across the ranks' parts.
        buffers = DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=60)
        self._ddp = DistributedDataParallel(config, buffers, net)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(lr=RATE, clip_grad=0.0, use_distributed_optimizer=True), [self._ddp]
        )
        # Of torch's optimizers, the distributed one is made with Adam alone; its ranges are the
        # same for another. In one group: hyper-parameters are set of the first.
        (inner,) = self.optimizer.chained_optimizers
        ranges = [p for group in inner.optimizer.param_groups for p in group["params"]]
        inner.optimizer = torch.optim.SGD([torch.zeros(1)], lr=RATE, momentum=MOMENTUM)
        inner.optimizer.param_groups[0]["params"] = ranges

    def attach(self, job: str, step: int | None) -> Any:
        from paramd.integrations.megatron import attach

        return attach(self._ddp, self.optimizer, job=job, step=step)

    def update(self, step: int) -> None:
        self._ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._ddp(step).backward()
        self._ddp.finish_grad_sync()
        self.optimizer.step()


PACKAGES: dict[str, type[Package]] = {"deepspeed": DeepSpeed, "megatron": Megatron}
