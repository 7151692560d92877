"""What a client summons is what torch gathers at the same step, byte for byte, and training with
paramd attached is that without.

Every kind, at every world size, with sizes that nothing divides, in several dtypes.
"""

from pathlib import Path

import pytest
import torch

from paramd.layout.types import Box
from paramd.mesh.mesh import Mesh
from tests.launch import start_ranks
from tests.longer import sample, share
from tests.multiprocess.kinds import kinds_for
from tests.multiprocess.truth import (
    Tensors,
    assert_same_bytes,
    assert_slices_equal,
    assert_spectra_equal,
    assert_stats_equal,
    connect_to,
    read_truth,
    wait_until,
)

WORKER = "tests.multiprocess.workers.composite"
JOB = "composite"


# Two ranks are also in test_exports_kinds.py.
@pytest.mark.timeout(300)
@pytest.mark.parametrize("world_size", sample([1, 3, 4], [4]))
def test_every_kind_is_summoned_as_torch_gathers_it(world_size: int, tmp_path: Path) -> None:
    with start_ranks(WORKER, world_size, args=["--folder", str(tmp_path)]) as ranks:
        path = tmp_path / f"{JOB}.truth"
        wait_until(
            lambda: path.exists() or any(r.process.poll() is not None for r in ranks),
            "the truth is written",
            timeout_s=90,
        )
        assert path.exists(), ranks.outputs()
        step, truth = read_truth(path)
        assert {name.partition(".")[0] for name in truth} == {
            kind.name for kind in kinds_for(world_size)
        }
        with connect_to(ranks.state_dir, JOB) as mesh:
            compare(mesh, step, truth)
        (tmp_path / f"{JOB}.checked").touch()
        ranks.end_well(180)


def compare(mesh: Mesh, step: int, truth: Tensors) -> None:
    for transport in ("grpc", "same-host"):
        found = mesh.summon("*", transport=transport)  # type: ignore[arg-type]
        assert found.step == step
        assert_same_bytes(found, truth)
    assert_given_tensors_are_filled(mesh, truth)
    assert_cast_equal(mesh, truth)
    assert_views_equal(mesh, truth)
    assert_tied(mesh, truth)
    assert_stats_equal(mesh, truth, step)
    some = some_of_each_kind(truth)
    assert_spectra_equal(mesh, {name: some[name] for name in share(list(some), 4)})
    compared = assert_slices_equal(mesh, {name: some[name] for name in share(list(some), 2)})
    print(f"{len(truth)} tensors, {compared} slices, step {step}")


def some_of_each_kind(truth: Tensors) -> Tensors:
    """Every fourth tensor and all of the kinds that slice oddly."""
    odd = ("ddp-odd", "fsdp2-dims", "tp")
    return {
        name: tensor
        for index, (name, tensor) in enumerate(truth.items())
        if index % 4 == 0 or name.startswith(odd)
    }


def assert_given_tensors_are_filled(mesh: Mesh, truth: Tensors) -> None:
    into = {}
    for info in mesh.params("*"):
        # Tied names share their tensor.
        into |= dict.fromkeys(info.names, torch.empty_like(truth[info.name]))
    mesh.summon("*", into=into)
    assert_same_bytes(into, truth)


def assert_cast_equal(mesh: Mesh, truth: Tensors) -> None:
    found = mesh.summon("*", dtype=torch.float64)
    assert_same_bytes(found, {name: tensor.double() for name, tensor in truth.items()})


def assert_views_equal(mesh: Mesh, truth: Tensors) -> None:
    """Shards on the sidecars' own memory make up the whole."""
    with mesh.view("*") as view:
        found = {name: torch.empty_like(tensor) for name, tensor in truth.items()}
        for name, shards in view.items():
            for region, shard in shards:
                if isinstance(region, Box):
                    bounds = zip(region.begin, region.end, strict=True)
                    found[name][tuple(slice(b, e) for b, e in bounds)] = shard
                else:
                    found[name].view(-1)[region.begin : region.end] = shard
        del shards, shard
    assert_same_bytes(found, truth)


def assert_tied(mesh: Mesh, truth: Tensors) -> None:
    """A tied tensor has one entry with all its names; each name summons it."""
    tied = [info for info in mesh.params("*") if len(info.names) > 1]
    assert {name for info in tied for name in info.names} >= {"ddp.embed.weight", "ddp.head.weight"}
    for info in tied:
        found = mesh.summon(*info.names)
        assert sorted(found) == sorted(info.names)
        assert_same_bytes(found, {name: truth[name] for name in info.names})
