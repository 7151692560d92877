"""Trains until `<folder>/end` says at which step to end, and lets itself be put back.

The model, the batches and the digests are those of resuming.py.

    <folder>/at-<rank>       step the rank is at
    <folder>/steps-<rank>    "rewound to N" whenever the block was left
    <folder>/final-<rank>    digests by name, JSON
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import paramd
from tests.ending import end
from tests.multiprocess.workers.resuming import OPTIMIZERS, Loader, built, digests


class Fragile:
    """A kept object that cannot be put back once its file says so."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, _state: dict[str, Any]) -> None:
        if self._path.exists():
            raise RuntimeError("this object cannot be put back")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--kind", default="plain")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--pause-s", type=float, default=0.0)
    parser.add_argument("--resume", default="auto")
    parser.add_argument("--no-block", action="store_true")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    folder = Path(args.folder)
    model = built(args.kind, 31)
    data_rank = rank if args.kind != "tp-fsdp2" else 0
    torch.manual_seed(100 + data_rank)
    random.seed(rank)
    np.random.seed(rank)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = OPTIMIZERS[args.optimizer](parameters)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10_000)
    loader = Loader(rank, data_rank, args.folder, draws=True)
    keep = {"scheduler": scheduler, "loader": loader, "fragile": Fragile(folder / f"break-{rank}")}
    attachment = paramd.attach(
        model, optimizer, job="rewinding", resume=args.resume, extra_state=keep
    )
    print("attached", attachment.resumed, flush=True)

    at = folder / f"at-{rank}"

    def over() -> bool:
        path = folder / "end"
        return path.exists() and attachment.step >= int(path.read_text() or 1 << 60)

    def epoch() -> None:
        for tokens, targets in loader:
            random.random()
            np.random.random()
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(tokens), targets).backward()
            optimizer.step()
            scheduler.step()
            attachment.log(loss=1e6 if (folder / "diverges").exists() else 1.0)
            written = at.with_suffix(".new")
            written.write_text(str(attachment.step))
            written.replace(at)
            time.sleep(args.pause_s)
            if over():
                return

    while not over():
        if args.no_block:
            epoch()
            continue
        with attachment.rollback_scope():
            epoch()
            continue
        with Path(folder, f"steps-{rank}").open("a") as steps:
            steps.write(f"from {at.read_text()} to {attachment.step}\n")
    found = digests(model, optimizer, scheduler, loader)
    Path(folder, f"final-{rank}").write_text(json.dumps(found, indent=1))
    with attachment.rollback_scope():
        # A script may end anywhere.
        attachment.detach()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    end(main)
