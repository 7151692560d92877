"""Memory that a client takes while it writes a file much larger than its buffer.

`mesh.download`, which `paramd summon -f FILE` calls, on every lane; each in a process of its own.
The file goes to the directory for temporary files: name a disk by TMPDIR. Exports are written by
sidecars: `python -m benchmarks export` has their memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.big import WORLD_SIZE, Big, big
from benchmarks.ranks import ObedientRanks
from benchmarks.report import Goal, Report, Table
from paramd.mesh.exports.download import BATCH_BYTES

TRANSPORTS = ("same-host", "stream", "grpc")
ROUNDS = 3
_MIB = 1 << 20


def run(*, quick: bool) -> Report:
    """1 GiB of float32 over two ranks; `quick` takes a quarter of it."""
    with (
        tempfile.TemporaryDirectory(prefix="paramd-download-") as folder,
        big(layers=4 if quick else 16) as job,
    ):
        path = Path(folder) / "model.safetensors"
        return _report(job, {name: _peak(job, name, path) for name in TRANSPORTS})


def _peak(job: Big, transport: str, path: Path) -> int:
    """Most memory of several downloads by one process."""
    with ObedientRanks("benchmarks.workers.client", state_dir=job.ranks.state_dir) as client:
        client.call("connect")
        peaks = []
        for _ in range(ROUNDS):
            job.advance()
            peaks.append(int(client.call("download", str(path), transport)[0]))
        return max(peaks)


def _report(job: Big, peaks: Mapping[str, int]) -> Report:
    rows = [[name, f"{peak / _MIB:.0f}"] for name, peak in peaks.items()]
    return Report(
        name="download",
        tables=[
            Table(
                title="Memory of a client that writes a file",
                header=[f"{job.gib:g} GiB, {WORLD_SIZE} ranks", "most beyond what it had, MiB"],
                rows=rows,
            )
        ],
        goals=[
            Goal(
                what="memory of a download",
                unit="MiB",
                measured=max(peaks.values()) / _MIB,
                limit=2 * BATCH_BYTES / _MIB,
            )
        ],
        numbers={"peak_bytes": dict(peaks)},
    )
