"""What a user reads of a real training that freezes some of its weights and averages others."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import paramd
from paramd.cli.main import main
from paramd.errors import ConflictError, ParamdError
from paramd.mesh.mesh import Mesh
from tests.launch import Ranks, start_ranks
from tests.multiprocess.workers.standins import AVERAGE, Model

WORKER = "tests.multiprocess.workers.standins"


@contextmanager
def training(
    folder: Path, monkeypatch: pytest.MonkeyPatch, world_size: int = 1, *options: str
) -> Iterator[tuple[Ranks, Mesh]]:
    arguments = ["--folder", str(folder), *options]
    with start_ranks(WORKER, world_size, args=arguments) as ranks:
        ranks.wait_for_text("attached", rank=0)
        monkeypatch.setenv("PARAMD_STATE_DIR", str(ranks.state_dir))
        with paramd.connect(job="standins", timeout=20) as mesh:
            yield ranks, mesh
        for name in ("back", "stop"):
            (folder / name).touch()
        ended = ranks.wait(timeout_s=60)
        assert [one.returncode for one in ended] == [0] * world_size, ended


@pytest.mark.in_turns
def test_what_is_summoned_loads_frozen_is_listed_and_averaged_is_refused_or_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.setenv("PARAMD_DESTINATIONS", json.dumps({"checkpoints": str(tmp_path / "out")}))
    with training(tmp_path, monkeypatch, 2) as (ranks, mesh):
        found = mesh.summon("*", buffers=True)
        plain = found.state_dict()
        assert type(plain) is dict
        assert plain["head.weight"] is plain["embed.weight"] is found["embed.weight"]
        model = Model()
        model.load_state_dict(plain, strict=True)
        assert torch.equal(model.head.weight, torch.full((8, 4), float(found.step)))
        assert torch.equal(model.state_dict()["norm.running_var"], plain["norm.running_var"])

        frozen = {"adapter.weight", "adapter.bias"}
        assert {row.name for row in mesh.params(trainable=False)} == frozen
        assert {row.name for row in mesh.params(buffers=True, trainable=True)} == {
            "embed.weight",
            "norm.weight",
            "norm.bias",
        }
        shown = {row.name: row.trainable for row in mesh.params(buffers=True)}
        assert shown["norm.running_mean"] is None
        assert main(["params", "--frozen", "-o", "name"]) == 0
        assert set(capsys.readouterr().out.split()) == frozen
        averages_are_refused_by_their_label_or_told_with_it(tmp_path, ranks, mesh)


def averages_are_refused_by_their_label_or_told_with_it(
    tmp_path: Path, ranks: Ranks, mesh: Mesh
) -> None:
    earlier = mesh.summon("*")
    (tmp_path / "swap").touch()
    shown = ranks.wait_for_text("swapped", rank=0)
    ranks.wait_for_text("swapped", rank=1)
    step = int(shown.split("swapped")[1].split()[0])

    for refused in (
        lambda: mesh.summon("*"),
        lambda: mesh.summon("*", transport="grpc", timeout=1.0),
        lambda: mesh.summon("*", buffers=True),
        lambda: mesh.stats("embed.*"),
    ):
        with pytest.raises(ConflictError, match="'ema'"):
            refused()
    accepted = mesh.summon("*", unsettled=True)
    assert (accepted.step, accepted.unsettled, accepted.label) == (step, True, "ema")
    assert torch.equal(accepted["head.weight"], torch.full((8, 4), AVERAGE))
    assert "'ema'" in repr(accepted)
    stats = mesh.stats("embed.weight", unsettled=True)
    assert (stats.label, stats[0].summary.max) == ("ema", AVERAGE)
    assert any("'ema'" in row["reason"] for row in degraded(mesh))

    export = mesh.export("checkpoints/ema", include=("parameters",))
    with pytest.raises(ParamdError, match="'ema'"):
        export.wait(60)
    assert list((tmp_path / "out").iterdir()) == []
    with pytest.raises(ConflictError, match="'ema'"):
        mesh.download(tmp_path / "all.safetensors", timeout=20)
    assert not (tmp_path / "all.safetensors").exists()

    (tmp_path / "back").touch()
    after = mesh.summon("*")
    assert after.label == ""
    assert after.step >= step > earlier.step
    assert torch.equal(after["head.weight"], torch.full((8, 4), float(after.step)))
    until = after.step + 5
    while (later := mesh.summon("*", buffers=True)).step < until:
        assert torch.equal(later["head.weight"], torch.full((8, 4), float(later.step)))
    assert not later.unsettled
    assert degraded(mesh) == []


def test_a_block_that_raised_does_not_end_the_training_or_lend_its_values_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with training(tmp_path, monkeypatch, 1, "--raises") as (ranks, mesh):
        (tmp_path / "swap").touch()
        ranks.wait_for_text("swapped", rank=0)
        (tmp_path / "back").touch()
        found = mesh.summon("*")
        until = found.step + 5
        while (found := mesh.summon("*")).step < until:
            assert torch.equal(found["head.weight"], torch.full((8, 4), float(found.step)))


def degraded(mesh: Mesh) -> list[dict[str, str]]:
    """Ranks that need attention, by the job's status."""
    return [{"reason": row.reason} for row in mesh.status() if row.reason]
