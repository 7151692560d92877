"""The example of a package that adds parts: installed as any other, and used from outside."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import httpx2
import pytest

import paramd
from paramd.mesh.mesh import Mesh
from paramd.places import read_endpoint
from paramd.v1 import sidecar_pb2 as pb
from tests.added import package
from tests.integration.fake_trainer import attached
from tests.integration.sidecar_process import client_of, sidecar, values_of
from tests.launch import ROOT

pytestmark = pytest.mark.usefixtures("grpc_is_up")

PACKAGE = ROOT / "examples" / "kurtosis"
JOB = "added"
PATIENCE_S = 90.0


def ran(*arguments: str, environment: Mapping[str, str]) -> str:
    """What a Python program prints; it succeeds."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def kurtosis_of(mesh: Mesh) -> dict[str, float]:
    """Of the tensors' values, read here."""
    found = {}
    for name, tensor in mesh.summon("*").items():
        values = tensor.double()
        central = values - values.mean()
        found[name] = (central.pow(4).mean() / central.pow(2).mean() ** 2).item()
    return found


@pytest.mark.timeout(300)
def test_an_installed_package_adds_a_statistic_a_route_a_command_and_a_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    offline = ("--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")
    install = ("-m", "pip", "install", "-q", *offline, "--target", str(site), str(PACKAGE))
    ran(*install, environment=os.environ)
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "PARAMD_LISTEN": "127.0.0.1:0"}
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(
            [sys.executable, "-m", "tests.integration.resting_trainer", JOB],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        ) as training,
    ):
        try:
            assert training.stdin is not None
            assert training.stdout is not None
            assert training.stdout.readline() == b"rests\n"
            # From its next step on, the state of the last one is settled.
            training.stdin.write(b"\n")
            training.stdin.flush()
            assert training.stdout.readline() == b"goes on\n"
            command = ("-m", "paramd.cli", "kurtosis", "--job", JOB, "-o", "json")
            printed = json.loads(ran(*command, environment=environment))
            monkeypatch.syspath_prepend(str(site))
            with paramd.connect(JOB, timeout=PATIENCE_S) as mesh:
                right = kurtosis_of(mesh)
                assert len(right) == 4
                rows = mesh.parts.kurtosis.compute("*.weight")
                assert {row.name: row.kurtosis for row in rows} == pytest.approx(
                    {name: right[name] for name in right if name.endswith("weight")}
                )
                assert "kurtosis" in dir(mesh.parts)
                assert dir(mesh.parts.kurtosis) == ["compute"]
                with pytest.raises(AttributeError, match="adds a part 'nothing' to a mesh"):
                    _ = mesh.parts.nothing
                asked = httpx2.get(
                    f"{mesh.url}/api/v1/jobs/{JOB}/kurtosis",
                    headers={"authorization": f"Bearer {read_endpoint(JOB).token}"},
                )
                assert set(asked.json()) == right.keys(), asked.text
            assert printed["step"] == 3
            found = {row["name"]: row["kurtosis"] for row in printed["tensors"]}
            assert found == pytest.approx(right)
        finally:
            training.stdin.close()
            if _stuck(training):
                training.kill()
    assert training.returncode == 0, (tmp_path / "log").read_text()


FAILING = """
from paramd_service.sidecar.parts import SidecarPart


class Failing(SidecarPart):
    name = "failing"

    def ops(self):
        return {"map": None}

    def attaching(self, request, *, reached, refreshed):
        raise RuntimeError("attaching failed")

    async def attached(self, memory):
        raise RuntimeError("attached failed")

    def samples(self):
        raise RuntimeError("samples failed")


class Unmade(SidecarPart):
    name = "unmade"

    def __init__(self, host):
        raise RuntimeError("made by nobody")
"""


def test_a_part_that_fails_is_logged_and_harms_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = {"a": "greeting:Failing", "b": "greeting:Unmade", "c": "nowhere:Absent"}
    named = {f"sidecar.{name}": value for name, value in entries.items()}
    site = str(package(tmp_path / "site", FAILING, **named))
    path = [site, os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    # An interpreter looks at it when it starts, so this one has to be a new one.
    monkeypatch.setenv("PARAMD_TESTS_COLD", "1")
    with sidecar(tmp_path) as process, attached(process.socket_path) as trainer:
        trainer.update()
        with client_of(trainer) as client:
            pin = client.pin()
            assert values_of(client.read(pin.snapshot_id)) == {1}
            assert "paramd_sidecar_step" in client.call("GetMetrics", pb.GetMetricsRequest()).text
        log = process.log
        assert process.terminate() == 0
    for failed in ("nowhere", "made by nobody", "attaching failed", "attached failed"):
        assert failed in log
    assert '"part": "failing", "what": "samples"' in log


def _stuck(training: subprocess.Popen[bytes]) -> bool:
    """Whether it does not end by itself at the end of its stdin."""
    try:
        training.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        return True
    return False


def test_the_example_is_short() -> None:
    lines = [file.read_text().count("\n") for file in PACKAGE.rglob("*.py")]
    assert sum(lines) <= 150
