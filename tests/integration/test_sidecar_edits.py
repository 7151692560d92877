"""Edits at a real sidecar: staged, applied, told true; also when it is killed in between."""

import contextlib
import ctypes
import fcntl
import os
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import torch
import xxhash

from paramd.errors import DataLossError, NotFoundError, UsageError
from paramd.layout.edits.kinds import EditKind
from paramd.layout.types import Box
from paramd.memory import handover
from paramd.memory.descriptors import LentMemory, lent_memory
from paramd.mesh.edits.lending import Lender, Loan, Sender
from paramd.mesh.peers.bulk import BulkStream
from paramd.mesh.peers.sidecars import StreamOffer
from paramd.security.tickets import Role
from paramd.streams import DATA, Grant, Window
from paramd.v1 import sidecar_pb2 as pb
from paramd.wire import checksum_of
from tests.edit_ops import edit_op
from tests.integration.edit_trainer import FILL_B, W_BYTES, Editing, bytes_of, editing, matrix
from tests.integration.sidecar_process import sidecar, ticket, wait_until


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Editing]:
    """One rank with its sidecar; tests take numbers of edits and boundaries of their own."""
    directory = tmp_path_factory.mktemp("edits", numbered=True)
    directory.chmod(0o700)
    with sidecar(directory / "s") as process, editing(process) as one:
        # Connected before the first test, which is to leave nothing open.
        one.call("GetState", pb.GetStateRequest())
        yield one


def refused(
    code: grpc.StatusCode, words: str, work: object, *args: object, **kwargs: object
) -> None:
    with pytest.raises(grpc.RpcError, match=words) as caught:
        work(*args, **kwargs)  # type: ignore[operator]
    assert caught.value.code() is code


def test_only_editors_stage_and_only_the_control_plane_drops(shared: Editing) -> None:
    one, denied = shared, grpc.StatusCode.PERMISSION_DENIED
    refused(denied, "needs editor", one.stage, one.manifest(0x20, FILL_B), role=Role.READER)
    drop = pb.DropEditRequest(edit_id=f"{0x20:032x}")
    refused(denied, "may not", one.call, "DropEdit", drop, Role.EDITOR)
    for op in ("lend", "stage"):
        with handover.connect(Path(one.peer.socket_path)) as connection:
            message = {"op": op, "ticket": ticket(Role.READER), "edit_id": f"{0x20:032x}"}
            handover.send(connection, message)
            assert handover.receive(connection)[0]["code"] == "PERMISSION_DENIED"


def test_only_the_token_that_stages_an_edit_adds_data_to_it(tmp_path: Path) -> None:
    """Over gRPC and from lent memory; also when the sidecar has been replaced."""
    tmp_path.chmod(0o700)
    denied, data = grpc.StatusCode.PERMISSION_DENIED, bytes_of(matrix(11))

    def by_socket(one: Editing, op: str, token_id: str | None) -> str:
        with handover.connect(Path(one.peer.socket_path)) as connection:
            shown = ticket(Role.EDITOR, token_id=token_id)
            handover.send(connection, {"op": op, "ticket": shown, "edit_id": manifest.edit_id})
            answer, descriptors = handover.receive(connection)
        for descriptor in descriptors:
            os.close(descriptor)
        return str(answer.get("code", answer["op"]))

    with sidecar(tmp_path, faults="edit-ready:kill") as process, editing(process) as one:
        manifest = one.manifest(1)
        assert one.stage(manifest, data[: 1 << 20], token_id="ann").author == "ann"
        for other in ("bob", None):
            refused(denied, "another token", one.stage, manifest, data, 1 << 20, token_id=other)
            assert by_socket(one, "stage", other) == "PERMISSION_DENIED"
        assert one.progress(1).staged_bytes == 1 << 20
        assert by_socket(one, "stage", "ann") == "staging"
        staged = one.stage(manifest, data, 1 << 20, token_id="ann")
        assert staged.data_digests == [xxhash.xxh3_128_digest(data)]
        with pytest.raises(grpc.RpcError):
            one.reach(1, 1).result()
        process.process.wait(timeout=60)
        with sidecar(tmp_path) as successor, editing(successor, back=one.trainer.fds) as again:
            # What somebody else has staged whole is not taken for one's own data either.
            refused(denied, "another token", again.stage, manifest, data, token_id="bob")
            # Killed while it was made ready: the page may say so already, or not yet.
            phase = again.stage(manifest, data, token_id="ann").phase
            assert phase in (pb.EDIT_PHASE_STAGED, pb.EDIT_PHASE_READY)
            # Without data there is nothing to add: the control plane stages it for whoever asks.
            again.stage(again.manifest(2, FILL_B), token_id="ann")
            again.stage(again.manifest(2, FILL_B), role=Role.CONTROL)


