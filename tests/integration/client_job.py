"""A job without torch.distributed: real sidecars and control plane, and a fake trainer.

The test's own process plays the trainers of all ranks in lockstep, so that a test decides
when an update happens. Arenas hold whatever the test writes.
"""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeVar, cast

import httpx2
import pytest

from paramd.cli import demo
from paramd.cli.main import main
from paramd.layout.codec import encode_layout
from paramd.layout.merge import layout_digest
from paramd.layout.types import Box, Layout, Piece, TensorKind, TensorLayout
from paramd.memory import handover
from paramd.memory.arena import HostArena
from paramd.memory.control_page import ControlPage, Word
from paramd.memory.descriptors import wake
from paramd.memory.gate import TrainerGate
from paramd.places import host_id, job_dir
from paramd.security.tickets import Signer, new_private_key
from tests.integration.fake_trainer import TrainerSettings, attach_message
from tests.integration.without import control as control_plane
from tests.longer import wait_until as wait_for

Answer = TypeVar("Answer")

JOB = "client-test"
DEADLINE_S = 60.0
"""Only a hang is ended by it: none of these waits is a promise about speed."""


def compared(ask: Callable[[], Answer]) -> Answer:
    """An answer with which replicas were compared: the others' state came in time for it."""
    found: list[Answer] = []

    def is_compared() -> bool:
        found.append(ask())
        return cast("Any", found[-1]).replicas_differ is not None

    wait_for(is_compared, "replicas are compared")
    return found[-1]


def halves(numel: int, name: str = "weight") -> Layout:
    """One float32 tensor, of which each of two ranks has `numel` elements, all of its arena."""
    pieces = tuple(Piece(rank, 0, Box((rank * numel,), ((rank + 1) * numel,))) for rank in range(2))
    tensor = TensorLayout(name, "float32", (2 * numel,), TensorKind.PARAMETER, pieces)
    return Layout(world_size=2, arena_bytes=(4 * numel, 4 * numel), tensors=(tensor,))


def _log(name: str) -> BinaryIO:
    """A log file in the job's directory, as `attach` would have it."""
    path = job_dir(JOB) / name
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")


