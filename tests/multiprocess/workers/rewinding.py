"""Trains until `<folder>/end` says at which step to end, and lets itself be put back.

The model, the batches and the digests are those of resuming.py.

    <folder>/at-<rank>       step the rank is at
    <folder>/steps-<rank>    "rewound to N" whenever the block was left
    <folder>/final-<rank>    digests by name, JSON
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import nn

import paramd
from tests.multiprocess.workers.resuming import begun, digests
from tests.rank import run


class Fragile:
    """A kept object that cannot be put back once its file says so."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, _state: dict[str, Any]) -> None:
        if self._path.exists():
            raise RuntimeError("this object cannot be put back")


def main(
    folder: Path, *, kind: str = "plain", optimizer: str = "adamw", pause_s: float = 0.0,
    resume: str = "auto", no_block: bool = False,
) -> None:  # fmt: skip
    rank = dist.get_rank()
    begin = model, updating, scheduler, loader = begun(folder, kind, optimizer, draws=True)
    keep = {"scheduler": scheduler, "loader": loader, "fragile": Fragile(folder / f"break-{rank}")}
    attachment = paramd.attach(model, updating, job="rewinding", resume=resume, extra_state=keep)
    print("attached", attachment.resumed, flush=True)

    at = folder / f"at-{rank}"

    def over() -> bool:
        path = folder / "end"
        return path.exists() and attachment.step >= int(path.read_text() or 1 << 60)

    def epoch() -> None:
        for tokens, targets in loader:
            random.random()
            np.random.random()
            updating.zero_grad()
            nn.functional.cross_entropy(model(tokens), targets).backward()
            updating.step()
            scheduler.step()
            attachment.log(loss=1e6 if (folder / "diverges").exists() else 1.0)
            written = at.with_suffix(".new")
            written.write_text(str(attachment.step))
            written.replace(at)
            time.sleep(pause_s)
            if over():
                return

    while not over():
        if no_block:
            epoch()
            continue
        with attachment.rollback_scope():
            epoch()
            continue
        with Path(folder, f"steps-{rank}").open("a") as steps:
            steps.write(f"from {at.read_text()} to {attachment.step}\n")
    found = digests(*begin)
    Path(folder, f"final-{rank}").write_text(json.dumps(found, indent=1))
    with attachment.rollback_scope():
        # A script may end anywhere.
        attachment.detach()


if __name__ == "__main__":
    run(main)
