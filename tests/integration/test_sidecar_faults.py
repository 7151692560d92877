"""Sidecars killed and stopped at named points, and trainers that end: never a wrong answer."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from paramd.memory.control_page import Word
from tests.integration.fake_trainer import FakeTrainer, TrainerSettings, attach
from tests.integration.sidecar_process import (
    READY_S,
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
    trainer = attach(
        process.socket_path,
        TrainerSettings(arena_bytes=ARENA_BYTES, **settings),  # type: ignore[arg-type]
    )
    try:
        trainer.send_mesh()
        trainer.start()
        yield trainer
    finally:
        trainer.close()


def goes_on_training(trainer: FakeTrainer) -> None:
    step = trainer.page[Word.STEP]
    wait_until(lambda: trainer.page[Word.STEP] > step + 2, "training goes on")


@pytest.mark.parametrize(
    "faults",
    ["pin-prepared:kill", "copy-begun:kill", "copy-chunk:kill@2", "copy-moved:kill"],
)
def test_a_sidecar_killed_during_a_pin_is_replaced_and_right(tmp_path: Path, faults: str) -> None:
    with sidecar(tmp_path / "s", faults=faults) as first, trained(first) as trainer:
        with client_of(trainer) as client, pytest.raises(grpc.RpcError) as lost:
            client.pin()
        assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
        assert first.process.wait(timeout=5) == -signal.SIGKILL
        goes_on_training(trainer)
        with sidecar(tmp_path / "s") as second:
            again = attach(second.socket_path, trainer.settings, handed_back=trainer.fds)
            try:
                again.send_mesh()
                assert trainer.page[Word.COPY_BEGUN] == trainer.page[Word.COPY_ENDED]
                with client_of(again) as client:
                    pin = client.pin()
                    assert values_of(client.read(pin.snapshot_id)) == {pin.header.step}
            finally:
                again.close()
        goes_on_training(trainer)


def test_a_sidecar_whose_trainer_ends_before_it_attached_does_not_linger(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "infinity"]) as trainer:
        try:
            options = ["--trainer-pid", str(trainer.pid)]
            with sidecar(tmp_path / "alive", *options) as process:
                trainer.kill()
                assert process.process.wait(timeout=READY_S) == 0
                assert "the trainer that started it ended before it attached" in process.log
        finally:
            trainer.kill()
    with sidecar(tmp_path / "gone", *options) as process:
        assert process.process.wait(timeout=READY_S) == 0


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
        attach(process.socket_path, TrainerSettings(incarnation=3)).close()
        assert process.process.poll() is None


def test_a_sidecar_killed_during_a_read_leaves_no_wrong_bytes(tmp_path: Path) -> None:
    with (
        sidecar(tmp_path / "s", faults="read-chunk:kill@3") as process,
        trained(process) as trainer,
        client_of(trainer) as client,
    ):
        pin = client.pin()
        with pytest.raises(grpc.RpcError) as lost:
            client.read(pin.snapshot_id)
        assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
        goes_on_training(trainer)


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


def test_a_rank_whose_trainer_ended_between_updates_is_still_served(tmp_path: Path) -> None:
    with sidecar(tmp_path / "s") as process, trainer_process(process, "--steps", "5") as trainer:
        client = Client(address_of(trainer))
        try:
            assert trainer.stdout is not None
            assert trainer.stdout.readline() == "trained\n"
            trainer.kill()
            wait_until(lambda: "ORPHANED" in process.log, "the end is noticed")
            pin = client.pin()
            assert pin.header.step == 5
            assert values_of(client.read(pin.snapshot_id)) == {5}
            with pytest.raises(grpc.RpcError) as refused:
                client.pin(at_boundary=True)
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        finally:
            client.close()


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
            trainer.wait(timeout=10)
            wait_until(lambda: "TORN" in process.log, "the end is noticed")
            assert waiting.result(timeout=1).header.step < 20
            with pytest.raises(grpc.RpcError) as refused:
                client.pin((8, 4096))
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert "mix two states" in refused.value.details()
            last = client.pin()
            assert last.header.step == pin.header.step < 20
            assert values_of(client.read(last.snapshot_id)) == {last.header.step}
        finally:
            client.close()


def test_a_newer_incarnation_takes_an_orphaned_sidecar_over(tmp_path: Path) -> None:
    with sidecar(tmp_path / "s") as process:
        with trainer_process(process, "--steps", "1") as trainer:
            address_of(trainer)
            with pytest.raises(AssertionError, match="another training process"):
                attach(process.socket_path, TrainerSettings(incarnation=2))
        wait_until(lambda: "trainer-ended" in process.log, "the end is noticed")
        with pytest.raises(AssertionError, match="incarnation 1 is stale"):
            attach(process.socket_path, TrainerSettings(incarnation=1))
        successor = attach(process.socket_path, TrainerSettings(incarnation=2))
        try:
            successor.send_mesh()
            with client_of(successor) as client:
                assert client.pin().header.incarnation == 2
            stale = Client(successor.address, incarnation=1)
            with contextlib.closing(stale), pytest.raises(grpc.RpcError) as refused:
                stale.pin()
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        finally:
            successor.close()


def test_a_sidecar_that_nobody_needs_leaves(tmp_path: Path) -> None:
    with sidecar(tmp_path / "s", "--linger-s", "0.3") as process:
        begin_s = time.monotonic()
        assert process.process.wait(timeout=10) == 0
        assert time.monotonic() - begin_s < 5
        assert not process.socket_path.exists()
