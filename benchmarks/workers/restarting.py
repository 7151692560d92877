"""One rank of a training that is killed and starts again: how long until its first step.

    python -m benchmarks.workers.restarting FOLDER LAYERS {train|resume|load}

`train` makes a few steps, saves a checkpoint with torch.distributed.checkpoint, and waits to be
killed. `resume` goes on from memory, `load` from that checkpoint; both write the seconds of each
stage to a file when the first step is about to begin, and end.
"""

from __future__ import annotations

import time

BEGIN_S = time.perf_counter()

import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

WIDTH = 512
"""Of a layer with 1 MiB of parameters, and 3 MiB of state with AdamW's moments."""


class Clock:
    """Seconds of each stage since the process's first line."""

    def __init__(self) -> None:
        self.stages: dict[str, float] = {}
        self.of_that: dict[str, float] = {}
        """Parts of stages."""
        self._last_s = BEGIN_S

    def stage(self, name: str) -> None:
        now_s = time.perf_counter()
        self.stages[name] = now_s - self._last_s
        self._last_s = now_s


def main() -> None:
    clock = Clock()
    folder, layers, how = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    clock.stage("import torch")
    dist.init_process_group("gloo")
    dist.barrier()
    clock.stage("process group")
    # Without values of its own, as scripts do that load them: they would only take time.
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    if how == "train":
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    clock.stage("build the model")
    if how == "load":
        _load(model, optimizer, folder)
        clock.stage("torch.distributed.checkpoint")
    else:
        attachment = _attach(model, optimizer, clock)
        resumed = attachment.resumed
        assert how == "train" or (resumed is not None and resumed.how == "live"), resumed
    if how != "train":
        Path(folder, f"told-{dist.get_rank()}").write_text(
            json.dumps({"stages": clock.stages, "of that": clock.of_that})
        )
        # No step and no detach: the memory stays for the next start.
        os._exit(0)
    _train(model, optimizer, folder)


def _attach(model: nn.Module, optimizer: torch.optim.Optimizer, clock: Clock) -> Any:
    import paramd
    from paramd.trainer.helpers.control_link import ControlLink

    opened, started_s = ControlLink.open, [0.0]

    def timed(link: ControlLink, **options: bool) -> None:
        begin_s = time.perf_counter()
        try:
            opened(link, **options)
        finally:
            started_s[0] = time.perf_counter() - begin_s

    ControlLink.open = timed  # type: ignore[method-assign]
    attachment = paramd.attach(model, optimizer, job="restarting", resume="auto")
    clock.stage("paramd.attach")
    clock.of_that["control plane"] = started_s[0]
    return attachment


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    for _ in range(4):
        model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dcp.save(_state(model, optimizer), checkpoint_id=folder / "checkpoint")
    # The record of the last step is complete when training goes on.
    model(torch.randn(4, WIDTH))
    Path(folder, f"trained-{dist.get_rank()}").touch()
    time.sleep(600)


def _load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    state = _state(model, optimizer)
    dcp.load(state, checkpoint_id=folder / "checkpoint")
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


if __name__ == "__main__":
    main()
