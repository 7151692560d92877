"""A training that is killed and started again goes on from memory and computes the same bits."""

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

import paramd
from paramd.memory import handover
from tests.launch import Ranks, run_ranks, start_ranks
from tests.leaks import open_files
from tests.longer import busy, sample, share, times, wait_until

WORKER = "tests.multiprocess.workers.resuming"
STEPS = 30
DEADLINE_S = 90.0
LONG = ("--steps", "200")
"""For a training that must not end while it is exported."""

KINDS = {
    "plain": (1, "adamw"), "ddp": (2, "adamw"), "fsdp1": (2, "adafactor"), "fsdp1-flat": (2, "sgd"),
    "fsdp2": (2, "adamw"), "hsdp": (2, "sgd"), "tp-fsdp2": (2, "adamw"),
}  # fmt: skip


class Life:
    """One job through its starts. The sidecars live until the test ends."""

    def __init__(self, folder: Path, kind: str, stack: ExitStack, *options: str) -> None:
        self.folder = folder / "life"
        self.folder.mkdir()
        self.kind = kind
        self.world_size, self.optimizer = KINDS[kind]
        self.state = folder / "state"
        self._stack = stack
        self._options = options

    def start(
        self, *options: str, world_size: int | None = None, env: dict[str, str] | None = None
    ) -> Ranks:
        args = [str(self.folder), "--kind", self.kind, "--optimizer", self.optimizer]
        world = world_size if world_size is not None else self.world_size
        return self._stack.enter_context(
            start_ranks(
                WORKER,
                world,
                args=[*args, "--steps", str(STEPS), *self._options, *options],
                state_dir=self.state,
                env=env,
            )
        )

    def struck(self, rank: int, point: str, step: int) -> None:
        """One start that ends when a rank kills itself there; the others are killed then."""
        (self.folder / f"die-{rank}").write_text(f"{point} {step}")
        # Else a busy machine takes them more rarely.
        ranks = self.start("--pause-s", "0.005", env={"PARAMD_STANDING_EVERY": "10"})
        wait_for(lambda: ranks[rank].process.poll() == -signal.SIGKILL, ranks)
        kill(ranks)

    def await_steps(self, ranks: Ranks) -> None:
        """Wait until a rank has made a step, or has ended."""
        before = self.at()
        wait_for(lambda: self.at() != before or any(r.process.poll() for r in ranks), ranks)

    def traces(self) -> list[list[tuple[int, dict[str, str]]]]:
        """By rank, step and digests of each pass of the loop."""
        return [
            [json.loads(line) for line in self._lines(f"trace-{rank}")]
            for rank in range(self.world_size)
        ]

    def at(self) -> list[str]:
        paths = [self.folder / f"at-{rank}" for rank in range(self.world_size)]
        return [path.read_text() if path.exists() else "" for path in paths]

    def ended(self) -> Ranks:
        """One start that trains to the end."""
        ranks = self.start()
        ranks.end_well(DEADLINE_S)
        return ranks

    def starts(self) -> list[list[dict[str, Any] | None]]:
        """By rank, how each start was resumed."""
        return [
            [json.loads(line) for line in self._lines(f"starts-{rank}")]
            for rank in range(self.world_size)
        ]

    def final(self) -> list[dict[str, str]]:
        """By rank, the digests at the end."""
        return [
            json.loads((self.folder / f"final-{rank}").read_text())
            for rank in range(self.world_size)
        ]

    def _lines(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def wait_for(condition: Any, ranks: Ranks) -> None:
    wait_until(condition, "in time", DEADLINE_S, ranks.outputs)


def kill(ranks: Ranks) -> None:
    for rank in ranks:
        if rank.process.poll() is None:
            rank.process.send_signal(signal.SIGKILL)
    wait_for(lambda: all(rank.process.poll() is not None for rank in ranks), ranks)


@cache
def undisturbed(kind: str, *more: str, steps: int = STEPS) -> list[dict[str, str]]:
    """The digests of a training without resume that nobody kills."""
    world_size, optimizer = KINDS[kind]
    options = ["--kind", kind, "--optimizer", optimizer, "--resume", "never", *more]
    with TemporaryDirectory() as calm:
        args = [calm, *options, "--steps", str(steps)]
        run_ranks(WORKER, world_size, args=args, timeout_s=90 + steps / 4)
        return [json.loads(Path(calm, f"final-{rank}").read_text()) for rank in range(world_size)]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", sample(list(KINDS), {"fsdp1-flat"}))
def test_killed_trainings_end_with_the_bits_of_one_that_was_not(
    tmp_path: Path, kind: str, stack: ExitStack
) -> None:
    life = Life(tmp_path, kind, stack)
    life.struck(0, "forward", 6)
    life.struck(life.world_size - 1, "update", 21)
    ends_undisturbed(life)


def ends_undisturbed(life: Life) -> None:
    """Killed at 6 and 21 it trains to the end: live, then from a snapshot, with the same bits."""
    life.ended()
    for started in life.starts():
        assert started[0] is None
        # Killed in the forward after a settled step: nothing is lost.
        assert started[1] == {"step": 6, "how": "live", "lost": 0}
        # Killed between an update and what goes with it: from the standing snapshot.
        assert started[2] is not None
        assert (started[2]["how"], started[2]["step"] >= 20) == ("snapshot", True)
    assert life.final() == undisturbed(life.kind)


@pytest.mark.in_turns
@pytest.mark.timeout(400)
def test_a_script_that_says_where_its_loop_ends_loses_nothing_there(
    tmp_path: Path, stack: ExitStack
) -> None:
    """And while the former trainer lives, nobody takes its memory."""
    life = Life(tmp_path, "plain", stack, "--explicit")
    (life.folder / "die-0").write_text("kept 20")
    first = life.start("--pause-s", "0.1")
    wait_for((life.folder / "at-0").exists, first)
    first[0].process.send_signal(signal.SIGSTOP)
    (second,) = life.start().wait(timeout_s=DEADLINE_S, stop_on_failure=False)
    assert second.returncode == 1
    assert f"still runs (pid {first[0].process.pid})" in second.stderr
    first[0].process.send_signal(signal.SIGCONT)
    wait_for(lambda: first[0].process.poll() == -signal.SIGKILL, first)
    life.ended()
    assert life.starts() == [[None, {"step": 21, "how": "live", "lost": 0}]]
    assert life.final() == undisturbed("plain", "--explicit")


@pytest.mark.in_turns
@pytest.mark.timeout(400)
def test_a_kill_while_it_resumes_changes_nothing(tmp_path: Path, stack: ExitStack) -> None:
    life = Life(tmp_path, "ddp", stack)
    life.struck(1, "forward", 5)
    life.struck(0, "restore", 0)
    life.struck(1, "forward", 5)
    life.ended()
    live = {"step": 5, "how": "live", "lost": 0}
    # Rank 1 was killed wherever it was when rank 0 died. If its sidecar was just being given to
    # it, all go on from the snapshot of the same step.
    snapshot = live | {"how": "snapshot"}
    for first, second, third in life.starts():
        assert first is None
        assert second in (live, snapshot)
        assert third == live
    assert life.final() == undisturbed("ddp")


@pytest.mark.in_turns
@pytest.mark.timeout(400)
def test_a_kill_while_it_takes_a_snapshot_over_leaves_the_snapshot(
    tmp_path: Path, stack: ExitStack
) -> None:
    life = Life(tmp_path, "ddp", stack)
    life.struck(0, "inside-end", 15)
    # One rank's sidecar is given to the new start, the other's perhaps not yet: all goes on from
    # the same snapshot nevertheless.
    ranks = life.start(env={"PARAMD_TRAINER_FAULTS": "opened:kill"})
    wait_for(lambda: ranks[1].process.poll() == -signal.SIGKILL, ranks)
    kill(ranks)
    life.ended()
    for first, resumed in life.starts():
        assert first is None
        assert resumed is not None
        assert resumed["how"] == "snapshot"
    assert life.final() == undisturbed("ddp")


@pytest.mark.in_turns
@pytest.mark.timeout(400)
def test_steps_that_were_told_as_lost_are_not_told_again(tmp_path: Path, stack: ExitStack) -> None:
    life = Life(tmp_path, "ddp", stack)
    life.struck(0, "inside-end", 19)
    life.struck(1, "inside-end", 12)
    life.ended()
    for _, first, second in life.starts():
        assert first is not None
        assert second is not None
        assert (first["how"], second["how"]) == ("snapshot", "snapshot")
        # All that the second start had made, whatever the one before it had.
        assert first["step"] <= 12 < first["step"] + first["lost"]
        assert second["step"] + second["lost"] in (12, 13)
    assert life.final() == undisturbed("ddp")


@pytest.mark.timeout(400)
def test_memory_that_was_damaged_after_the_end_is_not_gone_on_in(
    tmp_path: Path, stack: ExitStack
) -> None:
    life = Life(tmp_path, "plain", stack)
    life.struck(0, "forward", 12)
    socket_path = tmp_path / "state" / "resuming" / "rank-0.sock"
    wait_until(lambda: offered(socket_path)["digests"], "digests")
    damage(socket_path, "memfd:paramd-optimizer")
    ranks = life.ended()
    (started,) = life.starts()
    assert started[1] is not None
    assert started[1]["how"] == "snapshot"
    assert "the live state of step 12 is damaged on rank 0" in ranks[0].stderr
    assert life.final() == undisturbed("plain")


def offered(socket_path: Path) -> dict[str, Any]:
    """What a sidecar offers to a successor."""
    with handover.connect(socket_path) as connection:
        handover.send(connection, {"op": "offer", "job": "resuming", "rank": 0})
        offer, descriptors = handover.receive(connection)
    for descriptor in descriptors:
        os.close(descriptor)
    return offer


def damage(socket_path: Path, name: str) -> None:
    """Change the first byte of a sidecar's memory."""
    with handover.connect(socket_path) as connection:
        pid = handover.check_peer(connection)
    for link, target in open_files(pid).items():
        if target.startswith(f"/{name}"):
            with link.open("r+b", buffering=0) as memory:
                (first,) = memory.read(1)
                memory.seek(0)
                memory.write(bytes([first ^ 0xFF]))
            return
    raise AssertionError(f"process {pid} has no {name}")


@pytest.mark.in_turns
@pytest.mark.timeout(400)
def test_torchrun_restarts_it_and_no_bit_changes(tmp_path: Path, stack: ExitStack) -> None:
    life = Life(tmp_path, "ddp", stack)
    (life.folder / "die-1").write_text("forward 6")
    torchrun = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "3"]
    worker = ["-m", WORKER, str(life.folder)]
    ranks = stack.enter_context(
        start_ranks(
            "torch.distributed.run",
            1,
            args=[*torchrun, *worker, "--kind", "ddp", "--steps", str(STEPS), "--pause-s", "0.01"],
            # Else gloo (torch 2.13) finds the addresses of killed workers in the agent's store, and
            # no restart comes up, with paramd or without.
            env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        )
    )
    (result,) = ranks.wait(timeout_s=3 * DEADLINE_S)
    assert result.returncode == 0, ranks.outputs()
    assert life.starts() == [[None, {"step": 6, "how": "live", "lost": 0}]] * 2
    assert life.final() == undisturbed("ddp")