def test_what_is_wrong_with_an_edit_is_said_and_nothing_is_kept(shared: Editing) -> None:
    one, before = shared, shared.w.clone()
    data, bad = bytes_of(matrix(2)), matrix(2)
    bad[700, 3] = float("nan")
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    refused(invalid, "holds NaN.*element 700003", one.stage, one.manifest(0x30), bytes_of(bad))
    refused(grpc.StatusCode.NOT_FOUND, "is unknown on this rank", one.progress, 0x30)
    refused(grpc.StatusCode.NOT_FOUND, "no parameter", one.stage,
            one.manifest(0x31, [edit_op(fqn="x", kind=EditKind.FILL)]))  # fmt: skip
    out = [edit_op(fqn="b", box=Box((0,), (1001,)), kind=EditKind.FILL)]
    refused(invalid, "out of range", one.stage, one.manifest(0x32, out))
    refused(invalid, "first message", one.call, "StageEdit", iter([pb.StageEditRequest(data=b"x")]))
    stale = one.manifest(0x33, FILL_B)
    stale.incarnation = 7
    refused(grpc.StatusCode.FAILED_PRECONDITION, "run 7", one.stage, stale)
    one.stage(one.manifest(0x34, FILL_B))
    other = one.manifest(0x34, FILL_B, reset_moments=True)
    refused(grpc.StatusCode.ALREADY_EXISTS, "another content", one.stage, other)
    refused(grpc.StatusCode.FAILED_PRECONDITION, "not applied", one.stage,
            one.manifest(0x35, FILL_B, undo_of=f"{0x34:032x}"))  # fmt: skip
    assert one.stage(one.manifest(0x36), data[: 2 << 20]).phase == pb.EDIT_PHASE_STAGING
    refused(grpc.StatusCode.FAILED_PRECONDITION, "not complete", one.reach(0x36, 90).result)
    for number in (0x34, 0x36, 0x36):
        one.call("DropEdit", pb.DropEditRequest(edit_id=f"{number:032x}"))
    assert torch.equal(one.w, before)


def test_a_broken_chunk_costs_itself_and_staging_goes_on_behind_the_last_good_one(
    shared: Editing,
) -> None:
    one, data = shared, bytes_of(matrix(3))
    manifest = one.manifest(0x40)
    refused(grpc.StatusCode.DATA_LOSS, "checksum", one.stage, manifest, data, spoil=2)
    progress = one.progress(0x40)
    assert (progress.phase, progress.staged_bytes) == (pb.EDIT_PHASE_STAGING, 2 << 20)
    assert not progress.data_digests
    refused(grpc.StatusCode.INVALID_ARGUMENT, "continue there", one.stage, manifest, data, 3 << 20)
    progress = one.stage(manifest, data, progress.staged_bytes)
    assert progress.phase == pb.EDIT_PHASE_STAGED
    assert progress.data_digests == [xxhash.xxh3_128_digest(data)]
    assert one.stage(manifest, data) == progress
    one.call("DropEdit", pb.DropEditRequest(edit_id=f"{0x40:032x}"))


def upload(
    one: Editing,
    number: int,
    data: bytes,
    *,
    begin: int | None = None,
    end: int | None = None,
    spoil: int = -1,
    token_id: str | None = None,
) -> int:
    """Sends data over a bulk stream, as of another host; returns how much was taken in all.

    `end`: leave after that many bytes. `spoil`: number of the window with a wrong checksum.
    """
    request = pb.GrantStreamRequest(edit_id=f"{number:032x}")
    found = one.call("GrantStream", request, Role.EDITOR, token_id)
    grant = Grant(found.grant_id, found.secret)
    offer = StreamOffer(grant, found.header, "127.0.0.1", found.port, None, found.staged_bytes)
    assert found.size_bytes == len(data)
    at = offer.staged_bytes if begin is None else begin
    with contextlib.closing(BulkStream(offer, at, len(data))) as stream:
        stream.checksums = True
        stream.open()
        for window, low in enumerate(range(at, len(data) if end is None else end, 1 << 20)):
            part = memoryview(data)[low : low + (1 << 20)]
            stream.send(
                Window(DATA, low, len(part), checksum_of(part, low) ^ (window == spoil)), part
            )
        return stream.window().offset if end is None else at


