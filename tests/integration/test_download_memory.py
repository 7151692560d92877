"""A client that writes a file takes a bounded buffer, however large file and tensors are."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors import safe_open

from paramd.mesh.exports.download import BATCH_BYTES
from tests.integration.client_job import JOB, Job, Rank, halves, running_job

NUMEL = 40 << 20
"""Of each rank: the file's only tensor has 320 MiB."""

CLIENT = """
import sys
from pathlib import Path
import paramd

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(name))) << 10

job, path, *transports = sys.argv[1:]
with paramd.connect(job=job) as mesh:
    mesh.summon("weight[0:1]")
    for transport in transports:
        # The highest figure counts from now on.
        Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS")
        mesh.download(path, overwrite=True, transport=transport)
        print(transport, status("VmHWM") - before)
"""


def write_the_end(rank: Rank, step: int) -> None:
    rank.arena.buffer[4 * NUMEL - 4 : 4 * NUMEL] = b"last"


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setenv("PARAMD_STATE_DIR", str(tmp_path / "state"))
    (tmp_path / "state").mkdir()
    with running_job(halves(NUMEL)) as found:
        found.update(write_the_end)
        yield found


@pytest.mark.in_turns
@pytest.mark.timeout(300)
def test_a_client_that_writes_a_file_takes_a_bounded_buffer_on_every_lane(
    job: Job, tmp_path: Path
) -> None:
    path, lanes = tmp_path / "model.safetensors", ("same-host", "stream", "grpc")
    command = [sys.executable, "-c", CLIENT, JOB, str(path), *lanes]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=240)
    peaks = {lane: int(peak) for lane, peak in map(str.split, done.stdout.splitlines())}
    assert set(peaks) == set(lanes)
    assert max(peaks.values()) < 2 * BATCH_BYTES < path.stat().st_size / 2, peaks
    with safe_open(path, "pt") as file:
        assert file.get_slice("weight").get_shape() == [2 * NUMEL]
    with path.open("rb") as written:
        written.seek(-4, 2)
        assert written.read() == b"last"
