"""What `summon_full_params` refuses, and what it does with odd blocks; world size 2.

python -m tests.multiprocess.workers.local_summon_guards [CASE ...]
"""

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    ShardingStrategy,
    fully_shard,
)

import paramd
from paramd import errors
from tests.multiprocess.kinds import full_parameters
from tests.rank import Cases, run

summon = paramd.summon_full_params
case = Cases()


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    case.run(names)


def layers() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(5, 7), nn.ReLU(), nn.Sequential(nn.Linear(7, 7)), nn.Linear(7, 3)
    )


def fsdp1(*, orig: bool = True, strategy: str = "FULL_SHARD", **options: object) -> nn.Module:
    net = layers()
    options |= {
        "device_id": torch.device("cpu"),
        "use_orig_params": orig,
        "sharding_strategy": ShardingStrategy[strategy],
    }
    net[2] = FullyShardedDataParallel(net[2], **options)
    return FullyShardedDataParallel(net, **options)


def fsdp2(**options: object) -> nn.Module:
    net = layers()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(net[2], mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def ddp() -> nn.Module:
    return nn.parallel.DistributedDataParallel(layers())


MAKERS = (layers, ddp, fsdp1, lambda: fsdp1(orig=False), fsdp2)


def batch() -> torch.Tensor:
    return torch.arange(10.0).view(2, 5) / 10


@contextlib.contextmanager
def raises(kind: type[Exception], *texts: str) -> Iterator[None]:
    with pytest.raises(kind) as caught:
        yield
    for text in texts:
        assert text in str(caught.value)


def first(model: nn.Module) -> nn.Parameter:
    return next(iter(model.parameters()))


@case
def one_rank_alone_learns_who_did_not_come() -> None:
    model = fsdp2()
    for alone in (0, 1):
        other = 1 - alone
        if dist.get_rank() == alone:
            began = time.monotonic()
            text = f"ranks [{other}] of 2 did not arrive"
            with raises(errors.DeadlineError, text), summon(model, timeout_s=0.5):
                raise AssertionError("entered alone")
            assert time.monotonic() - began > 0.4
        dist.barrier()
        with summon(model, timeout_s=30) as params:
            assert len(params) == 6


@case
def different_arguments_are_refused_everywhere() -> None:
    text, second = "call it alike on every rank", dist.get_rank() == 1
    with raises(errors.ConflictError, text), summon(layers(), with_grads=second):
        pass
    different = layers() if dist.get_rank() == 0 else nn.Linear(2, 2)
    with raises(errors.ConflictError, "call it alike on every rank"), summon(different):
        pass


@case
def inside_forward_it_is_refused() -> None:
    for make in MAKERS:
        model = make()

        def in_forward(*_: object, model: nn.Module = model) -> None:
            with raises(errors.ConflictError, "forward"), summon(model):
                pass

        inner = model.module if hasattr(model, "module") else model
        handle = inner[2].register_forward_hook(in_forward)
        expected = model(batch()).detach()
        handle.remove()
        assert torch.equal(model(batch()), expected)
        model(batch()).sum().backward()
        with summon(model):
            pass


@case
def inside_backward_it_is_refused() -> None:
    for make in MAKERS:
        model: nn.Module = make()
        seen: list[torch.Tensor] = []

        def in_backward(
            grad: torch.Tensor, model: nn.Module = model, seen: list[torch.Tensor] = seen
        ) -> None:
            with raises(errors.ConflictError, "backward"), summon(model):
                pass
            seen.append(grad)

        output = model(batch())
        output.register_hook(in_backward)
        output.sum().backward()
        assert len(seen) == 1
        with summon(model):
            pass


@case
def nested_on_the_same_parameters_it_is_refused() -> None:
    for make in MAKERS:
        model = make()
        inner = (model.module if hasattr(model, "module") else model)[2]
        for rank0_only in (False, True):
            with summon(model, rank0_only=rank0_only):
                for again in (model, inner):
                    with raises(errors.ConflictError, "already summoned"), summon(again):
                        pass
            with (
                summon(inner, rank0_only=rank0_only),
                raises(errors.ConflictError, "already summoned"),
                summon(model),
            ):
                pass


@case
def side_by_side_and_level_by_level_it_may_be_nested() -> None:
    model = fsdp2()
    before = full_parameters(model)
    with summon(model, recurse=False) as outer, summon(model[2]) as inner, torch.no_grad():
        assert outer.keys() | {f"2.{name}" for name in inner} == before.keys()
        for param in (*outer.values(), *inner.values()):
            param.add_(1)
    for name, now in full_parameters(model).items():
        assert torch.equal(now, before[name] + 1)


@case
def in_a_region_of_compile_it_is_refused() -> None:
    for make in (layers, fsdp2):
        model = make()

        def traced(x: torch.Tensor, model: nn.Module = model) -> torch.Tensor:
            with summon(model):
                x = x + 1
            return x

        def broken(x: torch.Tensor, traced: Callable[..., torch.Tensor] = traced) -> torch.Tensor:
            torch._dynamo.graph_break()
            return traced(x)

        for function in (traced, broken):
            with raises(errors.ConflictError, "torch.compile"):
                torch.compile(function, backend="eager")(torch.ones(2))
        assert torch.equal(traced(torch.ones(2)), torch.full((2,), 2.0))


@case
def a_block_that_raises_on_one_rank_keeps_nothing_anywhere() -> None:
    for make in MAKERS:
        for rank0_only in (False, True):
            model = make()
            before, ids = full_parameters(model), [id(p) for p in model.parameters()]
            expected = ZeroDivisionError if dist.get_rank() == 1 else errors.AbortedError
            text = "" if dist.get_rank() == 1 else "rank 1 raised ZeroDivisionError"
            with raises(expected, text), summon(model, rank0_only=rank0_only) as params:
                for param in params.values():
                    param.data.fill_(7)
                if dist.get_rank() == 1:
                    raise ZeroDivisionError
            assert [id(p) for p in model.parameters()] == ids
            for name, now in full_parameters(model).items():
                assert torch.equal(now, before[name]), name
            model(batch()).sum().backward()


@case
def a_forward_of_a_wrapper_inside_is_refused() -> None:
    for make in MAKERS[1:]:
        model = make()
        with summon(model), raises(errors.ConflictError, "cannot run inside summon_full_params"):
            model(batch())
        model(batch()).sum().backward()


@case
def an_assigned_tensor_is_an_edit() -> None:
    for make in MAKERS:
        model = make()
        inner = model.module if hasattr(model, "module") else model
        with summon(model) as params:
            new = torch.randn(7, 5, generator=torch.Generator().manual_seed(1))
            inner[0].weight = nn.Parameter(new.t().contiguous().t())
            params["3.weight"].data = torch.ones(3, 7, dtype=torch.float64)
        after = full_parameters(model)
        assert torch.equal(after["0.weight"], new)
        assert torch.equal(after["3.weight"], torch.ones(3, 7))
        model(batch()).sum().backward()


@case
def a_removed_or_reshaped_parameter_is_refused() -> None:
    for make in MAKERS:
        model = make()
        inner = model.module if hasattr(model, "module") else model
        before, ids = full_parameters(model), [id(p) for p in model.parameters()]
        with raises(errors.UsageError, "'0.bias' was removed"), summon(model) as params:
            del inner[0].bias
            params["0.weight"].data.zero_()
        with raises(errors.UsageError, "shape [2, 2]"), summon(model):
            inner[0].weight = nn.Parameter(torch.ones(2, 2))
        if dist.get_rank() == 0:
            expected, text = errors.UsageError, "shape [2, 2]"
        else:
            expected, text = errors.AbortedError, "rank 0 cannot: parameter '0.weight'"
        with raises(expected, text), summon(model, rank0_only=True):
            if dist.get_rank() == 0:
                inner[0].weight = nn.Parameter(torch.ones(2, 2))
        assert [id(p) for p in model.parameters()] == ids
        for name, now in full_parameters(model).items():
            assert torch.equal(now, before[name]), name


@case
def gradients_neither_come_nor_go_inside() -> None:
    for make in MAKERS:
        model = make()
        with summon(model, with_grads=True) as params:
            assert all(param.grad is None for param in params.values())
        assert all(param.grad is None for param in model.parameters())
        with raises(errors.UsageError, "had none"), summon(model, with_grads=True) as params:
            params["0.weight"].grad = torch.ones(7, 5)
        model(batch()).sum().backward()
        with raises(errors.UsageError, "was removed"), summon(model, with_grads=True) as params:
            params["0.weight"].grad = None


@case
def gradients_that_are_being_accumulated_are_refused() -> None:
    for make in MAKERS[2:]:
        model = make()
        if isinstance(model, FullyShardedDataParallel):
            with model.no_sync():
                model(batch()).sum().backward()
        else:
            model.set_requires_gradient_sync(False)
            model(batch()).sum().backward()
            model.set_requires_gradient_sync(True)
        with raises(errors.ConflictError, "being accumulated"), summon(model, with_grads=True):
            pass
        with summon(model):
            pass
        model(batch()).sum().backward()
        with summon(model, with_grads=True) as params:
            assert all(param.grad is not None for param in params.values())


@case
def after_a_forward_without_backward_edits_are_used_by_the_next() -> None:
    makers = [
        lambda: fsdp1(strategy="SHARD_GRAD_OP"),
        lambda: fsdp1(strategy="SHARD_GRAD_OP", orig=False),
        lambda: fsdp2(reshard_after_forward=False),
        fsdp2,
    ]
    for make in makers:
        model, reference = make(), layers()
        with torch.no_grad():
            model(batch())
        ids = [id(p) for p in model.parameters()]
        with summon(model) as params, torch.no_grad():
            for name, param in reference.named_parameters():
                params[name].mul_(0.5).add_(0.01)
                param.copy_(params[name])
        if not isinstance(model, FullyShardedDataParallel):
            assert [id(p) for p in model.parameters()] == ids
        torch.testing.assert_close(model(batch()), reference(batch()))


@case
def between_forward_and_backward_looking_changes_nothing() -> None:
    makers = (*MAKERS, lambda: fsdp1(strategy="SHARD_GRAD_OP"), lambda: fsdp1(strategy="NO_SHARD"))
    for make in makers:
        gradients = []
        for looks in (False, True):
            torch.manual_seed(0)
            model = make()
            loss = model(batch()).sum()
            for rank0_only in (False, True) if looks else ():
                with summon(model, with_grads=True, rank0_only=rank0_only):
                    pass
            loss.backward()
            with summon(model, writeback=False, with_grads=True) as params:
                gradients.append({name: param.grad for name, param in params.items()})
        for name, grad in gradients[0].items():
            assert torch.equal(grad, gradients[1][name]), name


@case
def without_recurse_nested_fsdp_modules_are_left_out() -> None:
    own = {"0.weight", "0.bias", "3.weight", "3.bias"}
    for make in (fsdp1, lambda: fsdp1(orig=False), fsdp2):
        model = make()
        before = full_parameters(model)
        inner = (model.module if hasattr(model, "module") else model)[2]
        nested = {id(p) for p in inner.parameters()}
        with summon(model, recurse=False) as params, torch.no_grad():
            assert params.keys() == own
            assert {id(p) for p in inner.parameters()} == nested
            for param in params.values():
                param.zero_()
        for name, now in full_parameters(model).items():
            assert torch.equal(now, torch.zeros_like(now) if name in own else before[name]), name
    for model in (layers(), ddp()):
        with summon(model, recurse=False) as params:
            assert len(params) == 6
    for model in (fsdp1(), fsdp1(orig=False)):
        part = model.module[2]
        with summon(part) as params:
            assert not any("_flat_param" in name for name, _ in part.named_parameters())
            assert {p.shape for p in params.values()} == {p.shape for p in layers()[2].parameters()}
    outside = nn.Sequential(fsdp1(), nn.Linear(3, 3), fsdp2())
    with summon(outside, recurse=False) as params:
        assert params.keys() == {"1.weight", "1.bias"}
    with summon(outside) as params:
        assert len(params) == 14


@case
def shards_on_the_cpu_by_policy_are_served() -> None:
    # FSDP1 pins its shards, for which it needs an accelerator.
    model, reference = fsdp2(offload_policy=CPUOffloadPolicy(pin_memory=False)), layers()
    with summon(model) as params:
        reference.load_state_dict(params)
    model(batch()).sum().backward()
    reference(batch()).sum().backward()
    with summon(model, with_grads=True, offload_to_cpu=True) as params:
        for name, param in reference.named_parameters():
            torch.testing.assert_close(params[name].grad, param.grad)
            params[name].grad.fill_(0.5)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    for name, now in full_parameters(model).items():
        assert torch.equal(now, reference.get_parameter(name) - 0.5), name


@case
def tied_parameters_stay_tied_inside() -> None:
    for wrap in ("plain", "fsdp1", "flat", "fsdp2"):
        net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        net[2].weight = net[0].weight
        model: nn.Module = net
        if wrap in ("fsdp1", "flat"):
            model = FullyShardedDataParallel(
                net, device_id=torch.device("cpu"), use_orig_params=wrap == "fsdp1"
            )
        elif wrap == "fsdp2":
            model = fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
        with summon(model) as params:
            assert net[0].weight is net[2].weight is params["0.weight"] is params["2.weight"]
            net[2].weight = nn.Parameter(torch.full((4, 4), 2.0))
        after = full_parameters(model)
        assert torch.equal(after["0.weight"], torch.full((4, 4), 2.0)), wrap


if __name__ == "__main__":
    run(main)
