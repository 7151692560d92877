"""A trainer without torch: it owns a control page, and stamps its step into the arena.

Every update writes the new step into all 8-byte words of the arena, piece by piece, with
pauses between. So a snapshot that mixes two steps shows at once. Runs as a thread of a
test, or as a process (`python -m tests.integration.fake_trainer`) that may be killed.
"""

import argparse
import ctypes
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paramd import places
from paramd.layout.codec import encode_layout
from paramd.layout.merge import layout_digest
from paramd.layout.types import Box, Layout, Piece, TensorKind, TensorLayout
from paramd.memory import descriptors, handover
from paramd.memory.arena import HostArena
from paramd.memory.control_page import ControlPage, Word, note_agreed
from paramd.memory.gate import TrainerGate
from paramd.security.tickets import Role, Signer
from paramd.version import __version__

SIGNER = Signer(bytes(range(32)))
STALL_BUDGET_NS = 5_000_000
PIECES = 8
EDIT, HOLD, STEP, RESUME = 1, 2, 3, 4
"""A `paramd.v1.BoundaryAction`."""


@dataclass(kw_only=True)
class TrainerSettings:
    """How the fake trainer behaves; may be changed while it runs."""

    job: str = "job"
    incarnation: int = 1
    rank: int = 0
    world_size: int = 1
    arena_bytes: int = 1 << 20
    constant_s: float = 0.02
    """Time between two updates."""
    update_s: float = 0.01
    """Time within an update."""
    agrees: bool = True
    """Whether boundary requests are agreed (this rank alone is the mesh)."""
    control_address: str = ""
    die_in_update: int = -1
    """Step in whose update the process ends itself; -1 never."""


def layout_of(arena_bytes: int) -> Layout:
    """One int64 parameter that fills the arena."""
    numel = arena_bytes // 8
    piece = Piece(0, 0, Box((0,), (numel,)))
    tensor = TensorLayout("w", "int64", (numel,), TensorKind.PARAMETER, (piece,))
    return Layout(1, (arena_bytes,), (tensor,))


