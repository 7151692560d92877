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
from paramd_service.sidecar.owner import Ownership

STALL_STEPS = 20
STALL_LEAST_S = 30.0
"""A boundary is long overdue after this many of the trainer's smoothed step times, but not before
this time: a validation or a checkpoint takes longer than a step."""

FIRST_STEP_S = 900.0
"""The same while no step has ended yet: the first one compiles, warms up and fills caches."""

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


def doing(ownership: Ownership, words: Sequence[int], *, process_state: str, now_ns: int) -> Doing:
    """What the rank is doing now. The control page's `words` are read only when it is OWNED;
    `process_state` is the trainer's letter in /proc/<pid>/stat, or empty; `now_ns` is monotonic."""
    if ownership is not Ownership.OWNED:
        return Doing(_ENDED[ownership], ownership.value)
    if process_state in STOPPED_STATES:
        return Doing(common_pb2.PHASE_STALLED, "its trainer's process is stopped (SIGSTOP)")
    if words[Word.HELD] == _HELD:
        return Doing(common_pb2.PHASE_HELD, "training is paused on request; it resumes by itself")
    inside = words[Word.SEQ] & 1 == 1 and not words[Word.REST]
    boundary_ns, step_ns = words[Word.BOUNDARY_NS], words[Word.STEP_TIME_NS]
    age_ns = max(now_ns - boundary_ns, 0) if boundary_ns else 0
    if age_ns > stall_after_ns(step_ns):
        return Doing(common_pb2.PHASE_STALLED, _overdue(age_ns, step_ns, inside=inside))
    if inside:
        return Doing(common_pb2.PHASE_UPDATE)
    if _summoned(words):
        return Doing(common_pb2.PHASE_SUMMON)
    if not boundary_ns or age_ns > max(IDLE_STEPS * step_ns, IDLE_LEAST_S * 1e9):
        return Doing(common_pb2.PHASE_IDLE)
    return Doing(common_pb2.PHASE_FORWARD_BACKWARD)


def stall_after_ns(step_time_ns: int) -> int:
    """Age of the last boundary beyond which a training with this step time has stalled; 0: it
    is in its first step."""
    if not step_time_ns:
        return round(FIRST_STEP_S * 1e9)
    return max(STALL_STEPS * step_time_ns, round(STALL_LEAST_S * 1e9))


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
