"""What is left of memory: of the host, and of each cgroup above this process.

Everything that paramd takes beside the training asks here first (`Room`). The functions are pure:
they read files below a root, or take figures and return a decision with its reason.

A limit is the host's memory or that of one cgroup, of version 1 or 2. Its reserve stays free for
the training. What the trainings are about to take (`Growth`) counts as taken: the first steps
allocate gradients and optimizer state that no figure of the kernel shows yet.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Protocol

from paramd.errors import CapacityError, ExhaustedError

HEADROOM_BYTES = 256 << 20
"""Memory that stays free when an arena, or another thing that the training needs, is made."""

RESERVE_DIVISOR = 20
"""The default reserve of a limit is one 20th of it, or more where a step takes more."""

STALLED_PERCENT = 10.0
"""Memory is short when all tasks of the host waited for it in this share of the last 10 s."""

SMALL_DIVISOR = 64
"""A request of at most one 64th of the reserve is granted while half of the reserve is free, and
one of at most one 64th of the headroom leaves 64 times its own size free instead."""

RAISE_S = 60.0
"""Seconds with enough memory before more standing snapshots are kept again."""
LOWER_S = 0.5
"""Seconds that giving back may take to show before one more standing snapshot is given up."""

_ROOT = Path("/")


class Purpose(Enum):
    """Why memory is wanted: in words, and what to do when there is not enough."""

    TRAINING = "memory of the training", "use a machine or container limit with more memory"
    SNAPSHOT = (
        "a snapshot for a reader",
        "read less at a time: a pattern ('layers.0.*'), a slice ('w[:1000]'), or one tensor after "
        "the other with into=",
    )
    STANDING = "a standing snapshot", "bound them with PARAMD_STANDING_BUDGET_BYTES"
    COPY = "a copy of another host's rank", "set replicas=0, or use hosts with more memory"
    MARK = "a restore point", "delete another one first (paramd unmark)"
    EDIT = "an edit", "make it smaller, or apply it in parts"
    GRADIENTS = "gradients for a reader", "follow fewer parameters at a time"
    CLIENT = (
        "what this process reads",
        "read less at a time: a pattern, a slice, one tensor after the other with into=; or write "
        "to a file (paramd summon -f FILE, mesh.download), which takes a bounded buffer",
    )

    @property
    def words(self) -> str:
        return self.value[0]

    @property
    def instead(self) -> str:
        return self.value[1]


@dataclass(frozen=True, slots=True)
class Limit:
    """Memory that one limit leaves."""

    where: str
    """The host, or the cgroup's path."""
    total_bytes: int
    left_bytes: int
    """What can still be taken, including what the kernel gives back by itself."""


