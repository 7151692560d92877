"""One rank that trains the example's GPT in a dtype, at a learning rate."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import paramd
from benchmarks.ranks import obey
from paramd.examples.train_gpt import GPT, Passages
from paramd.trainer.attaching.attachment import Attachment
from tests.ending import end


class Training:
    """One attached model after the other."""

    def __init__(self) -> None:
        self._attachment: Attachment | None = None

    def build(self, dtype: str, lr: float, job: str) -> int:
        """Begin anew; bytes of all parameters."""
        if self._attachment is not None:
            self._attachment.detach()
        torch.manual_seed(0)
        model = GPT().to(getattr(torch, dtype))
        size_bytes = sum(one.nbytes for one in model.parameters())
        fully_shard(model)
        self._model = model
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        self._passages = Passages(dist.get_rank())
        self._attachment = paramd.attach(model, self._optimizer, job=job)
        return size_bytes

    def train(self, count: int) -> None:
        """Some updates."""
        for _ in range(count):
            tokens = next(self._passages)
            logits = self._model(tokens[:, :-1]).float()
            functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            self._optimizer.step()
            self._optimizer.zero_grad()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    training = Training()
    obey({"build": training.build, "train": training.train})
    dist.destroy_process_group()


if __name__ == "__main__":
    end(main)
