"""The assertions of PyTorch's own tests of `summon_full_params`, for ours, on their models.

    python -m tests.multiprocess.workers.local_summon_torch_models [CASE ...]     (2 ranks)

Where PyTorch's tests expect NotImplementedError, or edits that persist in spite of
`writeback=False`, these expect what the arguments say.
"""

from __future__ import annotations

import itertools
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp._common_utils import clean_tensor_name
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.testing._internal.common_fsdp import (
    DEVICEInitMode,
    FSDPInitMode,
    NestedWrappedModule,
    TransformerWithSharedParams,
)

import paramd
from paramd.errors import ConflictError
from tests.ending import end

summon = paramd.summon_full_params
CPU = torch.device("cpu")
HALF = MixedPrecision(param_dtype=torch.bfloat16)
STRATEGIES = (
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
)
BOTH = (False, True)
CASES: list[Callable[[], None]] = []


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES.append(function)
    return function


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for function in CASES:
        if not sys.argv[1:] or function.__name__ in sys.argv[1:]:
            began = time.monotonic()
            torch.manual_seed(0)
            function()
            print(f"ok {function.__name__} {time.monotonic() - began:.1f} s", flush=True)
    dist.destroy_process_group()


def fsdp(module: nn.Module, **options: Any) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(module, device_id=CPU, **options)


def two_layers(**options: Any) -> FullyShardedDataParallel:
    inner = fsdp(nn.Linear(5, 5, bias=False), **options)
    return fsdp(nn.Sequential(inner, nn.Linear(5, 3, bias=False)), **options)


def nested(mode: FSDPInitMode, **options: Any) -> nn.Module:
    if mode is FSDPInitMode.RECURSIVE:
        options["device_id"] = CPU
    return NestedWrappedModule.init(
        dist.group.WORLD, mode, DEVICEInitMode.DEVICE_NEVER, options, deterministic=True
    )


def transformer(mode: FSDPInitMode, **options: Any) -> nn.Module:
    if mode is FSDPInitMode.RECURSIVE:
        options["device_id"] = CPU
    return TransformerWithSharedParams.init(
        dist.group.WORLD, mode, DEVICEInitMode.DEVICE_NEVER, options, deterministic=True
    )


def shows(rank0_only: bool) -> bool:
    return not rank0_only or dist.get_rank() == 0


@case
def edits_persist_exactly_with_writeback() -> None:
    for writeback, outer, mixed, orig, strategy in itertools.product(
        BOTH, BOTH, (None, HALF), BOTH, STRATEGIES
    ):
        model = two_layers(mixed_precision=mixed, use_orig_params=orig, sharding_strategy=strategy)
        mine = float(dist.get_rank() + 2)
        param = next((model if outer else model[0]).parameters())
        with torch.no_grad():
            param.fill_(mine)
        with summon(model, writeback=writeback), torch.no_grad():
            for full in model.parameters():
                full.zero_()
        first = param.detach().reshape(-1)[0].item()
        assert first == (0 if writeback else mine), (writeback, outer, mixed, orig, strategy)


@case
def values_are_those_of_the_local_model() -> None:
    for rank0_only, offload, mixed, orig, strategy in itertools.product(
        BOTH, BOTH, (None, HALF), BOTH, STRATEGIES
    ):
        local = nested(FSDPInitMode.NO_FSDP)
        model = nested(
            FSDPInitMode.RECURSIVE,
            mixed_precision=mixed,
            use_orig_params=orig,
            sharding_strategy=strategy,
        )
        assert not isinstance(model, FullyShardedDataParallel)
        with summon(model, rank0_only=rank0_only, offload_to_cpu=offload) as params:
            handles = [m._handle for m in FullyShardedDataParallel.fsdp_modules(model)]
            if shows(rank0_only):
                found = list(model.named_parameters())
                expected = list(local.named_parameters())
                assert [clean_tensor_name(n) for n, _ in found] == [n for n, _ in expected]
                assert params.keys() == {n for n, _ in expected}
                for (_, theirs), (name, ours) in zip(expected, found, strict=True):
                    assert isinstance(ours, nn.Parameter), name
                    assert (ours.device, ours.dtype) == (CPU, theirs.dtype), name
                    assert torch.equal(theirs, ours), name
            for handle in (h for h in handles if h is not None and h.uses_sharded_strategy):
                assert handle.flat_param.shape == handle.flat_param._sharded_size


@case
def a_single_element_persists_and_padding_does_not() -> None:
    for orig in BOTH:
        model = fsdp(nn.Linear(1, 1, bias=False), use_orig_params=orig)
        flat = model._handle.flat_param
        assert flat.numel() == 1
        with torch.no_grad():
            flat[0] = dist.get_rank() + 2
        with summon(model), torch.no_grad():
            assert model.weight.shape == (1, 1)
            model.weight.zero_()
        # The second rank has nothing but padding.
        assert flat[0].item() == (0 if dist.get_rank() == 0 else 3)


