"""Asynchronous agreement among trainers, so that all ranks act at the same boundary.

Every rank counts its boundaries. A round is launched at one boundary and always collected at
the next, so all ranks learn the same result at the same boundary. A request is agreed when its
number and token are equal on all ranks, which one MIN all-reduce over n and -n shows. A rank
that is not ready contributes zeros.

A rank promises its contribution (`promise`): from then on only the outcome of the round
decides, whatever the sidecar writes to the page.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from paramd.memory.control_page import Word, Words
from paramd.trainer import exit

IDLE_ROUND_NS = 200_000_000
"""Time between rounds with no request pending."""

EXPECTED_ROUND_NS = 10_000_000
"""Time between rounds while the rank's sidecar expects a request soon."""

QUIET_ROUND_NS = 1_000_000_000
"""Time between rounds while no sidecar has clients: the wait of the first request after that."""

MAX_INTERVAL = 1000
"""Most boundaries between rounds, so that a sudden slow-down is noticed."""

QUIET_BOUNDARIES = 64
"""Most boundaries in QUIET_ROUND_NS: when steps turn slow, a first request waits no longer."""

EAGER_BOUNDARIES = 64
"""Boundaries with a round at each after an agreed request: requests come in bursts."""

CAPTURE, EDIT, HOLD, STEP, RESUME = range(5)
"""Actions, numbered as in paramd.v1.BoundaryAction."""


class AgreementLost(RuntimeError):
    """A round failed or timed out; no more agreement in this incarnation."""


class Request(NamedTuple):
    """The page's request: what all ranks are to do at one boundary."""

    number: int
    token: int
    action: int
    argument: int


NOTHING = Request(0, 0, CAPTURE, 0)


class Round(NamedTuple):
    """Outcome of a round; the same on all ranks."""

    agreed: Request | None
    stay: bool
    """Whether every rank still wants training to stay paused."""
    iteration: int = 0
    """This rank's backward passes when it contributed."""
    iterations: tuple[int, int] = (0, 0)
    """Lowest and highest backward passes; equal when ranks are in lock-step."""
    differs: bool = False
    """FSDP computed at this boundary of some ranks, and not of others."""
    postponed: int = 0
    """The number of the edit that all ranks had postponed; 0: none, or not all of them."""


def promise(words: Words, last_agreed: int, accept: Callable[[Request], bool]) -> Request:
    """Return the page's request once PROMISED is written, or NOTHING.

    The sidecar withdraws by writing READY = 0, pausing, then reading PROMISED. However its
    accesses interleave with ours, either it sees PROMISED or we see READY change.
    """
    number = words[Word.READY]
    if number <= last_agreed:
        return NOTHING
    request = Request(number, words[Word.TOKEN], words[Word.ACTION], words[Word.ARGUMENT])
    if words[Word.READY] != number or not accept(request):
        return NOTHING
    words[Word.PROMISED] = number
    # Look again after promising: a withdrawal before this store may not have seen the promise.
    if words[Word.READY] != number or words[Word.TOKEN] != request.token:
        words[Word.PROMISED] = 0
        return NOTHING
    return request


def refuse(words: Words, number: int, why: int) -> None:
    """Record that this rank will never promise the request, and why: a `Refusal`, or the step of
    the boundary that missed its `if_step`.
    """
    if words[Word.REFUSED] == number:
        return
    words[Word.REFUSED_STEP] = why
    # Last: a reader of this number must find the reason already written.
    words[Word.REFUSED] = number


