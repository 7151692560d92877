"""What a rank is doing: a pure function of its control page, its trainer and the clock."""

import os
import subprocess
import sys

import pytest

from paramd.memory.control_page import Word
from paramd.v1 import common_pb2
from paramd_service.sidecar.owner import Ownership, Worked, exit_of, worked
from paramd_service.sidecar.phase import (
    BY_ITSELF,
    FIRST_STEP_S,
    STALL_LEAST_S,
    WORKING_S,
    Doing,
    Work,
    doing,
    stall_after_ns,
)

S = 1_000_000_000
NOW_NS = 1000 * S


def words(**named: int) -> list[int]:
    """A training of 0.1 s steps, 10 ms after a boundary."""
    page = [0] * 128
    page[Word.BOUNDARY_NS] = NOW_NS - S // 100
    page[Word.STEP_TIME_NS] = S // 10
    for name, value in named.items():
        page[Word[name]] = value
    return page


def phase(page: list[int], now_ns: int = NOW_NS) -> int:
    return doing(Ownership.OWNED, page, process_state="S", now_ns=now_ns).phase


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        (words(), common_pb2.PHASE_FORWARD_BACKWARD),
        (words(SEQ=2), common_pb2.PHASE_FORWARD_BACKWARD),
        (words(SEQ=3), common_pb2.PHASE_UPDATE),
        (words(COPY_BEGUN=5, COPY_ENDED=4), common_pb2.PHASE_SUMMON),
        (words(ANNOUNCE=5, SERVED=4), common_pb2.PHASE_SUMMON),
        (words(READY=5, AGREED=4), common_pb2.PHASE_SUMMON),
        (words(READY=4, AGREED=4), common_pb2.PHASE_FORWARD_BACKWARD),
        (words(SEQ=3, COPY_BEGUN=5, COPY_ENDED=4), common_pb2.PHASE_UPDATE),
        (words(BOUNDARY_NS=0, STEP_TIME_NS=0), common_pb2.PHASE_IDLE),
        (words(BOUNDARY_NS=NOW_NS - 2 * S), common_pb2.PHASE_IDLE),
    ],
)
def test_a_living_trainers_words_say_its_phase(page: list[int], expected: int) -> None:
    assert phase(page) == expected
    assert doing(Ownership.OWNED, page, process_state="R", now_ns=NOW_NS).reason == ""


@pytest.mark.parametrize("inside", [0, 1])
def test_a_trainer_without_boundaries_for_70_s_is_stalled_and_not_dead(inside: int) -> None:
    now_ns = NOW_NS + 70 * S
    found = doing(Ownership.OWNED, words(SEQ=inside), process_state="R", now_ns=now_ns)
    assert found.phase == common_pb2.PHASE_STALLED
    assert "no boundary for 70 s, its steps take 0.1 s" in found.reason
    assert ("inside an update" in found.reason) == bool(inside)


def test_how_long_is_too_long_depends_on_the_trainings_own_steps() -> None:
    # The first step compiles and warms up, for minutes perhaps.
    assert stall_after_ns(0) == FIRST_STEP_S * S
    first = words(STEP_TIME_NS=0, BOUNDARY_NS=NOW_NS - 300 * S)
    assert doing(Ownership.OWNED, first, process_state="R", now_ns=NOW_NS).reason == ""
    assert phase(first, now_ns=NOW_NS + 900 * S) == common_pb2.PHASE_STALLED
    assert stall_after_ns(1) == STALL_LEAST_S * S
    assert stall_after_ns(60 * S) == 1200 * S
    slow = words(STEP_TIME_NS=60 * S)
    assert phase(slow, now_ns=NOW_NS + 70 * S) == common_pb2.PHASE_FORWARD_BACKWARD
    assert phase(slow, now_ns=NOW_NS + 1300 * S) == common_pb2.PHASE_STALLED