@case
def what_is_unsharded_between_forward_and_backward_stays_so() -> None:
    for rank0_only, offload, orig, writeback in itertools.product(BOTH, BOTH, BOTH, BOTH):
        model = two_layers(use_orig_params=orig)
        outer, inner = model._handle.flat_param, model.module[0]._handle.flat_param
        full = outer.numel() * dist.get_world_size()

        def sizes(outer: Any = outer, inner: Any = inner) -> tuple[int, ...]:
            padded = (outer._full_param_padded, inner._full_param_padded)
            return tuple(p.untyped_storage().size() // p.itemsize for p in padded)

        model(torch.zeros(5)).sum().backward()
        assert sizes() == (0, 0)
        output = model(torch.zeros(5))
        assert sizes() == (full, 0)
        flags = {"rank0_only": rank0_only, "offload_to_cpu": offload, "writeback": writeback}
        with summon(model, **flags):
            pass
        assert sizes() == (full, 0), flags
        output.sum().backward()
        with summon(model, **flags):
            pass
        assert sizes() == (0, 0), flags


@case
def recurse_means_what_fsdp_means() -> None:
    for recurse, whole, mixed, orig in itertools.product(BOTH, BOTH, (None, HALF), BOTH):
        model = two_layers(mixed_precision=mixed, use_orig_params=orig)
        with summon(model if whole else model[0], recurse=recurse) as params:
            inner = sum(p.numel() for p in model[0].parameters())
            everything = sum(p.numel() for p in model.parameters())
        assert len(params) == 1 + (recurse and whole)
        assert (inner == 25) is (recurse or not whole), (recurse, whole, mixed, orig)
        assert (everything - inner == 15) is whole, (recurse, whole, mixed, orig)


@case
def names_and_buffers_are_those_of_the_local_model() -> None:
    for prefix, recurse, orig in itertools.product(("", "test_prefix"), BOTH, BOTH):
        local = nested(FSDPInitMode.NO_FSDP)
        model = fsdp(nested(FSDPInitMode.NO_FSDP), use_orig_params=orig)
        for module in (local, model):
            module.register_buffer("buffer", torch.ones(1))
        with summon(model):
            for kind in ("named_parameters", "named_buffers"):
                theirs = list(getattr(local, kind)(prefix=prefix, recurse=recurse))
                ours = list(getattr(model, kind)(prefix=prefix, recurse=recurse))
                assert [n for n, _ in ours] == [n for n, _ in theirs]
                assert all(torch.equal(a, b) for (_, a), (_, b) in zip(ours, theirs, strict=True))


@case
def gradients_are_those_of_ddp_and_persist_exactly_with_writeback() -> None:
    for writeback, offload, rank0_only, strategy, orig in itertools.product(
        BOTH, BOTH, BOTH, STRATEGIES, BOTH
    ):
        ddp = nn.parallel.DistributedDataParallel(transformer(FSDPInitMode.NO_FSDP))
        options = {"use_orig_params": orig, "sharding_strategy": strategy}
        model = transformer(FSDPInitMode.RECURSIVE, **options)
        inputs = model.get_input(CPU)
        for backward in (True, False):
            # Once after backward, and once between the next forward and its backward.
            losses = [ddp(*inputs).sum(), model(*inputs).sum()]
            if backward:
                for loss in losses:
                    loss.backward()
            check_gradients(ddp, model, (writeback, offload, rank0_only), f"{options}")


def check_gradients(
    ddp: nn.Module, model: nn.Module, flags: tuple[bool, bool, bool], where: str
) -> None:
    writeback, offload, rank0_only = flags
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with summon(model, True, writeback, rank0_only, offload, with_grads=True) as params:
        if shows(rank0_only):
            for name, param in ddp.module.named_parameters():
                torch.testing.assert_close(params[name].grad, param.grad)
                assert torch.count_nonzero(params[name].grad)
            for full in dict.fromkeys(params.values()):
                full.grad *= 2
    factor = 2 if writeback else 1
    after = [p.grad for p in model.parameters() if p.grad is not None]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old * factor, new), (where, flags)
    for param in ddp.parameters():
        param.grad *= factor


@case
def gradients_that_are_none_stay_none() -> None:
    for strategy, orig in itertools.product(STRATEGIES, BOTH):
        model = transformer(
            FSDPInitMode.RECURSIVE, sharding_strategy=strategy, use_orig_params=orig
        )
        with summon(model, with_grads=True):
            assert all(param.grad is None for param in model.parameters())
        assert all(param.grad is None for param in model.parameters())


@case
def a_part_of_the_model_has_no_flat_parameter_inside() -> None:
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)) for _ in range(2)]
    model = fsdp(nn.Sequential(*layers), auto_wrap_policy=ModuleWrapPolicy((nn.Sequential,)))
    with summon(model[0]):
        names = [name for name, _ in model[0].named_parameters()]
        assert len(names) == 4
        assert not any("_flat_param" in name for name in names)


@case
def inside_forward_and_backward_it_is_refused() -> None:
    class Summons(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.zeros(5))

        def forward(self, module: nn.Module) -> None:
            with summon(module):
                pass

    model = fsdp(Summons())
    with pytest.raises(ConflictError, match="forward"):
        model(model)
    other = fsdp(nn.Linear(2, 1))
    output = other(torch.ones(2))

    def hook(_: torch.Tensor) -> None:
        with summon(other):
            pass

    output.register_hook(hook)
    with pytest.raises(ConflictError, match="backward"):
        output.backward()


@case
def rank0_only_with_writeback_reaches_every_rank() -> None:
    for strategy, offload, orig in itertools.product(STRATEGIES, BOTH, BOTH):
        model = nested(FSDPInitMode.RECURSIVE, sharding_strategy=strategy, use_orig_params=orig)
        with summon(model, rank0_only=True, offload_to_cpu=offload), torch.no_grad():
            if dist.get_rank() == 0:
                for index, param in enumerate(model.parameters()):
                    param.fill_(index)
        with summon(model, writeback=False):
            for index, param in enumerate(model.parameters()):
                assert torch.equal(param, torch.full_like(param, index))


if __name__ == "__main__":
    end(main)
