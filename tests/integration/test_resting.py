"""Every kind of reader is told whether the state that it got was settled."""

import asyncio
import os
import select
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import httpx2
import pytest

import paramd
from paramd import places
from paramd.mesh.mesh import Mesh
from paramd.mesh.reading.assemble import SnapshotView

pytestmark = pytest.mark.usefixtures("grpc_is_up")

JOB = "resting"
PATIENCE_S = 90.0
STEP = 3

DOCUMENTS = {
    # Pages have a step where their filter asks for statistics.
    "params": {"filter": "* norm>=0"},
    "params/heatmap": {"name": "0.weight"},
    "params/stats": {"filter": "*"},
    "params/values": {"name": "0.bias"},
}
"""Of REST, with what each is asked for."""


@pytest.mark.in_turns
def test_each_answer_says_that_the_state_rests_and_later_that_it_is_settled(tmp_path: Path) -> None:
    environment = {**os.environ, "PARAMD_LISTEN": "127.0.0.1:0", "OMP_NUM_THREADS": "1"}
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(
            [sys.executable, "-m", "tests.integration.resting_trainer", JOB],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        ) as process,
    ):
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            # Readers load it anyway: meanwhile, the training's three processes start.
            import_module("torch")
            assert _line(process.stdout) == "rests"
            with paramd.connect(JOB, timeout=PATIENCE_S) as mesh:
                mesh.add_destination("here", str(tmp_path))
                assert _told(mesh, tmp_path, "resting") == (True, set())
                process.stdin.write(b"\n")
                process.stdin.flush()
                assert _line(process.stdout) == "goes on"
                # The same step, whose resting snapshots may be there still.
                assert _told(mesh, tmp_path, "settled") == (False, set())
            process.stdin.close()
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()


def _told(mesh: Mesh, folder: Path, name: str) -> tuple[bool, set[str]]:
    """What a plain `summon` says, and which other readers say otherwise."""
    parameters: Any = {"include": ["parameters"]}
    exported = mesh.export(f"here/{name}", **parameters).wait(PATIENCE_S)
    (listed,) = [one for one in mesh.exports() if one.id == exported.id]
    endpoint = places.read_endpoint(JOB)
    answers: dict[str, Any] = {
        transport: mesh.summon("*", transport=transport)
        for transport in ("auto", "same-host", "stream", "grpc")
    }
    answers |= {
        "stats": mesh.stats("*"),
        "view": _viewed(mesh),
        "download": mesh.download(folder / f"{name}.safetensors"),
        "export": exported,
        "exports": listed,
    }
    said = {reader: (answer.step, answer.unsettled) for reader, answer in answers.items()}
    if find_spec("mcp") is not None:
        said["mcp"] = _told_agent()
    for path, asked in DOCUMENTS.items():
        answer = httpx2.get(
            f"{endpoint.url}/api/v1/jobs/{JOB}/{path}",
            params=asked,
            headers={"Authorization": f"Bearer {endpoint.token}"},
            trust_env=False,
            timeout=PATIENCE_S,
        ).raise_for_status()
        document = answer.json()
        said[path] = document["step"], document["unsettled"]
    plain = said["auto"]
    assert plain[0] == STEP
    return plain[1], {reader for reader, told in said.items() if told != plain}


def _viewed(mesh: Mesh) -> SnapshotView:
    with mesh.view("*") as found:
        return found


def _told_agent() -> tuple[int, bool]:
    """What the tool of `paramd mcp` says to an agent."""
    from paramd.integrations.mcp_server import Tools

    async def ask() -> Mapping[str, Any]:
        async with paramd.aio.connect(JOB, timeout=PATIENCE_S) as mesh:
            return await Tools(mesh, mesh).statistics(["*"])

    found = asyncio.run(ask())
    return found["step"], found["unsettled"]


def _line(stream: IO[bytes]) -> str:
    assert select.select([stream], [], [], PATIENCE_S)[0]
    return stream.readline().decode().strip()
