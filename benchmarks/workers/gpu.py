"""One training on a CUDA device, bare, then attached: step times, stalls and rates, as JSON.

    python -m benchmarks.workers.gpu WIDTH LAYERS SECONDS

With PARAMD_GPU_TESTS_ON=cpu and a simulated driver the program itself can be tried; its numbers
mean nothing then.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import threading
import time

import torch
from torch import nn

import paramd

DEVICE = os.environ.get("PARAMD_GPU_TESTS_ON", "cuda")
JOB = "gpu"
READ_EVERY_S = 10.0
PINNED_BYTES = 256 << 20


def main() -> None:
    width, layers, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    os.environ["PARAMD_ARENA"] = "device"
    os.environ["PARAMD_STATE_DIR"] = tempfile.mkdtemp(prefix="paramd-gpu-")
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, layers).to(DEVICE, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = torch.randn(4, 128, width, device=DEVICE, dtype=torch.bfloat16)
    train(model, optimizer, batch, seconds / 4)
    bare = train(model, optimizer, batch, seconds)
    attachment = paramd.attach(model, optimizer, job=JOB)
    idle = train(model, optimizer, batch, seconds)
    reads: list[float] = []
    stop = threading.Event()
    every_s = min(READ_EVERY_S, seconds)
    reader = threading.Thread(target=read, args=(stop, reads, every_s))
    reader.start()
    read_from = train(model, optimizer, batch, max(seconds, 2 * every_s))
    stop.set()
    reader.join()
    frames, stop = Frames(), threading.Event()
    follower = threading.Thread(target=frames.follow, args=(stop,))
    follower.start()
    with_statistics = train(model, optimizer, batch, seconds)
    stop.set()
    while follower.is_alive():
        # A frame comes of a step.
        train(model, optimizer, batch, 0.0)
    size_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    answer = {
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "simulated",
        "parameter_bytes": size_bytes,
        "bare_s": bare,
        "idle_s": idle,
        "read_s": read_from,
        "statistics_s": with_statistics,
        "statistics_frames": frames.count,
        "summon_s": statistics.median(reads),
        "longest_stall_s": attachment.stalls().longest_s,
        "pinned_bytes_per_s": pinned_rate(),
    }
    attachment.detach()
    print(json.dumps(answer))


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor, seconds: float
) -> float:
    """Median seconds of a step."""
    times: list[float] = []
    until_s = time.perf_counter() + seconds
    while not times or time.perf_counter() < until_s:
        begin_s = time.perf_counter()
        optimizer.zero_grad()
        model(batch).float().square().mean().backward()
        optimizer.step()
        wait_for_device()
        times.append(time.perf_counter() - begin_s)
    return statistics.median(times)


class Frames:
    """A reader of gradient statistics, of each step that it can follow."""

    def __init__(self) -> None:
        self.count = 0

    def follow(self, stop: threading.Event) -> None:
        with paramd.connect(job=JOB) as mesh:
            for _ in mesh.grads("*", kind="stats"):
                self.count += 1
                if stop.is_set():
                    return


def read(stop: threading.Event, reads: list[float], every_s: float) -> None:
    with paramd.connect(job=JOB) as mesh:
        while True:
            begin_s = time.perf_counter()
            mesh.summon("*", timeout=60)
            reads.append(time.perf_counter() - begin_s)
            if stop.wait(every_s):
                return


def pinned_rate() -> float:
    """Bytes a second from the device into page-locked memory."""
    source = torch.empty(PINNED_BYTES, dtype=torch.uint8, device=DEVICE)
    target = torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=DEVICE == "cuda")
    target.copy_(source)
    wait_for_device()
    begin_s = time.perf_counter()
    target.copy_(source, non_blocking=True)
    wait_for_device()
    return PINNED_BYTES / (time.perf_counter() - begin_s)


def wait_for_device() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