IN_STEP = ("forward", "backward", "inside-begin", "inside-end", "update")
IN_ATTACH = ("looked", "opened", "moved")
STRIKES = ("random", "random", *IN_STEP, *IN_ATTACH)
FIRST_STANDING = 4
"""Steps of a training after which a standing snapshot is there, on an idle machine."""
MORE = {"plain": ["--scaler"], "ddp": ["--scaler"], "fsdp2": ["--workers", "1"]}
"""What else trainings have that are killed."""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", sample(list(KINDS), {"fsdp2"}))
def test_kills_at_any_moment_change_no_bit(tmp_path: Path, kind: str, stack: ExitStack) -> None:
    steps, more = times(STEPS, 90), MORE.get(kind, ())
    life = Life(tmp_path, kind, stack, "--steps", str(steps), *more)
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(times(2, 80)):
        if strike(life, draw):
            break
    life.ended()
    print(life.starts())
    assert life.final() == undisturbed(kind, *more, steps=steps)


def strike(life: Life, draw: random.Random) -> bool:
    """One start that is killed in its step, as it attaches, or anywhere; whether it had ended."""
    what, rank = draw.choice(STRIKES), draw.randrange(life.world_size)
    begun, step = len(life.starts()[0]), min(int(at or 0) for at in life.at())
    die = life.folder / f"die-{rank}"
    if what in IN_STEP:
        die.write_text(f"{what} {int(life.at()[rank] or 0) + draw.randint(2, 9)}")
    env = {"PARAMD_TRAINER_FAULTS": f"{what}:kill"} if what in IN_ATTACH else None
    ranks = life.start("--pause-s", "0.02", env=env)
    if what == "random":
        if draw.random() < 0.7:
            life.await_steps(ranks)
        time.sleep(draw.random() * 0.6)
        ranks[rank].process.send_signal(signal.SIGKILL)
    else:
        # What is passed only where there is something to go on from is perhaps not passed.
        wait_for(lambda: any(one.process.poll() is not None for one in ranks), ranks)
    kill(ranks)
    die.unlink(missing_ok=True)
    assert not any("gave no answer" in one.stderr for one in ranks), ranks.outputs()
    # Every sidecar lives on, so there is something to go on from.
    afresh = life.starts()[0][begun:] == [None]
    assert not afresh or step < FIRST_STANDING * busy(), ranks.outputs()
    return all((life.folder / f"final-{one}").exists() for one in range(life.world_size))


