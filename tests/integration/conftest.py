"""One sidecar with a trainer, and a client of each; modules that need others define them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from paramd.mesh.mesh import Mesh
from tests.integration.export_job import ExportingJob
from tests.integration.fake_trainer import FakeTrainer
from tests.integration.sidecar_process import Client, SidecarProcess, client_of, sidecar


@pytest.fixture
def process(tmp_path: Path) -> Iterator[SidecarProcess]:
    with sidecar(tmp_path / "s") as started:
        yield started


@pytest.fixture
def client(trainer: FakeTrainer) -> Iterator[Client]:
    with client_of(trainer) as connected:
        yield connected


@pytest.fixture
def mesh(site: ExportingJob) -> Iterator[Mesh]:
    with site.connect() as found:
        yield found
