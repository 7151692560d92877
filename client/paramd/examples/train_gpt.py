"""Train a small GPT under torchrun with FSDP2, attached to paramd.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --job my-run

and in another terminal, for example: `paramd stats "head.*"` or
`paramd summon "head.*" -f head.safetensors`.
With --no-attach it trains without paramd; the losses are bit-identical. With PARAMD_RESUME=auto, a
killed training that is started again resumes at its last step.

The training text is Python's own help topics, byte by byte.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import paramd

VOCABULARY = 256
CONTEXT = 128
WIDTH = 128
HEADS = 4
LAYERS = 4
BATCH = 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) to the same."""
        batch, time, _ = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, time, WIDTH))
        return out


class Block(nn.Module):
    """Attention and an MLP, each behind a norm and around a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) to the same."""
        x = x + self.attention(self.norm1(x))
        down: Tensor = self.down(functional.gelu(self.up(self.norm2(x))))
        return x + down


class GPT(nn.Module):
    """Bytes in, the next byte's logits out."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, time) int64 to (batch, time, vocabulary)."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model, sharded over all ranks block by block, and its optimizer."""
    torch.manual_seed(seed)
    model = GPT()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


class Passages:
    """Random passages of the text, endless, different on each rank.

    An iterator, because paramd notes an iterator's state when an update ends, before the next
    passages are drawn; other objects' only when the next forward begins.
    """

    def __init__(self, seed: int) -> None:
        self._text = torch.tensor(list("\n".join(topics.values()).encode()), dtype=torch.uint8)
        self._generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())

    def __iter__(self) -> Passages:
        return self

    def __next__(self) -> Tensor:
        """(batch, context + 1) bytes as int64."""
        begins = torch.randint(len(self._text) - CONTEXT - 1, (BATCH,), generator=self._generator)
        return torch.stack([self._text[b : b + CONTEXT + 1] for b in begins.tolist()]).long()

    def state_dict(self) -> dict[str, Tensor]:
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._generator.set_state(state["generator"])


class Stop:
    """Ctrl-C and SIGTERM end the training after a step, the same one on all ranks."""

    def __init__(self) -> None:
        self.asked = False
        for name in (signal.SIGINT, signal.SIGTERM):
            signal.signal(name, self._ask)

    def _ask(self, number: int, frame: object) -> None:
        self.asked = True
        # A second Ctrl-C ends the process at once. Launchers and schedulers each send a SIGTERM.
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def train(arguments: argparse.Namespace) -> None:
    """Train until the steps are done or a signal arrives."""
    model, optimizer = build(arguments.seed)
    passages, stop, step = Passages(arguments.seed), Stop(), 0
    if arguments.attach:
        attachment = paramd.attach(
            model,
            optimizer,
            job=arguments.job,
            control=arguments.control,
            extra_state={"passages": passages},
        )
        step = attachment.step
    while arguments.keep or step < arguments.steps:
        tokens = next(passages)
        logits = model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        # One all-reduce for both: the mean loss, and whether any rank got a signal.
        said = torch.tensor([loss.item(), float(stop.asked)], dtype=torch.float64)
        dist.all_reduce(said)
        if arguments.attach:
            attachment.log(loss=said[0].item() / dist.get_world_size())
        if dist.get_rank() == 0 and (step % arguments.every == 0 or step == 1):
            print(f"step {step} loss {said[0].item() / dist.get_world_size():.9f}", flush=True)
        if said[1] > 0:
            break
    if arguments.attach:
        attachment.detach()


def main() -> int:
    """One rank, as torchrun starts it."""
    parser = argparse.ArgumentParser(description="Train a small GPT attached to paramd.")
    parser.add_argument("--steps", type=int, default=1000, help="number of updates (default 1000)")
    parser.add_argument("--job", default="gpt", help="name of the job (default gpt)")
    parser.add_argument("--control", metavar="URL", help="control plane of the site to join")
    parser.add_argument("--keep", action="store_true", help="train until Ctrl-C")
    parser.add_argument(
        "--no-attach", dest="attach", action="store_false", help="train without paramd"
    )
    parser.add_argument("--every", type=int, default=10, help="print every n-th loss (default 10)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (default 0)")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with: torchrun --standalone --nproc-per-node 2 " + sys.argv[0])
    dist.init_process_group("gloo")
    try:
        train(arguments)
    finally:
        # The model is a cycle that holds the group; left to interpreter shutdown, gloo may abort.
        gc.collect()
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
