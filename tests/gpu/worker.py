"""Trainings on a CUDA device whose kernels are slow, so that whoever reads too early reads wrong.

    --mode stamp       each update writes its number into every element
    --mode frozen      updates change nothing; what is there was edited
    --mode gradients   each update finds gradients that are its number (modulo 200)
    --mode moments     as stamp, and so for optimizer state of each parameter's shape
    --mode train       AdamW on random data, exactly `--steps` updates

and --wrap plain (one rank), ddp (ranks share the device, over gloo) or fsdp2 (one rank, NCCL).
Ends when `--stop` exists, except "train". At the end each rank prints "holds" and a digest of
its parameters. `--bare` trains without paramd. After update `--pause-at` it says "paused" and waits
until `--go` exists.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import paramd
from tests.ending import end
from tests.gpu.late import late_fill

JOB = "device"
DEVICE = os.environ.get("PARAMD_GPU_TESTS_ON", "cuda")
"""With "cpu" the tests themselves can be tried, on a mirrored mesh in host memory."""
MODULUS = 200
SLOW_CYCLES = 400_000
"""What the device sleeps between two writes: some 0.2 ms."""


class Slow(torch.optim.Optimizer):
    """Fills each parameter with the number of the update, in parts; or leaves it."""

    def __init__(self, parameters: Any, *, fills: bool, keeps: bool = False) -> None:
        super().__init__(list(parameters), {})
        self._fills, self._keeps = fills, keeps
        self.updates = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.updates += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                for part in local_of(parameter).reshape(-1).chunk(2):
                    sleep()
                    if self._fills:
                        late_fill(part, self.updates)
                if self._keeps:
                    state = self.state[parameter]
                    sleep()
                    late_fill(state.setdefault("stamp", torch.zeros_like(parameter)), self.updates)


def sleep() -> None:
    """Keeps the device busy; the host goes on."""
    if DEVICE == "cuda":
        torch.cuda._sleep(SLOW_CYCLES)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor.data)
    return local


def make_model(wrap: str) -> nn.Module:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(31, 67), nn.BatchNorm1d(67), nn.ReLU(), nn.Linear(67, 29))
    inner.append(nn.Linear(29, 13, dtype=torch.float32))
    model = inner.to(DEVICE)
    if wrap == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if wrap == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for module in model:
            if isinstance(module, nn.Linear):
                fully_shard(module)
        return fully_shard(model)
    return model


def updating(mode: str, model: nn.Module) -> tuple[torch.optim.Optimizer, Callable[[int], None]]:
    """The optimizer, and what does update n."""
    if mode == "train":
        adam = torch.optim.AdamW(model.parameters(), lr=0.01)

        def train(number: int) -> None:
            torch.manual_seed(number)
            adam.zero_grad()
            model(torch.randn(16, 31, device=DEVICE)).square().mean().backward()
            adam.step()

        return adam, train
    keeps = mode == "moments"
    slow = Slow(model.parameters(), fills=keeps or mode == "stamp", keeps=keeps)
    with torch.no_grad():
        for parameter in model.parameters():
            local_of(parameter).fill_(0)

    def update(number: int) -> None:
        if mode == "gradients":
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
                sleep()
                local_of(parameter.grad).fill_(number % MODULUS)
        if keeps:
            model(torch.randn(16, 31, device=DEVICE)).mean().backward()
        slow.step()

    return slow, update


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", required=True)
    parser.add_argument("--wrap", default="plain")
    parser.add_argument("--stop", type=Path)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--pause-at", type=int, default=0)
    parser.add_argument("--go", type=Path)
    arguments = parser.parse_args()
    if DEVICE == "cuda":
        torch.cuda.set_device(0)
    torch.use_deterministic_algorithms(True)
    if arguments.wrap != "plain":
        nccl = arguments.wrap == "fsdp2" and DEVICE == "cuda"
        backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
        dist.init_process_group(backend)
    model = make_model(arguments.wrap)
    optimizer, update = updating(arguments.mode, model)
    attachment = None
    if not arguments.bare:
        attachment = paramd.attach(model, optimizer, job=JOB)
        print("attached", flush=True)
    number = attachment.step if attachment is not None else 0
    resumed = attachment.resumed if attachment is not None else None
    print(f"from step {number}, {resumed.how if resumed is not None else 'anew'}", flush=True)
    while not over(arguments, number):
        number += 1
        update(number)
        if attachment is not None:
            attachment.end_iteration()
        pause(arguments, number)
        time.sleep(0.003)
    if attachment is not None:
        stalls = attachment.stalls()
        print(f"stalls {stalls.count}, longest {1e3 * stalls.longest_s:.2f} ms", flush=True)
        attachment.detach()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(bytes(local_of(parameter).cpu().contiguous().view(torch.uint8).numpy()))
    print(f"holds {digest.hexdigest()}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def pause(arguments: argparse.Namespace, number: int) -> None:
    if number == arguments.pause_at and not arguments.go.exists():
        print("paused", flush=True)
        while not arguments.go.exists():
            time.sleep(0.01)


def over(arguments: argparse.Namespace, number: int) -> bool:
    if arguments.steps:
        return number == arguments.steps
    if number % 10:
        return False
    told = torch.tensor([int(arguments.stop.exists())])
    if dist.is_initialized() and int(os.environ["WORLD_SIZE"]) > 1:
        dist.all_reduce(told, op=dist.ReduceOp.MIN)
    return bool(told.item())


if __name__ == "__main__":
    end(main)
