"""Train a small network with Ray Train, served by paramd and resumed from memory.

    python examples/train_ray.py --job my-run --workers 2

and in another terminal, for example: `paramd stats '*'`. Ray starts a worker that is killed again,
and training goes on from the step it was at. Needs pip install 'paramd[ray]'.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import ray.train
import torch
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn
from torch.distributed.fsdp import fully_shard

from paramd.integrations.ray import attached, worker_runtime_env


def train(config: dict[str, Any]) -> None:
    """What each worker runs; learns to add."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with attached(model, optimizer, job=config["job"]) as attachment:
        if attachment.resumed is not None:
            print(f"resumed at step {attachment.step} ({attachment.resumed.how})", flush=True)
        while attachment.step < config["steps"]:
            numbers = torch.randn(16, 8)
            loss = nn.functional.mse_loss(model(numbers), numbers.sum(1, keepdim=True))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(config["pause_s"])
    if dist.get_rank() == 0:
        ray.train.report({"loss": loss.item(), "step": attachment.step})
    else:
        ray.train.report({})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", default="train-ray")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--pause-s", type=float, default=0.0, help="sleep of each step")
    arguments = parser.parse_args()

    trainer = TorchTrainer(
        train,
        train_loop_config=vars(arguments),
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(
            num_workers=arguments.workers, placement_strategy="SPREAD", use_gpu=False
        ),
        run_config=RunConfig(
            name=arguments.job,
            failure_config=FailureConfig(max_failures=3),
            worker_runtime_env=worker_runtime_env(),
        ),
    )
    print(trainer.fit().metrics)


if __name__ == "__main__":
    main()
