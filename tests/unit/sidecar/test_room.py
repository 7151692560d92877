"""Grants of a rank's sidecar, with regard to the other ranks of its host; real files and blocks."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from paramd.errors import ExhaustedError
from paramd.memory.descriptors import SparseMemory
from paramd.memory.left import LOWER_S, Kills, Limit, Memory, Purpose, kills_now
from paramd_service.sidecar import room as module
from paramd_service.sidecar.room import MOST_STANDING, PAST_S, HostRoom, free_all

MIB = 1 << 20


class Host:
    """A host of 2,000 MiB, and its clock."""

    def __init__(self) -> None:
        self.left_bytes = 1000 * MIB
        self.now_s = 1000.0

    def memory(self) -> Memory:
        return Memory((Limit("the host", 2000 * MIB, self.left_bytes),))


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def opened(host: Host, tmp_path: Path) -> Iterator[Callable[[int], HostRoom]]:
    """Opens rooms of ranks of one job; each counts as a process that lives."""
    with ExitStack() as stack:

        def open_room(rank: int) -> HostRoom:
            made = HostRoom(
                tmp_path / f"rank-{rank}.sock",
                rank,
                reserve_bytes=None,
                memory=host.memory,
                clock_s=lambda: host.now_s,
            )
            made.open()
            stack.callback(made.close)
            return made

        yield open_room


def test_a_reader_is_refused_with_figures_before_the_reserve_is_used(
    host: Host, opened: Callable[[int], HostRoom]
) -> None:
    room = opened(0)
    with room.claimed(Purpose.SNAPSHOT, 900 * MIB):
        pass
    with (
        pytest.raises(ExhaustedError, match=r"1,048,576,000 bytes available.*104,857,600 stay"),
        room.claimed(Purpose.SNAPSHOT, 901 * MIB),
    ):
        pass


OF_SIDECARS = [one for one in Purpose if one not in (Purpose.TRAINING, Purpose.CLIENT)]


@pytest.mark.parametrize("purpose", OF_SIDECARS, ids=lambda one: one.name)
def test_whatever_it_is_for_what_does_not_fit_is_refused_with_what_to_do_instead(
    opened: Callable[[int], HostRoom], purpose: Purpose
) -> None:
    descriptor = os.memfd_create("sparse")
    os.truncate(descriptor, 2000 * MIB)
    memory = SparseMemory(descriptor, opened(0), purpose)
    try:
        with pytest.raises(ExhaustedError) as refusal:
            memory.reserve(0, 901 * MIB)
        assert purpose.words in str(refusal.value)
        assert purpose.instead in str(refusal.value)
        assert "1,048,576,000 bytes available" in str(refusal.value)
        assert os.fstat(descriptor).st_blocks == 0
        # A smaller one fits, and is given back.
        memory.reserve(0, MIB)
        memory.release(0, MIB)
        assert os.fstat(descriptor).st_blocks == 0
    finally:
        memory.close()
        os.close(descriptor)


def test_what_another_rank_was_just_granted_counts(
    host: Host, opened: Callable[[int], HostRoom]
) -> None:
    one, other = opened(0), opened(1)
    with (
        one.claimed(Purpose.SNAPSHOT, 600 * MIB),
        pytest.raises(ExhaustedError, match="granted a moment ago"),
        other.claimed(Purpose.SNAPSHOT, 600 * MIB),
    ):
        pass
    # Nothing was allocated, so it may be had again.
    with other.claimed(Purpose.SNAPSHOT, 600 * MIB):
        pass


def test_ranks_that_ask_at_the_same_time_never_get_the_same_memory(
    host: Host, opened: Callable[[int], HostRoom]
) -> None:
    rooms, granted, lock = [opened(rank) for rank in range(4)], [0], threading.Lock()
    together = threading.Barrier(4)

    def ask(room: HostRoom) -> None:
        together.wait()
        for _ in range(20):
            try:
                with room.claimed(Purpose.SNAPSHOT, 300 * MIB):
                    with lock:
                        granted[0] += 1
                        assert granted[0] <= 3
                    with lock:
                        granted[0] -= 1
            except ExhaustedError:
                pass

    threads = [threading.Thread(target=ask, args=(room,)) for room in rooms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_what_all_trainers_are_about_to_take_counts(
    host: Host, opened: Callable[[int], HostRoom]
) -> None:
    one, other = opened(0), opened(1)
    one.expect(step_bytes=200 * MIB, coming_bytes=100 * MIB)
    other.expect(step_bytes=200 * MIB, coming_bytes=100 * MIB)
    assert one.spare().spare_bytes == (1000 - 400 - 200) * MIB
    assert other.spare() == one.spare()


def test_the_lowest_rank_decides_for_all_and_another_when_it_is_gone(
    host: Host, opened: Callable[[int], HostRoom]
) -> None:
    one, other = opened(0), opened(1)
    # Nobody has decided yet, so the other rank takes nothing.
    assert other.standing_count(200 * MIB, 0) == 0
    assert one.standing_count(200 * MIB, 0) == MOST_STANDING
    assert other.standing_count(200 * MIB, 0) == MOST_STANDING
    host.left_bytes, host.now_s = 90 * MIB, host.now_s + LOWER_S
    assert other.decide() == MOST_STANDING
    assert one.decide() == 1
    assert other.decide() == 1
    one.close()
    # Its own decision begins with what it measures.
    host.left_bytes = 1000 * MIB
    assert other.standing_count(200 * MIB, 0) == MOST_STANDING


def test_only_so_many_standing_snapshots_as_all_ranks_have_memory_for(
    host: Host, opened: Callable[[int], HostRoom]
) -> None:
    one, other = opened(0), opened(1)
    # Twice 400 MiB for each of both are too much: one each.
    assert one.standing_count(400 * MIB, 0) == 1
    assert other.standing_count(400 * MIB, 0) == 1


DIES = """
import os, signal, sys
from pathlib import Path
from paramd_service.sidecar.room import HostRoom
room = HostRoom(Path(sys.argv[1]), 0, reserve_bytes=None)
room.open()
room.standing_count(1 << 20, 0)
room.expect(step_bytes=0, coming_bytes=0, trainer_pid=int(sys.argv[2]))
os.kill(os.getpid(), signal.SIGKILL)
"""


def dies(folder: Path, *, trainer_pid: int = 0) -> dict[str, float]:
    """What a sidecar of rank 0 leaves that is killed."""
    command = [sys.executable, "-c", DIES, folder / "rank-0.sock", str(trainer_pid)]
    subprocess.run(command, check=False)
    left = json.loads((folder / "rank-0.memory").read_text())
    assert isinstance(left, dict)
    return left


def more_kills(host: int, group: int) -> Kills:
    now = kills_now()
    return replace(now, host_count=now.host_count + host, group_count=now.group_count + group)


@pytest.mark.parametrize("victims", [0, 1])
def test_a_sidecar_that_the_kernel_ended_comes_back_with_one_snapshot_fewer(
    host: Host,
    opened: Callable[[int], HostRoom],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    victims: int,
) -> None:
    left = dies(tmp_path)
    assert left["count"] == MOST_STANDING
    monkeypatch.setattr(module, "kills_now", lambda: more_kills(victims, victims))
    host.now_s = left["since_s"] + 1
    room = opened(0)
    assert room.predecessor_killed == bool(victims)
    # Killed by somebody else, it takes again what it had.
    assert room.standing_count(MIB, 0) == MOST_STANDING - victims


def test_kills_in_other_containers_are_not_taken_for_its_own(
    opened: Callable[[int], HostRoom], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in a container, whatever this machine has.
    kills = Kills(host_count=7, group=1234, group_count=2)
    dies(tmp_path)
    left = module._figures(tmp_path / "rank-0.memory")
    assert left is not None
    one = left.with_kills(kills)
    (tmp_path / "rank-0.memory").write_text(json.dumps(asdict(one)))
    monkeypatch.setattr(module, "kills_now", lambda: replace(kills, host_count=8))
    assert not opened(0).predecessor_killed


@pytest.mark.parametrize("trainer_lives", [True, False])
def test_a_successor_that_comes_late_still_knows_why_while_the_trainer_lives(
    opened: Callable[[int], HostRoom],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    trainer_lives: bool,
) -> None:
    with subprocess.Popen(["sleep", "600"]) as trainer:
        try:
            dies(tmp_path, trainer_pid=trainer.pid)
            if not trainer_lives:
                trainer.kill()
                trainer.wait()
            old_s = time.time() - 10 * PAST_S
            os.utime(tmp_path / "rank-0.memory", (old_s, old_s))
            monkeypatch.setattr(module, "kills_now", lambda: more_kills(1, 1))
            # Without its trainer it is of an earlier start of the job.
            assert opened(0).predecessor_killed == trainer_lives
        finally:
            trainer.kill()


def test_figures_of_another_version_or_host_are_passed_over(
    host: Host, opened: Callable[[int], HostRoom], tmp_path: Path
) -> None:
    room = opened(1)
    figures = json.loads((tmp_path / "rank-1.memory").read_text())
    for number, text in enumerate(
        (
            "", "{", "[]", "[" * 100_000, json.dumps(figures | {"rank": 5, "host": "another"}),
            json.dumps(figures | {"rank": 6, "more": 1}), json.dumps(figures | {"rank": "7"}),
            json.dumps(figures | {"rank": 8, "start": 1, "claimed_bytes": 1 << 40}),
        )
    ):  # fmt: skip
        (tmp_path / f"rank-{number + 10}.memory").write_text(text)
    assert room.spare().spare_bytes == 900 * MIB


def test_figures_are_gone_once_the_sidecar_has_left(
    opened: Callable[[int], HostRoom], tmp_path: Path
) -> None:
    room = opened(0)
    assert os.listdir(tmp_path) == ["rank-0.memory"]
    room.close()
    assert not os.listdir(tmp_path)


def test_figures_of_a_successor_outlive_the_sidecar_that_hands_over(
    opened: Callable[[int], HostRoom], tmp_path: Path
) -> None:
    room = opened(0)
    shown = json.loads((tmp_path / "rank-0.memory").read_text())
    (tmp_path / "rank-0.memory").write_text(json.dumps(shown | {"pid": shown["pid"] + 1}))
    room.close()
    assert os.listdir(tmp_path) == ["rank-0.memory"]


def test_another_rank_frees_its_idle_memory_when_that_helps(
    host: Host, opened: Callable[[int], HostRoom]
) -> None:
    one, other = opened(0), opened(1)
    host.left_bytes = 300 * MIB
    other.show_idle(500 * MIB)
    done = threading.Event()

    def keep_watch() -> None:
        while not done.is_set():
            if other.is_asked:
                host.left_bytes += 500 * MIB
                other.show_idle(0)
                return
            time.sleep(0.001)

    watch = threading.Thread(target=keep_watch)
    watch.start()
    try:
        with one.claimed(Purpose.MARK, 600 * MIB):
            pass
    finally:
        done.set()
        watch.join()
    # What it has since is too little, so nobody waits for it.
    other.show_idle(90 * MIB)
    host.now_s += 60
    with (
        pytest.raises(ExhaustedError, match="a restore point needs"),
        one.claimed(Purpose.MARK, 800 * MIB),
    ):
        pass
    assert not other.is_asked


def test_standing_snapshots_count_on_idle_memory_unless_memory_is_short(
    host: Host, opened: Callable[[int], HostRoom]
) -> None:
    one, other = opened(0), opened(1)
    one.show_idle(500 * MIB)
    other.show_idle(300 * MIB)
    host.left_bytes = 200 * MIB
    assert one.reachable().spare_bytes == 900 * MIB
    assert one.standing_count(200 * MIB, 0) == MOST_STANDING
    host.left_bytes, host.now_s = 90 * MIB, host.now_s + LOWER_S
    assert one.decide() == 1


def test_memory_that_cannot_be_freed_keeps_no_other_from_it() -> None:
    freed: list[int] = []

    def stuck() -> None:
        raise BufferError("it is exported")

    with pytest.raises(BufferError):
        free_all([lambda: freed.append(1), stuck, lambda: freed.append(2)])
    assert freed == [1, 2]
