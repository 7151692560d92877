"""A snapshot's memory: asked for, read, and let go of exactly when nobody holds it."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
import torch

from paramd.errors import UnreachableError
from paramd.layout.replicas import Sample
from paramd.memory import handover
from paramd.mesh.peers.control import PeerAddress
from paramd.mesh.peers.grpc import RankUnreachableError
from paramd.mesh.reading import transfer
from paramd.mesh.reading.ops import is_same_host
from paramd.mesh.reading.transfer import SharedSnapshot, Transfer
from paramd.places import host_id
from paramd.security.tickets import Role, Signer, new_private_key

DATA = bytes(range(256)) * 64
TICKET = Signer(new_private_key()).mint(
    job="run", incarnation=3, role=Role.SIDECAR, rank=0, ttl_s=60
)
IDENTITY = {"job": "run", "incarnation": 3, "rank": 0}

Serve = Callable[[socket.socket], None]


@contextmanager
def sidecar(directory: Path, serve: Serve) -> Iterator[PeerAddress]:
    """A peer whose socket is served by `serve`, one connection, on a thread."""
    directory.chmod(0o700)
    path = directory / "rank-0.sock"
    listener = handover.listen(path)
    listener.setblocking(True)
    listener.settimeout(10)

    def run() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(10)
            serve(connection)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield PeerAddress(0, "host:1", str(path), host_id())
    finally:
        thread.join()
        listener.close()


class Maps:
    """Answers "map" with DATA, and keeps what it is told afterwards."""

    def __init__(self, said_bytes: int = len(DATA), **other: object) -> None:
        state = {"state": [3, 0, 7, 0, ""], "boundary_token": 0}
        self.said = {"op": "mapped", "size_bytes": said_bytes, **state, **IDENTITY, **other}
        self.told: list[str] = []

    def __call__(self, connection: socket.socket) -> None:
        message, _ = handover.receive(connection)
        assert (message["op"], message["ticket"], message["snapshot_id"]) == ("map", TICKET, "s")
        memory = os.memfd_create("snapshot")
        os.write(memory, DATA)
        handover.send(connection, self.said, [memory])
        os.close(memory)
        try:
            while True:
                self.told.append(handover.receive(connection)[0]["op"])
        except EOFError:
            self.told.append("closed")


def test_memory_is_read_and_given_back(tmp_path: Path) -> None:
    maps, target = Maps(), torch.zeros(1000, dtype=torch.uint8)
    with sidecar(tmp_path, maps) as peer:
        assert is_same_host(peer)
        shared = SharedSnapshot.open(peer, TICKET, "s")
        shared.read_into(target.data_ptr(), 300, 1000)
        shared.close()
        shared.close()
    assert bytes(target.tolist()) == DATA[300:1300]
    assert maps.told == ["unmap", "closed"]


def test_memory_that_somebody_still_holds_is_not_given_back(tmp_path: Path) -> None:
    maps = Maps()
    with sidecar(tmp_path, maps) as peer:
        shared = SharedSnapshot.open(peer, TICKET, "s")
        memory = shared.map_private()
        assert memory is not None
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        del memory
        shared.close()
    assert maps.told == ["closed"]
    tensor[0] = 9
    assert bytes(tensor[1:].tolist()) == DATA[1:]


@pytest.mark.parametrize(
    "other", [{"rank": 1}, {"incarnation": 2}, {"job": "walk"}, {"rank": None}]
)
def test_memory_of_somebody_else_is_not_taken(tmp_path: Path, other: dict[str, object]) -> None:
    with (
        sidecar(tmp_path, Maps(len(DATA), **other)) as peer,
        pytest.raises(UnreachableError, match="rank 0 of job 'run', run 3, is not at its Unix"),
    ):
        SharedSnapshot.open(peer, TICKET, "s")


@pytest.mark.parametrize(
    "other", [{"state": [3, 0]}, {"boundary_token": None}, {"size_bytes": None}]
)
def test_an_answer_that_says_too_little_is_no_answer_and_keeps_no_memory(
    tmp_path: Path, other: dict[str, object]
) -> None:
    maps = Maps()
    maps.said |= other
    before = len(os.listdir("/proc/self/fd"))
    with (
        sidecar(tmp_path, maps) as peer,
        pytest.raises(UnreachableError, match="its answer names no state"),
    ):
        SharedSnapshot.open(peer, TICKET, "s")
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_sidecar_that_hangs_or_hangs_up_is_unreachable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "ANSWER_S", 0.05)
    done = threading.Event()
    with sidecar(tmp_path, lambda _: done.wait(10) and None) as peer:
        with pytest.raises(UnreachableError, match="rank 0"):
            SharedSnapshot.open(peer, TICKET, "s")
        done.set()
    with (
        sidecar(tmp_path, lambda c: handover.receive(c) and None) as peer,
        pytest.raises(UnreachableError, match="closed"),
    ):
        SharedSnapshot.open(peer, TICKET, "s")


class Stopped:
    """In the place of `Sidecars` and their document: a peer that answers no probe either."""

    incarnation, layout_digest = 3, ""

    def __init__(self, peer: PeerAddress) -> None:
        self.document, self.peers, self.peer = self, [peer], lambda _: peer

    def shown(self, _: int) -> str:
        return TICKET

    async def probe(self, rank: int) -> None:
        raise RankUnreachableError(rank, "it does not answer", stopped=True)


async def test_a_replica_that_hangs_is_left_out_of_the_next_comparisons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "ANSWER_S", 0.05)
    done, left_out = threading.Event(), []
    with sidecar(tmp_path, lambda _: done.wait(10) and None) as peer, closing(Transfer()) as one:
        sidecars, samples = Stopped(peer), [Sample("a", ((0, 1),), {0: 0})]
        await one._open_samples(sidecars, {}, samples, ExitStack(), left_out.append)
        done.set()
    assert left_out == [0]


def test_memory_shorter_than_said_is_refused_not_touched(tmp_path: Path) -> None:
    maps, target = Maps(2 * len(DATA)), torch.zeros(2 * len(DATA), dtype=torch.uint8)
    with sidecar(tmp_path, maps) as peer:
        shared = SharedSnapshot.open(peer, TICKET, "s")
        with pytest.raises(UnreachableError, match="shorter"):
            shared.map_private()
        with pytest.raises(UnreachableError, match="shorter"):
            shared.read_into(target.data_ptr(), 0, len(target))
        shared.close()


def test_another_host_or_an_invisible_socket_is_not_the_same_host(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    path.touch()
    assert is_same_host(PeerAddress(0, "", str(path), host_id()))
    assert not is_same_host(PeerAddress(0, "", str(path), "another"))
    assert not is_same_host(PeerAddress(0, "", str(tmp_path / "absent"), host_id()))
    assert not is_same_host(PeerAddress(0, "", "", host_id()))