CHANGES = (
    (("--kind", "plain"), 1, "the world size was 2 and is 1"),
    (("--optimizer", "sgd"), 2, "optimizer 0 was AdamW and is SGD"),
    (("--wider",), 2, "the model's parameters, or how they are sharded"),
    (("--other-keep",), 2, "extra_state['scheduler'], an object of class Other, did not load"),
    (("--without-loader",), 2, "extra_state had loader, scheduler and has scheduler"),
)
"""Options of another script, its world size, and what it is told."""


@pytest.mark.in_turns
@pytest.mark.timeout(400)
def test_a_changed_script_is_refused_and_the_memory_stays(tmp_path: Path, stack: ExitStack) -> None:
    life = Life(tmp_path, "ddp", stack)
    life.struck(1, "forward", 5)
    for options, world_size, said in sample(CHANGES, (CHANGES[0], CHANGES[3])):
        ranks = life.start(*options, world_size=world_size)
        results = ranks.wait(timeout_s=DEADLINE_S, stop_on_failure=False)
        for result in results:
            assert result.returncode == 1
            assert said in result.stderr
    life.ended()
    assert life.starts()[0][-1] == {"step": 5, "how": "live", "lost": 0}


def exported(life: Life, ranks: Ranks, *destinations: str, optimizer: bool) -> list[int]:
    """Export once training has begun, then kill everything; the exports' steps."""
    wait_for(lambda: all(int(at or 0) > 1 for at in life.at()), ranks)
    endpoint = json.loads((life.state / "resuming" / "endpoint.json").read_text())
    include = ("parameters", "buffers", *(("optimizer",) if optimizer else ()))
    steps = []
    with paramd.connect(endpoint["url"], endpoint["token"]) as mesh:
        for destination in destinations:
            before = life.at()
            wait_for(lambda before=before: life.at() != before, ranks)
            steps.append(mesh.export(destination, include=include).wait(60).step)
    ranks.kill()
    return steps


