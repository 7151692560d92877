"""The trainers' asynchronous minimum: what lets all ranks act at the same boundary.

Every rank counts its boundaries. A round is launched at one boundary and collected at
the next, whatever has happened in between; so all ranks learn the same number at the
same boundary. The message is the highest request this rank is ready for and the
interval it proposes until the next launch; all ranks get the minimum of both.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

IDLE_ROUND_NS = 200_000_000
"""Time between two rounds when no request is pending."""

MAX_INTERVAL = 1000
"""Boundaries between two rounds at most, so that a sudden slow-down is noticed."""


class AgreementLost(RuntimeError):
    """A round failed or did not end in time; this epoch agrees on nothing more."""


class Agreement:
    """One rank's part in it. All ranks must call `boundary` at each boundary.

    Args:
        group: a gloo group over all ranks used by nobody else; None for a world of one.
        timeout_s: how long collecting may wait for the slowest rank.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, timeout_s: float) -> None:
        self._group = group
        self._timeout = timedelta(seconds=timeout_s)
        buffer = bytearray(16)
        self._message = memoryview(buffer).cast("q")
        self._tensor = torch.frombuffer(buffer, dtype=torch.int64)
        self._options = dist.AllreduceOptions()
        self._options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        self._work: dist.Work | None = None
        self._boundary = 0
        self._launched_at = 0
        self._next_launch = 1
        self._agreed = 0

    def boundary(self, ready: int, step_time_ns: int) -> int:
        """Counts one boundary and returns the highest request that all ranks are ready for.

        Raises:
            AgreementLost: once; afterwards this object must not be used.
        """
        if self._group is None:
            return ready
        self._boundary += 1
        if self._work is not None:
            self._collect()
        if self._boundary >= self._next_launch:
            self._launch(ready, step_time_ns)
        return self._agreed

    def finish(self) -> None:
        """Waits for a round under way, so that no rank is left alone in it."""
        if self._work is not None:
            self._collect()

    def _launch(self, ready: int, step_time_ns: int) -> None:
        assert self._group is not None
        pending = ready > self._agreed
        interval = 1 if pending else idle_interval(step_time_ns)
        self._message[0], self._message[1] = ready, interval
        try:
            # The group's own method: `dist.all_reduce` would double the time of a round.
            self._work = self._group.allreduce([self._tensor], self._options)
        except (RuntimeError, ValueError) as error:
            raise AgreementLost(f"a round could not be launched: {error}") from error
        self._launched_at = self._boundary

    def _collect(self) -> None:
        work, self._work = self._work, None
        assert work is not None
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            raise AgreementLost(
                f"a round did not end within {self._timeout.total_seconds():g} s: {error}"
            ) from error
        # READY may be taken back on one rank, so a later minimum can be lower.
        self._agreed = max(self._agreed, self._message[0])
        self._next_launch = self._launched_at + max(1, self._message[1])


def idle_interval(step_time_ns: int) -> int:
    """Boundaries between two rounds when nothing is pending; 1 while the time is unknown."""
    if step_time_ns <= 0:
        return 1
    return min(MAX_INTERVAL, max(1, IDLE_ROUND_NS // step_time_ns))