def test_a_stream_that_breaks_off_goes_on_where_it_was(shared: Editing) -> None:
    one, data = shared, bytes_of(matrix(22))
    one.stage(one.manifest(0x92))
    upload(one, 0x92, data, end=2 << 20)
    wait_until(lambda: one.progress(0x92).staged_bytes == 2 << 20, "two windows are taken")
    with pytest.raises(DataLossError, match="checksum"):
        upload(one, 0x92, data, spoil=1)
    assert one.progress(0x92).staged_bytes == 3 << 20, "what was good before it is kept"
    with pytest.raises(UsageError, match="continue there"):
        upload(one, 0x92, data, begin=W_BYTES - 100)
    assert upload(one, 0x92, data) == W_BYTES
    assert one.progress(0x92).data_digests == [xxhash.xxh3_128_digest(data)]
    one.call("DropEdit", pb.DropEditRequest(edit_id=f"{0x92:032x}"))


def test_uploads_of_two_edits_do_not_mix(shared: Editing) -> None:
    one = shared
    for n in (0, 1):
        one.stage(one.manifest(0x94 + n))
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda n: upload(one, 0x94 + n, bytes_of(matrix(30 + n))), (0, 1)))
    for n in (0, 1):
        digest = xxhash.xxh3_128_digest(bytes_of(matrix(30 + n)))
        assert one.progress(0x94 + n).data_digests == [digest]
        one.call("DropEdit", pb.DropEditRequest(edit_id=f"{0x94 + n:032x}"))


