"""A real control plane process for tests, fake sidecars that join it, and calls to it."""

import asyncio
import json
import select
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx2

from paramd import places
from paramd.layout.codec import layout_batches
from paramd.layout.merge import layout_digest
from paramd.layout.types import Box, Layout, Piece, TensorKind, TensorLayout
from paramd.security.tickets import Role, Signer, Verifier
from paramd.v1 import common_pb2, control_pb2, control_pb2_grpc, sidecar_pb2, sidecar_pb2_grpc
from tests.orders import bound

PRIVATE_KEY = bytes(range(32))
SIGNER = Signer(PRIVATE_KEY)
TOKEN = "a-token-of-the-user"
JOB = "run"
PATIENCE_S = 60.0

LAYOUT = Layout(
    world_size=2,
    arena_bytes=(4096, 4096),
    tensors=tuple(
        TensorLayout(
            fqn=f"layers.{n}.weight",
            dtype="float32",
            shape=(4, 2),
            kind=TensorKind.PARAMETER,
            pieces=(Piece(0, n * 64, Box((0, 0), (2, 2))), Piece(1, n * 64, Box((2, 0), (4, 2)))),
            placement="Shard(0) over 2",
        )
        for n in range(5)
    ),
)
DIGEST = layout_digest(LAYOUT)


@dataclass(frozen=True)
class Control:
    """A running control plane."""

    process: subprocess.Popen[bytes]
    url: str
    grpc_address: str
    log: Path
    job_name: str = JOB

    def get(self, path: str, token: str | None = TOKEN, **headers: str) -> httpx2.Response:
        if token is not None:
            headers["authorization"] = f"Bearer {token}"
        return httpx2.get(self.url + path, headers=headers, trust_env=False, timeout=60.0)

    def ask(self, method: str, path: str, token: str = "", **given: Any) -> httpx2.Response:
        """A request below /api/v1, as httpx2 takes it; without a token the owner's."""
        owner = TOKEN if self.job_name else site_token()
        return httpx2.request(
            method,
            f"{self.url}/api/v1{path}",
            headers={"authorization": f"Bearer {token or owner}"},
            trust_env=False,
            timeout=60.0,
            **given,
        )

    def new_token(self, role: str, **more: object) -> str:
        """A token that the owner makes."""
        made = self.ask("POST", "/tokens", json={"role": role, **more})
        assert made.status_code == 201, made.text
        return str(made.json()["token"])

    def job(self) -> Any:
        return self.get(f"/api/v1/jobs/{self.job_name}").json()

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        return self.process.wait(timeout_s)


@contextmanager
def control_plane(
    *options: str,
    incarnation: int = 1,
    listen: str = "127.0.0.1:0",
    world_size: int = 2,
    job: str = JOB,
    resumes: bool = False,
) -> Iterator[Control]:
    """Starts an embedded one and ends it, whatever the test did to it."""
    bootstrap = {
        "job": job,
        "incarnation": incarnation,
        "world_size": world_size,
        "private_key": PRIVATE_KEY.hex(),
        "token": TOKEN,
        "resumes": resumes,
    }
    stdin = json.dumps(bootstrap).encode() + b"\n"
    with _started(["--job", job, "--listen", listen, *options], stdin) as (process, log, ready):
        yield Control(process, ready["url"], ready["grpc_address"], log, job)


@contextmanager
def site_plane(*options: str, listen: str = "127.0.0.1:0") -> Iterator[Control]:
    """Starts a site's and ends it; its token lies in the state dir."""
    with _started(["--listen", listen, *options], b"") as (process, log, ready):
        yield Control(process, ready["url"], ready["grpc_address"], log, "")


def site_token() -> str:
    return (places.state_dir() / "_site" / "token").read_text().strip()


@contextmanager
def _started(
    arguments: list[str], stdin: bytes
) -> Iterator[tuple[subprocess.Popen[bytes], Path, dict[str, str]]]:
    log = places.state_dir() / f"control-{time.monotonic_ns()}.log"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "paramd_service.control", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with process.stdin, process.stdout:
            process.stdin.write(stdin)
            process.stdin.close()
            assert select.select([process.stdout], [], [], PATIENCE_S)[0], log.read_text()
            line = process.stdout.readline()
            assert line, log.read_text()
        yield process, log, json.loads(line)
    finally:
        process.kill()
        process.wait()


def ticket(role: Role = Role.READER, *, job: str = JOB, rank: int | None = None) -> Any:
    text = bound(SIGNER, role, rank, job=job, incarnation=1)
    return (("authorization", f"Bearer {text}"),)


PINS_NOTHING = "a fake sidecar pins nothing"


