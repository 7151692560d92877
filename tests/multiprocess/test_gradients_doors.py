"""The same frames through the command line, REST's events, the history, and a bare stub."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import httpx2

from paramd import places
from paramd.errors import READS_KEY
from paramd.v1 import sidecar_pb2 as pb
from paramd.v1 import sidecar_pb2_grpc
from tests.launch import Ranks, start_ranks
from tests.multiprocess.truth import connect_to, wait_until
from tests.multiprocess.workers.gradients import JOB, MODULUS

WORKER = "tests.multiprocess.workers.gradients"
FILTER = "*.blocks.0.up.*"
NAMES = {"ddp.blocks.0.up.weight", "ddp.blocks.0.up.bias"}


def test_every_door_shows_the_same_gradients(tmp_path: Path) -> None:
    arguments = ["--folder", str(tmp_path), "--only", "ddp", "--gap-ms", "5"]
    with start_ranks(WORKER, 2, args=arguments) as ranks:
        ranks.wait_for_text("attached", rank=0)
        endpoint = places._load(ranks.state_dir / JOB / places.ENDPOINT_FILE)
        assert endpoint is not None
        the_command_line(ranks)
        events_and_history(endpoint.url, endpoint.token)
        a_bare_stub(ranks)
        (tmp_path / "stop").touch()
        ranks.end_well(30)


def check_document(document: dict[str, Any]) -> None:
    expected = document["step"] % MODULUS
    assert {row["name"] for row in document["params"]} == NAMES
    for row in (*document["params"], document["total"]):
        assert (row["min"], row["max"], row["nan_count"]) == (expected, expected, 0)
    assert document["scale"] == 1.0
    assert document["clip"] == {"factor": None}


def the_command_line(ranks: Ranks) -> None:
    environment = os.environ | {"PARAMD_STATE_DIR": str(ranks.state_dir), "PARAMD_JOB": JOB}
    command = [sys.executable, "-m", "paramd.cli", "grads", FILTER, "-n", "3", "-o", "jsonl"]
    found = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert found.returncode == 0, found.stderr
    documents = [json.loads(line) for line in found.stdout.splitlines()]
    assert len(documents) == 3
    for document in documents:
        check_document(document)


def events_and_history(url: str, token: str) -> None:
    headers = {"Authorization": f"Bearer {token}"}
    base = f"{url}/api/v1/jobs/{JOB}"
    with httpx2.Client(headers=headers, timeout=60.0) as client:
        refused = client.get(f"{base}/grads", params={"filter": "no.such.*"})
        assert refused.status_code == 404
        # The history's total is that of all gradients, and of no other filter.
        for wanted in (FILTER, "*"):
            documents = []
            with client.stream("GET", f"{base}/grads", params={"filter": wanted}) as answer:
                assert answer.status_code == 200
                for line in answer.iter_lines():
                    if line.startswith("data: "):
                        documents.append(json.loads(line[6:]))
                        if wanted == FILTER:
                            check_document(documents[-1])
                        if len(documents) == 3:
                            break
        steps = [document["step"] for document in documents]
        assert steps == sorted(set(steps))

        def noted() -> bool:
            query = {"metric": "grad_norm", "subject": "total"}
            points = client.get(f"{base}/history", params=query).json()["points"]
            return bool(points) and points[0]["step"] in steps

        wait_until(noted, "the norm is in the history", timeout_s=20)


def a_bare_stub(ranks: Ranks) -> None:
    """As a client in another language would."""
    with connect_to(ranks.state_dir, JOB) as mesh:
        document = mesh._mesh._host.reach.document
        path = f"/jobs/{mesh.job}?rank=1&gather=true"
        found = mesh._run(mesh._mesh._host.reach._directory.send("GET", path))
    metadata = (("authorization", f"Bearer {found['ticket']}"), (READS_KEY, found["reads"]))
    request = pb.StreamGradientsRequest(pattern=FILTER)
    with grpc.insecure_channel(document.peers[1].address) as channel:
        stub = sidecar_pb2_grpc.SidecarServiceStub(channel)
        call = stub.StreamGradients(request, timeout=30, metadata=metadata)
        steps: list[int] = []
        data, left, names = b"", 0, []
        for message in call:
            if message.HasField("frame"):
                if len(steps) == 3:
                    call.cancel()
                    break
                steps.append(message.frame.step)
                names = []
            elif message.HasField("tensor"):
                names.append(message.tensor.fqn)
                data, left = b"", message.tensor.size_bytes
                assert message.tensor.dtype == "float32"
            else:
                data += message.data
                left -= len(message.data)
            if names and left == 0 and data:
                assert set(memoryview(data).cast("f")) == {float(steps[-1] % MODULUS)}
        assert set(names) == NAMES
        assert steps == sorted(set(steps))
