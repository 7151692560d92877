"""TP+DDP through `pre_dp_module_transform`, against the same module on one process.

python -m tests.multiprocess.workers.tp_ddp [CASE ...]        (2 or 4 ranks)
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import paramd
from tests.gloo import use_one_thread
from tests.rank import Cases, run

case = Cases()
TP = 2


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    shape = (dist.get_world_size() // TP, TP)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    case.run(names, mesh)


class Block(nn.Module):
    """A residual MLP; its norm's gradients are partial sums under sequence parallelism."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 16)
        self.down = nn.Linear(16, width)
        self.recompute = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._compute, x, use_reentrant=False)
        return self._compute(x)

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Nested blocks, a plain head tied to the embedding, one layer that can be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.spare = nn.Linear(8, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        self.fail = False
        self.seen: list[set[str]] = []

    def forward(self, tokens: torch.Tensor, spare: bool = True) -> torch.Tensor:
        self.seen.append({name for name, _ in self.named_parameters()})
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        if self.fail:
            raise ZeroDivisionError
        return self.head(self.spare(x) if spare else x)


def parallelized(mesh: DeviceMesh, net: Net) -> Net:
    tp = mesh["tp"]
    for block in net.blocks:
        plan = {
            "norm": SequenceParallel(use_local_output=False),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(),
        }
        parallelize_module(block, tp, plan)
        block.norm.register_forward_pre_hook(_shard_sequence(tp), prepend=True)
    parallelize_module(net, tp, {"spare": ColwiseParallel(output_layouts=Replicate())})
    tied = nn.Parameter(distribute_tensor(net.embed.weight.data, tp, [Replicate()]))
    net.embed.weight = net.head.weight = tied
    for layer in (net.embed, net.head):
        layer.register_forward_pre_hook(lambda _, args: (_whole(args[0], tp),))
        layer.register_forward_hook(lambda _, __, output: output.to_local())
    return net


def _whole(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False)


def _shard_sequence(mesh: DeviceMesh) -> Callable[..., tuple[torch.Tensor]]:
    def hook(_: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return (_whole(args[0], mesh).redistribute(placements=[Shard(1)]).to_local(),)

    return hook


def tokens(mesh: DeviceMesh, step: int, replica: int | None = None) -> torch.Tensor:
    replica = replica if replica is not None else mesh.get_local_rank("dp")
    generator = torch.Generator().manual_seed(10 * step + replica)
    return torch.randint(12, (3, 4), generator=generator)


def ready(mesh: DeviceMesh, **options: object) -> tuple[Net, DistributedDataParallel]:
    torch.manual_seed(0)
    net = parallelized(mesh, Net())
    assert paramd.pre_dp_module_transform(net) is net
    return net, DistributedDataParallel(net, process_group=mesh.get_group("dp"), **options)


def expected_training(mesh: DeviceMesh, steps: int, spare: bool = True) -> list[dict]:
    """Full parameters after each step of one process that sees the data of all replicas."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    found = []
    for step in range(steps):
        for replica in range(mesh.size(0)):
            loss = net(tokens(mesh, step, replica), spare).square().mean()
            (loss / mesh.size(0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append({name: p.detach().clone() for name, p in net.named_parameters()})
    return found


def whole(net: nn.Module) -> dict[str, torch.Tensor]:
    """Full parameters, put together from what is registered."""
    return {
        name: DTensor.from_local(
            param.detach(),
            param._st_info.mesh,
            param._st_info.placements,
            run_check=False,
            shape=param._st_info.shape,
            stride=param._st_info.stride,
        )
        .full_tensor()
        .clone()
        for name, param in net.named_parameters()
    }


@case
def training_is_that_of_one_process(mesh: DeviceMesh) -> None:
    variants = (
        {},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"broadcast_buffers": False, "bucket_cap_mb": 0.0001},
    )
    expected = expected_training(mesh, 3)
    for options in variants:
        net, ddp = ready(mesh, **options)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            ddp(tokens(mesh, step)).square().mean().backward()
            assert all(type(p.grad) is torch.Tensor for p in net.parameters()), options
            optimizer.step()
            optimizer.zero_grad(set_to_none="gradient_as_bucket_view" not in options)
            now = whole(net)
            assert now.keys() == expected[step].keys()
            for name, value in expected[step].items():
                torch.testing.assert_close(now[name], value, msg=lambda m, n=name: f"{n}: {m}")


@case
def unused_parameters_are_found(mesh: DeviceMesh) -> None:
    expected = expected_training(mesh, 2, spare=False)
    net, ddp = ready(mesh, find_unused_parameters=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        ddp(tokens(mesh, step), False).square().mean().backward()
        assert net.spare.weight.grad is None
        optimizer.step()
        optimizer.zero_grad()
    for name, value in whole(net).items():
        torch.testing.assert_close(value, expected[1][name])


@case
def every_parameter_is_seen_at_any_time(mesh: DeviceMesh) -> None:
    net, ddp = ready(mesh)
    names = {name for name, _ in Net().named_parameters()}
    ids = [id(p) for p in ddp.parameters()]
    for fail in (False, True, False):
        net.fail = fail
        try:
            ddp(tokens(mesh, 0)).sum().backward()
        except ZeroDivisionError:
            assert fail
        assert [id(p) for p in ddp.parameters()] == ids
        assert {name for name, _ in net.named_parameters()} == names
        assert net.state_dict().keys() == Net().state_dict().keys()
        assert net.blocks[0].up.weight is net.blocks[0].up._parameters["weight"]
        assert not any(isinstance(v, DTensor) for m in net.modules() for v in vars(m).values())
    assert all(seen == names for seen in net.seen)
    # DDP itself does not survive a forward that raised with reductions pending.
    assert len(net.seen) == 3


@case
def state_dicts_load(mesh: DeviceMesh) -> None:
    for assign in (False, True):
        net, _ = ready(mesh)
        other, _ = ready(mesh)
        net(tokens(mesh, 0))
        with torch.no_grad():
            for param in other.parameters():
                param.mul_(0.5)
        state = {name: value.clone() for name, value in other.state_dict().items()}
        if assign:
            state["head.weight"] = state["embed.weight"]
        net.load_state_dict(state, assign=assign)
        assert all(hasattr(param, "_st_info") for param in net.parameters())
        assert torch.equal(net(tokens(mesh, 0)), other(tokens(mesh, 0)))
        net(tokens(mesh, 0)).sum().backward()
        assert all(p.grad is not None for p in net.parameters())
        other_whole = whole(other)
        other_whole["head.weight"] = other_whole["embed.weight"]
        for name, value in whole(net).items():
            assert torch.equal(value, other_whole[name]), name


@case
def tied_parameters_stay_one(mesh: DeviceMesh) -> None:
    net, _ = ready(mesh)
    assert net.embed.weight is net.head.weight
    together: list[bool] = []

    def look(head: nn.Module, _: object) -> None:
        together.append(head.weight is net.embed.weight and isinstance(head.weight, DTensor))

    net.head.register_forward_pre_hook(look)
    net(tokens(mesh, 0)).sum().backward()
    assert together == [True]


@case
def ignored_parameters_stay_dtensors(mesh: DeviceMesh) -> None:
    net = parallelized(mesh, Net())
    kept = net.spare.weight
    paramd.pre_dp_module_transform(net, ignored_params={kept})
    assert net.spare.weight is kept
    ddp = DistributedDataParallel(net, process_group=mesh.get_group("dp"))
    assert ddp.parameters_to_ignore == {"spare.weight"}
    ddp(tokens(mesh, 0)).square().mean().backward()
    assert isinstance(kept.grad, DTensor)
    assert type(net.spare.bias.grad) is torch.Tensor


@case
def frozen_parameters_stay_frozen(mesh: DeviceMesh) -> None:
    net = parallelized(mesh, Net())
    net.blocks[0].up.weight.requires_grad_(False)
    paramd.pre_dp_module_transform(net)
    frozen = net.blocks[0].up.weight
    ddp = DistributedDataParallel(net, process_group=mesh.get_group("dp"))
    ddp(tokens(mesh, 0)).sum().backward()
    assert not frozen.requires_grad
    assert frozen.grad is None
    assert net.blocks[0].up.bias.grad is not None


@case
def asynchronous_gradients_arrive_complete(mesh: DeviceMesh) -> None:
    """A gradient that is still under way in backward is complete when DDP gets it."""
    net, ddp = ready(mesh)
    local: list[torch.Tensor] = []

    def promise(grad: DTensor) -> DTensor:
        local.append(grad.to_local().clone())
        under_way = all_reduce(local[0], "sum", mesh.get_group("tp"))
        assert isinstance(under_way, AsyncCollectiveTensor)
        return DTensor(under_way, grad._spec, requires_grad=False)

    net.spare.register_forward_pre_hook(
        lambda spare, _: spare.weight.register_hook(promise) and None
    )
    arrived: list[type] = []
    net.spare.weight.register_hook(lambda grad: arrived.append(type(grad)))
    ddp(tokens(mesh, 0)).square().mean().backward()
    assert arrived == [torch.Tensor]
    dist.all_reduce(local[0])
    torch.testing.assert_close(net.spare.weight.grad, local[0] / mesh.size(0))


@case
def partial_gradients_arrive_summed(mesh: DeviceMesh) -> None:
    """Those of a norm under sequence parallelism are partial sums on each rank."""
    net, _ = ready(mesh)
    net(tokens(mesh, 0)).square().mean().backward()
    expected = Net()
    expected.load_state_dict(whole(net) | {"head.weight": whole(net)["embed.weight"]})
    expected(tokens(mesh, 0)).square().mean().backward()
    for name in ("weight", "bias"):
        ours, theirs = net.blocks[0].norm, expected.blocks[0].norm
        torch.testing.assert_close(getattr(ours, name).grad, getattr(theirs, name).grad)


@case
def partial_gradients_are_summoned_whole_and_edits_stay(mesh: DeviceMesh) -> None:
    """Without DDP, where they stay partial sums."""
    torch.manual_seed(0)
    net, expected = parallelized(mesh, Net()), Net()
    with paramd.summon_full_params(net, writeback=False) as params:
        expected.load_state_dict(params)
    for model in (net, expected):
        model(tokens(mesh, 0, replica=0)).square().mean().backward()
    grad = net.blocks[0].norm.weight.grad
    assert any(placement.is_partial() for placement in grad.placements), grad.placements
    for factor in (1, 2):
        for rank0_only in (False, True):
            with paramd.summon_full_params(net, rank0_only=rank0_only, with_grads=True) as params:
                for name, param in expected.named_parameters() if params else ():
                    torch.testing.assert_close(params[name].grad, factor * param.grad)
                    if factor == 1 and rank0_only:
                        params[name].grad.mul_(2)
    theirs = expected.blocks[0].norm.weight.grad
    torch.testing.assert_close(grad.full_tensor(), 2 * theirs)


@case
def parts_recompute_by_themselves(mesh: DeviceMesh) -> None:
    gradients = []
    for recompute in (False, True):
        net, ddp = ready(mesh)
        for block in net.blocks:
            block.recompute = recompute
        for _ in range(2):
            net.zero_grad()
            ddp(tokens(mesh, 0)).square().mean().backward()
        gradients.append({name: p.grad for name, p in net.named_parameters()})
        assert not any(isinstance(v, DTensor) for m in net.modules() for v in vars(m).values())
    for name, grad in gradients[0].items():
        assert torch.equal(grad, gradients[1][name]), name


@case
def a_part_may_be_transformed_or_called_alone(mesh: DeviceMesh) -> None:
    net = parallelized(mesh, Net())
    paramd.pre_dp_module_transform(net.blocks[0])
    paramd.pre_dp_module_transform(net)
    hooks = sum(len(m._forward_pre_hooks) for m in net.modules())
    paramd.pre_dp_module_transform(net)
    assert sum(len(m._forward_pre_hooks) for m in net.modules()) == hooks
    reference, _ = ready(mesh)
    assert torch.equal(net(tokens(mesh, 0)), reference(tokens(mesh, 0)))
    x = torch.ones(2, 4, 8)
    assert torch.equal(net.blocks[1](x), reference.blocks[1](x))


@case
def a_copy_is_independent(mesh: DeviceMesh) -> None:
    """The model that EMA or evaluation copies runs on its own parameters."""
    net, _ = ready(mesh)
    expected = net(tokens(mesh, 0)).detach()
    other = copy.deepcopy(net)
    with torch.no_grad():
        for param in net.parameters():
            param.zero_()
    assert torch.equal(other(tokens(mesh, 0)).detach(), expected)


if __name__ == "__main__":
    use_one_thread()
    run(main)