def test_what_a_client_writes_into_lent_memory_later_reaches_nobody(shared: Editing) -> None:
    """Half of the data lies in lent memory, the rest goes through the ring."""
    one, wanted = shared, matrix(5)
    data, over = bytes_of(wanted), threading.Event()
    one.stage(one.manifest(0x60))
    memory, loan = LentMemory(len(data) // 2), Loan(one.peer)
    try:
        for size in (0, 4096, len(memory) * 2):
            with pytest.raises(PermissionError):
                os.ftruncate(memory.descriptor, size)
        loan.lend(memory, ticket(Role.EDITOR))
        assert loan.stage(ticket(Role.EDITOR), f"{0x60:032x}") == 0
        memory[:] = data[: len(memory)]
        told: list[int] = []
        Sender(loan, 0, told.append).send(parts(memory, data))
        assert sum(told) == len(data)
        assert one.progress(0x60).phase == pb.EDIT_PHASE_STAGED

        def attack() -> None:
            while not over.is_set():
                for lent in (memory, loan.memories[loan.ring()]):
                    lent[-4096:] = b"\xff" * 4096

        thread = threading.Thread(target=attack)
        thread.start()
        try:
            memory[:] = b"\xff" * len(memory)
            assert one.commit(0x60, 60).captured
        finally:
            over.set()
            thread.join()
        assert torch.equal(one.w, wanted)
        assert one.progress(0x60).data_digests == [xxhash.xxh3_128_digest(data)]
    finally:
        loan.close()


def parts(lent: LentMemory, data: bytes) -> Iterator[memoryview]:
    """The data in odd parts: first those that lie in lent memory, then copies of our own."""
    for at in range(0, len(lent), 100_000):
        yield memoryview(lent)[at : at + 100_000]
    for at in range(len(lent), len(data), 100_000):
        yield memoryview(data)[at : at + 100_000]


def descriptor_of(kind: str) -> int:
    """A descriptor that a sidecar must not map."""
    if kind in ("plain file", "pipe"):
        reader, writer = os.pipe()
        os.close(writer)
        if kind == "pipe":
            return reader
        os.close(reader)
        with tempfile.TemporaryFile() as file:
            file.write(bytes(4096))
            file.flush()
            return os.dup(file.fileno())
    huge = os.MFD_HUGETLB if kind == "huge pages" else 0
    descriptor = os.memfd_create("other", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | huge)
    if kind != "empty":
        os.ftruncate(descriptor, 2 << 20)
    if kind != "not sealed":
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return descriptor


@pytest.mark.parametrize("kind", ["plain file", "pipe", "not sealed", "empty", "huge pages"])
def test_memory_that_could_kill_its_reader_is_refused(shared: Editing, kind: str) -> None:
    try:
        descriptor = descriptor_of(kind)
    except OSError as error:
        pytest.skip(f"this kernel makes no such memory: {error}")
    lend = {"op": "lend", "ticket": ticket(Role.EDITOR)}
    memory = LentMemory(4096)
    with handover.connect(Path(shared.peer.socket_path), timeout_s=20) as connection:
        try:
            for descriptors in ([descriptor], [], [memory.descriptor, descriptor]):
                handover.send(connection, lend, descriptors)
                assert handover.receive(connection)[0]["code"] == "INVALID_ARGUMENT"
        finally:
            os.close(descriptor)
        for number in range(8):
            handover.send(connection, lend, [memory.descriptor])
            assert handover.receive(connection)[0]["memory"] == number
        handover.send(connection, lend, [memory.descriptor])
        assert handover.receive(connection)[0]["code"] == "RESOURCE_EXHAUSTED"


def test_a_loan_serves_again_and_one_that_broke_is_replaced(shared: Editing) -> None:
    one, data, lender = shared, bytes_of(matrix(9)), Lender()
    memory = lent_memory(ctypes.addressof(buffer := lender.lend(W_BYTES)), W_BYTES)
    assert memory is not None
    buffer[:] = data
    used: list[Loan] = []
    try:
        for number in range(3):
            edit_id = f"{0x78 + number:032x}"
            one.stage(one.manifest(0x78 + number))
            with lender.loan(one.peer, ticket(Role.EDITOR), [memory]) as loan:
                begin = loan.stage(ticket(Role.EDITOR), edit_id)
                Sender(loan, begin, lambda _: None).send([memoryview(memory)])
            used.append(loan)
            progress = one.progress(0x78 + number)
            assert progress.data_digests == [xxhash.xxh3_128_digest(data)]
            one.call("DropEdit", pb.DropEditRequest(edit_id=edit_id))
            if number == 1:
                loan._connection.shutdown(socket.SHUT_RDWR)
        assert used[0] is used[1] is not used[2]
        with pytest.raises(NotFoundError), lender.loan(one.peer, ticket(Role.EDITOR), []) as loan:
            loan.stage(ticket(Role.EDITOR), f"{0x7F:032x}")
        assert not lender._loans  # what is open within it is unknown after an error
    finally:
        lender.close()


BAD_TAKES: list[dict[str, object]] = [
    {}, {"offset_bytes": 0}, {"offset_bytes": -1, "spans": []}, {"offset_bytes": True, "spans": []},
    {"offset_bytes": 0, "spans": {}}, {"offset_bytes": 0, "spans": [7]},
    {"offset_bytes": 0, "spans": [[0, 0]]}, {"offset_bytes": 0, "spans": [[0, 0, "8"]]},
    {"offset_bytes": 0, "spans": [[0, 0, 8.0]]}, {"offset_bytes": 0, "spans": [[-1, 0, 8]]},
    {"offset_bytes": 0, "spans": [[1, 0, 8]]}, {"offset_bytes": 0, "spans": [[0, -8, 8]]},
    {"offset_bytes": 0, "spans": [[0, 0, -8]]}, {"offset_bytes": 0, "spans": [[0, 1, 2 << 20]]},
    {"offset_bytes": 0, "spans": [[0, 1 << 70, 8]]},
    {"offset_bytes": 0, "spans": [[0, 0, 2 << 20]] * 33}, {"offset_bytes": 8, "spans": [[0, 0, 8]]},
    {"offset_bytes": 1 << 70, "spans": [[0, 0, 8]]},
]  # fmt: skip


def test_bytes_that_change_in_lent_memory_are_verified_as_they_were_taken(shared: Editing) -> None:
    one, size = shared, 2 << 20
    one.stage(one.manifest(0x70))
    memory = LentMemory(size)
    with handover.connect(Path(one.peer.socket_path), timeout_s=20) as connection:

        def ask(op: str, descriptors: Sequence[int] = (), **rest: object) -> handover.Message:
            handover.send(connection, {"op": op, **rest}, descriptors)
            return handover.receive(connection)[0]

        take: dict[str, object] = {"offset_bytes": 0, "spans": [[0, 0, size]]}
        assert "send stage first" in ask("take", **take)["message"]
        assert ask("lend", [memory.descriptor], ticket=ticket(Role.EDITOR))["memory"] == 0
        assert "send stage first" in ask("take", **take)["message"]
        assert ask("stage", ticket=ticket(Role.EDITOR), edit_id=f"{0x70:032x}")["op"] == "staging"
        for bad in BAD_TAKES:
            assert ask("take", **bad)["code"] == "INVALID_ARGUMENT", bad
        assert one.progress(0x70).staged_bytes == 0
        # Numbers race with NaN while they are taken: whichever came, the verdict is of those.
        stop = threading.Event()

        def race() -> None:
            while not stop.is_set():
                memory[size - 4 : size] = b"\x00\x00\xc0\x7f"
                memory[size - 4 : size] = b"\x00\x00\x80\x3f"

        thread = threading.Thread(target=race)
        thread.start()
        try:
            answer = ask("take", **take)
        finally:
            stop.set()
            thread.join()
        if answer["op"] == "taken":
            staged = one.progress(0x70)
            assert staged.staged_bytes == size
            rest = bytes_of(matrix(0))[size:]
            assert one.stage(one.manifest(0x70), bytes(size) + rest, size).data_digests
            assert one.commit(0x70, 70).captured
            assert bool(torch.isfinite(one.w).all())
        else:
            assert "NaN" in answer["message"]
            refused(grpc.StatusCode.NOT_FOUND, "is unknown on this rank", one.progress, 0x70)
