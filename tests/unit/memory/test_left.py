"""What may be granted, from files of the kernel and figures of a training: no host is needed."""

from pathlib import Path

import pytest

from paramd.errors import CapacityError
from paramd.memory.left import (
    RAISE_S,
    Demand,
    Growth,
    Kills,
    Limit,
    Memory,
    Purpose,
    Spare,
    Wanted,
    check_client,
    kills_now,
    lacking_headroom,
    memory_now,
    private_bytes,
    refusal,
    spare_of,
    standing_count,
)

GIB = 1 << 30
HOST = Limit("the host", 24 * GIB, 9 * GIB)


def spare(left_gib: float, demand: Demand | None = None, *, stalled: float = 0.0) -> Spare:
    limit = Limit("the host", 20 * GIB, int(left_gib * GIB))
    return spare_of(Memory((limit,), stalled), demand if demand is not None else Demand())


def test_the_reserve_is_five_percent_or_what_a_step_takes_or_what_is_set() -> None:
    assert Demand().reserve_of(HOST) == 24 * GIB // 20
    assert Demand(step_bytes=3 * GIB).reserve_of(HOST) == 3 * GIB
    assert Demand(step_bytes=3 * GIB, reserve_bytes=0).reserve_of(HOST) == 0


def test_the_limit_that_leaves_least_decides_and_is_named() -> None:
    cgroup = Limit("cgroup /job", 2 * GIB, GIB)
    found = spare_of(Memory((HOST, cgroup)), Demand())
    assert found.spare_bytes == GIB - 2 * GIB // 20
    text = refusal(Purpose.SNAPSHOT, GIB, found)
    assert "cgroup /job has 1,073,741,824 bytes available" in text
    assert "107,374,182 stay free for the training" in text
    assert "into=" in text
    assert "PARAMD_HOST_RESERVE" in text


def test_what_the_first_steps_take_and_what_was_just_granted_count_as_taken() -> None:
    full = spare(9)
    less = spare(9, Demand(coming_bytes=3 * GIB, claimed_bytes=2 * GIB))
    assert full.spare_bytes - less.spare_bytes == 5 * GIB
    assert "first steps" in less.text
    assert "granted a moment ago" in less.text


def test_a_small_request_may_use_half_of_the_reserve() -> None:
    assert spare(0.9).short
    assert not spare(0.9).allows(1 << 28)
    assert spare(0.9).allows(1 << 20)
    assert not spare(0.4).allows(1 << 20)


def test_a_host_that_waits_for_memory_grants_nothing_large() -> None:
    assert spare(10).allows(GIB)
    assert spare(10, stalled=30.0).short
    assert not spare(10, stalled=30.0).allows(GIB)


def test_active_cache_counts_half_and_kernel_caches_count(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/pressure").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 900 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (tmp_path / "proc/pressure/memory").write_text(
        "some avg10=40.00 avg60=1.00 avg300=0.00 total=1\n"
        "full avg10=12.50 avg60=1.00 avg300=0.00 total=1\n"
    )
    cgroup = tmp_path / "sys/fs/cgroup"
    cgroup.mkdir(parents=True)
    (cgroup / "memory.max").write_text("500000\n")
    (cgroup / "memory.current").write_text("400000\n")
    (cgroup / "memory.stat").write_text(
        "inactive_file 1000\nactive_file 2000\nslab_reclaimable 30\nshmem 5\n"
    )
    found = memory_now(tmp_path)
    assert found.limits[1].left_bytes == 100_000 + 1000 + 1000 + 30
    assert found.stalled_percent == 12.5


