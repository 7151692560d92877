"""Standing snapshots on their way between two sidecars: who may send, and what kills leave."""

from __future__ import annotations

import ctypes
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from paramd.memory import handover
from paramd.memory.continuation import RECORD, TABLE, KeptSlots
from paramd.memory.control_page import Word
from paramd.memory.descriptors import SparseMemory
from paramd.security.tickets import Role
from paramd.trainer.resume.choice import RankOffer
from paramd.trainer.resume.copies import Copies, Damaged
from paramd.v1 import sidecar_pb2 as pb
from paramd.v1 import sidecar_pb2_grpc
from tests.integration.client_job import halves
from tests.integration.fake_trainer import SIGNER, FakeTrainer, TrainerSettings, attach
from tests.integration.sidecar_process import SidecarProcess, wait_until
from tests.leaks import open_files
from tests.orders import Ordering, bound

ARENA_BYTES = 8 << 20
DEADLINE_S = 60.0


def ticket(role: Role, rank: int, incarnation: int = 1) -> str:
    return bound(SIGNER, role, rank, incarnation=incarnation, ttl_s=600.0)


class Rank:
    """A sidecar and a trainer that only asks for standing snapshots."""

    def __init__(self, folder: Path, rank: int, faults: str = "") -> None:
        self.folder, self.rank = folder, rank
        self.listen = "127.0.0.1:0"
        self.trainer: FakeTrainer | None = None
        self.start(faults)

    def start(self, faults: str = "") -> None:
        """Start its sidecar, again under the same address, and attach to it."""
        options = ["--listen", self.listen, "--copy-rate-bytes", str(1 << 30)]
        self.process = SidecarProcess(self.folder, *options, faults=faults, rank=self.rank)
        self.process.wait_until_started()
        before = self.trainer
        settings = TrainerSettings(rank=self.rank, world_size=2, arena_bytes=ARENA_BYTES)
        self.trainer = attach(
            self.process.socket_path,
            settings,
            before.fds if before is not None else None,
            copy_ticket=ticket(Role.COPIER, self.rank),
        )
        self.listen = self.trainer.address
        if before is not None:
            before.close()
        else:
            self.page[Word.LINEAGE] = 77

    @property
    def page(self) -> Any:
        assert self.trainer is not None
        return self.trainer.page

    def meet(self, ranks: list[Rank]) -> None:
        assert self.trainer is not None
        peers = [one.trainer.peer() for one in ranks if one.trainer is not None]
        self.trainer.send_mesh(halves(ARENA_BYTES // 4), peers, buddies=[1, 0])

    def stand(self, step: int) -> None:
        """Make `step` the state, and ask for its snapshot until it is made."""
        assert self.trainer is not None
        page, fds = self.page, self.trainer.fds
        ctypes.memset(self.trainer.arena.address, step, ARENA_BYTES)
        continuation = SparseMemory(fds[6])
        table = KeptSlots(continuation, TABLE).write(b"table")
        KeptSlots(continuation, RECORD).write(b"record %d" % step, beside=table)
        continuation.close()
        page[Word.STEP] = page[Word.STANDING_STEP] = step

        def answered() -> bool:
            return page[Word.STANDING_MADE] == step or page[Word.COPY_SETTLED] == step

        end_s = time.monotonic() + DEADLINE_S
        while page[Word.STANDING_MADE] != step:
            # One at a time: another one that is asked for meanwhile would be made, and sent, again.
            page[Word.COPY_SETTLED] = step - 1
            page[Word.STANDING] += 1
            os.eventfd_write(fds[1], 1)
            left_s = end_s - time.monotonic()
            wait_until(answered, f"standing {step}: {self.process.log}", left_s)

    def await_word(self, word: Word, step: int) -> None:
        wait_until(lambda: self.page[word] >= step, f"{word}: {self.process.log}", DEADLINE_S)

    def kept(self) -> list[tuple[int, int]]:
        """(rank, step) of the copies that a successor is offered, after a look at their bytes."""
        found = []
        for told in self._asked({"op": "copies"})[0]["copies"]:
            label = told["label"]
            if told["rank"] == self.rank:
                continue
            wanted = {"lineage": label["lineage"], "step": label["step"]}
            _, (descriptor,) = self._asked({"op": "copy", "of": told["rank"], **wanted})
            data = os.pread(descriptor, ARENA_BYTES + 20, 0)
            os.close(descriptor)
            step = label["step"]
            assert data.startswith(bytes([step]) * ARENA_BYTES + b"record %dtable" % step)
            found.append((told["rank"], step))
        return sorted(found)

    def _asked(self, message: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        connection: socket.socket
        with handover.connect(self.process.socket_path) as connection:
            handover.send(connection, {**message, "job": "job", "rank": self.rank})
            return handover.receive(connection)

    def died(self) -> bool:
        return self.process.process.poll() is not None

    def close(self) -> None:
        if self.trainer is not None:
            self.trainer.close()
        self.process.end()


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., list[Rank]]]:
    with ExitStack() as stack:

        def start(*faults: str) -> list[Rank]:
            ranks = [Rank(tmp_path / f"r{rank}", rank, faults[rank]) for rank in range(2)]
            for rank in ranks:
                stack.callback(rank.close)
            for rank in ranks:
                rank.meet(ranks)
            return ranks

        yield start


def test_snapshots_go_to_the_buddy_and_nobody_else_may_put_any(
    started: Callable[..., list[Rank]],
) -> None:
    ranks = started("", "")
    for step in (1, 2, 3):
        for rank in ranks:
            rank.stand(step)
        for rank in ranks:
            rank.await_word(Word.COPIED, step)
            rank.await_word(Word.COPY_SETTLED, step)
    assert ranks[0].kept() == [(1, 2), (1, 3)]
    assert ranks[1].kept() == [(0, 2), (0, 3)]

    label = pb.StandingCopy(
        lineage=77, step=9, arena_bytes=ARENA_BYTES, record_bytes=1, table_bytes=1, digest=1
    )
    label.world_size = 2
    for claimed, of, changes, code in (
        # Rank 1 keeps rank 0's copies, not its own; and not for a reader, or of before.
        (Role.COPIER, 1, {}, grpc.StatusCode.PERMISSION_DENIED),
        (Role.COPIER, 2, {}, grpc.StatusCode.PERMISSION_DENIED),
        (Role.SIDECAR, 0, {}, grpc.StatusCode.PERMISSION_DENIED),
        (Role.CONTROL, 1, {}, grpc.StatusCode.PERMISSION_DENIED),
        (Role.COPIER, 0, {"incarnation": 2}, grpc.StatusCode.UNAUTHENTICATED),
        # What no state of rank 0 can be takes no memory.
        (Role.COPIER, 0, {"arena_bytes": 1 << 50}, grpc.StatusCode.INVALID_ARGUMENT),
        (Role.COPIER, 0, {"optimizer_bytes": 1 << 50}, grpc.StatusCode.INVALID_ARGUMENT),
        (Role.COPIER, 0, {"digest": 0}, grpc.StatusCode.INVALID_ARGUMENT),
        (Role.COPIER, 0, {"lineage": 78}, grpc.StatusCode.FAILED_PRECONDITION),
    ):
        told = pb.StandingCopy()
        told.CopyFrom(label)
        incarnation = int(changes.get("incarnation", 1))
        for name, value in changes.items():
            if name != "incarnation":
                setattr(told, name, value)
        with grpc.insecure_channel(ranks[1].listen) as channel:
            ordering = grpc.intercept_channel(channel, Ordering(SIGNER))
            stub = sidecar_pb2_grpc.SidecarServiceStub(ordering)
            bearer = ticket(claimed, of, incarnation)
            with pytest.raises(grpc.RpcError) as refused:
                stub.PutCopy(
                    pb.PutCopyRequest(copy=told),
                    timeout=10,
                    metadata=(("authorization", f"Bearer {bearer}"),),
                )
        assert refused.value.code() is code, (claimed, of, changes, refused.value.details())
    assert ranks[1].kept() == [(0, 2), (0, 3)]
    check_damage(ranks[1])


def check_damage(keeper: Rank) -> None:
    """A copy that is damaged where it is kept is found before it is given to anybody."""
    socket_path = keeper.process.socket_path
    copies = Copies(job="job", rank=1, sockets={1: socket_path})
    held = copies.look().copies
    assert [(copy.rank, copy.mark.step) for copy in held if copy.mark.step == 3] == [(0, 3)]
    mark = next(copy.mark for copy in held if copy.mark.step == 3)
    offers = [RankOffer(), RankOffer(copies=held)]
    assert copies.prepare(mark, {0: 1}, offers) == []
    pid = keeper.process.process.pid
    for link, target in open_files(pid).items():
        # It may close this one, too, before it is opened here.
        with suppress(FileNotFoundError):
            if "memfd:paramd-snapshot" not in target:
                continue
            with link.open("r+b", buffering=0) as memory:
                memory.seek(ARENA_BYTES // 2)
                if memory.read(1) == b"\x03":
                    memory.seek(ARENA_BYTES // 2)
                    memory.write(b"\x07")
    assert copies.prepare(mark, {0: 1}, offers) == [Damaged(0, 1, mark)]
    other = next(copy.mark for copy in held if copy.mark.step == 2)
    assert copies.prepare(other, {0: 1}, offers) == []
    copies.close()


def test_a_buddy_that_dies_while_it_receives_gets_the_copy_again(
    started: Callable[..., list[Rank]],
) -> None:
    ranks = started("", "copy-received:kill@4")
    ranks[0].stand(1)
    wait_until(ranks[1].died, "the buddy dies", DEADLINE_S)
    assert ranks[0].page[Word.COPIED] == 0
    ranks[1].start()
    ranks[1].meet(ranks)
    ranks[0].await_word(Word.COPIED, 1)
    assert ranks[1].kept() == [(0, 1)]


def test_a_buddy_that_stays_away_is_given_up_until_the_next_snapshot(
    started: Callable[..., list[Rank]],
) -> None:
    # A copy of 8 MiB and its record is six calls: the first one asks what is there.
    ranks = started("", "copy-received:kill@9")
    ranks[0].stand(1)
    ranks[0].await_word(Word.COPIED, 1)
    ranks[0].stand(2)
    # Trainers may go on asking for standing snapshots: those of the host itself.
    ranks[0].await_word(Word.COPY_SETTLED, 2)
    assert (ranks[0].page[Word.COPIED], ranks[1].died()) == (1, True)
    assert '"copy-failed"' in ranks[0].process.log
    ranks[1].start()
    ranks[1].meet(ranks)
    ranks[0].stand(3)
    ranks[0].await_word(Word.COPIED, 3)
    assert ranks[1].kept() == [(0, 3)]
