"""A running mesh shows no token, ticket or key: not in argv, environment, logs or files."""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import paramd
from paramd import places
from paramd.cli.main import main as paramd_command
from paramd.errors import UnreachableError
from paramd.layout.types import Box, Layout, Piece, TensorKind, TensorLayout
from tests.integration.client_job import JOB, Job, running_job

PATIENCE_S = 20.0


def layout() -> Layout:
    halves = (Piece(0, 0, Box((0,), (4,))), Piece(1, 0, Box((4,), (8,))))
    weight = TensorLayout("weight", "float32", (8,), TensorKind.PARAMETER, halves)
    return Layout(world_size=2, arena_bytes=(64, 64), tensors=(weight,))


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setenv("PARAMD_LOG_LEVEL", "DEBUG")
    with running_job(layout()) as found:
        yield found


def used(job: Job) -> list[str]:
    """Uses everything that has a secret once; returns the secrets."""
    secrets = [job.token, job.private_key.hex()]
    secrets.append(base64.urlsafe_b64encode(job.private_key).decode().rstrip("="))
    deadline_s = time.monotonic() + PATIENCE_S
    with paramd.connect(job.url, job.token) as mesh:
        while True:
            try:
                mesh.summon("*", transport="grpc")
                break
            except UnreachableError:
                assert time.monotonic() < deadline_s, "the sidecars have not joined"
                time.sleep(0.05)
        mesh.stats("*")
        secrets.append(mesh._mesh._reach.document.ticket)
    return secrets


def processes() -> list[psutil.Process]:
    """Sidecars and control plane: children of this process."""
    found = [p for p in psutil.Process().children(recursive=True) if p.status() != "zombie"]
    ours = [p for p in found if any("paramd_service" in word for word in p.cmdline())]
    assert len(ours) == 3
    return ours


def texts(job: Job, tmp_path: Path) -> Iterator[tuple[str, bytes]]:
    """What others can see: /proc of every process, and every file of the state dir."""
    for process in processes():
        for name in ("cmdline", "environ"):
            yield f"{process.pid} {name}", Path(f"/proc/{process.pid}/{name}").read_bytes()
    for path in places.state_dir().rglob("*"):
        # Where the owner's token is meant to be, 0600.
        if path.is_file() and path.name != places.ENDPOINT_FILE:
            yield str(path), path.read_bytes()


def test_no_secret_is_seen_in_a_running_mesh(
    job: Job, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = used(job)
    monkeypatch.setenv("PARAMD_TOKEN", job.token)
    create = ["token", "create", "--url", job.url, "--job", JOB, "--role", "viewer", "--ttl", "5m"]
    assert paramd_command([*create, "--name", "seen"]) == 0
    shown = capfd.readouterr()
    token = shown.out.strip()
    assert token.startswith("pmd_")
    assert token not in shown.err
    secrets.append(token)
    with paramd.connect(job.url, token) as mesh:
        assert mesh.status() is not None
    assert paramd_command(["token", "list", "--url", job.url, "--job", JOB, "-o", "json"]) == 0
    listed = capfd.readouterr()
    assert [row["name"] for row in json.loads(listed.out)["tokens"]] == ["seen"]
    assert paramd_command(["token", "revoke", "seen", "--url", job.url, "--job", JOB]) == 0
    monkeypatch.setenv("PARAMD_TOKEN", token)
    assert paramd_command(["token", "list", "--url", job.url, "--job", JOB]) == 7
    said = capfd.readouterr()
    monkeypatch.delenv("PARAMD_TOKEN")
    seen = [*texts(job, tmp_path), ("cli", (listed.out + said.out + said.err).encode())]
    assert any(name.endswith("cmdline") and b"paramd_service.sidecar" in t for name, t in seen)
    logs = b"".join(text for name, text in seen if name.endswith(".log"))
    assert b"/api/v1/tokens" in logs, "the control plane's log is looked at, with debug lines"
    assert b"attached" in logs
    for name, text in seen:
        for secret in secrets:
            assert secret.encode() not in text, name


def test_files_with_secrets_are_ours_alone(job: Job) -> None:
    for path in (places.state_dir() / JOB).iterdir():
        mode = os.lstat(path).st_mode & 0o777
        assert not mode & 0o077, (path.name, oct(mode))
