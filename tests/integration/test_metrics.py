"""Metrics as Prometheus' own tool reads them, of the control plane and of a real sidecar."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from paramd import places
from paramd.v1 import sidecar_pb2 as pb
from tests.integration.control_process import Control, control_plane, until
from tests.integration.fake_trainer import FakeTrainer, attached
from tests.integration.sidecar_process import client_of, sidecar
from tests.needs import check_with_promtool

pytestmark = pytest.mark.usefixtures("grpc_is_up")

ARENA_BYTES = 1 << 16
LABELS = {"cause", "job", "rank", "rule", "kind", "ok", "captured", "le", "state", "health", "gpu"}


@contextmanager
def training(control_address: str = "") -> Iterator[FakeTrainer]:
    told = {"arena_bytes": ARENA_BYTES, "control_address": control_address}
    with (
        sidecar(places.job_dir("job")) as process,
        attached(process.socket_path, trains=True, **told) as trainer,
    ):
        yield trainer


def check(text: str) -> dict[str, dict[str, float]]:
    """Values by metric and rank; strictly parsed, and by promtool where it is installed."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation, family.name
        for sample in family.samples:
            assert set(sample.labels) <= LABELS, sample
            if set(sample.labels) <= {"job", "rank"}:
                assert sample.labels.get("job", "job") == "job"
                found.setdefault(sample.name, {})[sample.labels.get("rank", "")] = sample.value
    check_with_promtool(text)
    return found


async def test_what_a_sidecar_sees_of_its_host_is_in_rest_and_metrics() -> None:
    with (
        control_plane("--no-watch", job="job", world_size=1) as control,
        training(control.grpc_address),
    ):

        def host() -> dict[str, float] | None:
            rank = control.get("/api/v1/jobs/job/ranks").json()["ranks"][0]
            found: dict[str, float] | None = rank["host"]
            return found

        await until(lambda: host() is not None)
        told = host()
        assert told is not None
        assert told["processors"] >= 1
        assert 0 < told["memory_available_bytes"] < told["memory_bytes"]
        assert told["trainer_delay"] >= 0 or told["trainer_delay"] == -1
        found = check(control.get("/metrics").text)
        assert set(found["paramd_rank_host_busy_ratio"]) == {"0"}
        assert found["paramd_rank_host_memory_available_bytes"]["0"] > 0


async def test_both_sides_are_scraped_and_agree() -> None:
    with (
        control_plane("--no-watch", job="job", world_size=1) as control,
        training(control.grpc_address) as trainer,
    ):
        await until(lambda: control.job()["reason"] == "")
        await until(lambda: _steps(control) > 3)
        site = check(control.get("/metrics").text)
        stood = 'paramd_rank_stand_max_seconds{cause="edit",job="job",rank="0"} 0.0'
        assert stood in control.get("/metrics").text
        assert site["paramd_joined_ranks"] == {"": 1}
        assert site["paramd_rank_arena_bytes"] == {"0": ARENA_BYTES}
        assert site["paramd_alerts_fired_total"] == {"": 0}
        assert site["paramd_audit_ok"] == {"": 1}
        assert site["paramd_store_writes_waiting"][""] >= 0
        assert site["paramd_history_dropped_samples_total"] == {"": 0}
        answer = control.get("/api/v1/jobs/job/ranks/0/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert 'paramd_sidecar_stands_total{job="job",rank="0",cause="edit"} 0' in answer.text
        own = check(answer.text)
        assert own["paramd_sidecar_arena_bytes"] == {"0": ARENA_BYTES}
        assert own["paramd_sidecar_step"]["0"] >= site["paramd_rank_step"]["0"] > 0
        assert own["paramd_sidecar_resident_bytes"]["0"] > 10 << 20
        assert own["paramd_sidecar_refused_calls_total"] == {"0": 0}
        assert {rank for values in own.values() for rank in values} == {"0"}
        with client_of(trainer) as client:
            for _ in range(2):
                with pytest.raises(grpc.RpcError):
                    client.stub.GetState(pb.GetStateRequest(), timeout=10.0)
        own = check(control.get("/api/v1/jobs/job/ranks/0/metrics").text)
        assert own["paramd_sidecar_refused_calls_total"] == {"0": 2}
        await until(lambda: _refused(control))
        (record,) = _refused(control)
        assert (record["detail"]["rank"], record["detail"]["total"]) in ((0, 1), (0, 2))
        assert "GetState: the call has no ticket" in record["detail"]["last"]
        assert control.get("/api/v1/jobs/job/ranks/1/metrics").status_code == 404
        assert control.get("/api/v1/jobs/job/ranks/0/metrics", token=None).status_code == 401
        trainer.finish()


def _refused(control: Control) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = control.get("/api/v1/audit?limit=100").json()["records"]
    return [record for record in records if record["method"] == "sidecar.denied"]


def _steps(control: Control) -> int:
    found: int = control.job()["step"]
    return found
