"""One flipped bit, in a parameter or optimizer state, is found in n steps and named; so is NaN."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from paramd.errors import NotFoundError
from paramd.mesh.insight.reports import Alert
from paramd.mesh.mesh import Mesh
from tests.launch import Ranks, start_ranks
from tests.longer import sample
from tests.multiprocess.frozen import edit_to, frozen
from tests.multiprocess.truth import connect_to, step_of, wait_until

WORKER = "tests.multiprocess.workers.insight"
JOB = "insight"
EVERY = 20
REPLAYED = [("fsdp2", "adamw"), ("ddp", "sgd")]
SLACK = 30
"""Steps of 30 ms that pass while digests are made and compared on a busy machine; requests are made
three ahead, and further where one was missed."""


@contextmanager
def training(folder: Path, world_size: int, *options: str) -> Iterator[tuple[Mesh, Ranks]]:
    """Ranks that train, all of whose replicas are compared; they end when the block does."""
    state_dir = folder / "state"
    env = {
        "PARAMD_ALERTS": json.dumps({"watch": False, "compare_steps": EVERY, "sample_bytes": 2000})
    }
    args = [str(folder), *options]
    with start_ranks(WORKER, world_size, args=args, env=env, state_dir=state_dir) as ranks:
        try:
            wait_until((folder / "moments-0").exists, "it trains")
            with connect_to(state_dir, JOB) as mesh:
                yield mesh, ranks
            (folder / "end").touch()
            assert {one.returncode for one in ranks.wait(timeout_s=60.0)} == {0}
        except BaseException:
            print(ranks.outputs())
            raise


def after(mesh: Mesh, steps: int) -> None:
    begun = step_of(mesh)
    wait_until(lambda: step_of(mesh) >= begun + steps, "it goes on")


def flip(folder: Path, rank: int, name: str, key: str, element: int, bit: int) -> int:
    """The step whose update the bit was flipped in."""
    part = folder / f"part-{rank}"
    part.write_text(json.dumps({"name": name, "key": key, "element": element, "bit": bit}))
    part.rename(folder / f"flip-{rank}")
    done = folder / f"flipped-{rank}"
    wait_until(done.exists, "the flip")
    wait_until(lambda: bool(done.read_text()), "the step")
    return int(done.read_text())


def step_at(folder: Path, time_s: float) -> int:
    """The last step that was finished then."""
    lines = [json.loads(line) for line in (folder / "moments-0").read_text().splitlines()[:-1]]
    return max(int(line["step"]) for line in lines if line["time_s"] <= time_s)


def drifts(mesh: Mesh) -> dict[str, Alert]:
    return {one.subject: one for one in mesh.alerts(state="firing") if one.rule == "replica-drift"}


@pytest.mark.in_turns
@pytest.mark.timeout(180)
def test_a_flipped_bit_is_found_within_n_steps_wherever_it_is(tmp_path: Path) -> None:
    with training(tmp_path, 3, "--pause-s", "0.03") as (mesh, _):
        after(mesh, 2 * EVERY)
        assert drifts(mesh) == {}
        # A mean of gradients never mends a state: the damage stays, and passes to the weight.
        step = flip(tmp_path, 2, "up.weight", "exp_avg_sq", 40, 3)
        wait_until(lambda: "exp_avg_sq of up.weight" in drifts(mesh), "the state is named")
        found = drifts(mesh)["exp_avg_sq of up.weight"]
        assert found.ranks == (2,)
        assert "rank 2 differs from 2 equal replicas" in found.reason
        assert "of element 40 of its piece" in found.reason
        assert step <= step_at(tmp_path, found.first_seen_s) <= step + EVERY + SLACK
        step = flip(tmp_path, 1, "head.bias", "", 2, 11)
        wait_until(lambda: "head.bias" in drifts(mesh), "the parameter is named")
        wait_until(
            lambda: "head.bias" in (mesh.summon("*").replicas_differ or ()), "answers say so"
        )
        found = drifts(mesh)["head.bias"]
        assert 1 in found.ranks
        assert step <= step_at(tmp_path, found.first_seen_s) <= step + EVERY + SLACK


@pytest.mark.in_turns
@pytest.mark.timeout(180)
def test_in_hybrid_sharding_both_replicas_of_the_shard_are_named(tmp_path: Path) -> None:
    with training(tmp_path, 4, "--kind", "hsdp", "--pause-s", "0.03") as (mesh, _):
        after(mesh, 2 * EVERY)
        assert drifts(mesh) == {}
        flip(tmp_path, 3, "up.weight", "", 2, 30)
        wait_until(lambda: "up.weight" in drifts(mesh), "the parameter is named")
        found = drifts(mesh)["up.weight"]
        assert found.ranks == (1, 3)
        assert "two cannot show which is wrong" in found.reason
        assert "of element 2 of its piece" in found.reason


@pytest.mark.in_turns
@pytest.mark.timeout(180)
def test_nan_is_told_with_its_tensor_until_it_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARAMD_ALERTS", json.dumps({"watch_share": 1, "stats_every_s": 0.5}))
    with frozen(tmp_path, "ddp", 2) as ranks, connect_to(ranks.state_dir, "frozen") as mesh:

        def told(state: str) -> dict[str, str]:
            found = mesh.alerts(state=state)
            return {one.name: one.reason for one in found if one.rule == "non-finite"}

        edit_to(mesh, 1)
        assert told("all") == {}
        mesh.edit("module.bias[0:1]", fill=float("nan"), allow_nonfinite=True)
        wait_until(lambda: "module.bias" in told("firing"), "it is named")
        assert "1 NaN and 0 infinite of 7 elements" in told("firing")["module.bias"]
        assert told("firing").keys() == {"module.bias"}
        edit_to(mesh, 3)
        wait_until(lambda: "module.bias" in told("resolved"), "it is over")
        assert told("firing") == {}


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("kind", "optimizer"), sample(REPLAYED, REPLAYED[:1]))
def test_an_update_made_again_is_the_same_and_a_flipped_bit_is_named(
    kind: str, optimizer: str, tmp_path: Path
) -> None:
    options = ["--kind", kind, "--optimizer", optimizer, "--pause-s", "0.03"]
    with training(tmp_path, 2, *options) as (mesh, _):
        for rank in (0, 1):
            found = mesh.verify(rank=rank)
            assert found.clean, found
            assert {row.name for row in found} >= {"up.weight", "head.bias"}
            keys = {"adamw": {"", "exp_avg", "exp_avg_sq"}, "sgd": {"", "momentum_buffer"}}
            assert {row.key for row in found} == keys[optimizer]
            assert "bit-identical" in found.summary()
        only = mesh.verify("head.*")
        assert {row.name for row in only} == {"head.weight", "head.bias"}
        with pytest.raises(NotFoundError, match="ranks 0 to 1"):
            mesh.verify(rank=5)
        if optimizer == "adamw":
            moments_and_rates_are_the_trainers(mesh, tmp_path)
        planted(mesh, tmp_path, optimizer)
        changed_by_the_script(mesh, tmp_path, optimizer)
        (tmp_path / "changes").unlink()
        (tmp_path / "flip-each-1").unlink()
        set_right_before_the_update(mesh, tmp_path)


def set_right_before_the_update(mesh: Mesh, folder: Path) -> None:
    """A learning rate that no record has: what differs then proves nothing."""
    late = folder / "late-lr"
    part = folder / "part"
    part.write_text("yes")
    part.rename(late)
    after(mesh, 3)
    found = mesh.verify(rank=1)
    assert not found.differing, found
    assert "not proven: the script set hyper-parameters" in found.summary()
    late.unlink()
    after(mesh, 3)
    assert mesh.verify(rank=1).clean


def changed_by_the_script(mesh: Mesh, folder: Path, optimizer: str) -> None:
    """That is no damage, and is told; damage to what the script leaves alone still is."""
    changes = folder / "changes"
    for when in ("after", "after, by data"):
        part = folder / "part"
        part.write_text(when)
        part.rename(changes)
        after(mesh, 3)
        found = mesh.verify(rank=1)
        assert not found.differing, (when, found)
        (why,) = {row.refused for row in found if not row.key}
        assert "before training went on" in why
        assert why in found.summary()
    changes.write_text("after")
    key = {"adamw": "exp_avg", "sgd": "momentum_buffer"}[optimizer]
    order = {"name": "up.weight", "key": key, "element": 7, "bit": 2}
    (folder / "flip-each-1").write_text(json.dumps(order))
    wait_until((folder / "flipped-1").exists, "the flip")
    (row,) = mesh.verify(rank=1).differing
    assert (row.name, row.key, row.element) == ("up.weight", key, 7)


def moments_and_rates_are_the_trainers(mesh: Mesh, folder: Path) -> None:
    """Second moments and effective learning rates, as the sidecars read them in shared memory."""
    found = mesh.updates()
    assert found.moments_missing == ""
    assert len(found) == 6
    for row in found:
        said = [moments_at(folder, rank, row.step) for rank in (0, 1)]
        # Shards add up.
        total, squares, numel = (sum(one[row.name][i] for one in said) for i in range(3))
        assert row.numel == numel
        assert row.moment_rms == pytest.approx(math.sqrt(squares / numel), rel=1e-6)
        corrected = total / numel / (1 - 0.999**row.step)
        expected = said[0]["lr"] / (math.sqrt(corrected) + 1e-8)
        assert row.effective_lr == pytest.approx(expected, rel=1e-6)


def moments_at(folder: Path, rank: int, step: int) -> dict[str, Any]:
    """What a rank wrote of that step."""
    found: list[dict[str, Any]] = []

    def written() -> bool:
        lines = (folder / f"moments-{rank}").read_text().splitlines(keepends=True)
        found[:] = [
            one for line in lines if line[-1:] == "\n" and (one := json.loads(line))["step"] == step
        ]
        return bool(found)

    wait_until(written, f"rank {rank} has written step {step}")
    return found[0]


def planted(mesh: Mesh, folder: Path, optimizer: str) -> None:
    """A bit is flipped in one update after the other, so that the captured one has it."""
    key = {"adamw": "exp_avg", "sgd": "momentum_buffer"}[optimizer]
    for flipped in ("", key):
        (folder / "flip-each-1").write_text(
            json.dumps({"name": "up.weight", "key": flipped, "element": 7, "bit": 2})
        )
        wait_until((folder / "flipped-1").exists, "the flip")
        found = mesh.verify(rank=1)
        (folder / "flip-each-1").unlink()
        (folder / "flipped-1").unlink()
        (row,) = found.differing
        assert (row.name, row.key, row.differing, row.element, row.bits) == (
            "up.weight", flipped, 1, 7, (2,)
        )  # fmt: skip
        assert not found.clean
        assert "is wrong: " in found.summary()
        assert mesh.verify(rank=0).clean
        after(mesh, 3)
        assert mesh.verify(rank=1).clean
