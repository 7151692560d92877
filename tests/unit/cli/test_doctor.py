"""What the doctor finds, and what it says to do."""

from __future__ import annotations

import json
import os
import socket

import pytest

from paramd import places
from paramd.cli.main import main


def test_a_job_that_does_not_answer_fails_the_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    places.write_endpoint(endpoint("silent", f"http://127.0.0.1:{port}"))
    assert main(["doctor", "-o", "json"]) == 1
    captured = capsys.readouterr()
    found = {row["check"]: row for row in json.loads(captured.out)["checks"]}
    assert found["job silent"]["verdict"] == "failed"
    assert found["job silent"]["advice"]
    assert "a-token-of-the-job" not in captured.out + captured.err


def endpoint(job: str, url: str) -> places.Endpoint:
    return places.Endpoint(
        url=url,
        token="a-token-of-the-job",
        pid=os.getpid(),
        job=job,
        grpc_address="127.0.0.1:1",
        incarnation=1,
    )