@contextmanager
def demo_training(folder: Path, job: str) -> Iterator[Path]:
    """The demo's training of one rank, calmly; yields the state directory that it is found in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "MODULE", "tests.integration.calm_gpt")
        patch.setenv("PARAMD_STATE_DIR", str(folder / "state"))
        patch.setenv("PARAMD_LISTEN", "127.0.0.1:0")
        with demo.started(job, folder, keep=True, ranks=1) as training:
            training.wait_until_open()
            wait_for(lambda: main(["status", "-o", "name"]) == 0, "all ranks well")
            yield folder / "state"


Capture = pytest.CaptureFixture[str]


def answer(capsys: Capture, *arguments: str, code: int = 0) -> tuple[str, str]:
    """What a command wrote to stdout and stderr, once its exit code is the expected one."""
    found = main(arguments)
    captured = capsys.readouterr()
    assert found == code, captured.err
    return captured.out, captured.err


def document(capsys: Capture, *arguments: str, code: int = 0) -> dict[str, Any]:
    """What it wrote as JSON."""
    found = json.loads(answer(capsys, *arguments, "-o", "json", code=code)[0])
    assert isinstance(found, dict)
    return found


class Rank:
    """One sidecar process and its trainer's half, held by the test."""

    def __init__(self, rank: int, directory: Path, environment: dict[str, str]) -> None:
        self.rank = rank
        self.socket_path = directory / f"rank-{rank}.sock"
        self._environment = environment
        self.descriptors: list[int] = []
        self.address = ""
        self.listen = "127.0.0.1:0"
        self.start_process()

    def start_process(self) -> None:
        arguments = ["--job", JOB, "--rank", str(self.rank), "--socket", str(self.socket_path)]
        arguments += ["--listen", self.listen]
        with _log(f"rank-{self.rank}.log") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "paramd_service.sidecar", *arguments],
                env=self._environment,
                stderr=log,
            )

    def connect(self) -> socket.socket:
        def listening() -> bool:
            assert self.process.poll() is None, "the sidecar ended at once"
            try:
                self.connection = handover.connect(self.socket_path)
            except Exception:
                return False
            return True

        wait_for(listening, "the sidecar's socket")
        return self.connection

    def ask(self, message: dict[str, object], descriptors: list[int] | None = None) -> list[int]:
        handover.send(self.connection, message, descriptors if descriptors is not None else [])
        self.connection.settimeout(DEADLINE_S)
        self.answer, received = handover.receive(self.connection)
        assert self.answer["op"] != "error", self.answer
        return received

    def attach(self, signer: Signer, incarnation: int, layout: Layout) -> None:
        """Attaches, or gives a respawned sidecar what its predecessor made."""
        self.connect()
        again = bool(self.descriptors)
        received = self.ask(
            attach_message(
                TrainerSettings(
                    job=JOB,
                    incarnation=incarnation,
                    rank=self.rank,
                    world_size=layout.world_size,
                    arena_bytes=layout.arena_bytes[self.rank],
                ),
                signer,
            ),
            self.descriptors,
        )
        self.address = str(self.answer["address"])
        if again:
            for descriptor in received:
                os.close(descriptor)
            return
        self.descriptors = received
        self.page = ControlPage(received[0])
        self.arena = HostArena(received[2], layout.arena_bytes[self.rank])
        self.gate = TrainerGate(self.page, stall_budget_ns=200_000_000)
        self.page[Word.INCARNATION] = incarnation
        self.page[Word.TRAINER_PID] = os.getpid()
        self.page[Word.AGREEMENT_STATE] = 1

    def close(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()
        if self.descriptors:
            self.connection.close()
            self.page.close()
            self.arena.close()
        for descriptor in self.descriptors:
            os.close(descriptor)


class Job:
    """All ranks of one incarnation, and the control plane."""

    def __init__(
        self,
        layout: Layout,
        stack: ExitStack,
        incarnation: int,
        listen: str,
        without: Sequence[str],
    ) -> None:
        self.layout = layout
        self._without = without
        self._control_listen = listen
        self.incarnation = incarnation
        self.private_key = new_private_key()
        self.signer = Signer(self.private_key)
        self.token = secrets.token_hex(16)
        self._environment = dict(os.environ)
        directory = job_dir(JOB)
        self.control = self._start_control(stack)
        self.ranks = [Rank(rank, directory, self._environment) for rank in range(layout.world_size)]
        for rank in self.ranks:
            stack.callback(rank.close)
            rank.attach(self.signer, self.incarnation, layout)
        self._digest = layout_digest(layout)
        for rank in self.ranks:
            self.send_mesh(rank)
        self._training: threading.Thread | None = None
        self._stop = threading.Event()

    def _start_control(self, stack: ExitStack) -> subprocess.Popen[str]:
        program = [sys.executable, *control_plane(self._without), "--job", JOB]
        control = stack.enter_context(
            subprocess.Popen(
                [*program, "--listen-near", self._control_listen],
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stack.enter_context(_log("control.log")),
                text=True,
            )
        )
        stack.callback(control.kill)
        assert control.stdin is not None
        assert control.stdout is not None
        self.tell(control.stdin)
        endpoint = json.loads(control.stdout.readline())
        self.url, self.control_address = endpoint["url"], endpoint["grpc_address"]
        return control

    def tell(self, control: IO[str]) -> None:
        """Tells a control plane what it is of."""
        bootstrap = {
            "job": JOB,
            "incarnation": self.incarnation,
            "world_size": self.layout.world_size,
            "private_key": self.private_key.hex(),
            "token": self.token,
        }
        control.write(json.dumps(bootstrap) + "\n")
        control.flush()

    def send_mesh(self, rank: Rank) -> None:
        """Tells a sidecar its peers and the layout; it serves from then on."""
        peers = [
            {
                "rank": other.rank,
                "address": other.address,
                "socket_path": str(other.socket_path),
                "host_id": host_id(),
            }
            for other in self.ranks
        ]
        with tempfile.TemporaryFile() as file:
            file.write(encode_layout(self.layout).SerializeToString())
            file.flush()
            rank.ask(
                {
                    "op": "mesh",
                    "peers": peers,
                    "control_address": self.control_address,
                    "layout_digest": self._digest,
                },
                [file.fileno()],
            )

    def ask(self, method: str, path: str, **given: Any) -> httpx2.Response:
        """A request about this job over REST, as httpx2 takes it."""
        url = f"{self.url}/api/v1/jobs/{JOB}{path}"
        headers = {"authorization": f"Bearer {self.token}"}
        return httpx2.request(method, url, headers=headers, trust_env=False, **given)

    def respawn(self, rank: Rank) -> None:
        """A new sidecar gets back what the last one made."""
        rank.connection.close()
        rank.process.wait()
        rank.start_process()
        rank.attach(self.signer, self.incarnation, self.layout)
        self.send_mesh(rank)

    def update(self, write: Callable[[Rank, int], None] | None = None) -> None:
        """One update on all ranks, one after the other, and then their boundary."""
        agreed = min(rank.page[Word.READY] for rank in self.ranks)
        for rank in self.ranks:
            rank.gate.begin_update()
            if write is not None:
                write(rank, rank.page[Word.STEP] + 1)
            step = rank.page[Word.STEP] + 1
            rank.gate.settle(step, 0, proven=True)
            self._boundary(rank, step, agreed)

    def _boundary(self, rank: Rank, step: int, agreed: int) -> None:
        page, now_ns = rank.page, time.monotonic_ns()
        if page[Word.BOUNDARY_NS]:
            page[Word.STEP_TIME_NS] = now_ns - page[Word.BOUNDARY_NS]
        page[Word.BOUNDARY_NS] = now_ns
        announce = page[Word.WANT] != getattr(rank, "seen_want", 0)
        rank.seen_want = page[Word.WANT]
        announce = announce or page[Word.ARM_STEP] == step
        if agreed > page[Word.AGREED]:
            page[Word.AGREED_STEP] = step
            page[Word.BUFFERS_STEP], page[Word.BUFFERS_FOR] = step, agreed
            page[Word.AGREED_TOKEN] = page[Word.TOKEN]
            page[Word.AGREED] = agreed
            announce = True
        if announce:
            page[Word.ANNOUNCE] += 1
            wake(rank.descriptors[1])

    def train(self, write: Callable[[Rank, int], None], every_s: float) -> None:
        """Updates in the background until `rest`."""

        def loop() -> None:
            while not self._stop.wait(every_s):
                self.update(write)

        self._stop.clear()
        self._training = threading.Thread(target=loop)
        self._training.start()

    def rest(self) -> None:
        """Ends the background updates."""
        if self._training is not None:
            self._stop.set()
            self._training.join()
            self._training = None


@contextmanager
def running_job(
    layout: Layout,
    *,
    incarnation: int = 1,
    listen: str = "127.0.0.1:0",
    without: Sequence[str] = (),
) -> Iterator[Job]:
    """A job whose ranks serve; everything it started ends with the block.

    `listen` is the control plane's, which does not have the parts of the subjects `without`.
    """
    with ExitStack() as stack:
        job = Job(layout, stack, incarnation, listen, without)
        stack.callback(job.rest)
        yield job
