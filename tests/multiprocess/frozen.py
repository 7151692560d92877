"""A training that changes nothing, to be edited: whatever it holds was written by edits."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from paramd.mesh.edits.calls import Edit
from paramd.mesh.mesh import Mesh
from paramd.mesh.reading.stream import Transport
from tests.launch import Ranks, start_ranks
from tests.multiprocess.striking import logs

WORKER = "tests.multiprocess.workers.frozen"


@contextmanager
def frozen(
    folder: Path, kind: str, world_size: int, *options: str, ends_well: bool = True
) -> Iterator[Ranks]:
    """A trainer that changes nothing. Within the block it runs; afterwards it has ended well."""
    stop, faults = folder / "stop", folder / "faults"
    faults.mkdir(exist_ok=True)
    arguments = ["--kind", kind, "--stop", str(stop), *options]
    environment = {"PARAMD_FAULTS_DIR": str(faults), "PARAMD_TRAINER_FAULTS_DIR": str(faults)}
    with start_ranks(WORKER, world_size, args=arguments, env=environment) as ranks:
        try:
            ranks.wait_for_text("attached", rank=0)
            yield ranks
        except BaseException:
            print(ranks.outputs(), logs(ranks), sep="\n")
            raise
        if not ends_well:
            return
        stop.touch()
        ranks.end_well()


def edit_to(mesh: Mesh, value: int, *, timeout_s: float = 60.0) -> Edit:
    """Sets everything to a value, in turn without data and with it."""
    if value % 2:
        return mesh.edit("*", fill=float(value), timeout=timeout_s)
    tensors = {
        info.name: torch.full(info.shape, value, dtype=torch.float32) for info in mesh.params("*")
    }
    transport: Transport = "grpc" if value % 4 else "auto"
    return mesh.edit(set=tensors, transport=transport, timeout=timeout_s)
