"""The OpenAPI document keeps its promises against a live control plane and real sidecars."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.integration.client_job import Job, running_job
from tests.integration.test_client import layout, write_arenas

SEED = "1"
EXAMPLES = os.environ.get("SCHEMATHESIS_EXAMPLES", "1")
"""Requests to each operation; CI has 12 of each, `make fuzz` 50."""
PATIENCE_S = max(240, 20 * int(EXAMPLES))

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "response_headers_conformance",
)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARAMD_STATE_DIR", str(tmp_path_factory.mktemp("state")))
        with running_job(layout()) as running:
            write_arenas(running)
            # Buffers can be read only while training goes on.
            running.train(lambda rank, step: None, 0.05)
            yield running


@pytest.mark.timeout(PATIENCE_S + 10)
def test_whatever_is_asked_is_answered_as_the_document_says(job: Job, tmp_path: Path) -> None:
    """Schemathesis runs in a process of its own, with a fixed seed."""
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{job.url}/api/v1/openapi.json"]
    command += ["--header", f"Authorization: Bearer {job.token}", "--checks", ",".join(CHECKS)]
    command += ["--seed", SEED, "--phases", "fuzzing", "--generation-database", "none"]
    # A stream of events never ends; its refusals are tested with it. Learning rates are waited for,
    # from trainers that have an optimizer; the page's tests ask such ones.
    command += ["--exclude-path-regex", "/events$", "--continue-on-failure", "--no-color"]
    command += ["--exclude-operation-id", "get_hyperparameters"]
    command += ["--request-timeout", "35", "--no-shrink", "--max-examples", EXAMPLES]
    environment = {**os.environ, "NO_COLOR": "1"}
    done = subprocess.run(
        command, check=False, cwd=tmp_path, env=environment, capture_output=True, text=True,
        timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout, done.stdout[-8000:]


def test_every_operation_says_its_problems_and_needs_a_token(job: Job) -> None:
    with httpx2.Client(trust_env=False, base_url=job.url) as client:
        right = {"authorization": f"Bearer {job.token}"}
        document: dict[str, Any] = client.get("/api/v1/openapi.json", headers=right).json()
    assert document["security"] == [{"token": []}]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            where = f"{method} {path}"
            assert operation.get("description"), where
            for status in ("401", "403", "404", "409", "422", "429", "503", "504"):
                content = operation["responses"][status]["content"]
                assert list(content) == ["application/problem+json"], where
            assert "security" not in operation, where
    for schema in ("ParamPage", "HeatmapDocument", "HistogramDocument", "ValuesDocument"):
        assert document["components"]["schemas"][schema]["examples"], schema
