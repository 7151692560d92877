"""One rank that tries one set of arguments of `summon_full_params`, by PyTorch or by paramd."""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

import paramd
from benchmarks.ranks import obey
from tests.ending import end

LEARNING_RATE = 0.5

Tensors = dict[str, torch.Tensor]


def cell(by: str, flags: dict[str, bool], orig: bool, strategy: str) -> str:
    """ "ok", or what went otherwise than the arguments say."""
    model = _built(orig, strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    model(torch.ones(2, 5)).sum().backward()
    values, grads = _full(model), _expected_grads()
    call: Any = paramd.summon_full_params
    if by == "torch":
        call = FullyShardedDataParallel.summon_full_params
    try:
        wrong = _inside(call, model, flags, values, grads)
    except NotImplementedError:
        return "refused"
    except (RuntimeError, AssertionError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"
    if flags["writeback"]:
        values = {name: value + 1 for name, value in values.items()}
        if flags["with_grads"]:
            grads = {name: 2 * grad for name, grad in grads.items()}
    wrong = wrong or _different(_full(model), values, "values afterwards")
    optimizer.step()
    values = {name: value - LEARNING_RATE * grads[name] for name, value in values.items()}
    return wrong or _different(_full(model), values, "gradients afterwards") or "ok"


def _inside(
    call: Any, model: nn.Module, flags: dict[str, bool], values: Tensors, grads: Tensors
) -> str:
    shards = sum(param.numel() for param in model.parameters())
    wrong = ""
    with call(model, **flags), torch.no_grad():
        if flags["rank0_only"] and dist.get_rank() != 0:
            if sum(param.numel() for param in model.parameters()) != shards:
                wrong = "wrong: not rank 0, but not sharded"
        else:
            shown = {n.replace("_fsdp_wrapped_module.", ""): p for n, p in model.named_parameters()}
            wrong = _different(shown, values, "values shown")
            if flags["with_grads"]:
                missing = [name for name, param in shown.items() if param.grad is None]
                found = {name: param.grad for name, param in shown.items()}
                wrong = wrong or (
                    f"wrong: no gradient of {missing[0]}"
                    if missing
                    else _different(found, grads, "gradients shown")
                )
            for param in shown.values():
                param.add_(1)
                if flags["with_grads"] and param.grad is not None:
                    param.grad.mul_(2)
    return wrong


def _different(found: Any, expected: Tensors, what: str) -> str:
    for name, value in expected.items():
        if name not in found or found[name].shape != value.shape:
            return f"wrong: {what}, {name} is missing"
        if not torch.allclose(found[name], value, atol=1e-6):
            return f"wrong: {what}"
    return ""


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))


def _built(orig: bool, strategy: str) -> nn.Module:
    options: dict[str, Any] = {
        "device_id": torch.device("cpu"),
        "use_orig_params": orig,
        "sharding_strategy": ShardingStrategy[strategy],
    }
    net = _layers()
    net[0] = FullyShardedDataParallel(net[0], **options)
    return FullyShardedDataParallel(net, **options)


def _expected_grads() -> Tensors:
    net = _layers()
    net(torch.ones(2, 5)).sum().backward()
    return {n: p.grad for n, p in net.named_parameters() if p.grad is not None}


def _full(model: nn.Module) -> Tensors:
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return {name: value.detach().clone() for name, value in state.items()}


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    obey({"cell": cell})
    dist.destroy_process_group()


if __name__ == "__main__":
    end(main)
