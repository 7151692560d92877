"""A reader of gradients in a process of its own."""

from __future__ import annotations

import socket
import time
from typing import Any

import paramd
from benchmarks.ranks import obey
from benchmarks.workers.gradients import JOB
from paramd.mesh.frames.frames import Kind
from paramd.mesh.mesh import Mesh
from paramd.mesh.reading.stream import Transport


class Reader:
    """One connection."""

    def __init__(self) -> None:
        self._mesh: Mesh | None = None
        self._sockets: list[socket.socket] = []

    def connect(self) -> int:
        self._mesh = paramd.connect(job=JOB)
        return self._mesh.incarnation

    def frames(
        self, kind: Kind, transport: Transport, count: int, rest_s: float
    ) -> list[list[float]]:
        """Takes `count` frames: step, dropped before it, seconds it took to read, global norm."""
        assert self._mesh is not None
        found = []
        for frame in self._mesh.grads("*", kind=kind, transport=transport):
            norm = frame.total.norm if kind != "full" else 0.0
            found.append([frame.step, frame.dropped, frame.read_s, norm])
            if len(found) == count:
                break
            if rest_s:
                time.sleep(rest_s)
        return found

    def dial(self, ports: list[int]) -> None:
        """Opens one raw connection to each sender."""
        self._sockets = [socket.create_connection(("127.0.0.1", port)) for port in ports]

    def receive(self, size_bytes: int) -> float:
        """`size_bytes` from each raw connection, one after the other's part; seconds."""
        import threading

        def one(connection: socket.socket) -> None:
            buffer = memoryview(bytearray(4 << 20))
            connection.sendall(b"g")
            left = size_bytes
            while left:
                moved = connection.recv_into(buffer[: min(left, len(buffer))])
                if moved == 0:
                    raise RuntimeError("a sender ended")
                left -= moved

        threads = [threading.Thread(target=one, args=(item,)) for item in self._sockets]
        begin_s = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - begin_s

    def close(self) -> None:
        for one in self._sockets:
            one.close()
        if self._mesh is not None:
            self._mesh.close()


def main() -> None:
    reader = Reader()
    commands: dict[str, Any] = {
        name: getattr(reader, name) for name in ("connect", "frames", "dial", "receive")
    }
    try:
        obey(commands)
    finally:
        reader.close()


if __name__ == "__main__":
    main()
