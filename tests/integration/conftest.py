"""One sidecar with a trainer, a client of each, a store; modules that need others define them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.integration.fake_trainer import FakeTrainer, attached
from tests.integration.sidecar_process import Client, SidecarProcess, client_of, sidecar

if TYPE_CHECKING:
    # The process that only tells workers what to run imports this file, too, and none of these.
    from paramd.mesh.mesh import Mesh
    from paramd_service.control.store.engine import StoreAddress
    from tests.integration.export_job import ExportingJob
    from tests.postgres import Postgres


@pytest.fixture
def process(tmp_path: Path) -> Iterator[SidecarProcess]:
    with sidecar(tmp_path / "s") as started:
        yield started


@pytest.fixture
def trainer(process: SidecarProcess, request: pytest.FixtureRequest) -> Iterator[FakeTrainer]:
    """With an arena as large as the module says."""
    size = getattr(request.module, "ARENA_BYTES", 1 << 20)
    with attached(process.socket_path, arena_bytes=size) as found:
        yield found


@pytest.fixture
def client(trainer: FakeTrainer) -> Iterator[Client]:
    with client_of(trainer) as connected:
        yield connected


@pytest.fixture
def mesh(site: ExportingJob) -> Iterator[Mesh]:
    with site.connect() as found:
        yield found


@pytest.fixture(scope="module", params=("sqlite", "postgres"))
def server(request: pytest.FixtureRequest) -> Iterator[Postgres | None]:
    from tests.integration.store_process import server_of

    with server_of(request.param) as found:
        yield found


@pytest.fixture
def address(server: Postgres | None, tmp_path: Path) -> StoreAddress:
    from tests.integration.store_process import fresh_address

    return fresh_address(server, tmp_path)