@dataclass
class FakeSidecar(sidecar_pb2_grpc.SidecarServiceServicer):  # type: ignore[misc]
    """Joins as a rank; answers ReachBoundary with `step`, once `gate` is open."""

    rank: int
    step: int = 10
    ready_boundary: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    welcome: control_pb2.JoinResponse | None = None
    address: str = ""

    async def ReachBoundary(self, request: Any, context: Any) -> Any:
        authorization = dict(context.invocation_metadata())["authorization"]
        offered = authorization.removeprefix("Bearer ")
        claims = Verifier(SIGNER.public_key).verify(
            offered, job=JOB, incarnation=request.incarnation
        )
        assert claims.role is Role.CONTROL
        self.asked.append((request.boundary, tuple(request.snapshot_ids)))
        self.ready_boundary = max(self.ready_boundary, request.boundary)
        await self.gate.wait()
        step = self.step + request.boundary
        return sidecar_pb2.ReachBoundaryResponse(
            header=self.header(request.incarnation, step), captured=True
        )

    async def GetState(self, request: Any, context: Any) -> Any:
        return sidecar_pb2.GetStateResponse(header=self.header(1, 0))

    async def PinSnapshot(self, request: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, PINS_NOTHING)

    async def GetLayout(self, request: Any, context: Any) -> Any:
        for batch in layout_batches(LAYOUT, max_tensors=2):
            yield sidecar_pb2.GetLayoutResponse(header=self.header(1, 0), layout=batch)

    def header(self, incarnation: int, step: int) -> common_pb2.Header:
        return common_pb2.Header(
            job=JOB, incarnation=incarnation, step=step, rank=self.rank, layout_digest=DIGEST
        )

    def report(self, *, incarnation: int = 1, leaving: bool = False) -> control_pb2.JoinRequest:
        return control_pb2.JoinRequest(
            header=self.header(incarnation, self.step),
            world_size=2,
            peer=common_pb2.Peer(rank=self.rank, address=self.address, host_id=places.host_id()),
            state=common_pb2.RankState(
                rank=self.rank,
                phase=common_pb2.PHASE_CONSTANT,
                ready_boundary=self.ready_boundary,
                agreement_works=True,
            ),
            leaving=leaving,
        )


@asynccontextmanager
async def serving(sidecar: FakeSidecar) -> AsyncIterator[FakeSidecar]:
    """The fake sidecar's gRPC server, with its gate open."""
    server = grpc.aio.server()
    sidecar_pb2_grpc.add_SidecarServiceServicer_to_server(sidecar, server)
    sidecar.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    sidecar.gate.set()
    await server.start()
    try:
        yield sidecar
    finally:
        await server.stop(None)


@asynccontextmanager
async def joined(
    control: Control, sidecar: FakeSidecar
) -> AsyncIterator[Callable[[control_pb2.JoinRequest], Any]]:
    """A Join stream; gives the function that sends another report."""
    metadata = ticket(Role.SIDECAR, rank=sidecar.rank)
    async with grpc.aio.insecure_channel(control.grpc_address) as channel:
        stub: Any = control_pb2_grpc.ControlServiceStub(channel)
        sidecar.welcome = None
        stream = stub.Join(metadata=metadata)
        await stream.write(sidecar.report())

        async def listen() -> None:
            async for answer in stream:
                sidecar.welcome = answer

        listening = asyncio.create_task(listen())
        try:
            await until(lambda: sidecar.welcome is not None)
            yield stream.write
        finally:
            stream.cancel()
            await asyncio.wait({listening})
            if not listening.cancelled():
                listening.exception()


@asynccontextmanager
async def mesh(control: Control) -> AsyncIterator[list[FakeSidecar]]:
    """Both ranks, serving and joined."""
    zero, one = FakeSidecar(0), FakeSidecar(1)
    async with serving(zero), serving(one), joined(control, zero), joined(control, one):
        yield [zero, one]


async def schedule(
    control: Control, *snapshots: tuple[int, str], timeout_s: float = 10.0
) -> control_pb2.ScheduleBoundaryResponse:
    request = control_pb2.ScheduleBoundaryRequest(
        job=control.job_name,
        incarnation=1,
        snapshots=[control_pb2.SnapshotRef(rank=r, snapshot_id=i) for r, i in snapshots],
    )
    async with grpc.aio.insecure_channel(control.grpc_address) as channel:
        stub: Any = control_pb2_grpc.ControlServiceStub(channel)
        answer: control_pb2.ScheduleBoundaryResponse = await stub.ScheduleBoundary(
            request, timeout=timeout_s, metadata=ticket(job=control.job_name)
        )
        return answer


async def until(condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.02)
