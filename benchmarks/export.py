"""Exports to a local directory, beside raw writers and what PyTorch offers.

Everything is written to the directory for temporary files: name a disk by TMPDIR.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.big import WORLD_SIZE, Big, big
from benchmarks.harness import Series, run_rounds
from benchmarks.object_store import BUCKET, object_store
from benchmarks.report import Goal, Report, Table

RAW_TWO = "two raw writers, own files, synced"
RAW_ONE = "one raw writer, synced"
SHARDED = "sharded export (safetensors)"
ONE_FILE = "export into one file (safetensors)"
OUR_DCP = "export (dcp)"
DCP_SAVE = "DCP save"
S3_EXPORT = "sharded export into moto's S3"
S3_PLAIN = "one obstore put of the same bytes into moto's S3"
TORCH_SAVE = "get_model_state_dict + torch.save"

STEP_S = 0.25
"""About what a step of such a model takes at the least."""
_MIB = 1 << 20


def run(*, quick: bool) -> Report:
    """1 GiB of float32 over two ranks; `quick` takes a quarter of it and fewer rounds."""
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paramd-export-")))
        store = stack.enter_context(object_store())
        places = {"here": str(root), "cloud": {"root": f"s3://{BUCKET}/x", **store.options}}
        environment = {"PARAMD_DESTINATIONS": json.dumps(places)}
        job = stack.enter_context(big(layers=4 if quick else 16, environment=environment))
        # First of all, before any process keeps memory that it used once.
        before = {pid: _anonymous_bytes(pid) for pid in job.helpers}
        memory = {name: _peak(job, root, name, before) for name in (SHARDED, ONE_FILE, OUR_DCP)}
        found = run_rounds(
            _contenders(job, root),
            rounds=3 if quick else 5,
            warm_ups=1,
            watched=job.watched,
            before=lambda _: _clear(job, root),
        )
        stops = _stops(job, root)
        data = bytearray(job.size_bytes)
        uploads = run_rounds(
            {
                S3_EXPORT: lambda: _export(job, SHARDED, "cloud/ours"),
                S3_PLAIN: lambda: store.put("plain", data),
            },
            rounds=3 if quick else 1,
            warm_ups=0,
            watched=job.watched,
            before=lambda _: store.clear(),
        )
        return _report(job, {**found, **uploads}, memory, stops)


def _contenders(job: Big, root: Path) -> Mapping[str, Callable[[], float]]:
    half = job.size_bytes // WORLD_SIZE

    def raw(*sizes: int) -> float:
        return max(map(float, job.ranks.call("raw_write", str(root), list(sizes))))

    return {
        RAW_TWO: lambda: raw(half, half),
        RAW_ONE: lambda: raw(job.size_bytes, 0),
        SHARDED: lambda: _export(job, SHARDED),
        ONE_FILE: lambda: _export(job, ONE_FILE),
        OUR_DCP: lambda: _export(job, OUR_DCP),
        DCP_SAVE: lambda: max(map(float, job.ranks.call("dcp_save", str(root / "dcp-save")))),
        TORCH_SAVE: lambda: max(map(float, job.ranks.call("gather_save", str(root / "whole.pt")))),
    }


def _export(job: Big, name: str, where: str = "here/ours") -> float:
    shard = str(job.size_bytes // WORLD_SIZE) if name == SHARDED else "100GB"
    return job.ask("export", where, shard, "dcp" if name == OUR_DCP else "safetensors")


def _clear(job: Big, root: Path) -> None:
    """A new step, no files, and nothing left to be written back by the kernel."""
    for path in root.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    os.sync()
    job.advance()


def _peak(job: Big, root: Path, name: str, before: Mapping[int, int]) -> int:
    """Most anonymous memory that any helper has gained (snapshots are shared memory)."""
    _clear(job, root)
    with _sampled(lambda: {pid: _anonymous_bytes(pid) for pid in job.helpers}) as samples:
        _export(job, name)
    return max(sample[pid] - before[pid] for sample in samples for pid in before)


def _stops(job: Big, root: Path) -> float:
    """Longest wait of an update for a copy while exports are made of a training that steps."""
    before = [total for total, _ in job.ranks.call("stalls")]
    longest = 0.0
    for name in (SHARDED, ONE_FILE):
        _clear(job, root)
        job.ranks.tell("pace", STEP_S, 24)
        time.sleep(3 * STEP_S)
        _export(job, name)
        job.ranks.update()
        now = [total for total, _ in job.ranks.call("stalls")]
        longest = max(longest, *(b - a for a, b in zip(before, now, strict=True)))
        before = now
    return longest


@contextmanager
def _sampled(look: Callable[[], dict[int, int]]) -> Iterator[list[dict[int, int]]]:
    samples = [look()]
    done = threading.Event()

    def sample() -> None:
        while not done.wait(0.005):
            samples.append(look())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        done.set()
        thread.join()


def _anonymous_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0


def _report(
    job: Big, found: Mapping[str, Series], memory: Mapping[str, int], stop_s: float
) -> Report:
    rows = [
        [
            name,
            f"{series.seconds:.3f}",
            f"{series.spread_s[0]:.3f} to {series.spread_s[1]:.3f}",
            f"{job.size_bytes / 1e9 / series.seconds:.2f}",
            f"{series.cpu_s / job.gib:.2f}",
            f"{memory[name] / _MIB:.0f}" if name in memory else "",
        ]
        for name, series in found.items()
    ]
    header = [
        f"{job.gib:g} GiB, {WORLD_SIZE} ranks", "s", "fastest to slowest", "GB/s",
        "CPU s per GiB", "most memory beyond the snapshot, MiB",
    ]  # fmt: skip
    seconds = {name: series.seconds for name, series in found.items()}
    return Report(
        name="export",
        tables=[Table(title="Exports to a local directory", header=header, rows=rows)],
        goals=[
            Goal(what="sharded export, speed / two raw writers", at_least=True,
                 measured=seconds[RAW_TWO] / seconds[SHARDED], limit=0.7),
            Goal(what="sharded export, speed / DCP save", at_least=True,
                 measured=seconds[DCP_SAVE] / seconds[SHARDED], limit=1.5),
            Goal(what="export into one file, speed / one raw writer", at_least=True,
                 measured=seconds[RAW_ONE] / seconds[ONE_FILE], limit=0.75),
            Goal(what="export into one file, speed / state dict + torch.save", at_least=True,
                 measured=seconds[TORCH_SAVE] / seconds[ONE_FILE], limit=2.0),
            Goal(what="memory beyond the snapshot in any process", unit="MiB",
                 measured=max(memory.values()) / _MIB, limit=64.0),
            Goal(what="training stopped by an export", unit="ms",
                 measured=1e3 * stop_s, limit=1.0),
        ],
        notes=[
            "Exports are timed from the request to DONE, by the control plane's clock, and are "
            "synced to the disk, as the raw writers and DCP save are; torch.save is not."
        ],
        numbers={
            "seconds": {n: [x.seconds for x in s.samples] for n, s in found.items()},
            "cpu_s": {n: [x.cpu_s for x in s.samples] for n, s in found.items()},
            "memory_beyond_snapshot_bytes": dict(memory),
            "stop_s": stop_s,
        },
    )  # fmt: skip
