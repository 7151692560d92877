"""Memory beside the training: one place where every reservation of a sidecar asks.

The sidecars of a job's ranks on one host share figures through a small file each, beside their
sockets: what their trainers are about to take, what they were just granted, their idle memory, and
their standing snapshots. A rank writes its own file, then reads the others'. Two ranks that ask at
the same time may both be refused, but never both be granted the same memory.

Idle memory is what is kept for the next reader, follower, edit or gradient frame, and what nobody
holds. It gives way to any request, whatever its purpose: before a refusal, this rank frees its own.
If that is too little and other ranks show enough of theirs, they are asked for it, for `ASK_S`.

The lowest rank whose sidecar lives decides for all how many standing snapshots each keeps.
"""

from __future__ import annotations

import json
import os
import threading
import time
from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from paramd import state_files
from paramd.answers import parsed_json, read_file
from paramd.bounds import FIGURES
from paramd.errors import ExhaustedError
from paramd.memory.left import (
    Demand,
    Kills,
    Memory,
    Purpose,
    Spare,
    Wanted,
    kills_now,
    memory_now,
    refusal,
    spare_of,
    standing_count,
)
from paramd_service.aio import post

MOST_STANDING = 2
"""Standing snapshots of a rank, when there is memory for them."""

SHOWN_BYTES = 8 << 20
"""A smaller grant is not shown to other ranks: it is allocated in less time than that takes."""

SHOW_S = 10.0
"""Longest time between two writes of a rank's figures, in seconds."""

PAST_S = 3 * SHOW_S
"""Age in seconds at which figures are of an earlier start, unless their trainer still lives."""

PART_S = 2.0
"""Longest wait for the event loop to part with idle memory, in seconds."""
ASK_S = 2.5
"""Longest wait for other ranks to free idle memory, in seconds: they look once a second."""
ASK_POLL_S = 0.02

SUFFIX = ".memory"


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What one rank's sidecar shows the others of its host."""

    host: str = ""
    pid: int = 0
    start: int = 0
    """With the pid, names the process."""
    rank: int = 0
    step_bytes: int = 0
    """What the next step of its trainer may take beyond the present."""
    coming_bytes: int = 0
    """What its trainer's first steps will still take for good."""
    claimed_bytes: int = 0
    """Granted, and being allocated."""
    idle_bytes: int = 0
    """What it frees when another rank asks for memory."""
    asked_s: float = 0.0
    """When it last asked other ranks for their idle memory (monotonic clock of the host)."""
    standing_bytes: int = 0
    """Size of one of its standing snapshots; 0: it makes none."""
    held_bytes: int = 0
    """What its standing snapshots take now."""
    killed_count: int = 0
    """Processes of the host that the kernel had ended for memory when this was written."""
    group: int = 0
    """The cgroup whose count is known, too (`Kills.group`)."""
    group_killed_count: int = 0
    """The same count of that cgroup."""
    trainer_pid: int = 0
    """Its trainer; 0: none yet, or one in another container."""
    trainer_start: int = 0
    count: int = -1
    """Its decision: how many standing snapshots each rank may keep; -1: none yet."""
    since_s: float = 0.0
    """When it decided that (monotonic clock of the host)."""
    killed_s: float = 0.0
    """When it found that the kernel had ended its predecessor for memory; 0: it has not."""

    @property
    def kills(self) -> Kills:
        return Kills(self.killed_count, self.group, self.group_killed_count)

    def with_kills(self, kills: Kills) -> Figures:
        return replace(
            self,
            killed_count=kills.host_count,
            group=kills.group,
            group_killed_count=kills.group_count,
        )


Freeing = Callable[[], object]
"""Frees memory that was taken from where it was kept; on any thread, which it may block."""


def free_all(freeing: Sequence[Freeing]) -> None:
    """Free all, in order. One that fails does not keep the rest from being freed: edits wait for
    theirs. Raises the last error."""
    with ExitStack() as stack:
        for free in reversed(freeing):
            stack.callback(free)


