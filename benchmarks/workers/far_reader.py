"""Reads a job from a third host, and as many bytes over plain TLS sockets, by turns.

    python -m benchmarks.workers.far_reader serve ADDRESS BYTES CERTIFICATE KEY
    python -m benchmarks.workers.far_reader read ROUNDS BYTES CERTIFICATE ADDRESS [ADDRESS ...]

`serve` answers each byte on a connection with BYTES bytes. `read` reads all parameters of the job
"far", held meanwhile, and BYTES from each address at once; prints a JSON line.
"""

from __future__ import annotations

import json
import socket
import ssl
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import paramd

PORT = 29600
CHUNK_BYTES = 1 << 20


def serve(address: str, size_bytes: int, certificate: str, key: str) -> None:
    """Serve one connection after the other until the process is ended."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    data = memoryview(bytearray(size_bytes))
    data[:] = b"\1" * size_bytes
    with socket.create_server((address, PORT)) as listener:
        print("listens", flush=True)
        while True:
            plain, _ = listener.accept()
            with plain, context.wrap_socket(plain, server_side=True) as connection:
                while connection.recv(1):
                    for begin in range(0, size_bytes, CHUNK_BYTES):
                        connection.sendall(data[begin : begin + CHUNK_BYTES])


class Sockets:
    """One TLS connection to each server, and memory for its bytes that has been touched."""

    def __init__(self, addresses: list[str], size_bytes: int, certificate: str) -> None:
        context = ssl.create_default_context(cafile=certificate)
        self._connections = [
            context.wrap_socket(socket.create_connection((address, PORT)), server_hostname=address)
            for address in addresses
        ]
        self._memory = [memoryview(bytearray(size_bytes)) for _ in addresses]
        self._threads = ThreadPoolExecutor(len(addresses))

    def read(self) -> None:
        list(self._threads.map(self._one, self._connections, self._memory))

    def _one(self, connection: ssl.SSLSocket, memory: memoryview) -> None:
        connection.sendall(b"x")
        at = 0
        while at < len(memory):
            at += connection.recv_into(memory[at : at + CHUNK_BYTES])


def read(rounds: int, size_bytes: int, certificate: str, addresses: list[str]) -> dict[str, Any]:
    """Seconds of each round both ways, and the lanes that were used."""
    sockets = Sockets(addresses, size_bytes, certificate)
    found: dict[str, list[float]] = {"paramd": [], "sockets": []}
    with paramd.connect(job="far") as mesh:
        into = mesh.summon("*")
        mesh.pause(timeout=240)
        try:
            ways: dict[str, Callable[[], object]] = {
                "paramd": lambda: mesh.summon("*", into=into),
                "sockets": sockets.read,
            }
            for turn in range(rounds + 1):
                for name, way in ways.items():
                    begin_s = time.perf_counter()
                    way()
                    if turn:
                        found[name].append(time.perf_counter() - begin_s)
        finally:
            mesh.resume()
        lanes = [lane.transport for lane in mesh.lanes()]
    return {"seconds": found, "bytes": into.bytes, "lanes": lanes}


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], int(sys.argv[3]), *sys.argv[4:6])
    else:
        print(json.dumps(read(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:])))
