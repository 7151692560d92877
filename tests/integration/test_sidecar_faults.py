"""Sidecars killed and stopped at named points, and trainers that end: never a wrong answer."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from paramd.memory import handover
from paramd.memory.control_page import Word
from tests.integration.fake_trainer import FakeTrainer, TrainerSettings, attach, attached
from tests.integration.sidecar_process import (
    Client,
    SidecarProcess,
    client_of,
    sidecar,
    values_of,
    wait_until,
)

ROOT = Path(__file__).resolve().parents[2]
ARENA_BYTES = 16 << 20


@contextmanager
def trained(process: SidecarProcess, **settings: float) -> Iterator[FakeTrainer]:
    with attached(process.socket_path, trains=True, arena_bytes=ARENA_BYTES, **settings) as found:
        yield found


def goes_on_training(trainer: FakeTrainer) -> None:
    step = trainer.page[Word.STEP]
    wait_until(lambda: trainer.page[Word.STEP] > step + 2, "training goes on")


def test_a_sidecar_whose_trainer_ends_before_it_attached_does_not_linger(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "infinity"]) as trainer:
        try:
            options = ["--trainer-pid", str(trainer.pid)]
            with sidecar(tmp_path / "alive", *options) as process:
                trainer.kill()
                assert process.process.wait(timeout=60) == 0
                assert "the trainer that started it ended before it attached" in process.log
        finally:
            trainer.kill()
    with sidecar(tmp_path / "gone", *options) as process:
        assert process.process.wait(timeout=60) == 0


def test_a_sidecar_lingers_for_the_memory_of_a_trainer_that_it_had(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "infinity"]) as starter:
        try:
            with (
                sidecar(tmp_path / "s", "--trainer-pid", str(starter.pid)) as process,
                trained(process) as trainer,
            ):
                starter.kill()
                starter.wait()
                goes_on_training(trainer)
                with client_of(trainer) as client:
                    assert client.pin().header.step > 0
                assert process.process.poll() is None
        finally:
            starter.kill()


def test_a_sidecar_that_had_a_trainer_waits_on_when_its_successor_dies_as_it_attaches(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-m", "tests.integration.fake_trainer", "--socket"]
    with (
        subprocess.Popen(["sleep", "infinity"]) as starter,
        sidecar(tmp_path / "s", "--trainer-pid", str(starter.pid)) as process,
    ):
        try:
            with subprocess.Popen(
                [*command, str(process.socket_path)], cwd=ROOT, stdout=subprocess.PIPE
            ) as trainer:
                assert trainer.stdout is not None
                trainer.stdout.readline()
                trainer.kill()
        finally:
            starter.kill()
        wait_until(lambda: "trainer-ended" in process.log, "the trainer's end is noticed")
        # The sidecar gives up the former's memory for it, and then finds that it has ended.
        with pytest.raises(AssertionError, match="did not start at 1"):
            attach(process.socket_path, TrainerSettings(incarnation=2), start=1)
        with handover.connect(process.socket_path) as connection:
            handover.send(connection, {"op": "offer", "job": "job", "rank": 0})
            offer, _ = handover.receive(connection)
        assert "died while it attached" in offer["why_not_live"]
        assert offer["lineage"] == 0
        attach(process.socket_path, TrainerSettings(incarnation=3)).close()
        assert process.process.poll() is None


def test_a_sidecar_stopped_during_a_copy_costs_one_stall_budget(tmp_path: Path) -> None:
    with (
        sidecar(tmp_path / "s", faults="copy-chunk:stop@2") as process,
        trained(process) as trainer,
        client_of(trainer) as client,
    ):
        call = client.stub.PinSnapshot.future(
            client.pin_request(), timeout=20, metadata=client.metadata
        )
        wait_until(
            lambda: trainer.page[Word.COPY_BEGUN] != trainer.page[Word.COPY_ENDED],
            "the copy begins",
        )
        goes_on_training(trainer)
        stalled_ns = trainer.page[Word.STALL_TOTAL_NS]
        goes_on_training(trainer)
        assert trainer.page[Word.STALL_TOTAL_NS] == stalled_ns < 100_000_000
        process.process.send_signal(signal.SIGCONT)
        # What it copied before it was stopped is another step's by now.
        pin = call.result(timeout=20)
        assert values_of(client.read(pin.snapshot_id)) == {pin.header.step}
        assert client.state().state.abandoned_copy_count >= 1


@contextmanager
def trainer_process(process: SidecarProcess, *options: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.integration.fake_trainer"]
    command += ["--socket", str(process.socket_path), *options]
    trainer = subprocess.Popen(
        command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        yield trainer
    finally:
        trainer.kill()
        trainer.communicate(timeout=10)


def address_of(trainer: subprocess.Popen[str]) -> str:
    assert trainer.stdout is not None
    return trainer.stdout.readline().strip()


def test_a_torn_rank_is_refused_but_its_last_snapshot_is_served(tmp_path: Path) -> None:
    with (
        sidecar(tmp_path / "s") as process,
        trainer_process(process, "--die-in-update", "20") as trainer,
    ):
        client = Client(address_of(trainer))
        try:
            pin = client.pin()
            waiting = client.stub.PinSnapshot.future(
                client.pin_request((0, 4096)), timeout=20, metadata=client.metadata
            )
            trainer.wait(timeout=60)
            wait_until(lambda: "TORN" in process.log, "the end is noticed")
            assert waiting.result(timeout=20).header.step < 20
            with pytest.raises(grpc.RpcError) as refused:
                client.pin((8, 4096))
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert "mix two states" in refused.value.details()
            last = client.pin()
            assert last.header.step == pin.header.step < 20
            assert values_of(client.read(last.snapshot_id)) == {last.header.step}
        finally:
            client.close()


def test_a_sidecar_that_nobody_needs_leaves(tmp_path: Path) -> None:
    with sidecar(tmp_path / "s", "--linger-s", "0.3") as process:
        assert process.process.wait(timeout=30) == 0
        assert not process.socket_path.exists()