def test_a_reader_says_what_it_would_take_before_it_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "proc").mkdir()
    figures = f"MemTotal: {4 << 20} kB\nMemAvailable: {3 << 20} kB\n"
    (tmp_path / "proc/meminfo").write_text(figures)
    check_client(2 * GIB, tmp_path)
    # The first result is there; a second one for the same variable needs as much again.
    (tmp_path / "proc/meminfo").write_text(figures.replace(str(3 << 20), str(1 << 20)))
    with pytest.raises(CapacityError, match=r"needs 2,147,483,648 bytes.*into=.*summon -f FILE"):
        check_client(2 * GIB, tmp_path)
    monkeypatch.setenv("PARAMD_HOST_RESERVE", str(GIB))
    with pytest.raises(CapacityError):
        check_client(GIB // 2, tmp_path)
    # Where memory is unknown, nobody is refused.
    check_client(1 << 60, tmp_path / "elsewhere")


def test_without_meminfo_nothing_is_known(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        memory_now(tmp_path)


def test_private_memory_is_read(tmp_path: Path) -> None:
    (tmp_path / "proc/7").mkdir(parents=True)
    (tmp_path / "proc/7/status").write_bytes(
        # A name of 15 bytes, cut within its last letter.
        "Name:\tAusführungsgrö".encode()[:-1] + b"\nVmRSS:\t 99 kB\nRssAnon:\t 12 kB\n"
    )
    assert private_bytes(7, tmp_path) == 12 << 10
    assert private_bytes(8, tmp_path) is None


GROUPS = {
    "0::/job/rank": "sys/fs/cgroup/job/rank/memory.events.local",
    "4:memory:/job": "sys/fs/cgroup/memory/job/memory.oom_control",
    # Containers that see their own cgroup at the mount's root, and are told its path outside.
    "0::/outside": "sys/fs/cgroup/memory.events.local",
    "9:cpuset:/\n4:memory:/outside": "sys/fs/cgroup/memory/memory.oom_control",
}


@pytest.mark.parametrize("line", GROUPS)
def test_the_kernels_victims_are_those_of_this_cgroup_where_it_counts(
    tmp_path: Path, line: str
) -> None:
    counter = tmp_path / GROUPS[line]
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/vmstat").write_text("pgfault 5\noom_kill 3\n")
    (tmp_path / "proc/self/cgroup").write_text(f"{line}\n")
    alone = kills_now(tmp_path)
    assert (alone.host_count, alone.group) == (3, 0)
    counter.parent.mkdir(parents=True, exist_ok=True)
    counter.write_text("oom 4\noom_kill 1\noom_group_kill 0\n")
    before = kills_now(tmp_path)
    assert (before.host_count, before.group_count) == (3, 1)
    # Another container's.
    (tmp_path / "proc/vmstat").write_text("oom_kill 4\n")
    elsewhere = kills_now(tmp_path)
    assert not elsewhere.rose_since(before)
    # Without a cgroup that counts, or in another than before, the host's count is all there is.
    assert elsewhere.rose_since(alone)
    counter.write_text("oom_kill 2\n")
    assert kills_now(tmp_path).rose_since(elsewhere)


def test_where_nothing_counts_nobody_was_ended(tmp_path: Path) -> None:
    assert kills_now(tmp_path) == Kills()
    assert not Kills().rose_since(Kills())


def test_a_step_is_expected_to_take_what_earlier_ones_took() -> None:
    growth = Growth()
    for step in range(10):
        growth.see(4 * GIB, step)
        growth.see(7 * GIB, step)
    growth.see(4 * GIB, 10)
    assert growth.step_bytes == 3 * GIB
    # At its highest, the present step needs no more.
    growth.see(7 * GIB, 10)
    assert growth.step_bytes == 0


def test_what_long_ago_took_more_is_forgotten() -> None:
    growth = Growth()
    growth.see(9 * GIB, 0)
    for step in range(3 * Growth.WINDOW_STEPS):
        growth.see(4 * GIB, step)
    assert growth.step_bytes == 0


def test_what_the_first_steps_take_counts_until_it_is_there() -> None:
    growth = Growth()
    growth.see(GIB, 0)
    assert growth.coming_bytes(3 * GIB, 0, 0) == 3 * GIB
    growth.see(2 * GIB, 0)
    assert growth.coming_bytes(3 * GIB, 0, 0) == 2 * GIB
    # State that has moved to shared memory is there too.
    assert growth.coming_bytes(3 * GIB, GIB, 1) == GIB
    assert growth.coming_bytes(3 * GIB, 0, Growth.FIRST_STEPS) == 0


RANKS = (Wanted(2 * GIB), Wanted(2 * GIB))


@pytest.mark.parametrize(("left_gib", "count"), [(20, 2), (9.1, 2), (8.9, 1), (5.1, 1), (4.9, 0)])
def test_standing_snapshots_are_as_many_as_fit_on_all_ranks(left_gib: float, count: int) -> None:
    # 1 GiB stays free.
    found = standing_count(None, lasted_s=0, spare=spare(left_gib), ranks=RANKS, most=2)
    assert found == count


def test_they_go_down_to_one_and_then_to_none_when_memory_is_short() -> None:
    held = (Wanted(2 * GIB, 4 * GIB), Wanted(2 * GIB, 4 * GIB))
    count: int | None = 2
    count = standing_count(count, lasted_s=9, spare=spare(0.9), ranks=held, most=2)
    assert count == 1
    # What one fewer gives back has not shown yet.
    count = standing_count(count, lasted_s=0.1, spare=spare(0.9), ranks=held, most=2)
    assert count == 1
    count = standing_count(count, lasted_s=1, spare=spare(0.9), ranks=held, most=2)
    assert count == 0
    # Half of the reserve is gone: there is no time for steps.
    assert standing_count(2, lasted_s=0, spare=spare(0.4), ranks=held, most=2) == 0


def test_they_come_back_when_there_has_been_enough_for_a_while() -> None:
    assert standing_count(0, lasted_s=1, spare=spare(20), ranks=RANKS, most=2) == 0
    assert standing_count(0, lasted_s=RAISE_S, spare=spare(20), ranks=RANKS, most=2) == 2
    held = (Wanted(2 * GIB, 4 * GIB), Wanted(2 * GIB, 4 * GIB))
    assert standing_count(2, lasted_s=RAISE_S, spare=spare(1.1), ranks=held, most=2) == 2


def test_what_the_training_itself_cannot_have_names_the_limit_that_leaves_least() -> None:
    memory = Memory((HOST, Limit("cgroup /job", 2 * GIB, 300 << 20)))
    assert lacking_headroom(Purpose.TRAINING, 44 << 20, memory) == ""
    said = lacking_headroom(Purpose.TRAINING, (44 << 20) + 1, memory)
    assert "46,137,345 bytes of shared memory are needed" in said
    assert "cgroup /job has 314,572,800 bytes available" in said
    assert "use a machine or container limit with more memory" in said
    # More was taken than the limit allows, as when it was lowered.
    over = Memory((HOST, Limit("cgroup /job", GIB, -1)))
    assert "cgroup /job has 0 bytes available" in lacking_headroom(Purpose.TRAINING, 1, over)


def test_a_few_bytes_leave_little_free_so_that_a_killed_sidecar_comes_back() -> None:
    """Found by the kernel's own kills: 875 bytes were refused, with 142 MB left, and again."""
    memory = Memory((HOST, Limit("cgroup /job", 2 * GIB, 1 << 20)))
    assert lacking_headroom(Purpose.TRAINING, 875, memory) == ""
    assert lacking_headroom(Purpose.TRAINING, 16 << 10, memory)