def test_one_long_step_in_which_the_trainer_works_is_no_stall_for_minutes_and_a_hang_is() -> None:
    for age_s, works, expected in (
        (70, True, common_pb2.PHASE_IDLE),
        (70, False, common_pb2.PHASE_STALLED),
        (WORKING_S - 1, True, common_pb2.PHASE_IDLE),
        # Waits for a device keep a core busy: work is no proof for ever.
        (WORKING_S + 1, True, common_pb2.PHASE_STALLED),
    ):
        now_ns = NOW_NS + round(age_s * S)
        found = doing(Ownership.OWNED, words(), process_state="S", now_ns=now_ns, works=works)
        assert found.phase == expected, (age_s, works)
        assert bool(found.reason) == (expected == common_pb2.PHASE_STALLED)


@pytest.mark.parametrize(
    ("activity", "works", "waits"),
    [
        ("collective", False, True),
        # A wait for a device keeps a core busy: no work, and a stall as soon as any other.
        ("collective", True, True),
        ("backward", False, True),
        ("backward", True, False),
        # These wait for nobody else: slow, perhaps in a sleep, and no stall yet.
        ("dataloader", False, False),
        ("lock", False, False),
        ("code", False, False),
        ("code", True, False),
        ("", False, False),
    ],
)
def test_a_late_trainer_waits_for_others_or_is_busy_by_itself(
    activity: str, works: bool, waits: bool
) -> None:
    def found(age_s: float) -> Doing:
        return doing(
            Ownership.OWNED,
            words(),
            process_state="S",
            now_ns=NOW_NS + round(age_s * S),
            works=works,
            activity=activity,
        )

    busy = not waits and (works or activity in BY_ITSELF)
    stalled = found(70).phase == common_pb2.PHASE_STALLED
    assert stalled != busy
    assert (found(70).waits, found(70).works) == (waits, busy)
    assert (found(0).waits, found(0).works) == (False, False), "on schedule"
    assert found(WORKING_S + 1).phase == common_pb2.PHASE_STALLED


def test_a_trainer_works_while_it_computes_or_writes_and_no_longer() -> None:
    work = Work()
    assert not work.seen(1, Worked(50.0, 0), 0), "of one look nothing is known"
    assert work.seen(1, Worked(56.0, 0), 6 * S), "it computes"
    assert work.seen(1, Worked(56.0, 0), 8 * S), "until the window is over"
    assert not work.seen(1, Worked(56.1, 0), 12 * S), "it hangs; threads of ours use a little"
    assert work.seen(1, Worked(56.2, 200 << 20), 18 * S), "it saves"
    assert not work.seen(2, Worked(90.0, 0), 24 * S), "another process"
    assert not work.seen(2, None, 30 * S)


def test_what_a_process_does_is_read() -> None:
    before = worked(os.getpid())
    assert before is not None
    while (now := worked(os.getpid())) is not None and now.cpu_s - before.cpu_s < 0.05:
        pass
    assert now is not None
    assert now.io_bytes > before.io_bytes, "it has read those files"
    assert worked(0) is None


def test_who_owns_the_memory_comes_before_what_the_words_say() -> None:
    for ownership, expected in (
        (Ownership.WAITING, common_pb2.PHASE_WAITING),
        (Ownership.ORPHANED, common_pb2.PHASE_ORPHANED),
        (Ownership.TORN, common_pb2.PHASE_TORN),
    ):
        # The pid of a trainer that has ended may be another's, which is stopped.
        found = doing(ownership, words(SEQ=1), process_state="T", now_ns=NOW_NS)
        assert (found.phase, found.reason) == (expected, ownership.value)


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL"),
        ("raise SystemExit(3)", "exited with code 3"),
        ("", "exited with code 0"),
    ],
)
def test_how_a_process_ended_is_known_until_its_parent_asks(code: str, told: str) -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", code]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        found = exit_of(ended.pid)
        assert found is not None
        assert (found.text, found.signal) == (told, 9 if "SIGKILL" in told else 0)
    for none in (ended.pid, 0, os.getpid()):
        assert exit_of(none) is None