@dataclass
class FakeTrainer:
    """Attached to a sidecar; `run` trains until `stop` is set."""

    settings: TrainerSettings
    connection: socket.socket
    fds: list[int]
    address: str
    stop: threading.Event = field(default_factory=threading.Event)
    apply: Callable[[int], None] | None = None
    """Runs the edit program that begins at that byte of the memory of edits; None does nothing."""

    def __post_init__(self) -> None:
        self.page = ControlPage(self.fds[0])
        self.arena = HostArena(self.fds[2], self.settings.arena_bytes)
        self.gate = TrainerGate(self.page, stall_budget_ns=STALL_BUDGET_NS)
        self.page[Word.AGREEMENT_STATE] = 1
        self._want_seen = self.page[Word.WANT]
        self._agreed_count = 0
        self._thread: threading.Thread | None = None

    def peer(self) -> dict[str, object]:
        """Where this rank's sidecar is found."""
        return {
            "rank": self.settings.rank,
            "address": self.address,
            "socket_path": "",
            "host_id": places.host_id(),
        }

    def send_mesh(
        self,
        layout: Layout | None = None,
        peers: list[dict[str, object]] | None = None,
        buddies: Sequence[int] = (),
    ) -> None:
        """Tells the sidecar who is there and what they hold, and waits until it serves."""
        layout = layout if layout is not None else layout_of(self.settings.arena_bytes)
        serialized = encode_layout(layout).SerializeToString()
        memory = os.memfd_create("layout")
        os.write(memory, serialized)
        message = {
            "op": "mesh",
            "peers": peers if peers is not None else [self.peer()],
            "control_address": self.settings.control_address,
            "layout_digest": layout_digest(layout),
            "buddies": list(buddies),
        }
        handover.send(self.connection, message, [memory])
        os.close(memory)
        expect(self.connection, "serving")

    def begin_update(self) -> None:
        self.gate.begin_update()

    def stamp(self, step: int, piece: int) -> None:
        """Writes the step into one piece of the arena."""
        words = self.arena.buffer[: self.settings.arena_bytes // 8 * 8].cast("q")
        begin, end = (len(words) * number // PIECES for number in (piece, piece + 1))
        pattern = step.to_bytes(8, "little") * (end - begin)
        ctypes.memmove(self.arena.address + 8 * begin, pattern, len(pattern))

    def update(self) -> None:
        """One whole update and its boundary."""
        step = self.page[Word.STEP] + 1
        self.begin_update()
        for piece in range(PIECES):
            self.stamp(step, piece)
            time.sleep(self.settings.update_s / PIECES)
            if step == self.settings.die_in_update and piece == PIECES // 2:
                os._exit(9)
        self.end_update()
        self.boundary()

    def end_update(self) -> None:
        """The update is over, and training has gone on."""
        self.gate.settle(self.page[Word.STEP] + 1, 0, proven=True)

    def boundary(self) -> None:
        """Agrees (alone) and announces, as the real trainer does."""
        page = self.page
        now_ns = time.monotonic_ns()
        last_ns, page[Word.BOUNDARY_NS] = page[Word.BOUNDARY_NS], now_ns
        if last_ns:
            page[Word.STEP_TIME_NS] = now_ns - last_ns
        announce = self.settings.agrees and self._agree()
        if not self.settings.agrees:
            page[Word.ROUNDS_LAUNCHED] += 1
            page[Word.ROUNDS_COLLECTED] += 1
        want = page[Word.WANT]
        if announce or want != self._want_seen:
            self._want_seen = want
            page[Word.ANNOUNCE] += 1
            descriptors.wake(self.fds[1])

    def _agree(self) -> bool:
        """A whole round of a mesh of one: promises, agrees, and does what is asked for."""
        page, number = self.page, self.page[Word.READY]
        if number <= page[Word.AGREED]:
            return False
        token, action = page[Word.TOKEN], page[Word.ACTION]
        argument = page[Word.ARGUMENT]
        page[Word.PROMISED] = number
        agreed = page[Word.READY] == number and page[Word.TOKEN] == token
        page[Word.ROUNDS_LAUNCHED] += 1
        if agreed:
            if action == EDIT:
                page[Word.EDIT_AGREED] = number
            if page[Word.BUFFERS_WANTED] == number:
                page[Word.BUFFERS_STEP], page[Word.BUFFERS_FOR] = page[Word.STEP], number
            if page[Word.MOMENTS_WANTED] == number:
                page[Word.MOMENTS_FOR] = number
            self._agreed_count += 1
            note_agreed(page.words, self._agreed_count, number)
            page[Word.AGREED_TOKEN] = token
            page[Word.AGREED_STEP] = page[Word.STEP]
            page[Word.AGREED] = number
        page[Word.PROMISED] = 0
        page[Word.ROUNDS_COLLECTED] += 1
        if agreed and action == EDIT:
            self._edit(number, token, argument)
        elif agreed and action in (HOLD, STEP, RESUME):
            page[Word.HELD] = {HOLD: 1, STEP: 2, RESUME: 0}[action]
            page[Word.HOLD_STEPS_LEFT] = argument if action == STEP else 0
        return agreed

    def _edit(self, number: int, token: int, argument: int) -> None:
        page = self.page
        begin_ns = time.monotonic_ns()
        self.gate.begin_update()
        if self.apply is not None:
            self.apply(argument)
        self.gate.end_edit()
        page[Word.EDIT_NS] = time.monotonic_ns() - begin_ns
        page[Word.EDIT_STEP] = page[Word.STEP]
        page[Word.EDIT_TOKEN] = token
        page[Word.EDIT_APPLIED] = number

    def run(self) -> None:
        while not self.stop.is_set():
            self.update()
            time.sleep(self.settings.constant_s)

    def start(self) -> None:
        self._thread = threading.Thread(target=self.run, name="paramd-fake-trainer")
        self._thread.start()

    def finish(self) -> None:
        """Stops training; the sidecar is left alone."""
        self.stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        self.finish()
        self.page.close()
        self.arena.close()
        self.connection.close()
        for descriptor in self.fds:
            os.close(descriptor)
        self.fds = []


def expect(connection: socket.socket, op: str) -> tuple[handover.Message, list[int]]:
    """The next message, which must be of that op."""
    message, fds = handover.receive(connection)
    if message["op"] != op:
        raise AssertionError(f"the sidecar answered {message}")
    return message, fds


def attach_message(
    settings: TrainerSettings, signer: Signer = SIGNER, **changes: object
) -> handover.Message:
    """An "attach" message of this very process."""
    return {
        "op": "attach",
        "job": settings.job,
        "incarnation": settings.incarnation,
        "rank": settings.rank,
        "world_size": settings.world_size,
        "pid": os.getpid(),
        "start": places.process_start(os.getpid()),
        "arena_bytes": settings.arena_bytes,
        "public_key": signer.public_key.hex(),
        "rank_ticket": signer.mint(
            job=settings.job,
            incarnation=settings.incarnation,
            role=Role.SIDECAR,
            rank=settings.rank,
            ttl_s=600.0,
        ),
        "version": __version__,
        **changes,
    }


def attach(
    path: Path, settings: TrainerSettings, handed_back: list[int] | None = None, **changes: object
) -> FakeTrainer:
    """Attaches this process to the sidecar at `path`."""
    connection = handover.connect(path, timeout_s=10)
    try:
        handover.send(connection, attach_message(settings, **changes), handed_back or [])
        message, fds = expect(connection, "attached")
    except BaseException:
        connection.close()
        raise
    return FakeTrainer(settings, connection, fds, message["address"])


@contextmanager
def attached(
    path: Path, *, trains: bool = False, buddies: Sequence[int] = (), **settings: Any
) -> Iterator[FakeTrainer]:
    """A trainer that all peers know, until the block ends; with `trains` it updates meanwhile."""
    trainer = attach(path, TrainerSettings(**settings))
    try:
        trainer.send_mesh(buddies=list(buddies))
        if trains:
            trainer.start()
        yield trainer
    finally:
        trainer.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--incarnation", type=int, default=1)
    parser.add_argument("--arena-bytes", type=int, default=1 << 20)
    parser.add_argument("--die-in-update", type=int, default=-1)
    values = vars(parser.parse_args())
    trainer = attach(values.pop("socket"), TrainerSettings(**values))
    trainer.send_mesh()
    print(trainer.address, flush=True)
    while True:
        trainer.update()
        time.sleep(trainer.settings.constant_s)


if __name__ == "__main__":
    main()