def of_state(digests: dict[str, str]) -> dict[str, str]:
    """Digests of parameters, buffers and optimizer state."""
    others = ("groups", "scheduler", "loader", "scaler", "torch", "python", "numpy")
    return {name: digest for name, digest in digests.items() if name not in others}


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("kind", "optimizer"), share([("fsdp1-flat", True), ("ddp", False)], 2))
def test_when_nothing_is_in_memory_the_newest_export_is_gone_on_from(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch, kind: str, optimizer: bool
) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.setenv("PARAMD_SIDECAR_START_TIMEOUT_S", "60")
    monkeypatch.setenv("PARAMD_DESTINATIONS", json.dumps({"backup": str(tmp_path / "out")}))
    life = Life(tmp_path, kind, stack, *LONG, "--trace")
    (step,) = exported(life, life.start("--pause-s", "0.25"), "backup/one", optimizer=optimizer)
    lines = [len(trace) for trace in life.traces()]
    again = life.start("--pause-s", "0.25")
    wait_for(lambda: all(len(t) > n for t, n in zip(life.traces(), lines, strict=True)), again)
    again.kill()
    for rank, (trace, count) in enumerate(zip(life.traces(), lines, strict=True)):
        first = next(found for at, found in trace[:count] if at == step)
        resumed_step, resumed = trace[count]
        assert resumed_step == step
        expected = of_state(first)
        # An export has one replica's buffers; DDP broadcasts the first rank's in each forward.
        whole = next(found for at, found in life.traces()[0] if at == step)
        expected |= {name: whole[name] for name in expected if "norm.running" in name}
        if not optimizer:
            expected = {k: v for k, v in expected.items() if not k.startswith("state ")}
        assert of_state(resumed) == expected, rank
        assert life.starts()[rank] == [None, {"step": step, "how": "export", "lost": 0}]
    said = again[0].stderr
    assert f"continues from its export of step {step} as safetensors at backup/one" in said
    loaded = "parameters and optimizer state are" if optimizer else "parameters are"
    assert f"{loaded} loaded; not in it" in said
    assert ("are optimizer state, random states" in said) is not optimizer


