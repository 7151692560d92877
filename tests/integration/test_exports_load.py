"""An export loaded back over REST: real sidecars and files, and trainers that agree on nothing."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paramd.mesh.mesh import Mesh
from tests.integration.export_job import ExportingJob, exporting_job

ID = "0123456789abcdef" * 2


@pytest.fixture
def site(tmp_path: Path) -> Iterator[ExportingJob]:
    with exporting_job(tmp_path) as found:
        yield found


@pytest.fixture
def mesh(site: ExportingJob) -> Iterator[Mesh]:
    with site.connect() as found:
        yield found


def test_a_repeated_load_aborts_nothing(site: ExportingJob, mesh: Mesh) -> None:
    done = mesh.export("checkpoints/back", include=("parameters",)).wait(60)

    def load() -> Any:
        path = f"/exports/{done.id}/load"
        answer = site.job.ask("POST", path, json={"id": ID, "wait_s": 0.0}, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer.json()

    first = load()
    assert first["state"] in ("STAGED", "COMMITTED"), first
    # The files are gone: only a request that does not read them again can succeed.
    for file in (site.folder / "back").glob("*.safetensors"):
        file.unlink()
    assert load()["state"] in ("STAGED", "COMMITTED")