@dataclass(frozen=True, slots=True)
class Memory:
    """All limits above this process, at one moment."""

    limits: tuple[Limit, ...]
    """The host's first. Never empty."""
    stalled_percent: float = 0.0
    """Share of the last 10 s in which all tasks waited for memory; 0 where unknown."""

    @property
    def left_bytes(self) -> int:
        return max(0, min(limit.left_bytes for limit in self.limits))


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What counts as taken already, or stays free, of every limit."""

    reserve_bytes: int | None = None
    """PARAMD_HOST_RESERVE; None: the default."""
    step_bytes: int = 0
    """What one more step of the trainings here has been seen to take."""
    coming_bytes: int = 0
    """What their first steps will take for good."""
    claimed_bytes: int = 0
    """What was granted and does not show in the kernel's figures yet."""

    def reserve_of(self, limit: Limit) -> int:
        if self.reserve_bytes is not None:
            return self.reserve_bytes
        return max(limit.total_bytes // RESERVE_DIVISOR, self.step_bytes)


@dataclass(frozen=True, slots=True)
class Spare:
    """Memory that may still be granted, by the limit that leaves least."""

    spare_bytes: int
    """Below 0: the reserve is being used."""
    reserve_bytes: int
    limit: Limit
    demand: Demand
    stalled_percent: float = 0.0

    @property
    def short(self) -> bool:
        """Whether what nobody holds should be given back now."""
        return self.spare_bytes < 0 or self.stalled_percent >= STALLED_PERCENT

    def reaching(self, idle_bytes: int) -> Spare:
        """The same once memory that nobody uses, of that size, is freed."""
        return replace(self, spare_bytes=self.spare_bytes + idle_bytes)

    def allows(self, size_bytes: int) -> bool:
        if not size_bytes:
            return True
        small = size_bytes <= self.reserve_bytes // SMALL_DIVISOR
        least_bytes = -(self.reserve_bytes // 2) if small else 0
        calm = small or self.stalled_percent < STALLED_PERCENT
        return calm and self.spare_bytes - size_bytes >= least_bytes

    @property
    def text(self) -> str:
        """The figures in words."""
        demand, parts = self.demand, []
        parts.append(f"{self.reserve_bytes:,} stay free for the training (PARAMD_HOST_RESERVE)")
        if demand.coming_bytes:
            parts.append(f"{demand.coming_bytes:,} are what its first steps will take")
        if demand.claimed_bytes:
            parts.append(f"{demand.claimed_bytes:,} were granted a moment ago")
        text = f"{self.limit.where} has {max(self.limit.left_bytes, 0):,} bytes available, of which"
        text = f"{text} {' and '.join(parts)}"
        if self.stalled_percent >= STALLED_PERCENT:
            text += f"; all of it waits for memory {self.stalled_percent:.0f} % of the time"
        return text


def memory_now(root: Path = _ROOT) -> Memory:
    """Read what is left now.

    Raises:
        OSError, KeyError: Without /proc/meminfo: the limit is unknown, so nothing may be
            granted.
    """
    lines = (root / "proc/meminfo").read_text().splitlines()
    figures = dict(line.split(":", 1) for line in lines if ":" in line)
    total, left = (int(figures[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    limits = [Limit("the host", total, left), *_cgroups(root, total)]
    return Memory(tuple(limits), _stalled_percent(_read(root / "proc/pressure/memory")))


def spare_of(memory: Memory, demand: Demand) -> Spare:
    """What may be granted under all limits. Pure."""
    taken_bytes = demand.coming_bytes + demand.claimed_bytes
    found = []
    for limit in memory.limits:
        reserve_bytes = demand.reserve_of(limit)
        left_bytes = limit.left_bytes - taken_bytes - reserve_bytes
        found.append(Spare(left_bytes, reserve_bytes, limit, demand, memory.stalled_percent))
    return min(found, key=lambda one: one.spare_bytes)


def refusal(purpose: Purpose, size_bytes: int, spare: Spare) -> str:
    """Why a request is refused, with the figures and what to do instead."""
    return f"{purpose.words} needs {size_bytes:,} bytes: {spare.text}; {purpose.instead}"


def _cgroups(root: Path, host_bytes: int) -> Iterator[Limit]:
    """The limits of this process's cgroup and its ancestors, in v1 and v2.

    A container sees its own cgroup at the mount's root, whatever its path, so a path that does not
    exist there is skipped.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number != "0" and "memory" not in controllers.split(","):
            continue
        mounted = root / "sys/fs/cgroup"
        folder = mounted if number == "0" else mounted / "memory"
        parts = Path(path.lstrip("/")).parts
        for depth in range(len(parts) + 1):
            name = f"cgroup /{'/'.join(parts[:depth])}"
            yield from _limits_of(folder.joinpath(*parts[:depth]), name, host_bytes)


def _limits_of(cgroup: Path, name: str, host_bytes: int) -> Iterator[Limit]:
    for limits, used, prefix in _CGROUP_FILES:
        now = _number(_read(cgroup / used))
        # A soft limit too: above it the kernel stops tasks for as long as it takes.
        found = [_number(_read(cgroup / limit)) for limit in limits]
        most = min((limit for limit in found if limit is not None), default=None)
        # Version 1 says "no limit" by a number beyond any host's memory.
        if most is None or now is None or most > host_bytes:
            continue
        yield Limit(name, most, most - now + _given_back_bytes(cgroup, prefix))


_CGROUP_FILES = (
    (("memory.max", "memory.high"), "memory.current", ""),
    (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_"),
)
"""Limits, usage, and the prefix of the names in memory.stat: of cgroup v2, and of v1."""


def _given_back_bytes(cgroup: Path, prefix: str) -> int:
    """What the kernel gives back before it ends a process: page cache and its own caches.

    Half of the cache in active use counts: the training reads from it.
    """
    pairs = (line.split(" ", 1) for line in _read(cgroup / "memory.stat").splitlines())
    stat = {pair[0]: _number(pair[-1]) for pair in pairs}
    inactive, active, slab = (
        stat.get(name) or 0
        for name in (f"{prefix}inactive_file", f"{prefix}active_file", "slab_reclaimable")
    )
    return inactive + active // 2 + slab


def _stalled_percent(text: str) -> float:
    """The share of "full" over 10 s in a file of the kernel's pressure; 0 if it cannot be read."""
    for line in text.splitlines():
        if line.startswith("full "):
            fields = dict(word.partition("=")[::2] for word in line.split()[1:])
            try:
                return float(fields.get("avg10", "0"))
            except ValueError:
                return 0.0
    return 0.0


def _number(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    try:
        # A process's name may be cut in the middle of a character.
        return path.read_text(errors="replace")
    except OSError:
        return ""


def private_bytes(pid: int, root: Path = _ROOT) -> int | None:
    """Private memory of a process; None when it has ended or cannot be read."""
    for line in _read(root / f"proc/{pid}/status").splitlines():
        name, _, value = line.partition(":")
        if name == "RssAnon":
            return int(value.split()[0]) << 10
    return None


@dataclass(frozen=True, slots=True)
class Kills:
    """How many processes the kernel has ended for memory, by its own counters."""

    host_count: int = 0
    """Of the whole host, since its start; 0 where unknown."""
    group: int = 0
    """The cgroup of this process, as the number of its folder; 0: none that counts."""
    group_count: int = 0
    """Of that cgroup, since it was made."""

    def rose_since(self, earlier: Kills) -> bool:
        """Whether a process of this cgroup has been ended since.

        Where there is no cgroup, or another one than then, one of the host.
        """
        if self.group and self.group == earlier.group:
            return self.group_count > earlier.group_count
        return self.host_count > earlier.host_count


def kills_now(root: Path = _ROOT) -> Kills:
    """Read the kernel's counters of the processes that it ended for memory."""
    host_count = _counted(root / "proc/vmstat") or 0
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number != "0" and "memory" not in controllers.split(","):
            continue
        mounted = root / "sys/fs/cgroup"
        folder, name = (
            (mounted, "memory.events.local")
            if number == "0"
            else (mounted / "memory", "memory.oom_control")
        )
        # A container may see its own cgroup at the mount's root, whatever its path.
        for cgroup in (folder / path.lstrip("/"), folder):
            count = _counted(cgroup / name)
            if count is not None:
                return Kills(host_count, _folder_number(cgroup), count)
    return Kills(host_count)


def _counted(path: Path) -> int | None:
    """`oom_kill` of one file of the kernel's counters; None if it does not count it."""
    for line in _read(path).splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill":
            return _number(value)
    return None


def _folder_number(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return 0


@dataclass(slots=True)
class Growth:
    """What a trainer is about to take, judged by what it has taken. Pure; see `see`."""

    WINDOW_STEPS = 32
    """Steps after which a highest figure may be forgotten: twice as many at most."""
    FIRST_STEPS = 2
    """Finished updates after which nothing more comes for the first time."""

    _base_bytes: int = sys.maxsize
    _now_bytes: int = 0
    _highs: list[int] = field(default_factory=lambda: [0, 0])
    _first_step: int | None = None
    _window: int = 0

    def see(self, private_bytes: int, step: int) -> None:
        """Note the trainer's private memory, and how many updates it has finished."""
        if self._first_step is None:
            self._first_step = step
        window = (step - self._first_step) // self.WINDOW_STEPS
        if window != self._window:
            self._window = window
            self._highs = [self._highs[-1], 0]
        self._highs[-1] = max(self._highs[-1], private_bytes)
        self._base_bytes = min(self._base_bytes, private_bytes)
        self._now_bytes = private_bytes

    @property
    def step_bytes(self) -> int:
        """What the next step may take beyond the present, as earlier ones did."""
        return max(0, max(self._highs) - self._now_bytes)

    def coming_bytes(self, expected_bytes: int, shared_bytes: int, step: int) -> int:
        """What is left to come of `expected_bytes` of gradients and optimizer state.

        `shared_bytes`: what of it lies in shared memory by now.
        """
        if self._first_step is None or step - self._first_step >= self.FIRST_STEPS:
            return 0
        grown_bytes = max(0, self._now_bytes - self._base_bytes) + shared_bytes
        return max(0, expected_bytes - grown_bytes)


@dataclass(frozen=True, slots=True)
class Wanted:
    """One rank's standing snapshots: the size of one, and what all of them take now."""

    size_bytes: int
    held_bytes: int = 0


def standing_count(
    now: int | None, *, lasted_s: float, spare: Spare, ranks: Sequence[Wanted], most: int
) -> int:
    """How many standing snapshots each rank of this host may keep. Pure.

    `now`: the last decision, `lasted_s` old; None: there was none. The same for all ranks: a state
    is of use only if all ranks have it.
    """
    if spare.short and now is not None:
        if spare.spare_bytes < -(spare.reserve_bytes // 2):
            return 0
        return max(0, now - 1) if lasted_s >= LOWER_S else now
    fitting = [
        count
        for count in range(1, most + 1)
        if spare.allows(sum(max(0, count * one.size_bytes - one.held_bytes) for one in ranks))
    ]
    fits = max(fitting, default=0)
    if now is None or (fits > now and lasted_s >= RAISE_S):
        return fits
    return now


def check_client(size_bytes: int, root: Path = _ROOT) -> None:
    """Check that this process, a reader, may take that much memory; call it before taking any.

    The reader asks for itself: a second result for one variable needs room beside the first. The
    reserve is PARAMD_HOST_RESERVE's, or the default. Raises CapacityError with the figures. Does
    nothing where memory is unknown, as on systems without /proc.
    """
    given = os.environ.get("PARAMD_HOST_RESERVE", "")
    try:
        memory, reserve_bytes = memory_now(root), int(float(given)) if given else None
    except (OSError, KeyError, ValueError, OverflowError):
        return
    spare = spare_of(memory, Demand(reserve_bytes=reserve_bytes))
    if not spare.allows(size_bytes):
        raise CapacityError(refusal(Purpose.CLIENT, size_bytes, spare))


class Room(Protocol):
    """Grants memory beside the training. Thread-safe."""

    def claimed(self, purpose: Purpose, size_bytes: int) -> AbstractContextManager[None]:
        """Have the bytes count as taken within the block, in which they are allocated.

        Raises:
            ExhaustedError: When there is not enough for them.
        """


def lacking_headroom(purpose: Purpose, size_bytes: int, memory: Memory) -> str:
    """Why the training itself cannot have that much, naming the limit; empty if it can. Pure."""
    least = min(memory.limits, key=lambda limit: limit.left_bytes)
    # A sidecar that the kernel ended has to come back while memory is still short: taking over
    # needs a few bytes.
    headroom_bytes = min(HEADROOM_BYTES, SMALL_DIVISOR * size_bytes)
    if size_bytes + headroom_bytes <= least.left_bytes:
        return ""
    return (
        f"{size_bytes:,} bytes of shared memory are needed: {least.where} has "
        f"{max(least.left_bytes, 0):,} bytes available, of which {headroom_bytes:,} stay free for "
        f"others; {purpose.instead}"
    )


class Headroom:
    """Room for what the training itself needs: all but a little of what is left."""

    @contextmanager
    def claimed(self, purpose: Purpose, size_bytes: int) -> Iterator[None]:
        lacking = lacking_headroom(purpose, size_bytes, memory_now())
        if lacking:
            raise ExhaustedError(lacking)
        yield


HEADROOM = Headroom()
