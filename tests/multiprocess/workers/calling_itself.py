"""A training whose own loop makes calls of a client: refused at once, or made right there."""

import argparse
import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import paramd
from paramd.errors import ConflictError, DeadlineError, ExhaustedError
from paramd.trainer.attaching.attachment import Attachment

JOB = "itself"
AT_ONCE_S = 20.0


def refused(call: Callable[[object], object], mesh: object) -> None:
    """The call is refused with what to call instead, long before its timeout of a minute."""
    began_s, said = time.monotonic(), "it was not refused"
    try:
        call(mesh)
    except ConflictError as error:
        said = str(error)
    assert "would wait for itself" in said, said
    assert time.monotonic() - began_s < AT_ONCE_S


async def read_async() -> None:
    async with await paramd.aio.connect(job=JOB) as mesh:
        await mesh.summon("*", buffers=True)


def ask(folder: Path) -> None:
    with paramd.connect(JOB) as mesh:
        refused(lambda m: mesh.edit("0.weight", mul=0.5), mesh)
        refused(lambda m: mesh.pause(), mesh)
        refused(lambda m: mesh.set_hyperparameters(lr=0.5), mesh)
        refused(lambda m: mesh.export("out/never").wait(), mesh)
        refused(lambda m: mesh.summon("*", buffers=True), mesh)
        refused(lambda m: mesh.download(folder / "f", buffers=True), mesh)
        refused(lambda m: next(iter(mesh.grads("*"))), mesh)
        refused(lambda m: asyncio.run(read_async()), mesh)
        # Needs no boundary: the state rests on all ranks.
        assert len(mesh.summon("*", timeout=AT_ONCE_S)) == 6
        # Applied as training goes on.
        edit = mesh.edit("0.bias", fill=3.0, wait=False)
        (folder / "edit").write_text(edit.id)


def cannot_begin(attachment: Attachment) -> None:
    """An export that rank 0 alone cannot begin: all ranks are told at once."""
    if attachment.rank == 0:
        # No thread can have a stack of that size.
        threading.stack_size(1 << 46)
    began_s, said = time.monotonic(), "it was exported"
    try:
        attachment.export("out/never")
    except ExhaustedError as error:
        said = str(error)
    finally:
        threading.stack_size(0)
    assert "rank 0 cannot start a thread" in said, said
    assert time.monotonic() - began_s < AT_ONCE_S


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    folder = parser.parse_args().folder
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    replica = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(replica.parameters())
    attachment = paramd.attach(replica, optimizer, job=JOB)

    def train(steps: int) -> None:
        for _ in range(steps):
            replica(torch.randn(8, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    train(3)
    while rank == 0:
        with paramd.connect(JOB) as mesh:
            if all(row.phase != "unreachable" for row in mesh.status()):
                break
    dist.barrier()
    if rank == 0:
        ask(folder)
    dist.barrier()
    train(70)
    made = attachment.export("out/whole", timeout=60)
    assert (made.destination, made.step) == ("out/whole", attachment.step == 73 and 73)
    if rank == 0:
        found = load_file(folder / "out" / "whole" / "model.safetensors")
        for name, tensor in model.state_dict().items():
            assert torch.equal(found[name], tensor.detach()), name
        names = {path.name for path in (folder / "out" / "whole").iterdir()}
        assert any("optimizer" in name for name in names), names
        with paramd.connect(JOB) as mesh:
            edit = mesh.get_edit((folder / "edit").read_text())
            assert edit.state == "APPLIED", edit
    dist.barrier()
    # At the same boundary again, where nothing is pending; and in the middle of an accumulation.
    replica(torch.randn(8, 8)).square().mean().backward()
    assert attachment.export("out/again", include=["parameters"]).step == 73
    optimizer.step()
    with attachment.swapped_weights("ema"):
        said = "it was not refused"
        try:
            attachment.export("out/never")
        except ConflictError as error:
            said = str(error)
        assert "block of other weights" in said, said
    try:
        attachment.export("out/late", timeout=0.001)
    except DeadlineError:
        pass
    else:
        raise AssertionError("it was in time")
    cannot_begin(attachment)
    train(2)
    attachment.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
