"""The standby: what of a store it gets, and when ranks elect it."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from random import Random

import pytest

from paramd import places
from paramd.v1 import control_pb2
from paramd_service.control.base.site import next_generation
from paramd_service.control.standby.election import Answer, Step, decide, is_enough
from paramd_service.control.standby.image import PAGE_BYTES, PART_BYTES, Replica, changes

HOME, THERE = "mtls://10.0.0.1:8471", "mtls://10.0.0.2:8471"


def parts(number: int, before: bytes, after: bytes) -> list[control_pb2.FollowStoreResponse]:
    found = [
        control_pb2.FollowStoreResponse(
            number=number, pages=[control_pb2.StorePage(offset_bytes=offset, data=data)]
        )
        for offset, data in changes(before, after)
    ]
    last = control_pb2.FollowStoreResponse(
        number=number, generation=7, size_bytes=len(after), audit_head=b"head", last=True
    )
    return [*found, last]


def replica_in(folder: Path) -> Replica:
    return Replica(folder / "control.sqlite", folder, "job")


def take(replica: Replica, number: int, before: bytes, after: bytes) -> None:
    taken = [replica.take(part) for part in parts(number, before, after)]
    assert taken == [False] * (len(taken) - 1) + [True]


def test_changes_make_the_same_file_elsewhere_whatever_was_changed(tmp_path: Path) -> None:
    random = Random(15)
    replica, before = replica_in(tmp_path), b""
    for number in range(1, 60):
        pages = random.choice((0, 1, 3, 40, 600))
        after = bytearray(before[: pages * PAGE_BYTES].ljust(pages * PAGE_BYTES, b"\0"))
        for _ in range(random.randrange(5)):
            if pages:
                begin = random.randrange(pages) * PAGE_BYTES
                after[begin : begin + 9] = random.randbytes(9)
        take(replica, number, before, bytes(after))
        replica.keep()
        assert (tmp_path / "control.sqlite").read_bytes() == after
        before = bytes(after)


def test_parts_are_small_and_only_of_what_differs() -> None:
    after = bytes(range(256)) * (3 * PART_BYTES // 256)
    assert [len(data) for _, data in changes(b"", after)] == [PART_BYTES] * 3
    changed = bytearray(after)
    changed[5 * PAGE_BYTES + 1] ^= 1
    assert [offset for offset, _ in changes(after, bytes(changed))] == [5 * PAGE_BYTES]
    assert list(changes(after, after)) == []


def test_a_state_that_is_not_whole_changes_nothing(tmp_path: Path) -> None:
    replica = replica_in(tmp_path)
    take(replica, 1, b"", b"a" * PAGE_BYTES)
    for part in parts(2, b"a" * PAGE_BYTES, b"b" * PAGE_BYTES)[:-1]:
        assert not replica.take(part)
    replica.keep()
    assert (tmp_path / "control.sqlite").read_bytes() == b"a" * PAGE_BYTES
    assert replica.number == 1


def test_what_was_there_is_put_aside_and_its_log_is_never_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARAMD_STATE_DIR", str(tmp_path))
    folder = places.job_dir("job")
    older = sqlite3.connect(folder / "control.sqlite")
    older.execute("PRAGMA journal_mode=WAL")
    older.execute("CREATE TABLE older (a)")
    older.commit()
    assert (folder / "control.sqlite-wal").stat().st_size
    with sqlite3.connect(":memory:") as newer:
        newer.execute("CREATE TABLE newer (a)")
        newer.commit()
        image = newer.serialize()
    newer.close()
    replica = replica_in(folder)
    take(replica, 1, b"", image)
    replica.keep()
    found = sqlite3.connect(folder / "control.sqlite")
    assert found.execute("SELECT name FROM sqlite_master").fetchall() == [("newer",)]
    found.close()
    older.close()
    assert (folder / "control.sqlite.before").exists()
    assert (folder / "audit-job.head").read_bytes() == b"head"
    # Who starts next is above the one whose store it has.
    assert places.generation("job") == 7
    assert next_generation(folder, now_s=0.0) == 8


def answer(*, reached: bool = False, address: str = HOME, generation: int = 1) -> Answer:
    return Answer(follows=False, control_address=address, generation=generation, reached=reached)


@pytest.mark.parametrize("world_size", range(1, 9))
def test_no_two_sides_of_a_cut_network_are_enough(world_size: int) -> None:
    for at_home in range(world_size + 1):
        there = world_size - at_home
        assert not (
            is_enough(at_home, world_size, at_home=True)
            and is_enough(there, world_size, at_home=False)
        )


def test_a_candidate_follows_whom_any_rank_reaches_and_the_newest_of_several() -> None:
    answers = [answer(), answer(), answer(reached=True)]
    assert decide(answers, 3, at_home=True).step is Step.FOLLOW
    answers.append(answer(reached=True, address=THERE, generation=2))
    assert decide(answers, 4, at_home=True).address == THERE


def test_who_follows_a_candidate_that_was_not_elected_follows_nobody() -> None:
    answers = [answer(reached=True, address=THERE), answer()]
    assert decide(answers, 2, at_home=True, mine=THERE).step is Step.STAND
    assert decide(answers, 2, at_home=True).step is Step.FOLLOW


def test_ranks_that_do_not_answer_count_for_nobody() -> None:
    assert decide([answer()], 2, at_home=False).step is Step.STAND
    assert decide([answer()], 2, at_home=True).step is Step.WAIT
    assert decide([answer()] * 2, 2, at_home=True).step is Step.STAND
    assert decide([], 2, at_home=False).step is Step.WAIT
