"""Looking at who listens at a loopback address neither waits nor fails, whatever is there."""

import errno
import socket
import struct
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from paramd.errors import UnreachableError
from paramd.security import loopback
from paramd.state_files import beside_port, sockets_dir


def test_a_server_that_is_stopped_with_a_full_backlog_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARAMD_STATE_DIR", str(tmp_path))
    sockets_dir()
    path = str(beside_port("127.0.0.1", 4711))
    with socket.socket(socket.AF_UNIX) as server, ExitStack() as stack:
        server.bind(path)
        server.listen(0)
        code = 0
        while not code:
            client = stack.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            code = client.connect_ex(path)
        assert code == errno.EAGAIN
        assert loopback.way_to("127.0.0.1", 4711) == f"unix:{path}"


def test_a_connection_that_was_closed_at_once_is_an_outage() -> None:
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        connection = stack.enter_context(socket.create_connection(server.getsockname()))
        accepted, _ = server.accept()
        # A reset, after which the connection has no peer.
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        accepted.close()
        with pytest.raises(UnreachableError, match="was closed at once"):
            loopback.question("http://127.0.0.1:1", "token", connection)


def test_an_answer_that_comes_byte_by_byte_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopback, "PROOF_S", 0.3)
    at = (loopback.plain_ip("127.0.0.1"), 1)
    asked = loopback.Question("http://127.0.0.1:1", "token", at, at, frozenset({7}), "0" * 32)
    monkeypatch.setattr(loopback, "question", lambda *_: asked)
    near, far = socket.socketpair()
    ended = threading.Event()

    def drip() -> None:
        with suppress(OSError):
            while not ended.wait(0.02):
                far.send(b"x")

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        with near, far, pytest.raises(loopback.StrangerError, match="belongs to uid 7 now"):
            loopback.ask_over(near, asked.url, asked.token)
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize(
    "proof", ['"\\ud800"', '"\u00e4"', "1", "null", '""', '"' + "0" * 64 + '"']
)
def test_what_is_no_proof_is_refused_whatever_it_is(proof: str) -> None:
    peer = (loopback.plain_ip("127.0.0.1"), 8470)
    asked = loopback.Question("http://127.0.0.1:8470", "token", peer, peer, frozenset(), "0" * 32)
    with pytest.raises(loopback.StrangerError):
        asked.check(b"HTTP/1.1 200 OK", b'{"proof": ' + proof.encode() + b"}")