class HostRoom:
    """Grants a rank's sidecar memory, with regard to all ranks of its job on this host.

    Thread-safe. `claimed` may wait for the event loop and for other ranks, for a few seconds; no
    other method waits.
    """

    def __init__(
        self,
        socket_path: Path,
        rank: int,
        *,
        reserve_bytes: int | None,
        memory: Callable[[], Memory] = memory_now,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`socket_path`: the sidecar's; its figures lie beside it. `reserve_bytes`: memory that
        stays free; None: the default (`Demand.reserve_of`)."""
        self._path = socket_path.with_suffix(SUFFIX)
        self._reserve_bytes = reserve_bytes
        self._memory = memory
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._own = Figures(rank=rank)
        self._written: Figures | None = None
        self._shown_s = 0.0
        self._keeper: tuple[AbstractEventLoop, Callable[[], Sequence[Freeing]]] | None = None
        self.predecessor_killed = False
        """The kernel ended this rank's last sidecar, because memory had run out."""

    def open(self) -> None:
        """Show this rank's figures to the others from now on, and look at what the last sidecar of
        this rank left. Until then this rank counts for itself."""
        pid = os.getpid()
        with self._lock:
            self._own = replace(
                self._own,
                host=state_files.kernel_of(state_files.host_id()),
                pid=pid,
                start=state_files.process_start(pid),
            ).with_kills(kills_now())
            self._take_over()
            self._show()

    @contextmanager
    def claimed(self, purpose: Purpose, size_bytes: int) -> Iterator[None]:
        """Have the bytes count as taken within the block, in which they are allocated.

        Idle memory is freed for them.

        Raises:
            ExhaustedError: When the reserve would not stay free.
        """
        refused = self._tried(size_bytes)
        if refused is not None and self._free_idle():
            refused = self._tried(size_bytes)
        if refused is not None:
            refused = self._tried_with_others(size_bytes, refused)
        if refused is not None:
            raise ExhaustedError(refusal(purpose, size_bytes, refused))
        try:
            yield
        finally:
            self._claim(-size_bytes)

    def free_idle_with(
        self, loop: AbstractEventLoop, take: Callable[[], Sequence[Freeing]]
    ) -> None:
        """Have this rank's idle memory give way to requests. `take`, on the event loop, takes it
        from where it is kept, and returns what frees it, on any thread."""
        self._keeper = loop, take

    def show_idle(self, size_bytes: int) -> None:
        """Note how much idle memory this rank has."""
        with self._lock:
            far = abs(size_bytes - self._own.idle_bytes) > SHOWN_BYTES
            self._own = replace(self._own, idle_bytes=size_bytes)
            if far:
                self._show()

    @property
    def is_asked(self) -> bool:
        """Whether another rank waits for idle memory."""
        asked_s = max((one.asked_s for one in self._others()), default=0.0)
        return 0 <= self._clock_s() - asked_s < ASK_S

    def reachable(self) -> Spare:
        """As `spare`, once the idle memory of all ranks is freed."""
        idle_bytes = self._own.idle_bytes + sum(one.idle_bytes for one in self._others())
        return self.spare().reaching(idle_bytes)

    def spare(self, *, besides_bytes: int = 0) -> Spare:
        """What may be granted now. `besides_bytes`: claims of this rank that do not count."""
        others = self._others()
        with self._lock:
            all_of = [self._own, *others]
        demand = Demand(
            reserve_bytes=self._reserve_bytes,
            step_bytes=sum(one.step_bytes for one in all_of),
            coming_bytes=sum(one.coming_bytes for one in all_of),
            claimed_bytes=max(0, sum(one.claimed_bytes for one in all_of) - besides_bytes),
        )
        return spare_of(self._memory(), demand)

    def expect(self, *, step_bytes: int, coming_bytes: int, trainer_pid: int = 0) -> None:
        """Note what this rank's trainer is about to take. `trainer_pid`: 0 while there is none, or
        where it is in another container."""
        with self._lock:
            own = replace(self._own, step_bytes=step_bytes, coming_bytes=coming_bytes)
            if trainer_pid != own.trainer_pid:
                start = state_files.process_start(trainer_pid) if trainer_pid else 0
                own = replace(own, trainer_pid=trainer_pid, trainer_start=start)
            self._own = own
            written = self._written if self._written is not None else Figures()
            far = (
                trainer_pid != written.trainer_pid
                or abs(step_bytes - written.step_bytes) > SHOWN_BYTES
                or abs(coming_bytes - written.coming_bytes) > SHOWN_BYTES
                or written.kills != kills_now()
            )
            if far or self._clock_s() - self._shown_s > SHOW_S:
                self._show()

    def standing_count(self, size_bytes: int, held_bytes: int) -> int:
        """How many standing snapshots of that size this rank may keep now, of which it has
        `held_bytes`. 0 while the rank that decides has not."""
        with self._lock:
            told = replace(self._own, standing_bytes=size_bytes, held_bytes=held_bytes)
            if told != self._own:
                self._own = told
                self._show()
        count = self.decide()
        return count if count is not None else 0

    def copies_count(self) -> int:
        """How many copies of another rank's standing snapshots may be kept here: as many as of the
        own ones, once that is decided."""
        count = self.decide()
        return count if count is not None else MOST_STANDING

    def decide(self) -> int | None:
        """The present decision for all ranks, made now if it is this rank's to make; None: there is
        none yet."""
        others = self._others()
        leader = min(others, key=lambda one: one.rank, default=self._own)
        if leader.rank < self._own.rank:
            return leader.count if leader.count >= 0 else None
        with self._lock:
            own = self._own
        ranks = [own, *others]
        largest = max(one.standing_bytes for one in ranks)
        if not largest:
            return own.count if own.count >= 0 else None
        now_s = self._clock_s()
        # What they kept did not fit.
        if own.count > 0 and any(one.killed_s > own.since_s for one in ranks):
            count = own.count - 1
        else:
            spare = self.spare()
            count = standing_count(
                own.count if own.count >= 0 else None,
                lasted_s=now_s - own.since_s,
                # When memory is short, idle memory is being freed anyway, and may not suffice.
                spare=spare if spare.short else self.reachable(),
                # Ranks that have not said yet are taken to be as large as the largest.
                ranks=[
                    Wanted(one.standing_bytes if one.standing_bytes else largest, one.held_bytes)
                    for one in ranks
                ],
                most=MOST_STANDING,
            )
        if count != own.count:
            with self._lock:
                self._own = replace(self._own, count=count, since_s=now_s)
                self._show()
        return count

    def close(self) -> None:
        """Take the figures away: this sidecar leaves by itself. Those of a successor, which has
        begun already, stay."""
        self._keeper = None
        with self._lock, suppress(OSError):
            there = _figures(self._path)
            if there is None or (there.pid, there.start) == (self._own.pid, self._own.start):
                self._path.unlink(missing_ok=True)

    def _tried(self, size_bytes: int) -> Spare | None:
        """Claim the bytes if they fit; else return the figures."""
        # Before looking: whoever looks later sees it.
        self._claim(size_bytes)
        try:
            spare = self.spare(besides_bytes=size_bytes)
        except BaseException:
            self._claim(-size_bytes)
            raise
        if spare.allows(size_bytes):
            return None
        self._claim(-size_bytes)
        return spare

    def _tried_with_others(self, size_bytes: int, refused: Spare) -> Spare | None:
        """As `_tried`, while other ranks free idle memory, if they have enough."""
        # Small requests are made where nobody may wait for seconds.
        until_s = time.monotonic() + (ASK_S if size_bytes > SHOWN_BYTES else 0.0)
        while time.monotonic() < until_s:
            others_bytes = sum(one.idle_bytes for one in self._others())
            # A rank whose memory is short frees it anyway, and its thread is needed for that.
            if refused.short or not refused.reaching(others_bytes).allows(size_bytes):
                break
            with self._lock:
                self._own = replace(self._own, asked_s=self._clock_s())
                self._show()
            time.sleep(ASK_POLL_S)
            again = self._tried(size_bytes)
            if again is None:
                return None
            refused = again
        return refused

    def _free_idle(self) -> bool:
        """Free this rank's idle memory; return whether there was any."""
        keeper = self._keeper
        if keeper is None:
            return False
        loop, take = keeper
        taken: Future[Sequence[Freeing]] = Future()

        def on_loop() -> None:
            if taken.set_running_or_notify_cancel():
                try:
                    taken.set_result(take())
                except Exception as error:
                    taken.set_exception(error)

        post(loop, on_loop)
        try:
            # Bounded: while the sidecar ends, its loop may wait for this thread.
            freeing = taken.result(PART_S)
        except TimeoutError:
            if taken.cancel():
                return False
            freeing = taken.result()
        free_all(freeing)
        self.show_idle(0)
        return bool(freeing)

    def _claim(self, size_bytes: int) -> None:
        with self._lock:
            claimed_bytes = self._own.claimed_bytes + size_bytes
            self._own = replace(self._own, claimed_bytes=claimed_bytes)
            if abs(size_bytes) >= SHOWN_BYTES:
                self._show()

    def _show(self) -> None:
        """Write the figures; the lock is held. Without a disk, this rank counts for itself."""
        if not self._own.pid:
            return
        self._own = self._own.with_kills(kills_now())
        # Not durable: figures of a host that went down say nothing.
        temporary = self._path.with_suffix(f"{SUFFIX}-new")
        with suppress(OSError):
            # Nobody else's, whatever the umask: how much a training holds is not for everyone.
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
            with os.fdopen(os.open(temporary, flags, 0o600), "w") as file:
                file.write(json.dumps(asdict(self._own)))
            os.replace(temporary, self._path)
            self._written, self._shown_s = self._own, self._clock_s()

    def _others(self) -> list[Figures]:
        """Figures of the other ranks here whose sidecars live."""
        found = []
        with suppress(OSError):
            for path in self._path.parent.glob(f"*{SUFFIX}"):
                one = _figures(path)
                if one is None or one.rank == self._own.rank or one.host != self._own.host:
                    continue
                if _lives(one.pid, one.start):
                    found.append(one)
        return found

    def _take_over(self) -> None:
        """Take over what this rank's last sidecar had decided; note whether the kernel ended it.

        Its process is still there when it only hands over, and its figures are gone when it left
        by itself. A slow host may take long to start this one, so figures count however old they
        are while the trainer that they name lives. Other old ones are of an earlier start.
        """
        try:
            age_s = time.time() - self._path.stat().st_mtime
        except OSError:
            return
        one = _figures(self._path)
        if one is None or one.host != self._own.host:
            return
        if age_s > PAST_S and not _lives(one.trainer_pid, one.trainer_start):
            return
        self.predecessor_killed = not _lives(one.pid, one.start) and self._own.kills.rose_since(
            one.kills
        )
        killed_s = self._clock_s() if self.predecessor_killed else one.killed_s
        self._own = replace(self._own, count=one.count, since_s=one.since_s, killed_s=killed_s)


def _lives(pid: int, start: int) -> bool:
    return pid > 0 and start > 0 and state_files.process_start(pid) == start


def _figures(path: Path) -> Figures | None:
    """A rank's figures; None if they cannot be read or are of another version."""
    try:
        found = parsed_json(read_file(path, FIGURES), FIGURES)
    except (OSError, ValueError):
        return None
    names = {one.name for one in fields(Figures)}
    if not isinstance(found, dict) or set(found) != names or not isinstance(found["host"], str):
        return None
    numbers = (value for name, value in found.items() if name != "host")
    if any(type(value) not in (int, float) for value in numbers):
        return None
    return Figures(**found)
