"""What the doctor finds, and what it says to do."""

from __future__ import annotations

import json
import os
import socket
import tomllib
from pathlib import Path

import pytest

from paramd import places
from paramd.cli import doctor
from paramd.cli.doctor import Finding, Verdict
from paramd.cli.main import main

PYPROJECT = Path(__file__).resolve().parents[3] / "pyproject.toml"


def found_by_name() -> dict[str, Finding]:
    return {finding.check: finding for finding in doctor.machine()}


def test_the_floors_are_those_of_pyproject() -> None:
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    extras = project["optional-dependencies"].values()
    required = [*project["dependencies"], *(line for extra in extras for line in extra)]
    for name, floor in doctor.FLOORS.items():
        assert any(line.startswith(f"{name}>={floor}") for line in required), name


def test_a_machine_that_runs_these_tests_is_well() -> None:
    failed = [f for f in doctor.machine() if f.verdict is Verdict.FAILED]
    assert failed == []


def test_every_finding_that_is_not_well_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "FLOORS", {**dict.fromkeys(doctor.FLOORS, "999"), "absent-x": "1"})
    monkeypatch.setattr(doctor, "LITTLE_MEMORY_BYTES", 1 << 60)
    monkeypatch.setattr(doctor.time, "time", lambda: 0.0)
    findings = list(doctor.machine())
    bad = [f for f in findings if f.verdict is not Verdict.OK]
    assert {"torch", "grpcio", "absent-x", "shared memory", "clock"} <= {f.check for f in bad}
    assert all(f.advice for f in bad)
    assert not any(f.advice for f in findings if f.verdict is Verdict.OK)


def test_a_check_that_breaks_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Path:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(places, "state_dir", broken)
    finding = found_by_name()["state dir"]
    assert finding.verdict is Verdict.FAILED
    assert "no such luck" in finding.detail


def test_an_open_job_directory_is_found(private_state_dir: Path) -> None:
    assert found_by_name()["state dir"].verdict is Verdict.OK
    (private_state_dir / "job").mkdir()
    (private_state_dir / "job").chmod(0o755)
    finding = found_by_name()["job dir"]
    assert finding.verdict is Verdict.FAILED
    assert finding.advice == f"chmod 700 {private_state_dir / 'job'}"


def test_a_state_dir_that_others_can_change_is_found(private_state_dir: Path) -> None:
    private_state_dir.chmod(0o777)
    finding = found_by_name()["state dir"]
    assert finding.verdict is Verdict.FAILED
    assert "chmod go-w" in finding.advice


def test_a_taken_port_is_a_warning_and_our_own_job_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        monkeypatch.setattr(doctor, "DEFAULT_PORT", port)
        finding = found_by_name()[f"port {port}"]
        assert finding.verdict is Verdict.WARNING
        assert "PARAMD_LISTEN" in finding.advice
        places.write_endpoint(endpoint("mine", f"http://127.0.0.1:{port}"))
        assert found_by_name()[f"port {port}"].detail == "serves job mine"
    assert found_by_name()[f"port {port}"].verdict is Verdict.OK


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


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("2.13.0+cpu", (2, 13, 0)), ("1.71.2rc1", (1, 71, 2)), ("7", (7,)), ("odd", ())],
)
def test_versions_are_compared_by_their_numbers(version: str, numbers: tuple[int, ...]) -> None:
    assert doctor.release(version) == numbers


def endpoint(job: str, url: str) -> places.Endpoint:
    return places.Endpoint(
        url=url,
        token="a-token-of-the-job",
        pid=os.getpid(),
        job=job,
        grpc_address="127.0.0.1:1",
        incarnation=1,
    )