@pytest.mark.in_turns
@pytest.mark.timeout(400)
def test_a_damaged_export_is_passed_over_for_an_older_one_or_a_fresh_start(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.setenv("PARAMD_SIDECAR_START_TIMEOUT_S", "60")
    monkeypatch.setenv("PARAMD_DESTINATIONS", json.dumps({"backup": str(out)}))
    life = Life(tmp_path, "ddp", stack, *LONG)
    ranks = life.start("--pause-s", "0.25")
    older, _ = exported(life, ranks, "backup/one", "backup/two", optimizer=True)
    # What one rank alone compares with its checksum.
    spoil(out / "two" / "optimizer.safetensors")
    again = life.start("--pause-s", "0.25")
    wait_for(lambda: all(len(one) == 2 for one in life.starts()), again)
    again.kill()
    assert [one[1] for one in life.starts()] == [{"step": older, "how": "export", "lost": 0}] * 2
    assert "at backup/two is passed over: rank" in again[0].stderr
    assert "optimizer.safetensors is damaged: it is not what was exported" in again[0].stderr
    spoil(out / "one" / "model.safetensors")
    last = life.start("--steps", str(STEPS))
    last.end_well(DEADLINE_S)
    assert [one[2] for one in life.starts()] == [None, None]
    assert "at backup/one is passed over: rank" in last[0].stderr
    assert life.final() == undisturbed("ddp")


def spoil(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
