"""A real sidecar process for tests, and calls to it."""

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from paramd.layout.merge import layout_digest
from paramd.security.tickets import Role
from paramd.v1 import sidecar_pb2 as pb
from paramd.v1 import sidecar_pb2_grpc
from tests.integration.fake_trainer import SIGNER, FakeTrainer, layout_of
from tests.integration.without import sidecar as program
from tests.longer import wait_until
from tests.orders import Metadata, Ordering, bound


class SidecarProcess:
    """`python -m paramd_service.sidecar`, ended with the block."""

    def __init__(
        self,
        directory: Path,
        *options: str,
        faults: str = "",
        rank: int = 0,
        without: Sequence[str] = (),
    ) -> None:
        directory.mkdir(mode=0o700, exist_ok=True)
        self.socket_path = directory / f"rank-{rank}.sock"
        self.log_path = directory / f"sidecar-{uuid.uuid4().hex}.log"
        environment = {**os.environ, "PARAMD_FAULTS": faults}
        command = [sys.executable, *program(without), "--job", "job"]
        command += ["--rank", str(rank), "--socket", str(self.socket_path), *options]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stderr=log, env=environment
            )

    def wait_until_started(self) -> None:
        wait_until(lambda: '"started"' in self.log, "the sidecar starts")

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def terminate(self) -> int:
        """SIGTERM, and the exit code."""
        self.process.terminate()
        return self.process.wait(timeout=30)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait(timeout=60)


@contextmanager
def sidecar(
    directory: Path, *options: str, faults: str = "", rank: int = 0, without: Sequence[str] = ()
) -> Iterator[SidecarProcess]:
    """A started sidecar; `without`: subjects whose parts it does not have."""
    process = SidecarProcess(directory, *options, faults=faults, rank=rank, without=without)
    try:
        process.wait_until_started()
        yield process
    finally:
        process.end()


def ticket(
    role: Role = Role.READER,
    incarnation: int = 1,
    job: str = "job",
    ttl_s: float = 60,
    token_id: str | None = None,
    rank: int = 0,
) -> str:
    return bound(
        SIGNER, role, rank, job=job, incarnation=incarnation, ttl_s=ttl_s, token_id=token_id
    )


class Client:
    """Calls one sidecar with a ticket and a deadline."""

    def __init__(
        self,
        address: str,
        role: Role = Role.READER,
        incarnation: int = 1,
        arena_bytes: int = 1 << 20,
    ) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        channel = grpc.insecure_channel(address, options=options)
        self.channel = grpc.intercept_channel(channel, Ordering(SIGNER))
        self.stub = sidecar_pb2_grpc.SidecarServiceStub(self.channel)
        self.metadata: Metadata = [("authorization", f"Bearer {ticket(role, incarnation)}")]
        self.incarnation = incarnation
        self.arena_bytes = arena_bytes
        self.digest = layout_digest(layout_of(arena_bytes))

    def call(self, method: str, request: Any, timeout_s: float = 5.0) -> Any:
        return getattr(self.stub, method)(request, timeout=timeout_s, metadata=self.metadata)

    def state(self) -> Any:
        return self.call("GetState", pb.GetStateRequest())

    def pin_request(self, *spans: tuple[int, int], **fields: Any) -> pb.PinSnapshotRequest:
        spans = spans or ((0, self.arena_bytes),)
        return pb.PinSnapshotRequest(
            incarnation=self.incarnation,
            layout_digest=self.digest,
            spans=[pb.Span(begin=begin, end=end) for begin, end in spans],
            **fields,
        )

    def pin(self, *spans: tuple[int, int], timeout_s: float = 5.0, **fields: Any) -> Any:
        return self.call("PinSnapshot", self.pin_request(*spans, **fields), timeout_s)

    def read(self, snapshot_id: str, offset_bytes: int = 0, size_bytes: int = 0) -> bytes:
        request = pb.ReadSnapshotRequest(
            snapshot_id=snapshot_id, offset_bytes=offset_bytes, size_bytes=size_bytes
        )
        return b"".join(chunk.data for chunk in self.call("ReadSnapshot", request))

    def release(self, snapshot_id: str) -> None:
        self.call("ReleaseSnapshot", pb.ReleaseSnapshotRequest(snapshot_id=snapshot_id))

    def close(self) -> None:
        self.channel.close()


@contextmanager
def client_of(trainer: FakeTrainer, role: Role = Role.READER) -> Iterator[Client]:
    settings = trainer.settings
    client = Client(trainer.address, role, settings.incarnation, settings.arena_bytes)
    try:
        yield client
    finally:
        client.close()


def values_of(data: bytes) -> set[int]:
    """The distinct 8-byte words."""
    return set(memoryview(data).cast("q"))
