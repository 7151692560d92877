"""One rank of an attached FSDP2 model of any size; steps are empty unless asked for."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard

import paramd
from benchmarks.ranks import WARM_HEAP, obey
from paramd.trainer.attaching.attachment import Attachment
from tests.ending import end

JOB = "bench"


class ModelRank:
    """What the rank has been told to build."""

    def __init__(self) -> None:
        self._model: nn.Module = nn.Module()
        self._attachment: Attachment | None = None
        self._full: dict[str, torch.Tensor] = {}
        self._warm = bytearray()

    def build(self, width: int, layers: int) -> int:
        """Layers of `width` x `width` float32 without bias; returns their bytes."""
        torch.manual_seed(0)
        self._model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        for layer in self._model:
            fully_shard(layer)
        fully_shard(self._model)
        return 4 * sum(parameter.numel() for parameter in self._model.parameters())

    def attach(self) -> list[int]:
        """Returns the pids of the helper processes: the sidecar, on rank 0 the control plane."""
        self._attachment = paramd.attach(self._model, None, job=JOB)
        return [child.pid for child in psutil.Process().children()]

    def advance(self) -> int:
        """One update that changes nothing; returns the step."""
        assert self._attachment is not None
        with self._attachment.update():
            pass
        return self._attachment.step

    def pace(self, step_s: float, steps: int) -> int:
        """Steps that change nothing, at a steady pace; returns the last one."""
        assert self._attachment is not None
        due_s = time.perf_counter()
        for _ in range(steps):
            self.advance()
            due_s += step_s
            time.sleep(max(0.0, due_s - time.perf_counter()))
        return self._attachment.step

    def pace_until(self, step_s: float, edits: int) -> int:
        """Such steps until so many more edits have been applied; returns the last one."""
        assert self._attachment is not None
        wanted = self._attachment.edits + edits
        while self._attachment.edits < wanted:
            self.advance()
            time.sleep(step_s)
        return self._attachment.step

    def scatter(self) -> float:
        """The peer of a write-back: rank 0 has the full state, all ranks load it. Seconds."""
        if not self._full and dist.get_rank() == 0:
            self._full = {
                f"{number}.weight": torch.zeros(layer.weight.shape)
                for number, layer in enumerate(self._model)
            }
        dist.barrier()
        begin_s = time.perf_counter()
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        # It replaces the tensors of the dict it is given.
        set_model_state_dict(self._model, dict(self._full), options=options)
        return time.perf_counter() - begin_s

    def edit_unit(self) -> float:
        """The peer of a small edit: unshard one unit, change it, reshard it. Seconds."""
        dist.barrier()
        begin_s = time.perf_counter()
        with paramd.summon_full_params(self._model[0]) as params, torch.no_grad():
            next(iter(params.values()))[0:64].fill_(1.0)
        return time.perf_counter() - begin_s

    def gather(self) -> float:
        """The peer: every rank takes part, rank 0 has the full state on the CPU. Seconds."""
        dist.barrier()
        begin_s = time.perf_counter()
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(self._model, options=options)
        seconds = time.perf_counter() - begin_s
        if dist.get_rank() == 0:
            first = state["0.weight"]
            assert isinstance(first, torch.Tensor)
            assert first.shape[0] == first.shape[1]
        return seconds

    def raw_write(self, folder: str, sizes: list[int]) -> float:
        """Writes warm memory into a file of its own, synced; sizes by rank, maybe 0. Seconds."""
        size_bytes = sizes[dist.get_rank()]
        if len(self._warm) < size_bytes:
            self._warm = bytearray(os.urandom(1 << 20)) * (size_bytes >> 20)
        dist.barrier()
        begin_s = time.perf_counter()
        if size_bytes:
            view = memoryview(self._warm)[:size_bytes]
            with Path(folder, f"raw-{dist.get_rank()}").open("wb", buffering=0) as file:
                for begin in range(0, size_bytes, 8 << 20):
                    file.write(view[begin : begin + (8 << 20)])
                os.fsync(file.fileno())
        return time.perf_counter() - begin_s

    def dcp_save(self, folder: str) -> float:
        """The peer of a sharded export: DCP's `save`, which training waits for. Seconds."""
        dist.barrier()
        begin_s = time.perf_counter()
        dcp.save(get_model_state_dict(self._model), checkpoint_id=folder)
        return time.perf_counter() - begin_s

    def gather_save(self, path: str) -> float:
        """The peer of one file: rank 0 gathers everything and saves it. Seconds."""
        dist.barrier()
        begin_s = time.perf_counter()
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(self._model, options=options)
        if dist.get_rank() == 0:
            torch.save(state, path)
        dist.barrier()
        return time.perf_counter() - begin_s

    def stalls(self) -> list[float]:
        """Seconds that updates waited for copies: in all, and the longest."""
        assert self._attachment is not None
        found = self._attachment.stalls()
        return [found.total_s, found.longest_s]

    def detach(self) -> None:
        if self._attachment is not None:
            self._attachment.detach()


def main() -> None:
    for name in WARM_HEAP:
        # It has done its work here, and sidecars must run as they do for users.
        os.environ.pop(name, None)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    rank = ModelRank()
    commands: dict[str, Any] = {
        name: getattr(rank, name)
        for name in (
            "build",
            "attach",
            "advance",
            "pace",
            "pace_until",
            "scatter",
            "edit_unit",
            "gather",
            "raw_write",
            "dcp_save",
            "gather_save",
            "stalls",
        )
    }
    try:
        obey(commands)
    finally:
        rank.detach()
        dist.destroy_process_group()


if __name__ == "__main__":
    end(main)
