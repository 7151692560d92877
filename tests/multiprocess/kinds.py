"""Builds a small model of every kind that paramd serves, for all multi-process tests.

    for kind in kinds_for(world_size):
        built = kind.build()                       # collective, same on all ranks
        loss = built.loss(step)                    # then backward and optimizer.step
        full = full_parameters(built.model)        # collective: name -> full tensor

Sizes are primes on purpose: nothing divides evenly, and on four ranks some hold nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import cross_entropy

from paramd.trainer.model.tp_ddp import pre_dp_module_transform

WORDS = 29
WIDTH = 7
BATCH = 4
LENGTH = 5


class Block(nn.Module):
    """A residual MLP; `narrow` has fewer rows than four ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 13)
        self.down = nn.Linear(13, WIDTH)
        self.narrow = nn.Linear(WIDTH, 3)
        self.wide = nn.Linear(3, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        return x + self.wide(torch.relu(self.narrow(x)))


class Net(nn.Module):
    """Tied embedding and head, a frozen layer, buffers, an attribute named "module"."""

    def __init__(self, *, buffers: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.module = nn.Linear(WIDTH, WIDTH)
        self.module.requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        # Batch norm does not run in mixed precision on the CPU.
        self.norm = nn.BatchNorm1d(WIDTH) if buffers else nn.LayerNorm(WIDTH)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + self.module(x)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x.flatten(0, 1))
        return self.head(x.to(self.head.weight.dtype))


class Odd(nn.Module):
    """What only unsharded models may have: several dtypes, 0-dim, transposed, views of one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.small = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16) * 0.1)
        self.precise = nn.Parameter(torch.randn(WIDTH, 5, dtype=torch.float64).t() * 0.1)
        self.conv = nn.Conv2d(1, 3, (2, 3), padding=1).to(memory_format=torch.channels_last)
        both = torch.randn(3, WIDTH)
        self.first, self.second = nn.Parameter(both[:, :3]), nn.Parameter(both[:, 3:])
        self.empty = nn.Parameter(torch.empty(0, WIDTH))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("flags", torch.ones(3, 5).bool().t())
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        # Replaces the buffer object, as many users' modules do.
        self.steps = self.steps + 1
        x = self.embed(tokens) * self.scale
        x = x + (x.bfloat16() @ self.small).float()
        x = x + (x.double() @ self.precise.t() @ self.precise).float()
        x = x + self.conv(x[:, None]).mean((1, 2, 3))[:, None, None]
        x = x + torch.cat([self.first, self.second], 1).mean(0) + self.empty.sum(0)
        return self.head(x).flatten(0, 1)


@dataclass(frozen=True, kw_only=True)
class Built:
    """A model ready to train; `data_rank` says whose data this rank reads."""

    model: nn.Module
    data_rank: int

    def loss(self, step: int) -> torch.Tensor:
        """Loss of one batch, the same for the same step and data rank."""
        generator = torch.Generator().manual_seed(1000 * step + self.data_rank)
        tokens = torch.randint(WORDS, (BATCH, LENGTH), generator=generator)
        targets = torch.randint(WORDS, (BATCH * LENGTH,), generator=generator)
        return cross_entropy(self.model(tokens).float(), targets)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One way to distribute a model."""

    name: str
    make: Callable[[], Built]
    world_sizes: tuple[int, ...] = (1, 2, 3, 4)

    def build(self, seed: int = 0) -> Built:
        """Collective; the initial values depend on the seed alone."""
        torch.manual_seed(seed)
        return self.make()


def kinds_for(world_size: int) -> list[Kind]:
    """All kinds that `world_size` ranks can build."""
    return [kind for kind in KINDS if world_size in kind.world_sizes]


def named(name: str) -> Kind:
    """The kind of that name."""
    return next(kind for kind in KINDS if kind.name == name)


def full_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Collective: every parameter whole, by the names of a user's state dict, as torch says.

    Clones; tied parameters come under each of their names.
    """
    with _localized_restored(model) as fallback:
        if fallback is not None:
            return fallback
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=True)
        state = get_model_state_dict(model, options=options)
    others = {*_buffer_names(model), *(k for k in state if k.endswith("_extra_state"))}
    return {k: v.detach().clone() for k, v in state.items() if k not in others}


def _buffer_names(model: nn.Module) -> Iterator[str]:
    steps = ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module.")
    for long_name, _ in model.named_buffers():
        name = long_name
        for step in steps:
            name = name.replace(step, "")
        yield name
        yield name.removeprefix("module.")


@contextmanager
def _localized_restored(model: nn.Module) -> Iterator[dict[str, torch.Tensor] | None]:
    """torch's TP+DDP hides parameters from the state dict; they are gathered by hand."""
    hooks = [h for m in model.modules() for h in m._forward_pre_hooks.values()]
    hidden = any(getattr(hook, "__name__", "") == "_reconstruct_dtensor" for hook in hooks)
    if not hidden and not any(hasattr(param, "_st_info") for param in model.parameters()):
        yield None
        return
    from torch.distributed.tensor import DTensor

    found: dict[str, torch.Tensor] = {}
    inner: nn.Module = model.module  # type: ignore[assignment]
    for prefix, module in inner.named_modules():
        for name, value in [*module._parameters.items(), *vars(module).items()]:
            key = f"{prefix}.{name}" if prefix else name
            info = getattr(value, "_st_info", None)
            whole = value
            if info is not None:
                whole = DTensor.from_local(
                    value.detach(),
                    info.mesh,
                    info.placements,
                    run_check=False,
                    shape=info.shape,
                    stride=info.stride,
                )
            if isinstance(whole, DTensor):
                found[key] = whole.detach().full_tensor().clone()
            elif isinstance(whole, nn.Parameter):
                found[key] = whole.detach().clone()
    yield found


def _world() -> int:
    return dist.get_world_size()


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (_world(),), mesh_dim_names=("dp",))


