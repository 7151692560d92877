"""Two halves of a world of 4 that summon models of their own, each without the other.

As the stages of a pipeline do: different modules, each sharded over its own ranks.
"""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import paramd
from paramd.errors import DeadlineError
from tests.rank import run


def main() -> None:
    warnings.simplefilter("ignore")
    rank = dist.get_rank()
    stage = rank // 2
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))["shard"]
    for wrap in ("fsdp1", "fsdp2"):
        torch.manual_seed(stage)
        net = nn.Sequential(nn.Linear(3 + stage, 5), nn.Linear(5, 2))
        expected = {name: param.detach().clone() for name, param in net.named_parameters()}
        if wrap == "fsdp2":
            model: nn.Module = fully_shard(net, mesh=mesh)
        else:
            model = FullyShardedDataParallel(
                net, process_group=mesh.get_group(), device_id=torch.device("cpu")
            )
        # The second stage summons more often than the first.
        for _ in range(1 + stage):
            with paramd.summon_full_params(model, rank0_only=True) as params, torch.no_grad():
                assert bool(params) is (rank % 2 == 0)
                for name, param in params.items():
                    assert torch.equal(param, expected[name])
                    param.add_(1)
            expected = {name: value + 1 for name, value in expected.items()}
        with paramd.summon_full_params(model, writeback=False) as params:
            for name, param in params.items():
                assert torch.equal(param, expected[name])
        if rank == 2:
            alone = pytest.raises(DeadlineError, match=r"ranks \[3\] of 2 did not arrive")
            with alone, paramd.summon_full_params(model, timeout_s=0.3):
                raise AssertionError("entered alone")
        dist.barrier()
        print(f"ok {wrap}", flush=True)


if __name__ == "__main__":
    run(main)
