"""Standing snapshots: whole, of one step, two of them, and what a successor is offered."""

import io
import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from paramd.errors import DataLossError, ExhaustedError, NotFoundError
from paramd.memory.continuation import EXTRA, RECORD, TABLE, Checked, KeptSlots, check_left
from paramd.memory.control_page import Word, step_of
from paramd.memory.descriptors import SparseMemory
from paramd.memory.optimizer_state import TABLE_BYTES, parse_table, table_text
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.resume import offer
from paramd_service.resume.marks import Marks
from paramd_service.resume.offer import offer_of
from paramd_service.resume.standing import Standing
from paramd_service.sidecar.kept_states import Found
from paramd_service.sidecar.log import Log
from paramd_service.sidecar.owner import Ownership
from paramd_service.sidecar.snapshots.moments import Moments, table_key
from paramd_service.sidecar.snapshots.store import Block, BlockMaker, Snapshot
from tests.longer import wait_until as settled
from tests.unit.sidecar.test_device_state import attached_to

ARENA_BYTES, STATE_BYTES = 10_000, 5_000


class Trainer:
    """The words and bytes of a trainer in this process."""

    def __init__(self) -> None:
        self.attached = attached_to(None, ARENA_BYTES)
        self.page = self.attached.page
        self.optimizer = SparseMemory(self.attached.shared.optimizer)
        self.optimizer.reserve(0, 8192)
        self._continuation = SparseMemory(self.attached.shared.continuation)
        self._record = KeptSlots(self._continuation, RECORD)
        self._table = KeptSlots(self._continuation, TABLE)
        self.page[Word.LINEAGE] = 77
        self.page[Word.OPTIMIZER_BYTES] = STATE_BYTES

    def ask(self, step: int) -> None:
        """Make `step` the state everywhere, and ask for its snapshot."""
        self.attached.arena.buffer[:] = bytes([step]) * ARENA_BYTES
        self.optimizer.buffer[:STATE_BYTES] = bytes([step]) * STATE_BYTES
        table = self._table.write(b"table")
        self._record.write(b"record %d" % step, beside=table)
        self.page[Word.STEP] = self.page[Word.STANDING_STEP] = step
        self.page[Word.STANDING] += 1

    def close(self) -> None:
        self.optimizer.close()
        self._continuation.close()
        self.attached.close()


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    made = Trainer()
    yield made
    made.close()


@pytest.fixture
def blocks() -> Iterator[BlockMaker]:
    with ThreadPoolExecutor(1) as executor:
        yield BlockMaker(executor)


@pytest.fixture
def standing(blocks: BlockMaker) -> Iterator[Standing]:
    made = Standing(blocks, Log(fields={}), budget_bytes=None)
    yield made
    made.close()


def made_at(
    standing: Standing,
    trainer: Trainer,
    serve: Callable[[], None],
    step: int,
    *,
    others: bool = True,
) -> None:
    """Ask until memory is there and the snapshot is made.

    Args:
        others: the other ranks have made those before, too.
    """
    if others:
        trainer.page[Word.STANDING_COMMON] = trainer.page[Word.STANDING_MADE]
    deadline_s = time.monotonic() + 60
    while step_of(trainer.page[Word.STANDING_MADE]) != step:
        assert time.monotonic() < deadline_s
        trainer.ask(step)
        serve()
        time.sleep(0.001)


def steps(standing: Standing) -> list[int]:
    return [label.step for label, _ in standing.labels()]


def test_a_copy_that_an_update_overtakes_is_dropped(trainer: Trainer, standing: Standing) -> None:
    serve = standing.serving(trainer.attached, lambda: "")
    made_at(standing, trainer, serve, 1)
    made_at(standing, trainer, serve, 2)
    trainer.ask(3)
    trainer.page[Word.SEQ] |= 1
    serve()
    # The next update began before the copy did: both earlier ones stay.
    assert steps(standing) == [2, 1]