def _mesh2(names: tuple[str, str]) -> DeviceMesh:
    inner = 2 if _world() % 2 == 0 else 1
    return init_device_mesh("cpu", (_world() // inner, inner), mesh_dim_names=names)


def _plain() -> Built:
    return Built(model=Odd(), data_rank=0)


def _ddp(model: nn.Module) -> Built:
    return Built(model=nn.parallel.DistributedDataParallel(model), data_rank=dist.get_rank())


def _compiled() -> Built:
    return _ddp(torch.compile(Net(), backend="eager"))  # type: ignore[arg-type]


def _checkpointed() -> Built:
    net = Net()
    _wrap_blocks(net, _activation_checkpoint)
    return _ddp(net)


def _activation_checkpoint(block: nn.Module) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return checkpoint_wrapper(block)


def _wrap_blocks(net: Net, wrap: Callable[[nn.Module], nn.Module]) -> None:
    for index, block in enumerate(net.blocks):
        net.blocks[index] = wrap(block)


def _fsdp1(
    strategy: str, *, orig: bool, nested: bool = True, buffers: bool = True, **options: Any
) -> Built:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    def wrap(module: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(
            module,
            sharding_strategy=ShardingStrategy[strategy],
            device_id=torch.device("cpu"),
            use_orig_params=orig,
            **options,
        )

    net = Net(buffers=buffers)
    if not orig:
        net.module = nn.Identity()  # a flat parameter must be frozen as a whole or not at all
    if nested:
        _wrap_blocks(net, lambda block: wrap(_activation_checkpoint(block)))
    return Built(model=wrap(net), data_rank=dist.get_rank())


def _fsdp1_hybrid(orig: bool) -> Built:
    return _fsdp1("HYBRID_SHARD", orig=orig, device_mesh=_mesh2(("replicate", "shard")))


def _fsdp1_mixed(strategy: str, orig: bool) -> Built:
    from torch.distributed.fsdp import MixedPrecision

    mixed = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return _fsdp1(strategy, orig=orig, buffers=False, mixed_precision=mixed)


def _fsdp1_inner() -> Built:
    """The root is a plain module; only the blocks are FSDP, and a weight of each is transposed."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    net = Net()
    for block in net.blocks:
        weight = block.up.weight.detach().t().contiguous().t()
        block.up.weight = nn.Parameter(weight)
    _wrap_blocks(
        net,
        lambda block: FullyShardedDataParallel(
            block, device_id=torch.device("cpu"), use_orig_params=True
        ),
    )
    for param in [*net.embed.parameters(), *net.norm.parameters()]:
        param.requires_grad_(False)  # outside of FSDP nobody reduces their gradients
    return Built(model=net, data_rank=dist.get_rank())


def _fsdp2(dtype: torch.dtype = torch.float32, *, buffers: bool = True, **options: Any) -> Built:
    from torch.distributed.fsdp import fully_shard

    net = Net(buffers=buffers).to(dtype)
    options.setdefault("mesh", _mesh())
    _wrap_blocks(net, _activation_checkpoint)
    for block in net.blocks:
        fully_shard(block, **options)
    return Built(model=fully_shard(net, **options), data_rank=dist.get_rank())


def _fsdp2_mixed() -> Built:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return _fsdp2(buffers=False, mp_policy=policy, reshard_after_forward=False)


def _fsdp2_dims() -> Built:
    """Every parameter whose last dim divides is sharded there."""
    from torch.distributed.tensor import Shard

    def place(param: nn.Parameter) -> Shard | None:
        divides = param.ndim > 1 and param.shape[-1] % _world() == 0
        return Shard(param.ndim - 1) if divides else None

    from torch.distributed.fsdp import fully_shard

    net = nn.Sequential(nn.Embedding(WORDS, 12), nn.Linear(12, 5), nn.Linear(5, WORDS))
    net.append(nn.Flatten(0, 1))
    fully_shard(net, mesh=_mesh(), shard_placement_fn=place)
    return Built(model=net, data_rank=dist.get_rank())


def _hsdp() -> Built:
    return _fsdp2(mesh=_mesh2(("replicate", "shard")))


def _parallelize(net: Net, mesh: DeviceMesh) -> None:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    for block in net.blocks:
        plan = {
            "up": ColwiseParallel(use_local_output=False),
            "down": RowwiseParallel(),
            "narrow": ColwiseParallel(use_local_output=False),
            "wide": RowwiseParallel(),
        }
        parallelize_module(block, mesh, plan)
        if mesh.size() > block.narrow.out_features:
            # torch gives empty shards gradients of another placement, which Adam refuses.
            block.narrow.requires_grad_(False)
            block.wide.requires_grad_(False)


def _tp() -> Built:
    net = Net()
    _parallelize(net, init_device_mesh("cpu", (_world(),), mesh_dim_names=("tp",)))
    return Built(model=net, data_rank=0)


def _tp_fsdp2() -> Built:
    from torch.distributed.fsdp import fully_shard

    net, mesh = Net(), _mesh2(("dp", "tp"))
    _parallelize(net, mesh["tp"])
    for block in net.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(net, mesh=mesh["dp"])
    return Built(model=net, data_rank=mesh.get_local_rank("dp"))


def _tp_ddp_of_torch() -> Built:
    from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

    return _tp_ddp(_pre_dp_module_transform)


def _tp_ddp(transform: Callable[[nn.Module], object]) -> Built:
    net, mesh = Net(), _mesh2(("dp", "tp"))
    _parallelize(net, mesh["tp"])
    transform(net)
    model = nn.parallel.DistributedDataParallel(net, process_group=mesh.get_group("dp"))
    return Built(model=model, data_rank=mesh.get_local_rank("dp"))


FAMILIES = ("ddp-odd", "fsdp1-full", "fsdp1-flat", "hsdp", "fsdp2", "tp", "tp-fsdp2", "tp-ddp")
"""Kinds that stand for the others."""

KINDS = (
    Kind(name="plain", make=_plain),
    Kind(name="ddp", make=lambda: _ddp(Net())),
    Kind(name="ddp-odd", make=lambda: _ddp(Odd())),
    Kind(name="ddp-compiled", make=_compiled, world_sizes=(1, 2)),
    Kind(name="ddp-checkpointed", make=_checkpointed),
    Kind(name="fsdp1-full", make=lambda: _fsdp1("FULL_SHARD", orig=False)),
    Kind(name="fsdp1-full-orig", make=lambda: _fsdp1("FULL_SHARD", orig=True)),
    Kind(name="fsdp1-flat", make=lambda: _fsdp1("FULL_SHARD", orig=True, nested=False)),
    Kind(name="fsdp1-grad-op", make=lambda: _fsdp1("SHARD_GRAD_OP", orig=False)),
    Kind(name="fsdp1-grad-op-orig", make=lambda: _fsdp1("SHARD_GRAD_OP", orig=True)),
    Kind(name="fsdp1-no-shard", make=lambda: _fsdp1("NO_SHARD", orig=False)),
    Kind(name="fsdp1-no-shard-orig", make=lambda: _fsdp1("NO_SHARD", orig=True)),
    Kind(name="fsdp1-hybrid", make=lambda: _fsdp1_hybrid(orig=False), world_sizes=(2, 4)),
    Kind(name="fsdp1-hybrid-orig", make=lambda: _fsdp1_hybrid(orig=True), world_sizes=(2, 4)),
    Kind(name="fsdp1-mixed", make=lambda: _fsdp1_mixed("FULL_SHARD", orig=True)),
    Kind(name="fsdp1-mixed-no-shard", make=lambda: _fsdp1_mixed("NO_SHARD", orig=False)),
    Kind(name="fsdp1-inner", make=_fsdp1_inner),
    Kind(name="fsdp2", make=_fsdp2),
    Kind(name="fsdp2-bf16", make=lambda: _fsdp2(torch.bfloat16)),
    Kind(name="fsdp2-mixed-unsharded", make=_fsdp2_mixed),
    Kind(name="fsdp2-dims", make=_fsdp2_dims),
    Kind(name="hsdp", make=_hsdp),
    Kind(name="tp", make=_tp),
    Kind(name="tp-fsdp2", make=_tp_fsdp2),
    Kind(name="tp-ddp-of-torch", make=_tp_ddp_of_torch, world_sizes=(1, 2, 4)),
    Kind(name="tp-ddp", make=lambda: _tp_ddp(pre_dp_module_transform), world_sizes=(1, 2, 4)),
)
