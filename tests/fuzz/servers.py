"""A sidecar and a control plane in this process, and what may come to their doors.

Every method of both gRPC services gets random messages, with tickets of the role that may call
it; the Unix socket gets random JSON with random descriptors. What must hold: an answer that is no
internal error, nothing unexpected in a log, and a server that still answers.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import json
import logging
import os
import socket
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx2
from google.protobuf.message_factory import GetMessageClass

from paramd import parts, streams
from paramd.answers import asked_once
from paramd.bounds import Bound, OverBoundError
from paramd.layout.merge import layout_digest
from paramd.memory import handover
from paramd.security.tickets import Role
from paramd.v1 import control_pb2, export_pb2, sidecar_pb2
from paramd_service.control.base.config import Bootstrap, ControlConfig
from paramd_service.control.base.endpoint import Claim
from paramd_service.control.control_plane import ControlPlane
from paramd_service.parts import SIDECAR
from paramd_service.sidecar.config import SidecarConfig
from paramd_service.sidecar.faults import Faults
from paramd_service.sidecar.log import Log
from paramd_service.sidecar.parts import SidecarPart
from paramd_service.sidecar.rank import RankSidecar
from paramd_service.sidecar.rpc.control_link import Joining
from paramd_service.sidecar.rpc.grpc_server import GrpcServer
from paramd_service.sidecar.rpc.streams import GRANT_S
from paramd_service.sidecar.rpc.unix_server import UnixServer
from paramd_service.sidecar.snapshots.store import BlockMaker
from tests.fuzz.messages import Choices, fill, pick
from tests.integration.fake_trainer import SIGNER, FakeTrainer, TrainerSettings, attach, layout_of
from tests.orders import bound, ordered

JOB = "job"
ARENA_BYTES = 1 << 16
KEY = bytes(range(32))
TOKEN = "0123456789abcdef" * 2
CALL_S = 0.1
"""Deadline of a call: some wait for a boundary that never comes."""

LIES = Bound(what="an answer of a peer that lies", most_bytes=1000, within_s=5.0, parts=8)

BROKEN = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
"""What no input may bring about."""


class Servers:
    """One job of one rank, all of it in this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.faults: list[str] = []
        """What was logged that nobody expected."""
        os.environ["PARAMD_STATE_DIR"] = str(folder / "state")
        (folder / "state").mkdir(mode=0o700)
        (folder / "run").mkdir(mode=0o700)
        (folder / "exports").mkdir()
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(lambda _, context: self.saw(str(context)))
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        handler = logging.Handler(logging.ERROR)
        handler.emit = lambda record: self.saw(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger().addHandler(handler)
        self._start().result(60)

    def saw(self, text: str) -> None:
        """Something was logged as an error."""
        self.faults.append(text)

    def _start(self) -> Future[None]:
        return asyncio.run_coroutine_threadsafe(self._begin(), self._loop)

    async def _begin(self) -> None:
        bootstrap = Bootstrap(job=JOB, incarnation=1, world_size=1, private_key=KEY, token=TOKEN)
        config = ControlConfig(job=JOB, listen="127.0.0.1:0", no_watch=True, empty_end_s=1e6)
        self.control = ControlPlane(config, bootstrap, Claim(config, bootstrap))
        where = await self.control.start()
        self.url, self.control_address = where.url, where.grpc_address
        jobs = self.control._jobs
        assert jobs is not None
        self.generation = jobs.terms.generation
        self.rank = RankSidecar(
            SidecarConfig(job=JOB, rank=0, socket_path=self.folder / "run" / "rank-0.sock"),
            blocks=BlockMaker(ThreadPoolExecutor(1)),
            executor=ThreadPoolExecutor(1),
            stats_executor=ThreadPoolExecutor(1),
            faults=Faults(""),
            log=Log(fields={}, stream=_Lines(self.saw)),
            parts=parts.found(SIDECAR, "sidecar", SidecarPart),
        )
        self.server = GrpcServer(self.rank)
        await self.server.start()
        unix = UnixServer(
            self.rank, handover.listen(self.rank.config.socket_path), lambda: self.server.address
        )
        unix.start()
        self.address = self.server.address
        Joining(self.rank, address=self.address).start()
        self.trainer = await asyncio.to_thread(self._attach)

    def _attach(self) -> FakeTrainer:
        settings = TrainerSettings(
            arena_bytes=ARENA_BYTES, control_address=self.control_address, agrees=False
        )
        trainer = attach(self.rank.config.socket_path, settings)
        trainer.send_mesh()
        return trainer


class _Lines:
    """The sidecar's log: lines that tell of something unexpected are told on."""

    def __init__(self, saw: Any) -> None:
        self._saw = saw

    def write(self, line: str) -> None:
        if json.loads(line)["event"] in ("internal-error", "handover-failed"):
            self._saw(line)

    def flush(self) -> None:
        """Nothing is kept."""


class Doors:
    """What a fuzzer does to the servers, and what it knows of them."""

    def __init__(self, servers: Servers) -> None:
        self.servers = servers
        self._tickets = {role: bound(SIGNER, role, job=JOB, ttl_s=1e6) for role in Role}
        self._for_control = bound(SIGNER, Role.READER, None, job=JOB, ttl_s=1e6)
        options = [("grpc.use_local_subchannel_pool", 1)]
        self._sidecar = grpc.insecure_channel(servers.address, options=options)
        self._control = grpc.insecure_channel(servers.control_address, options=options)
        generation = servers.generation
        self._rest = httpx2.Client(
            base_url=servers.url,
            headers={"authorization": f"Bearer {TOKEN}"},
            trust_env=False,
            timeout=30.0,
        )
        self._count = 0
        self._granted: tuple[float, Any] | None = None
        self.known: dict[str, list[Any]] = {
            "job": [JOB], "incarnation": [1], "rank": [0], "world_size": [1],
            "layout_digest": [layout_digest(layout_of(ARENA_BYTES))], "generation": [generation],
            "token": [1, 2], "lease_ms": [0, 1000], "address": [servers.address, "127.0.0.1:1"],
            "socket_path": ["/nowhere"], "fqn": ["w"], "names": ["w", "*"],
            "patterns": ["w", "*", "w[0:4]", "nothing"], "filter": ["w", "*", "numel>1"],
            "edit_id": ["0" * 32, "1" * 32, "f" * 32], "undo_of": ["0" * 32, ""],
            "dtype": ["int64", "float32", ""], "destination": ["here"],
            "root": [str(servers.folder / "exports")], "key": ["a", "a/b", "../a"],
            "export_id": ["0" * 32, "1" * 32], "begin": [0, 8, 4096, ARENA_BYTES],
            "end": [0, 8, 4096, ARENA_BYTES], "name": ["w", "model.safetensors"],
        }  # fmt: skip
        self._look_again()

    def _look_again(self) -> None:
        """A good call is answered, and gives a snapshot that lives for a while."""
        request = sidecar_pb2.PinSnapshotRequest(
            incarnation=1,
            layout_digest=self.known["layout_digest"][0],
            spans=[sidecar_pb2.Span(begin=0, end=ARENA_BYTES)],
            lease_ms=300_000,
        )
        code, answers = self.call(
            self._sidecar, "/paramd.v1.SidecarService/PinSnapshot", Role.READER, [request], 30.0
        )
        assert code is grpc.StatusCode.OK, f"a good call is answered with {code}"
        pinned = sidecar_pb2.PinSnapshotResponse.FromString(answers[0]).snapshot_id
        item = sidecar_pb2.StatsItem(dtype="int64", numel=8)
        stats = sidecar_pb2.ComputeStatsRequest(snapshot_id=pinned, items=[item])
        code, _ = self.call(
            self._sidecar, "/paramd.v1.SidecarService/ComputeStats", Role.READER, [stats], 60.0
        )
        assert code is grpc.StatusCode.OK, f"good statistics are answered with {code}"
        for former in self.known.get("snapshot_id", []):
            gone = sidecar_pb2.ReleaseSnapshotRequest(snapshot_id=former)
            self.call(
                self._sidecar,
                "/paramd.v1.SidecarService/ReleaseSnapshot",
                Role.READER,
                [gone],
                30.0,
            )
        self.known["snapshot_id"] = self.known["snapshot_ids"] = [pinned]
        self._granted = None
        descriptors = len(os.listdir("/proc/self/fd"))
        assert descriptors < 400, f"{descriptors} descriptors are open"

    def call(
        self, channel: grpc.Channel, path: str, role: Role, messages: list[Any], timeout_s: float
    ) -> tuple[grpc.StatusCode, list[bytes]]:
        """Status and answers of a call; messages may be bytes."""
        data = [one if isinstance(one, bytes) else one.SerializeToString() for one in messages]
        here = channel is self._control and role is Role.READER
        text = self._for_control if here else self._tickets[role]
        metadata = ordered(SIGNER, path, (("authorization", f"Bearer {text}"),), data)
        call = channel.stream_stream(path)(iter(data), timeout=timeout_s, metadata=metadata)
        answers: list[bytes] = []
        with contextlib.suppress(grpc.RpcError):
            for answer in call:
                answers.append(answer)
                if len(answers) == 8:
                    call.cancel()
        return call.code(), answers

    def checked(self) -> None:
        """Raises when something was logged; now and then when a good call is refused."""
        self._count += 1
        if self._count % 500 == 0:
            self._look_again()
        faults, self.servers.faults = self.servers.faults, []
        assert not faults, faults

    def sidecar(self, choices: Choices) -> None:
        """One call of one method of the sidecar."""
        self._any(choices, self._sidecar, sidecar_pb2, "SidecarService", Role.CONTROL)

    def control(self, choices: Choices) -> None:
        """One call of one method of the control plane."""
        self._any(choices, self._control, control_pb2, "ControlService", Role.READER)

    def _any(
        self, choices: Choices, channel: grpc.Channel, module: Any, service: str, role: Role
    ) -> None:
        found = module.DESCRIPTOR.services_by_name[service]
        method = found.methods[choices.ConsumeIntInRange(0, len(found.methods) - 1)]
        messages = []
        for _ in range(choices.ConsumeIntInRange(1, 3) if method.client_streaming else 1):
            if choices.ConsumeIntInRange(0, 15) == 0:
                messages.append(choices.ConsumeBytes(64))
                continue
            message = GetMessageClass(method.input_type)()
            messages.append(self._tame(fill(choices, message, self.known)))
        if method.name == "StageEdit" and not isinstance(messages[0], bytes):
            # The first has the manifest alone, or nothing would ever be staged.
            messages[0] = sidecar_pb2.StageEditRequest(manifest=messages[0].manifest)
        path = f"/{found.full_name}/{method.name}"
        role = {"Join": Role.SIDECAR, "PutCopy": Role.COPIER}.get(method.name, role)
        code, _ = self.call(channel, path, role, messages, CALL_S)
        assert code not in BROKEN, f"{path}: {code} for {messages}"
        if method.name == "ReleaseSnapshot":
            self._look_again()
        if method.name == "Join" and code is grpc.StatusCode.OK:
            self._shown()
        self.checked()

    def _shown(self) -> None:
        """What a rank reported of itself can be shown, whatever it is."""
        for path in ("/api/v1/jobs/job", "/api/v1/jobs/job/ranks", "/metrics"):
            answer = self._rest.get(path)
            assert answer.status_code < 500, (path, answer.text)

    def _tame(self, message: Any) -> Any:
        """Exports go nowhere but into the folder that is there for them, and no number is so high
        that all later ones are refused.
        """
        for name, most in (
            ("generation", self.known["generation"][0]),
            ("boundary", self._count + 1),
        ):
            if getattr(message, name, 0) > most:
                setattr(message, name, most)
        target = getattr(message, "target", None)
        if isinstance(target, export_pb2.ExportTarget):
            target.root = self.known["root"][0]
        return message

    def socket(self, choices: Choices) -> None:
        """Some messages on one connection to the Unix socket."""
        connection = handover.connect(self.servers.rank.config.socket_path, timeout_s=10)
        try:
            for _ in range(choices.ConsumeIntInRange(1, 4)):
                data, answered = self._message(choices)
                descriptors = [os.eventfd(0) for _ in range(choices.ConsumeIntInRange(0, 2))]
                try:
                    socket.send_fds(connection, [data], descriptors)
                finally:
                    for descriptor in descriptors:
                        os.close(descriptor)
                if not answered:
                    continue
                answer, received = handover.receive(connection)
                for descriptor in received:
                    os.close(descriptor)
                assert answer.get("code") not in ("UNKNOWN", "INTERNAL"), (data, answer)
        except (EOFError, ConnectionError):
            pass  # empty messages mean the end
        finally:
            connection.close()
        self.checked()

    def streams(self, choices: Choices) -> None:
        """An opening at the port for streams, with or without a grant, whole or not."""
        granted = self._grant()
        ends = [pick(choices, (0, 1, ARENA_BYTES // 2, ARENA_BYTES, ARENA_BYTES + 1, 1 << 63))]
        ends.append(choices.ConsumeIntInRange(0, ARENA_BYTES))
        opening = streams.Opening(granted.grant_id, *sorted(ends), choices.ConsumeBool())
        data = bytearray(opening.sealed(granted.secret))
        if changed := choices.ConsumeIntInRange(0, 3):
            data[choices.ConsumeIntInRange(0, len(data) - 1)] ^= changed
        whole = bytes(data)
        if choices.ConsumeIntInRange(0, 3) == 0:
            whole = whole[: choices.ConsumeIntInRange(0, len(whole))] + choices.ConsumeBytes(200)
        with socket.create_connection(("127.0.0.1", granted.port), timeout=10.0) as connection:
            with contextlib.suppress(OSError):  # it may have left already
                connection.sendall(whole)
                connection.shutdown(socket.SHUT_WR)
            answer = b""
            with contextlib.suppress(OSError):
                while part := connection.recv(1 << 20):
                    answer += part
        if whole.startswith(opening.sealed(granted.secret)):
            self._granted = None
            if opening.end <= ARENA_BYTES:
                self._whole_stream(answer, opening, granted.secret)
        self.checked()

    def _grant(self) -> Any:
        """A grant not used yet: who does not know its secret cannot use it up."""
        now_s = time.monotonic()
        if self._granted is None or now_s - self._granted[0] > GRANT_S / 2:
            request = sidecar_pb2.GrantStreamRequest(snapshot_id=self.known["snapshot_id"][0])
            path = "/paramd.v1.SidecarService/GrantStream"
            code, answers = self.call(self._sidecar, path, Role.READER, [request], 30.0)
            assert code is grpc.StatusCode.OK, code
            self._granted = now_s, sidecar_pb2.GrantStreamResponse.FromString(answers[0])
        return self._granted[1]

    def _whole_stream(self, answer: bytes, opening: streams.Opening, secret: bytes) -> None:
        sealed = opening.sealed(secret)
        assert streams.read_reply(answer[: streams.REPLY_BYTES], sealed, secret) == (0, 0), answer
        at, offset = streams.REPLY_BYTES, opening.begin
        while True:
            window = streams.read_window(answer[at : at + streams.WINDOW_HEADER_BYTES])
            at += streams.WINDOW_HEADER_BYTES + window.size
            if window.kind == streams.LAST:
                break
            assert (window.kind, window.offset) == (streams.DATA, offset)
            offset += window.size
        assert offset == window.offset == opening.end
        assert at == len(answer)

    def _message(self, choices: Choices) -> tuple[bytes, bool]:
        """Bytes, and whether they are answered."""
        if choices.ConsumeIntInRange(0, 7) == 0:
            return choices.ConsumeBytes(200), True
        ops = ("map", "live", "lend", "stage", "take", "unmap", "attach", "mesh", "detach")
        message = {"op": pick(choices, ops)}
        names = (
            "ticket", "snapshot_id", "edit_id", "offset_bytes", "spans", "incarnation",
            "layout_digest",
        )  # fmt: skip
        for name in (*names, "rank", "pid", "start", "peers"):
            if choices.ConsumeIntInRange(0, 2):
                message[name] = self._anything(choices, name)
        return json.dumps(message).encode(), message["op"] != "unmap"

    def _anything(self, choices: Choices, name: str, depth: int = 0) -> Any:
        known = {**self.known, "ticket": [self._tickets[Role.EDITOR]]}
        if name in known and choices.ConsumeIntInRange(0, 3):
            return pick(choices, known[name])
        kind = choices.ConsumeIntInRange(0, 7)
        if kind == 0 and depth < 3:
            return [self._anything(choices, name, depth + 1) for _ in range(2)]
        if kind == 1 and depth < 3:
            return {name: self._anything(choices, name, depth + 1)}
        values = (None, True, -1, 0, 1 << 21, 1 << 63, 10**400, 1.5, float("nan"), float("inf"), "")
        if kind < 6:
            return pick(choices, values)
        return choices.ConsumeUnicodeNoSurrogates(20)


@functools.cache
def doors() -> Doors:
    """Made when first asked for; ended with the process."""
    folder = tempfile.TemporaryDirectory(prefix="paramd-fuzz-")
    atexit.register(folder.cleanup)
    return Doors(Servers(Path(folder.name)))


class _Liar:
    """A peer that answers every request with `says`, and then leaves."""

    def __init__(self) -> None:
        self.says = b""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(1 << 16)
                connection.sendall(self.says)
                connection.shutdown(socket.SHUT_WR)
                connection.recv(1)


@functools.cache
def _liar() -> _Liar:
    return _Liar()


def http_answer(data: bytes) -> None:
    """What a peer answers over HTTP: an answer within its bound, or an error of ours."""
    _liar().says = data
    try:
        transport = httpx2.AsyncHTTPTransport(trust_env=False)
        found = asked_once("GET", _liar().url, LIES, timeout_s=5.0, transport=transport)
    except (httpx2.HTTPError, OverBoundError, TimeoutError):
        return
    assert len(found.content) <= LIES.most_bytes
    assert isinstance(found.text, str)
    with contextlib.suppress(ValueError):
        found.json()


def _choices(data: bytes) -> Choices:
    import atheris

    found: Choices = atheris.FuzzedDataProvider(data)
    return found


SERVERS = {
    "sidecar": lambda data: doors().sidecar(_choices(data)),
    "control": lambda data: doors().control(_choices(data)),
    "socket": lambda data: doors().socket(_choices(data)),
    "streams": lambda data: doors().streams(_choices(data)),
    "http_answer": http_answer,
}