class Agreement:
    """One rank's side. All ranks must call `passes` or `collect` at each boundary, then
    `launch` when a round is due, or `exchange` equally often.

    `group`: a dedicated gloo group over all ranks; None for a world of one. Collecting waits at
    most `timeout_s` for the slowest rank, or `edit_timeout_s` when this rank has promised an edit:
    if it gave up too early, the others would apply the edit without it.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        timeout_s: float,
        edit_timeout_s: float | None = None,
    ) -> None:
        self._group = group
        self._timeout_s = timeout_s
        self._edit_timeout_s = max(timeout_s, edit_timeout_s if edit_timeout_s is not None else 0.0)
        buffer = bytearray(17 * 8)
        self._message = memoryview(buffer).cast("q")
        self._tensor = torch.frombuffer(buffer, dtype=torch.int64)
        self._options = dist.AllreduceOptions()
        self._options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        self._work: dist.Work | None = None
        self._ended: dist.Work | None = None
        self._request = NOTHING
        self._boundary = 0
        self._launched_at = 0
        self._iteration = 0
        self._next_launch = 1
        self._last_agreed = 0
        self._eager_until = 0
        self._pace = self._agreed_pace = 0
        self._copies = self._agreed_copies = (0, 0)
        self._made = self._agreed_made = 0
        self._longest = MAX_INTERVAL
        exit.register_at_exit(self)

    @property
    def alone(self) -> bool:
        """A world of one: only `exchange` makes sense."""
        return self._group is None

    @property
    def due(self) -> bool:
        """Whether to launch a round at this boundary; the same on all ranks."""
        return self._boundary >= self._next_launch

    def standing(self, pace: int, made: int, interval: int) -> tuple[int, int]:
        """Contribute to standing snapshots: steps wanted between two, and the step of the last one.

        Returns the highest `pace` that a rank wants and the lowest `made`, the same on all ranks
        between two boundaries; zeros before the first round. `interval`: most boundaries between
        rounds from now on.
        """
        self._pace, self._made, self._longest = pace, made, interval
        if self._group is None:
            return pace, made
        return self._agreed_pace, self._agreed_made

    def copies(self, settled: int, copied: int) -> tuple[int, int]:
        """Contribute this rank's progress in copying; return that of all ranks.

        `settled`: step of the last standing snapshot that was sent, or will not be; `copied`: of
        the last one that is complete on another host. Returns the lowest `settled`, and `copied` if
        it is the same on all ranks, else 0; the same on all ranks between two boundaries.
        """
        self._copies = settled, copied
        return self._copies if self._group is None else self._agreed_copies

    def passes(self, *, wanted: bool) -> bool:
        """Count a boundary and return True, unless something is due or `wanted`.

        The fast path: at most boundaries neither `collect`, `launch` nor `exchange` is due.
        `wanted`:
        the page has a request; only a world of one acts on it at once.
        """
        if self._group is None:
            return not wanted
        boundary = self._boundary + 1
        if self._work is not None or boundary >= self._next_launch:
            return False
        self._boundary = boundary
        return True

    def collect(self) -> Round | None:
        """Count a boundary and collect the round in flight, if any; AgreementLost is final."""
        self._boundary += 1
        return self._collected() if self._work is not None else None

    def launch(
        self,
        request: Request,
        *,
        pending: bool,
        stay: bool,
        step_time_ns: int,
        iteration: int = 0,
        expected: bool = False,
        quiet: bool = False,
        within: bool | None = None,
        postponed: int = 0,
    ) -> None:
        """Launch a round, to be collected at the next boundary; `request`: from `promise`.

        `pending`: this rank has a request that is not agreed yet; `expected`: it expects one soon;
        `stay`: it wants training to stay paused. `iteration`: backward passes it has seen; ranks
        that differ are not at the same point of training, whatever their step counts, and agree on
        nothing. `quiet`: it has no clients; the shortest interval of all ranks counts, so one rank
        with clients keeps rounds frequent on all. `within`: whether FSDP computes at this boundary;
        None: this rank did not look. `postponed`: the edit that it has postponed; 0: none.
        """
        assert self._group is not None
        if expected:
            interval = idle_interval(step_time_ns, EXPECTED_ROUND_NS)
        else:
            interval = quiet_interval(step_time_ns) if quiet else idle_interval(step_time_ns)
        interval = min(interval, self._longest)
        self._fill(request, pending=pending, stay=stay, interval=interval, iteration=iteration)
        self._fill_postponed(within, postponed)
        try:
            # The group's own method: `dist.all_reduce` doubles the cost of a round.
            self._work = self._group.allreduce([self._tensor], self._options)
        except (RuntimeError, ValueError) as error:
            raise AgreementLost(f"a round could not be launched: {error}") from error

    def exchange(
        self,
        request: Request,
        *,
        pending: bool,
        stay: bool,
        iteration: int = 0,
        within: bool | None = None,
        postponed: int = 0,
    ) -> Round:
        """Run a whole round synchronously: while paused, and always in a world of one."""
        if self._group is None:
            self._fill(request, pending=pending, stay=stay, interval=1, iteration=iteration)
            self._fill_postponed(within, postponed)
        else:
            self.launch(
                request,
                pending=pending,
                stay=stay,
                step_time_ns=0,
                iteration=iteration,
                within=within,
                postponed=postponed,
            )
        return self._collected()

    def finish(self) -> None:
        """Wait for the round in flight, so that no rank is left alone in it."""
        if self._work is not None:
            self._collected()

    def leave(self) -> None:
        """Process exit: wait briefly for the round in flight (see exit.py)."""
        self._timeout_s = self._edit_timeout_s = exit.LAST_ROUND_S
        with suppress(AgreementLost):
            self.finish()
        if self._ended is not None:
            exit.keep_for_ever(self._ended)

    def _fill(
        self, request: Request, *, pending: bool, stay: bool, interval: int, iteration: int
    ) -> None:
        eager = pending or self._boundary < self._eager_until
        message = self._message
        message[0], message[1] = request.number, -request.number
        message[2], message[3] = request.token, -request.token
        message[4] = 1 if eager else interval
        message[5] = int(stay)
        message[6], message[7] = iteration, -iteration
        settled, copied = self._copies
        message[8], message[9] = -self._pace, self._made
        message[10], message[11], message[12] = settled, copied, -copied
        self._iteration = iteration
        self._request = request
        self._launched_at = self._boundary

    def _fill_postponed(self, within: bool | None, postponed: int) -> None:
        # Their minima: 1 if FSDP computes on all ranks, and 1 if it does on none. A rank that did
        # not look changes neither.
        self._message[13], self._message[14] = int(within is not False), int(within is not True)
        self._message[15], self._message[16] = postponed, -postponed

    def _collected(self) -> Round:
        work, self._work = self._work, None
        if work is not None:
            # Kept until the next round, or gloo's thread might drop the last reference (exit.py).
            self._ended = work
            timeout_s = self._edit_timeout_s if self._request.action == EDIT else self._timeout_s
            try:
                work.wait(timedelta(seconds=timeout_s))
            except RuntimeError as error:
                # Leak both: destroying either would wait for the round, or end it on gloo's thread.
                exit.keep_for_ever(work)
                exit.keep_for_ever(self._group)
                raise AgreementLost(
                    f"a round did not end within {timeout_s:g} s: {error}"
                ) from error
        number, minus_number, token, minus_token, interval, stay, lowest, minus_highest = (
            self._message[:8]
        )
        slowest, self._agreed_made, settled, copied, minus_copied = self._message[8:13]
        all_inside, all_outside, postponed, minus_postponed = self._message[13:]
        self._agreed_pace = -slowest
        self._agreed_copies = settled, copied if copied == -minus_copied else 0
        self._next_launch = self._launched_at + max(1, interval)
        in_step = lowest == -minus_highest
        heard = Round(
            None,
            bool(stay),
            self._iteration,
            (lowest, -minus_highest),
            # Ranks that are apart look at different boundaries: what they see says nothing.
            differs=in_step and not (all_inside or all_outside),
            postponed=postponed if postponed == -minus_postponed else 0,
        )
        # MIN over x and -x gives opposite numbers only if every rank sent the same x.
        same = number == -minus_number and token == -minus_token and in_step
        if not same or number <= self._last_agreed:
            return heard
        self._last_agreed = number
        self._eager_until = self._boundary + EAGER_BOUNDARIES
        self._next_launch = self._launched_at + 1
        return heard._replace(agreed=self._request)


def idle_interval(step_time_ns: int, round_ns: int = IDLE_ROUND_NS) -> int:
    """Boundaries between rounds when nothing is pending; 1 while the step time is unknown."""
    return 1 if step_time_ns <= 0 else min(MAX_INTERVAL, max(1, round_ns // step_time_ns))


def quiet_interval(step_time_ns: int) -> int:
    """The same when no sidecar has clients; never shorter than `idle_interval`."""
    longest = min(QUIET_BOUNDARIES, idle_interval(step_time_ns, QUIET_ROUND_NS))
    return max(longest, idle_interval(step_time_ns))
