"""A client in a process of its own: what users run, and the machine's limits beside it."""

from __future__ import annotations

import ctypes
import os
import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

import paramd
from benchmarks.ranks import obey
from benchmarks.workers.model import JOB
from paramd.errors import ParamdError
from paramd.mesh.mesh import Mesh
from paramd.mesh.reading.stream import Transport, keep_freed_memory
from paramd.mesh.results import Summoned
from tests.ending import end

_KIB = 1 << 10

# mallopt(3) parameters.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_M_ARENA_MAX = -8


class Client:
    """One connection, and warm memory of the size of the model."""

    def __init__(self) -> None:
        self._mesh: Mesh | None = None
        self._warm: dict[str, torch.Tensor] = {}
        self._other: dict[str, torch.Tensor] = {}
        self._sockets: list[socket.socket] = []
        self._writing = ExitStack()

    @property
    def mesh(self) -> Mesh:
        assert self._mesh is not None
        return self._mesh

    def connect(self, job: str = JOB) -> int:
        """Connects; returns the step of a first small read."""
        if self._mesh is not None:
            self._mesh.close()
        self._mesh = paramd.connect(job=job)
        name = self.mesh.params()[0].name
        return self.mesh.summon(f"{name}[0:1]").step

    def read_again(self) -> int:
        """Reads all parameters until that succeeds; returns the step."""
        while True:
            try:
                return self.mesh.summon("*", timeout=1.0).step
            except ParamdError:
                time.sleep(0.01)

    def keep_heap(self) -> None:
        """From now on glibc keeps every freed block, as the peer's ranks do (`WARM_HEAP`)."""
        keep_freed_memory()  # sets thresholds once a process; ours come after it
        libc = ctypes.CDLL(None)
        wanted = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, (1 << 31) - 1), (_M_ARENA_MAX, 1))
        for parameter, value in wanted:
            assert libc.mallopt(parameter, value)

    def warm(self) -> int:
        """Makes the memory that `into` contenders fill; returns its bytes."""
        if not self._warm:
            self._warm = {
                info.name: torch.zeros(info.shape, dtype=getattr(torch, info.dtype))
                for info in self.mesh.params()
            }
        return sum(tensor.nbytes for tensor in self._warm.values())

    def summon(self, transport: Transport, into: bool) -> float:
        """All parameters; seconds."""
        given = self._warm if into else None
        begin_s = time.perf_counter()
        params = self.mesh.summon("*", transport=transport, into=given)
        seconds = time.perf_counter() - begin_s
        _check(params)
        return seconds

    def view(self) -> float:
        """Pins all parameters and looks at them where they lie. Seconds until they are there."""
        begin_s = time.perf_counter()
        with self.mesh.view("*") as shards:
            assert shards.step > 0
            return time.perf_counter() - begin_s

    def memcpy(self) -> float:
        """One warm copy of the whole result, with as many threads as cores. Seconds."""
        if not self._other:
            self._other = {name: torch.zeros_like(one) for name, one in self._warm.items()}
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        begin_s = time.perf_counter()
        for name, tensor in self._warm.items():
            self._other[name].copy_(tensor)
        return time.perf_counter() - begin_s

    def dial(self, ports: list[int]) -> None:
        """Opens one raw connection to each sender."""
        self._sockets = [socket.create_connection(("127.0.0.1", port)) for port in ports]

    def receive(self, size_bytes: int) -> float:
        """`size_bytes` from each raw connection into warm memory, one thread each. Seconds."""
        buffers = list(self._warm.values())
        parts = [buffers[number :: len(self._sockets)] for number in range(len(self._sockets))]
        threads = [
            threading.Thread(target=_receive, args=(one, part, size_bytes))
            for one, part in zip(self._sockets, parts, strict=True)
        ]
        begin_s = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - begin_s

    def stats(self) -> float:
        """Statistics of every parameter. Seconds."""
        begin_s = time.perf_counter()
        assert len(self.mesh.stats("*")) == len(self._warm)
        return time.perf_counter() - begin_s

    def torch_pass(self, name: str, threads: int) -> float:
        """One reduction of torch over the same number of bytes. Seconds."""
        torch.set_num_threads(threads)
        reduce = {"sum": torch.sum, "norm": torch.linalg.vector_norm}[name]
        begin_s = time.perf_counter()
        for tensor in self._warm.values():
            reduce(tensor)
        return time.perf_counter() - begin_s

    def read_until(self, stop: str, transport: Transport, bytes_per_s: float) -> dict[str, float]:
        """Summons everything again and again until the file `stop` exists.

        Args:
            bytes_per_s: sleeps so that no more than this is read on average; 0: no limit.
        """
        size_bytes, count, begin_s = self.warm(), 0, time.perf_counter()
        while not os.path.exists(stop):
            self.mesh.summon("*", transport=transport, into=self._warm)
            count += 1
            if bytes_per_s:
                due_s = begin_s + count * size_bytes / bytes_per_s
                _sleep_until(due_s, stop)
        seconds = time.perf_counter() - begin_s
        return {"count": count, "bytes_per_s": count * size_bytes / seconds}

    def peak(self, transport: Transport, into: bool) -> int:
        """Highest resident bytes during a summon beyond what was there and the result."""
        Path("/proc/self/clear_refs").write_text("5")
        before = _status_bytes("VmRSS")
        given = self._warm if into else None
        result = self.mesh.summon("*", transport=transport, into=given)
        result_bytes = 0 if into else sum(tensor.nbytes for tensor in result.values())
        return _status_bytes("VmHWM") - before - result_bytes

    def download(self, path: str, transport: Transport) -> int:
        """Highest resident bytes while all parameters are written to a file, beyond what was there
        before."""
        Path("/proc/self/clear_refs").write_text("5")
        before = _status_bytes("VmRSS")
        self.mesh.download(path, overwrite=True, transport=transport)
        return _status_bytes("VmHWM") - before

    def edit_small(self, pattern: str, count: int, value: float) -> list[tuple[float, float]]:
        """So many edits without data, one after another: seconds, and how long training stood."""
        found = []
        for number in range(count):
            begin_s = time.perf_counter()
            edit = self.mesh.edit(pattern, fill=value + number)
            assert edit.stop_ms is not None
            found.append((time.perf_counter() - begin_s, edit.stop_ms / 1e3))
        return found

    def write_back(self, transport: Transport) -> tuple[float, float]:
        """Sets all parameters to warm memory: seconds, and how long training stood."""
        begin_s = time.perf_counter()
        edit = self.mesh.edit(set=self._warm, transport=transport)
        seconds = time.perf_counter() - begin_s
        assert edit.stop_ms is not None
        return seconds, edit.stop_ms / 1e3

    def begin_writing(self) -> None:
        """Summons all parameters for writing, and changes each."""
        block = self.mesh.summon("*", writeback=True, pause=False, mode="replace")
        for tensor in self._writing.enter_context(block).values():
            tensor.add_(1.0)

    def end_writing(self) -> tuple[float, float]:
        """Ends the block. Seconds until all is written, and how long training stood."""
        begin_s = time.perf_counter()
        self._writing.close()
        seconds = time.perf_counter() - begin_s
        (edit,) = self.mesh.edits(limit=1)
        assert edit.stop_ms is not None
        return seconds, edit.stop_ms / 1e3

    def export(self, destination: str, max_shard_size: str, format: str) -> float:
        """Exports parameters without reading them back. Seconds, as the control plane has them."""
        begun = self.mesh.export(
            destination,
            format=format,
            max_shard_size=max_shard_size,
            include=["parameters"],
            verify=False,
            overwrite=True,
        )
        done = begun.wait(timeout=300)
        assert done.ended_s is not None
        return done.ended_s - done.created_s

    def close(self) -> None:
        with ExitStack() as stack:
            for one in self._sockets:
                stack.callback(one.close)
            if self._mesh is not None:
                stack.callback(self._mesh.close)


