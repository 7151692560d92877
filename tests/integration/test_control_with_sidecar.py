"""A real control plane with a real sidecar, and a trainer that stamps its step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from paramd import places
from paramd.memory import handover
from tests.integration.control_process import (
    Control,
    control_plane,
    schedule,
    until,
)
from tests.integration.fake_trainer import FakeTrainer, TrainerSettings, attach
from tests.integration.sidecar_process import client_of, sidecar

pytestmark = pytest.mark.usefixtures("grpc_is_up")

ARENA_BYTES = 1 << 16


@contextmanager
def training(control: Control) -> Iterator[FakeTrainer]:
    """One rank that trains, attached to a sidecar that joins `control`."""
    directory = places.job_dir("job")
    settings = TrainerSettings(arena_bytes=ARENA_BYTES, control_address=control.grpc_address)
    with sidecar(directory) as process:
        trainer = attach(process.socket_path, settings)
        try:
            trainer.send_mesh()
            trainer.start()
            yield trainer
        finally:
            trainer.close()


async def test_a_real_sidecar_joins_captures_is_reduced_and_leaves() -> None:
    with control_plane(job="job", world_size=1) as control, training(control) as trainer:
        await until(lambda: control.job()["reason"] == "")
        assert control.job()["peers"][0]["address"] == trainer.address

        with client_of(trainer) as client:
            for _ in range(3):
                pin = client.pin(at_boundary=True)
                answer = await schedule(control, (0, pin.snapshot_id))
                assert answer.captured, answer.reason
                step = answer.header.step
                assert client.read(pin.snapshot_id) == step.to_bytes(8, "little") * (
                    ARENA_BYTES // 8
                )
                client.release(pin.snapshot_id)

        params = control.get("/api/v1/jobs/job/params?filter=w").json()
        assert params["params"][0]["shape"] == [ARENA_BYTES // 8]
        found = control.get("/api/v1/jobs/job/params/stats?filter=w")
        assert found.status_code == 200, found.text
        stats = found.json()
        assert stats["step"] > 0
        assert stats["stats"][0]["min"] == stats["stats"][0]["max"] == stats["step"]
        assert stats["total"]["count"] == ARENA_BYTES // 8
        unknown = control.get("/api/v1/jobs/job/params/stats?filter=nothing")
        assert unknown.status_code == 404

        trainer.finish()
        handover.send(trainer.connection, {"op": "detach"}, [])
        await until(lambda: control.process.poll() is not None)
        assert control.wait() == 0
        assert "all 1 ranks have detached" in control.log.read_text()


async def test_a_real_sidecar_joins_again_and_numbers_go_on() -> None:
    with control_plane(job="job", world_size=1) as first, training(first) as trainer:
        await until(lambda: first.job()["reason"] == "")
        with client_of(trainer) as client:
            for _ in range(3):
                pin = client.pin(at_boundary=True)
                assert (await schedule(first, (0, pin.snapshot_id))).captured
            first.process.kill()
            first.wait()
            options = ("--grpc-listen", first.grpc_address)
            listen = first.url.removeprefix("http://")
            with control_plane(*options, job="job", world_size=1, listen=listen) as second:
                await until(lambda: second.job()["reason"] == "")
                pin = client.pin(at_boundary=True)
                answer = await schedule(second, (0, pin.snapshot_id))
                assert answer.captured, answer.reason
