"""One rank of a tensor-parallel module: what the hooks for DDP cost a forward."""

from __future__ import annotations

import time
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

from benchmarks.ranks import obey
from paramd.trainer.model.tp_ddp import pre_dp_module_transform
from tests.ending import end


class Layers(nn.Module):
    """Parameters without work: a forward costs what its hooks cost."""

    def __init__(self, count: int) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(count // 2))
        for layer in self.layers:
            for name, param in list(layer.named_parameters()):
                whole = distribute_tensor(param.detach(), mesh, [Shard(0)])
                layer.register_parameter(name, nn.Parameter(whole))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Rank:
    """Both modules, transformed."""

    def __init__(self) -> None:
        self._models: dict[str, nn.Module] = {}

    def build(self, count: int) -> int:
        """Modules of `count` parameters."""
        self._models = {"torch": Layers(count), "paramd": Layers(count)}
        _pre_dp_module_transform(self._models["torch"])
        pre_dp_module_transform(self._models["paramd"])
        return count

    def forward(self, by: str, grad: bool) -> float:
        """Seconds of one forward."""
        model, x = self._models[by], torch.ones(1)
        with torch.set_grad_enabled(grad):
            begin_s = time.perf_counter()
            model(x)
            seconds = time.perf_counter() - begin_s
        if by == "torch":
            _register_again(model)
        return seconds


def _register_again(model: nn.Module) -> None:
    """PyTorch's hooks leave no parameters, so that later forwards would cost nothing."""
    for layer in model.modules():
        for name, value in list(vars(layer).items()):
            if isinstance(value, DTensor):
                delattr(layer, name)
                param = nn.Parameter(value._local_tensor.detach())
                param._st_info = value._spec  # type: ignore[attr-defined]
                layer.register_parameter(name, param)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = Rank()
    obey({"build": rank.build, "forward": rank.forward})
    dist.destroy_process_group()


if __name__ == "__main__":
    end(main)
