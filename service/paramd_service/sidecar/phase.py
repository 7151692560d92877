"""What a rank is doing now, judged by its control page, the clock and its trainer's process:

    PHASE              reported when
    WAITING            no trainer has attached
    TORN, ORPHANED     the trainer's process has ended, inside or outside an update
    STALLED            the process is stopped
    HELD               the trainer waits at a boundary on request
    STALLED            its next boundary is long overdue
    UPDATE             SEQ is odd and nothing rests
    SUMMON             a copy is in progress, or a boundary request waits for the trainers
    IDLE               no boundary yet, or none for longer than a step takes
    FORWARD_BACKWARD   otherwise: between two updates of a running training

The first match wins. STALLED comes before UPDATE because an optimizer may hang too. Copies do not
depend on the phase; their correctness rests on SEQ alone (memory/gate.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paramd.memory.control_page import Word
from paramd.v1 import common_pb2
from paramd_service.sidecar.owner import Ownership, Worked

STALL_STEPS = 20
STALL_LEAST_S = 30.0
"""A boundary is long overdue after this many of the trainer's smoothed step times, but not before
this time: a validation or a checkpoint takes longer than a step."""

FIRST_STEP_S = 900.0
"""The same while no step has ended yet: the first one compiles, warms up and fills caches."""

WORKING_S = 600.0
"""The same while the trainer works, or is in code of its own: one long step after short ones saves,
evaluates, compiles, or waits for a slow disk. Not longer, because a hang may look like work too:
waits for a device keep a core busy."""

WORK_WINDOW_S = 5.0
WORK_CORES = 0.2
WORK_BYTES_PER_S = 1 << 20
"""A trainer works if it used so much of a core, or read or wrote so much, over such a window."""

IDLE_STEPS = 4
IDLE_LEAST_S = 1.0
"""A rank is idle after this many step times without a boundary, and at least this long."""

STOPPED_STATES = frozenset("Tt")
"""States in /proc/<pid>/stat: stopped by a signal or by a debugger."""

LASTING = frozenset(
    {
        common_pb2.PHASE_WAITING,
        common_pb2.PHASE_ORPHANED,
        common_pb2.PHASE_TORN,
        common_pb2.PHASE_STALLED,
        common_pb2.PHASE_HELD,
    }
)
"""Phases reported as soon as entered or left; the others change many times a second."""

MEETING = frozenset({"paramd", "optimizer", "backward", "forward"})
"""Activities that call collectives in native code, where the Python stack does not show them."""

BY_ITSELF = frozenset({"code", "lock", "dataloader", "checkpoint", "debugger"})
"""Activities in which a trainer waits for no other rank: it is slow, even if it uses no CPU."""

_HELD = 1

_ENDED = {
    Ownership.TORN: common_pb2.PHASE_TORN,
    Ownership.ORPHANED: common_pb2.PHASE_ORPHANED,
    Ownership.GONE: common_pb2.PHASE_ORPHANED,
    Ownership.WAITING: common_pb2.PHASE_WAITING,
}


@dataclass(frozen=True, slots=True)
class Doing:
    """A phase, and why it needs attention (empty if it does not)."""

    phase: common_pb2.Phase.ValueType
    reason: str = ""
    waits: bool = False
    """No boundary for longer than a step takes, and it only waits for other ranks."""
    works: bool = False
    """No boundary for longer than a step takes, and it works, or is in code of its own."""


class Work:
    """Whether a trainer works, by what its process has done between two looks."""

    def __init__(self) -> None:
        self._pid = 0
        self._at: tuple[int, Worked] | None = None
        self._works = False

    def seen(self, pid: int, done: Worked | None, now_ns: int) -> bool:
        """Note what process `pid` has done so far; return whether it has worked in the last window.
        Call every few seconds: a longer window has what was done before a hang, too."""
        if done is None or pid != self._pid or self._at is None:
            self._pid, self._works = pid, False
            self._at = (now_ns, done) if done is not None else None
            return False
        since_ns, before = self._at
        took_s = (now_ns - since_ns) / 1e9
        if took_s >= WORK_WINDOW_S:
            computes = done.cpu_s - before.cpu_s >= WORK_CORES * took_s
            self._works = computes or done.io_bytes - before.io_bytes >= WORK_BYTES_PER_S * took_s
            self._at = (now_ns, done)
        return self._works


def doing(
    ownership: Ownership,
    words: Sequence[int],
    *,
    process_state: str,
    now_ns: int,
    works: bool = False,
    activity: str = "",
) -> Doing:
    """What the rank is doing now. The control page's `words` are read only when it is OWNED;
    `process_state` is the trainer's letter in /proc/<pid>/stat, or empty; `now_ns` is monotonic;
    `works`: as `Work` says; `activity`: the kind of what its stack shows; empty: unknown."""
    if ownership is not Ownership.OWNED:
        return Doing(_ENDED[ownership], ownership.value)
    if process_state in STOPPED_STATES:
        return Doing(common_pb2.PHASE_STALLED, "its trainer's process is stopped (SIGSTOP)")
    if words[Word.HELD] == _HELD:
        return Doing(common_pb2.PHASE_HELD, "training is paused on request; it resumes by itself")
    inside = words[Word.SEQ] & 1 == 1 and not words[Word.REST]
    boundary_ns, step_ns = words[Word.BOUNDARY_NS], words[Word.STEP_TIME_NS]
    age_ns = max(now_ns - boundary_ns, 0) if boundary_ns else 0
    late = not boundary_ns or age_ns > max(IDLE_STEPS * step_ns, IDLE_LEAST_S * 1e9)
    waits = late and waits_for_others(activity, works=works)
    works = late and not waits and (works or activity in BY_ITSELF)
    if age_ns > stall_after_ns(step_ns, works=works):
        reason = _overdue(age_ns, step_ns, inside=inside)
        return Doing(common_pb2.PHASE_STALLED, reason, waits, works)
    phase = common_pb2.PHASE_FORWARD_BACKWARD
    if inside:
        phase = common_pb2.PHASE_UPDATE
    elif _summoned(words):
        phase = common_pb2.PHASE_SUMMON
    elif late:
        phase = common_pb2.PHASE_IDLE
    return Doing(phase, "", waits, works)


def waits_for_others(activity: str, *, works: bool) -> bool:
    """Whether a trainer that is late only waits for other ranks. `works`: its process is busy,
    which proves nothing in a collective: a wait for a device keeps a core busy."""
    return activity == "collective" or (activity in MEETING and not works)


def stall_after_ns(step_time_ns: int, *, works: bool = False) -> int:
    """Age of the last boundary beyond which a training with this step time has stalled; 0: it
    is in its first step. `works`: its trainer does something."""
    if not step_time_ns:
        return round(FIRST_STEP_S * 1e9)
    least_s = WORKING_S if works else STALL_LEAST_S
    return max(STALL_STEPS * step_time_ns, round(least_s * 1e9))


def _summoned(words: Sequence[int]) -> bool:
    copying = words[Word.COPY_BEGUN] != words[Word.COPY_ENDED]
    announced = words[Word.SERVED] < words[Word.ANNOUNCE]
    return copying or announced or words[Word.READY] > words[Word.AGREED]


def _overdue(age_ns: int, step_ns: int, *, inside: bool) -> str:
    where = "inside an update" if inside else "outside an update"
    usual = f"its steps take {step_ns / 1e9:.3g} s" if step_ns else "it is in its first step"
    return (
        f"no boundary for {age_ns // 1_000_000_000} s, {usual}: the trainer lives, but hangs "
        f"{where} or runs something long (evaluation, checkpoint)"
    )