def test_one_buffer_is_used_alone(
    trainer: Trainer, blocks: BlockMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    standing = Standing(blocks, Log(fields={}), budget_bytes=None)
    make, count = blocks.make, 0

    def only_one(size_bytes: int) -> Block:
        nonlocal count
        count += 1
        if count > 1:
            raise ExhaustedError("no memory")
        return make(size_bytes)

    monkeypatch.setattr(blocks, "make", only_one)
    serve = standing.serving(trainer.attached, lambda: "")
    for step in (1, 2):
        made_at(standing, trainer, serve, step)
        assert steps(standing) == [step]
    standing.close()


@pytest.fixture
def limited(blocks: BlockMaker) -> Iterator[tuple[Standing, list[int], io.StringIO]]:
    """Standing snapshots, how many there may be, and the log."""
    count, log = [2], io.StringIO()
    made = Standing(
        blocks,
        Log(fields={}, stream=log),
        budget_bytes=None,
        allowed=lambda _size, _held: count[0],
    )
    yield made, count, log
    made.close()


def test_when_memory_is_short_one_goes_then_the_other_and_both_come_back(
    trainer: Trainer, limited: tuple[Standing, list[int], io.StringIO]
) -> None:
    standing, count, log = limited
    serve = standing.serving(trainer.attached, lambda: "")
    for step in (1, 2):
        made_at(standing, trainer, serve, step)
    trainer.page[Word.STANDING_COMMON] = trainer.page[Word.STANDING_MADE]
    both_bytes = standing.held_bytes
    # The newest that all ranks have stays.
    for few, left in ((1, [2]), (0, [])):
        count[0] = few
        standing.shrink(few, trainer.attached, reason="few bytes")
        standing.digested().result()
        assert steps(standing) == left
        assert standing.held_bytes == both_bytes * few // 2
    trainer.ask(3)
    serve()
    assert steps(standing) == []
    count[0] = 2
    for step in (4, 5):
        made_at(standing, trainer, serve, step)
    settled(lambda: standing.held_bytes == both_bytes, "there are two again")
    assert steps(standing) == [5, 4]
    events = [json.loads(line) for line in log.getvalue().splitlines()]
    told = [(one["event"], one["buffers"]) for one in events if "buffers" in one]
    assert told[:2] == [("standing-exhausted", 1), ("standing-exhausted", 0)]
    assert told[-1] == ("standing-again", 2)
    reasons = {one["reason"] for one in events if one["event"] == "standing-exhausted"}
    assert reasons == {"few bytes"}


def test_only_one_that_all_ranks_have_is_kept_however_new_the_other_is(
    trainer: Trainer, limited: tuple[Standing, list[int], io.StringIO]
) -> None:
    standing, _, _ = limited
    serve = standing.serving(trainer.attached, lambda: "")
    made_at(standing, trainer, serve, 1)
    made_at(standing, trainer, serve, 2)
    # Other ranks missed step 2.
    trainer.page[Word.STANDING_COMMON] = 1
    standing.shrink(1, trainer.attached)
    standing.digested().result()
    assert steps(standing) == [1]


def test_one_that_is_being_sent_or_written_stays(trainer: Trainer, blocks: BlockMaker) -> None:
    short = False

    def in_between(_point: str) -> None:
        if short:
            standing.shrink(0, trainer.attached)
            standing.digested().result()

    standing = Standing(blocks, Log(fields={}), budget_bytes=None, at_point=in_between)
    serve = standing.serving(trainer.attached, lambda: "")
    made_at(standing, trainer, serve, 1)
    standing.digested().result()
    held = standing.hold()
    assert held is not None
    # Memory is short while the next one is being written.
    short = True
    made_at(standing, trainer, serve, 2)
    assert steps(standing) == [2, 1]
    assert held[1].buffer[0] == 1
    standing.release()
    standing.shrink(0, trainer.attached)
    standing.digested().result()
    assert not steps(standing)
    standing.close()


def test_memory_of_one_that_is_opened_is_not_freed_meanwhile(
    trainer: Trainer, standing: Standing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A descriptor's number may be another file's once it is closed."""
    made_at(standing, trainer, standing.serving(trainer.attached, lambda: ""), 1)
    standing.digested().result()
    opened = offer.opened
    freed: list[Block] = []

    def short_of_memory(block: Block) -> int:
        standing.shrink(0, trainer.attached)
        with suppress(TimeoutError):
            standing.digested().result(timeout=0.2)
            freed.append(block)
        return opened(block)

    monkeypatch.setattr(offer, "opened", short_of_memory)
    descriptor = offer.opened_standing(standing, 77, 1)
    assert not freed
    assert os.pread(descriptor, 1, 0) == b"\x01"
    os.close(descriptor)
    standing.digested().result()
    with pytest.raises(NotFoundError):
        offer.opened_standing(standing, 77, 1)


def test_a_rank_whose_successor_died_and_one_that_never_had_it_still_match(
    trainer: Trainer, standing: Standing
) -> None:
    made_at(standing, trainer, standing.serving(trainer.attached, lambda: ""), 1)
    # This rank's sidecar was given to a start that died; another's is still of the history before.
    standing.rebase(77, 88, 1, reached=3)
    standing.rebase(77, 99, 1, reached=3)
    ((label, _),) = standing.labels()
    assert (label.lineage, label.before) == (99, (88, 77))
    standing.rebase(88, 88, 1, reached=3)
    ((label, _),) = standing.labels()
    assert label.lineage == 88
    standing.rebase(55, 66, 1, reached=3)
    assert standing.labels() == []


def test_ranks_whose_copies_fail_at_different_times_keep_one_in_common(
    trainer: Trainer, standing: Standing
) -> None:
    serve = standing.serving(trainer.attached, lambda: "")
    for step in (1, 2):
        made_at(standing, trainer, serve, step)
    # Another rank has made none since step 2.
    trainer.page[Word.STANDING_COMMON] = 2
    for step in (3, 4, 5):
        made_at(standing, trainer, serve, step, others=False)
    assert steps(standing) == [5, 2]


def test_what_a_rollback_left_stays_until_all_ranks_have_something_newer(
    trainer: Trainer, standing: Standing, blocks: BlockMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve = standing.serving(trainer.attached, lambda: "")
    for step in (8, 9):
        made_at(standing, trainer, serve, step)
    trainer.page[Word.STANDING_COMMON] = 9
    # Steps come again now: 5 is newer than 9, and another rank may lack it.
    trainer.page[Word.REWOUND], trainer.page[Word.LINEAGE] = 1, 78
    made_at(standing, trainer, serve, 5, others=False)
    assert steps(standing) == [5, 9]
    made_at(standing, trainer, serve, 6, others=False)
    assert steps(standing) == [6, 9]
    made_at(standing, trainer, serve, 7)
    assert steps(standing) == [7, 6]
    # Of a step that came again the newest counts, though lineages are random.
    trainer.page[Word.REWOUND], trainer.page[Word.LINEAGE] = 2, 5
    made_at(standing, trainer, serve, 6, others=False)
    settled(lambda: all(label.digest for label, _ in standing.labels()))
    assert [(label.step, label.lineage) for label, _ in standing.labels()] == [(6, 5), (6, 78)]
    marks = Marks(blocks, standing, budget_bytes=None)
    assert marks.read("6", "", [(0, 1)], memoryview(bytearray(1))).lineage == 5

    def replaced(*_: object) -> None:
        for step in (7, 8):
            made_at(standing, trainer, serve, step)

    # While it is copied, the next ones take its memory.
    monkeypatch.setattr(Found, "read_into", replaced)
    with pytest.raises(DataLossError, match="step 6 is damaged"):
        marks.read("6", "", [(0, 1)], memoryview(bytearray(1)))


def test_extra_state_that_is_not_there_or_too_long_is_a_miss(
    trainer: Trainer, blocks: BlockMaker
) -> None:
    moments, slots = Moments(trainer.attached), KeptSlots(trainer._continuation, EXTRA)
    block = blocks.make(TABLE_BYTES)
    snapshot = Snapshot(table_key(1, pb.SOURCE_EXTRA_STATE), at_boundary=True, block=block)
    assert "noted no extra state" in moments.fill_extra([snapshot])
    slots.write(b"x" * TABLE_BYTES)
    assert "noted no extra state" in moments.fill_extra([snapshot])
    slots.write(table_text({"a": {"value": 1}}))
    assert moments.fill_extra([snapshot]) == ""
    assert parse_table(block.buffer) == {"a": {"value": 1}}
    block.close()
    moments.close()


def test_what_a_dead_trainer_left_is_digested(trainer: Trainer, standing: Standing) -> None:
    trainer.ask(7)
    assert standing.left_digests(trainer.attached) == []
    standing.trainer_ended(trainer.attached)
    standing.digested().result(timeout=10)
    digests = standing.left_digests(trainer.attached)
    assert offered(trainer, standing, Ownership.ORPHANED)["digests"] == digests
    parts = [memoryview(bytearray([7] * size)) for size in (ARENA_BYTES, STATE_BYTES)]
    assert check_left(parts, digests) == Checked(False, 2, 2)
    parts[1][STATE_BYTES - 1] = 8
    assert check_left(parts, digests).damaged
    assert check_left(parts[:1], digests).damaged


def offered(trainer: Trainer, standing: Standing, ownership: Ownership) -> dict[str, Any]:
    offer, descriptors = offer_of(trainer.attached, ownership, "digest", standing)
    for descriptor in descriptors:
        os.close(descriptor)
    return offer | {"descriptor_count": len(descriptors)}


def test_only_a_whole_state_is_offered(trainer: Trainer, standing: Standing) -> None:
    page = trainer.page
    trainer.ask(7)
    whole = offered(trainer, standing, Ownership.ORPHANED)
    assert (whole["why_not_live"], whole["step"], whole["descriptor_count"]) == ("", 7, 3)
    for ownership in (Ownership.OWNED, Ownership.TORN, Ownership.GONE):
        found = offered(trainer, standing, ownership)
        assert (found["why_not_live"], found["descriptor_count"]) == (ownership.value, 0)
    page[Word.SETTLED_SEQ], page[Word.SETTLED_DIGEST] = page[Word.SEQ], 12345
    changed = offered(trainer, standing, Ownership.ORPHANED)
    assert changed["why_not_live"] == "parameters were changed after the last update"
    page[Word.LINEAGE] = 0
    never = offered(trainer, standing, Ownership.ORPHANED)
    assert "resume='auto'" in never["why_not_live"]


def test_what_is_being_sent_is_not_overwritten(trainer: Trainer, standing: Standing) -> None:
    serve = standing.serving(trainer.attached, lambda: "")
    made_at(standing, trainer, serve, 1)
    made_at(standing, trainer, serve, 2)
    settled(lambda: all(label.digest for label, _ in standing.labels()))
    held = standing.hold()
    assert held is not None
    label, block = held
    before = bytes(block.buffer[: label.size_bytes])
    for step in (3, 4, 5):
        made_at(standing, trainer, serve, step)
    assert steps(standing) == [5, 2]
    assert bytes(block.buffer[: label.size_bytes]) == before
    standing.release()
    made_at(standing, trainer, serve, 6)
    assert steps(standing) == [6, 5]


def test_what_all_ranks_have_elsewhere_stays_until_they_have_another(
    trainer: Trainer, standing: Standing
) -> None:
    serve = standing.serving(trainer.attached, lambda: "")
    made_at(standing, trainer, serve, 1)
    trainer.page[Word.COPIES_STEP] = 1
    for step in (2, 3):
        made_at(standing, trainer, serve, step)
        assert steps(standing) == [step, 1]
    trainer.page[Word.COPIES_STEP] = 3
    made_at(standing, trainer, serve, 4)
    assert steps(standing) == [4, 3]
    # A successor's page knows of none yet.
    trainer.page[Word.COPIES_STEP] = 0
    made_at(standing, trainer, serve, 5)
    assert steps(standing) == [5, 3]


def test_a_snapshot_of_step_0_is_given_up_as_any_other(
    trainer: Trainer, standing: Standing
) -> None:
    serve = standing.serving(trainer.attached, lambda: "")
    # Asked for twice at the step it begins with, as by a start that goes on from there.
    for _ in range(2):
        trainer.ask(0)
        serve()
    assert steps(standing) == [0, 0]
    for step in (1, 2):
        made_at(standing, trainer, serve, step)
    assert steps(standing) == [2, 1]


def test_a_snapshot_that_is_not_made_is_not_waited_for(
    trainer: Trainer, standing: Standing
) -> None:
    """Trainers ask for the next one only once the last has been sent, or never will be."""
    serve = standing.serving(trainer.attached, lambda: "")
    for step in (1, 2, 3):
        made_at(standing, trainer, serve, step)
    trainer.ask(4)
    serve()
    assert (trainer.page[Word.STANDING_MADE], trainer.page[Word.COPY_SETTLED] < 4) == (4, True)
    trainer.ask(5)
    trainer.page[Word.SEQ] |= 1
    serve()
    assert trainer.page[Word.COPY_SETTLED] == 5
    # Nor is what a sidecar that died was asked for.
    trainer.page[Word.STANDING_STEP] = 6
    standing.serving(trainer.attached, lambda: "")
    assert trainer.page[Word.COPY_SETTLED] == 6
