"""One start of a training whose weights and moments are on a device: how long until a step is done.

    python -m benchmarks.workers.gpu_restart FOLDER WIDTH LAYERS {train|resume}

`train` makes a few steps, then waits to be killed. `resume` writes the seconds from its first line
to its first step to FOLDER/restarted, and detaches. As of benchmarks.workers.gpu, it can be tried
on the simulated driver.
"""

from __future__ import annotations

import time

BEGIN_S = time.perf_counter()

import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
from torch import nn  # noqa: E402

from benchmarks.workers.gpu import DEVICE, wait_for_device  # noqa: E402

JOB = "gpu-restart"
STEPS = 3
MOMENTS = 2
"""What AdamW keeps beside each weight."""


def main() -> None:
    folder, width, layers, how = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    os.environ["PARAMD_ARENA"] = "device"
    stages = {"import torch": time.perf_counter() - BEGIN_S}
    # Without values of its own, as scripts do that load them: they would only take time.
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    model.to_empty(device=DEVICE)
    if how == "train":
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    import paramd

    begin_s = time.perf_counter()
    stages["build the model"] = begin_s - BEGIN_S - stages["import torch"]
    attachment = paramd.attach(model, optimizer, job=JOB, resume="auto")
    stages["paramd.attach"] = time.perf_counter() - begin_s
    resumed = attachment.resumed
    step(model, optimizer, width)
    until_step_s = time.perf_counter() - BEGIN_S
    if how == "train":
        for _ in range(STEPS):
            step(model, optimizer, width)
        # The record of the last step is complete when training goes on.
        model(torch.randn(4, width, device=DEVICE))
        wait_for_device()
        (folder / "trained").touch()
        time.sleep(600)
        return
    weights = sum(parameter.nbytes for parameter in model.parameters())
    told = {
        "state_bytes": weights * (1 + MOMENTS),
        "resumed": resumed.how if resumed is not None else "not at all",
        "until_step_s": until_step_s,
        "stages": stages,
    }
    attachment.detach()
    (folder / "restarted").write_text(json.dumps(told))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, width: int) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, width, device=DEVICE)).square().mean().backward()
    optimizer.step()
    wait_for_device()


if __name__ == "__main__":
    main()
