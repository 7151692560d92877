"""A raw loopback sender: the limit that no protocol over TCP can pass."""

from __future__ import annotations

import socket

from benchmarks.ranks import obey

_PART_BYTES = 2 << 20


class Sender:
    """Sends the same warm bytes again and again, on request of the receiver."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._connection: socket.socket | None = None
        self._memory = memoryview(b"\1" * (64 << 20))

    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def accept(self) -> None:
        self._connection, _ = self._listener.accept()

    def send(self, size_bytes: int) -> None:
        """Waits for one byte, then sends."""
        assert self._connection is not None
        self._connection.recv(1)
        sent = 0
        while sent < size_bytes:
            at = sent % len(self._memory)
            part = self._memory[at : at + min(_PART_BYTES, size_bytes - sent)]
            self._connection.sendall(part)
            sent += len(part)


def main() -> None:
    sender = Sender()
    obey({"port": sender.port, "accept": sender.accept, "send": sender.send})


if __name__ == "__main__":
    main()
