"""A training whose vocabulary grows and whose layers are pruned, while a client reads it."""

import argparse
import copy
import threading
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import paramd
from paramd import places
from paramd.errors import ConflictError, ParamdError, UsageError
from paramd.memory.control_page import Word

JOB = "refreshed"
ROWS, WIDTH = 6, 4
PATIENCE_S = 20.0


class Model(nn.Module):
    def __init__(self, rows: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.embed(tokens)
        for layer in self.layers:
            found = layer(found)
        return found


class Reader(threading.Thread):
    """Reads in a loop, and keeps what it saw."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seen: list[tuple[int, int, dict[str, torch.Tensor]]] = []
        self.error = ""
        self.stop = threading.Event()
        self.changed = threading.Condition()

    def run(self) -> None:
        with paramd.connect(JOB) as mesh:
            while not self.stop.is_set() and not self.error:
                try:
                    found = mesh.summon("*", timeout=PATIENCE_S)
                except ParamdError as error:
                    self.error = repr(error)
                with self.changed:
                    self.seen.append((found.incarnation, found.step, dict(found)))
                    self.changed.notify_all()

    def await_state(self, run: int, step: int) -> None:
        """Wait until it has read this step of this run, or a later one."""
        with self.changed:
            self.changed.wait_for(
                lambda: self.error or (self.seen and self.seen[-1][:2] >= (run, step)), PATIENCE_S
            )
        assert not self.error, self.error
        assert self.seen[-1][:2] >= (run, step), self.seen[-1][:2]


@dataclass
class Training:
    kind: str
    rank: int
    inner: Model
    model: nn.Module = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    attachment: Any = None
    truth: dict[tuple[int, int], dict[str, torch.Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind == "fsdp2":
            fully_shard(self.inner)
            self.model = self.inner
        else:
            self.model = nn.parallel.DistributedDataParallel(self.inner)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def change(self, rows: int) -> None:
        """Add rows, and prune a layer in the middle."""
        inner = self.inner
        if self.kind == "fsdp2":
            inner = Model(rows, len(inner.layers) - 1)
        else:
            grown = nn.Embedding(rows, WIDTH)
            with torch.no_grad():
                grown.weight[: inner.embed.num_embeddings] = inner.embed.weight
            inner.embed = grown
            del inner.layers[1]
        self.inner = inner
        self.__post_init__()

    def helpers(self) -> list[psutil.Process]:
        """This rank's sidecar and, on rank 0, the control plane."""
        pids = [self.attachment._page[Word.SIDECAR_PID]]
        if self.rank == 0:
            pids.append(places.read_endpoint(JOB).pid)
        return [psutil.Process(pid) for pid in pids]

    def note(self) -> None:
        """Keep the right values of this step."""
        full = {}
        for name, one in self.inner.named_parameters():
            value = one.full_tensor() if isinstance(one, DTensor) else one
            full[name] = value.detach().clone()
        self.truth[self.attachment.incarnation, self.attachment.step] = full

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.model(torch.randint(0, ROWS, (8,))).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.note()


def refused(training: Training) -> None:
    """Wrong on one rank, it is refused on all, which stay attached as they were."""
    attachment, run = training.attachment, training.attachment.incarnation
    wrong = nn.Linear(2, 2) if training.rank == 1 else training.model
    with pytest.raises(UsageError, match="updates no parameter"):
        attachment.refresh(optimizer=torch.optim.SGD(wrong.parameters()))
    with attachment.update(), pytest.raises(ConflictError, match="inside an update"):
        attachment.refresh()
    training.note()
    assert attachment.incarnation == run


def refresh(training: Training, rows: int) -> None:
    attachment, before = training.attachment, training.helpers()
    run, step, url = attachment.incarnation, attachment.step, attachment.url
    training.change(rows)
    attachment.refresh(training.model, training.optimizer)
    assert (attachment.incarnation, attachment.step) == (run + 1, step)
    assert attachment.url == url
    assert training.helpers() == before
    training.note()
    training.train(3)
    assert attachment.step == step + 3


def refresh_unchanged(training: Training) -> None:
    """The optimizer's state stays as it is."""
    before = copy.deepcopy(training.optimizer.state_dict())
    training.attachment.refresh()
    after = training.optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for index, state in before["state"].items():
        for name, value in state.items():
            one, other = after["state"][index][name], value
            if isinstance(one, DTensor):
                one, other = one.to_local(), value.to_local()
            assert torch.equal(one, other), (index, name)
    training.note()
    training.train(2)


def fails(training: Training) -> None:
    """What fails later leaves no rank attached, and training goes on."""
    attachment, step = training.attachment, training.attachment.step
    helpers = training.helpers()
    odd = Model(ROWS + training.rank, 1)
    with pytest.raises(ParamdError):
        attachment.refresh(odd, torch.optim.SGD(odd.parameters()))
    assert "detached" in repr(attachment)
    _, alive = psutil.wait_procs(helpers, PATIENCE_S)
    assert not alive
    with pytest.raises(ConflictError, match="has ended"):
        attachment.refresh()
    training.train(1)
    assert attachment.step == step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", required=True)
    parser.add_argument("--resume", required=True)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    training = Training(options.kind, rank, Model(ROWS, 3))
    training.attachment = attachment = paramd.attach(
        training.model, training.optimizer, job=JOB, resume=options.resume
    )
    reader = Reader()

    def read_on() -> None:
        if rank == 0:
            reader.await_state(attachment.incarnation, attachment.step)
        dist.barrier()

    training.note()
    training.train(3)
    if rank == 0:
        reader.start()
    read_on()
    refused(training)
    training.train(1)
    read_on()
    refresh(training, ROWS + 3)
    read_on()
    refresh(training, ROWS + 4)
    read_on()
    refresh_unchanged(training)
    read_on()
    if options.kind == "ddp":
        # They come back at their addresses, in the run that it is now.
        for helper in training.helpers():
            helper.kill()
        training.train(1)
        read_on()
    if rank == 0:
        reader.stop.set()
        reader.join()
        for run, step, found in reader.seen:
            expected = training.truth[run, step]
            assert found.keys() == expected.keys(), (run, step, sorted(found))
            assert all(torch.equal(found[name], expected[name]) for name in found), (run, step)
    dist.barrier()
    fails(training)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