def _sleep_until(due_s: float, stop: str) -> None:
    while (left_s := due_s - time.perf_counter()) > 0 and not os.path.exists(stop):
        time.sleep(min(left_s, 0.05))


def _check(params: Summoned) -> None:
    assert len(params) > 0
    assert params.step > 0


def _receive(connection: socket.socket, parts: list[torch.Tensor], size_bytes: int) -> None:
    connection.sendall(b"g")
    left = size_bytes
    for tensor in parts:
        view = memoryview(tensor.view(torch.uint8).flatten().numpy().data)
        at = 0
        while at < len(view) and left:
            moved = connection.recv_into(view[at : at + left])
            if moved == 0:
                raise RuntimeError("a sender ended")
            at += moved
            left -= moved
    assert left == 0


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * _KIB
    raise RuntimeError(f"/proc/self/status has no {field}")


def main() -> None:
    client = Client()
    commands: dict[str, Any] = {
        name: getattr(client, name)
        for name in (
            "connect", "read_again", "keep_heap", "warm", "summon", "view", "memcpy", "dial",
            "receive", "stats", "torch_pass", "peak", "read_until", "edit_small", "write_back",
            "begin_writing", "end_writing", "export", "download",
        )
    }  # fmt: skip
    try:
        obey(commands)
    finally:
        client.close()


if __name__ == "__main__":
    end(main)
