"""Decides what the copying thread copies, and when.

A copy belongs right after a boundary, where forward and backward hide it. So a request that finds
the rank inside an update, or too close to the next one, raises WANT; the trainer announces its next
boundary, and everything pending is copied there. A request that finds the rank between updates with
time to spare is copied at once.

A boundary that all trainers agreed on (AGREED) is copied when it is announced. A copy that the next
update overtakes is reported as missed, with timings, and never repaired.

`Capture` has no thread: `Copier` (copier.py) runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from paramd.memory.arena import is_mirror
from paramd.memory.control_page import (
    BUFFERS_REFUSED,
    STANDS_IN,
    ControlPage,
    Word,
    read_text,
    unserved_reason,
)
from paramd.memory.device_driver import DeviceError
from paramd.memory.gate import (
    CopyEnd,
    CopySpan,
    Move,
    State,
    copy_at_one_step,
    copy_at_rest,
    copy_of_request,
    is_changed,
    state_of,
    worth_starting,
)
from paramd_service.sidecar.copying.page_requests import Boundary, Outcome, PageRequests

RETRY_NS = 250_000_000
"""Polling interval while a request waits and nothing was announced."""
REST_NS = 500_000_000
"""How long a state must rest before it is copied without training having continued. Changes that a
script makes right after an update are over by then; later ones change the samples."""
UNSERVED_NS = 2_000_000_000
"""How long a request waits while the trainer reports that it cannot serve its parameters."""
EAGER_ATTEMPTS = 3
"""Overtaken copies after which a request raises WANT only every `RETRY_NS`: each such boundary may
cost the trainer its whole stall budget."""

_ASSUMED_BYTES_PER_S = 4e9
_RATE_WEIGHT = 0.3

Copy = Callable[..., tuple[CopyEnd, State]]


@dataclass(eq=False, slots=True)
class CopyJob:
    """One snapshot to fill at any step."""

    spans: Sequence[CopySpan]
    done: Callable[[State | None], None]
    """Called once, on the copying thread, with the state of the bytes; None: given up."""
    at_step: int = 0
    """Exact step wanted; 0: any."""
    history: int = 0
    """The history that `at_step` belongs to."""
    attempts: int = 0
    """Copies that were overtaken."""
    longest_ns: int = 0
    """Longest run of a copy before it was overtaken."""
    unsettled: bool = False
    """Accept a resting state even if it was changed after its update."""
    changed: bool = False
    """Whether parameters changed after the last update while training has not continued."""
    unseen: tuple[State, int] | None = None
    """State copied at rest, and when the copy ended; valid once the trainer has checked again."""
    refused: str = ""
    """Why the trainer cannot serve the parameters, if the job was given up for that."""
    unserved_ns: int = 0
    """Since when the trainer has reported that; 0: it does not."""
    prepare: Callable[[], Sequence[CopySpan] | None] | None = None
    """Finds the spans right before each copy, while SEQ is even; None if this state lacks them."""

    @property
    def size_bytes(self) -> int:
        return sum(span.size_bytes for span in self.spans)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Begun:
    """An agreed boundary as it was right before what is copied of it was looked for."""

    step: int
    begin_ns: int
    seq: int


class Capture:
    """The sidecar's words in the control page, and pending copies. All methods run on one thread.
    Call `serve` on every wake, on every new request and every `RETRY_NS` while one waits."""

    def __init__(
        self,
        page: ControlPage,
        *,
        clock_ns: Callable[[], int],
        at_point: Callable[[str], None] = lambda _: None,
        copy: Copy | None = None,
        move: Move | None = None,
        digest: Callable[[], int] = lambda: 0,
        stopped: Callable[[], bool] = lambda: False,
        serve_standing: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            copy: Copies a settled state; None: `copy_at_one_step`.
            move: Copies from a device, which may be refused (DeviceError); None without a device.
            digest: Digest of the arena's present samples (memory/control_page.py).
            stopped: Whether the trainer's process is stopped, for example by SIGSTOP.
            serve_standing: Makes the standing snapshot that the trainer requests, if any.
        """
        self._words = page.words
        self._page = page
        self._clock_ns = clock_ns
        self._at_point = at_point
        self._copy = copy if copy is not None else partial(copy_at_one_step, move=move)
        self._move = move
        self._digest = digest
        self._stopped = stopped
        self._serve_standing = serve_standing
        self.trainer_ended = False
        """Once True, a resting state can no longer change."""
        self._jobs: list[CopyJob] = []
        self._stepped: list[CopyJob] = []
        """Jobs for an exact step; the earliest is armed, and the trainer announces it."""
        self.reaching = PageRequests(page.words, self._capture, at_point)
        self._wanted_at: int | None = None
        self._wanted_ns = 0
        self._quiet_seq, self._quiet_since_ns = -1, 0
        self._bytes_per_s = _ASSUMED_BYTES_PER_S
        self._measured = False
        self.given_up_count = 0

    @property
    def waiting(self) -> bool:
        """Whether any request waits for a copy."""
        return bool(self._jobs or self._stepped or self.reaching)

    def submit(self, job: CopyJob) -> None:
        """Add a snapshot to fill."""
        if job.at_step:
            self._stepped.append(job)
            self._arm_step()
        else:
            self._jobs.append(job)

    def cancel(self, job: CopyJob) -> None:
        """Drop an abandoned job; a no-op once it is done."""
        for waiting in (self._jobs, self._stepped):
            if job in waiting:
                waiting.remove(job)
                job.done(None)
        self._arm_step()

    def give_up(self, reason: str, *, jobs_too: bool) -> None:
        """Give up boundary requests, and with `jobs_too` all copies, as trainer or sidecar ends."""
        self.reaching.give_up(reason)
        if jobs_too:
            for job in [*self._jobs, *self._stepped]:
                self.cancel(job)

    def serve(self) -> None:
        """Make the copies that are possible now, then acknowledge the announcement."""
        # Read first: SERVED must not acknowledge an announcement that arrives during the copy.
        announce = self._words[Word.ANNOUNCE]
        announced = announce != self._words[Word.SERVED]
        try:
            self.reaching.serve(announced)
            self._serve_stepped()
            self._serve_jobs(announced)
            # Last: callers wait for the others.
            self._serve_standing()
        finally:
            # On errors too: the trainer's next update waits for this word.
            self._words[Word.SERVED] = announce

    def _serve_stepped(self) -> None:
        """Copy jobs for the current step; give up jobs for an earlier one, or another history."""
        for job in list(self._stepped):
            step = self._words[Word.STEP]
            if self._words[Word.REWOUND] != job.history:
                self._stepped.remove(job)
                job.done(None)
            elif step == job.at_step:
                try:
                    end, copied = self._copy_for(job)
                except DeviceError as error:
                    self._refuse(job, error)
                    continue
                named = (copied.history, copied.step)
                if end is CopyEnd.DONE and named == (job.history, job.at_step):
                    self._stepped.remove(job)
                    job.done(copied)
                elif end is CopyEnd.OVERTAKEN:
                    self.given_up_count += 1
            elif step > job.at_step:
                self._stepped.remove(job)
                job.done(None)
        self._arm_step()

    def _arm_step(self) -> None:
        wanted = min((job.at_step for job in self._stepped), default=0)
        if self._words[Word.ARM_STEP] != wanted:
            self._words[Word.ARM_STEP] = wanted

    def _refuse_unserved(self) -> None:
        """Give up jobs that the trainer has reported as unservable for a while, with its reason."""
        reason = unserved_reason(self._page)
        stands_in = self._words[Word.UNSERVED] == STANDS_IN
        now_ns = self._clock_ns()
        for job in list(self._jobs):
            if not reason or (stands_in and job.unsettled):
                job.unserved_ns = 0
            elif not job.unserved_ns:
                job.unserved_ns = now_ns
            elif now_ns - job.unserved_ns >= UNSERVED_NS:
                job.refused = reason
                self.cancel(job)

    def _refuse(self, job: CopyJob, error: DeviceError) -> None:
        job.refused = str(error)
        self.cancel(job)

    def _serve_jobs(self, announced: bool) -> None:
        self._refuse_unserved()
        if announced:
            self._wanted_at = None
        while self._jobs:
            end = self._try_jobs(announced)
            if not self._jobs or not self._ask_for_boundary():
                return
            # The update may have ended, unannounced, between reading SEQ and raising WANT.
            if end is not CopyEnd.UPDATING or self._words[Word.SEQ] & 1:
                return

    def _try_jobs(self, announced: bool) -> CopyEnd:
        """Copy the jobs worth trying; stop at the first update that interferes."""
        quiet = self._is_quiet()
        for job in list(self._jobs):
            if announced or quiet or self._may_start(job):
                end = self._copy_job(job)
                # A job that only waits for the trainer's check must not delay the others.
                if end is not CopyEnd.DONE and job.unseen is None:
                    return end
        return CopyEnd.DONE

    def _may_start(self, job: CopyJob) -> bool:
        """Whether to start a copy outside an announced boundary."""
        return not job.attempts and worth_starting(
            now_ns=self._clock_ns(),
            boundary_ns=self._words[Word.BOUNDARY_NS],
            step_time_ns=self._words[Word.STEP_TIME_NS],
            copy_ns=self.copy_ns(job.size_bytes),
        )

    def _is_quiet(self) -> bool:
        """Whether no update has begun or ended for a while: training is paused, hung or over."""
        now_ns, seq = self._clock_ns(), self._words[Word.SEQ]
        if seq != self._quiet_seq:
            self._quiet_seq, self._quiet_since_ns = seq, now_ns
        return now_ns - self._quiet_since_ns >= RETRY_NS

    def rests(self) -> bool:
        """Whether a state has rested long enough to be copied at rest."""
        words = self._words
        if not words[Word.REST] or is_mirror(words):
            return False
        return self.trainer_ended or self._clock_ns() - words[Word.REST_NS] >= REST_NS

    def _copy_for(self, job: CopyJob) -> tuple[CopyEnd, State]:
        """As `_copy_settled`, with the job's spans found in the copied state."""
        if job.prepare is None:
            return self._copy_settled(job.spans)
        seq = self._words[Word.SEQ]
        spans = job.prepare() if not seq & 1 else None
        if spans is None:
            return CopyEnd.UPDATING, state_of(self._page)
        job.spans = spans
        end, state = self._copy_settled(spans)
        if end is CopyEnd.DONE and state.proof != seq:
            return CopyEnd.OVERTAKEN, state
        return end, state

    def _copy_settled(self, spans: Sequence[CopySpan]) -> tuple[CopyEnd, State]:
        """Copy a settled state; CHANGED if its samples were changed without an update."""
        before = self._digest()
        end, state = self._copy(self._page, spans, at_point=self._at_point)
        if end is CopyEnd.DONE and any(
            is_changed(self._page, state, digest) for digest in (before, self._digest())
        ):
            return CopyEnd.CHANGED, state
        return end, state

    def _copy_job(self, job: CopyJob) -> CopyEnd:
        begin_ns, checks = self._clock_ns(), job.unseen is not None
        try:
            end, state = self._copy_for(job)
            if end is CopyEnd.UPDATING and self.rests() and job.prepare is None:
                end, state = self._copy_at_rest(job)
            else:
                job.unseen = None
        except DeviceError as error:
            self._refuse(job, error)
            return CopyEnd.UPDATING
        took_ns = self._clock_ns() - begin_ns
        if end is CopyEnd.DONE:
            if not checks:
                self._note_rate(job.size_bytes, took_ns)
            self._jobs.remove(job)
            job.done(state)
        elif end in (CopyEnd.OVERTAKEN, CopyEnd.CHANGED):
            self.given_up_count += 1
            job.attempts += 1
            job.longest_ns = max(job.longest_ns, took_ns)
        return end

    def _copy_at_rest(self, job: CopyJob) -> tuple[CopyEnd, State]:
        """Copy a resting state; valid once the trainer checks again, or at once if it ended."""
        if job.unseen is not None:
            state, copied_ns = job.unseen
            # Another update may have ended meanwhile: REST must still be the one copied.
            if self._words[Word.REST] == -state.proof:
                seen_ns = self._words[Word.REST_SEEN_NS]
                seen = self.trainer_ended or seen_ns >= copied_ns
                # A stopped trainer changes nothing, and checked every 100 ms until it stopped.
                seen = seen or (seen_ns > self._words[Word.REST_NS] and self._stopped())
                return CopyEnd.DONE if seen else CopyEnd.UPDATING, state
        job.unseen = None
        end, state = copy_at_rest(
            self._page,
            job.spans,
            self._digest,
            changed_too=job.unsettled,
            at_point=self._at_point,
            move=self._move,
        )
        job.changed = end is CopyEnd.CHANGED
        if end is CopyEnd.DONE and not self.trainer_ended:
            job.unseen = state, self._clock_ns()
            self._words[Word.LOOK_WANTED] += 1
            end = CopyEnd.UPDATING
        return end, state

    def _ask_for_boundary(self) -> bool:
        """Raise WANT unless an earlier one is still unanswered; return whether it did."""
        if self._wanted_at == self._words[Word.ANNOUNCE]:
            return False
        now_ns = self._clock_ns()
        eager = any(job.attempts < EAGER_ATTEMPTS for job in self._jobs)
        if not eager and now_ns - self._wanted_ns < RETRY_NS:
            return False
        self._wanted_at, self._wanted_ns = self._words[Word.ANNOUNCE], now_ns
        self._words[Word.WANT] += 1
        return True

    def _capture(self, boundary: Boundary, announced: bool) -> Outcome | None:
        words = self._words
        buffers = boundary.with_buffers or is_mirror(words)
        if buffers and words[Word.BUFFERS_STEP] == BUFFERS_REFUSED:
            return Outcome(-1, read_text(self._page), refused=True)
        if is_mirror(words):
            return self._capture_mirrored(boundary, announced)
        agreed_step = words[Word.AGREED_STEP]
        if not self._is_agreed(boundary):
            return Outcome(-1, "another request was agreed before the copy", missed=True)
        if words[Word.STEP] != agreed_step or words[Word.SEQ] & 1:
            return self._not_there(boundary, announced, "the next update began before the copy")
        # Before BUFFERS_STEP: what the trainer copies later, of the same step, has another SEQ.
        begun = _Begun(step=agreed_step, begin_ns=self._clock_ns(), seq=words[Word.SEQ])
        if not self._has_buffers(boundary, agreed_step):
            return self._not_there(boundary, announced, "the trainer did not copy its buffers")
        spans = self._spans_of(boundary)
        if isinstance(spans, str):
            return self._not_there(boundary, announced, spans)
        return self._copy_agreed(boundary, begun, spans)

    def _copy_agreed(self, boundary: Boundary, begun: _Begun, spans: Sequence[CopySpan]) -> Outcome:
        """Copy an agreed boundary's spans, and prove that they are of its state."""
        try:
            end, state = self._copy_settled(spans)
        except DeviceError as error:
            return Outcome(-1, str(error))
        took_ns = self._clock_ns() - begun.begin_ns
        size_bytes = sum(span.size_bytes for span in spans)
        self._at_point("boundary-copied")
        # Spans and buffers found before the copy must be of the state that was copied.
        found_before = boundary.state is not None or boundary.with_buffers
        still = not found_before or state.proof == begun.seq
        # And of this request still: they may be written again under the same SEQ.
        still = still and self._is_agreed(boundary) and self._has_buffers(boundary, begun.step)
        if end is CopyEnd.DONE and state.step == begun.step and still:
            self._note_rate(size_bytes, took_ns)
            return Outcome(
                state.step,
                "",
                edits=state.edits,
                history=state.history,
                proof=state.proof,
                token=boundary.token,
            )
        self.given_up_count += 1
        return Outcome(-1, self.explain(size_bytes, took_ns), missed=True)

    def _is_agreed(self, boundary: Boundary) -> bool:
        """Whether the last request that the trainers agreed on is still this one, by its token,
        too, which never comes again."""
        words = self._words
        return words[Word.AGREED_TOKEN] == boundary.token and words[Word.AGREED] == boundary.number

    def _has_buffers(self, boundary: Boundary, step: int) -> bool:
        """Whether the arena's buffers are those that the trainer copied for this request, at this
        step; True where it wants none."""
        if not boundary.with_buffers:
            return True
        words = self._words
        return (words[Word.BUFFERS_FOR], words[Word.BUFFERS_STEP]) == (boundary.number, step)

    def _capture_mirrored(self, boundary: Boundary, announced: bool) -> Outcome | None:
        """Copy from a mirrored arena, which updates do not touch: the step may have advanced."""
        words, number = self._words, boundary.number
        begin_ns = self._clock_ns()
        if words[Word.MIRRORED_FOR] != number:
            return self._not_there(boundary, announced, "the trainer did not copy its parameters")
        spans = self._spans_of(boundary)
        if isinstance(spans, str):
            return self._not_there(boundary, announced, spans)
        end, state = copy_of_request(self._page, spans, number, at_point=self._at_point)
        self._at_point("boundary-copied")
        if end is not CopyEnd.DONE:
            self.given_up_count += 1
            return Outcome(-1, "a later request overtook this one's copy")
        self._note_rate(sum(span.size_bytes for span in spans), self._clock_ns() - begin_ns)
        return Outcome(
            state.step, "", edits=state.edits, history=state.history, token=boundary.token
        )

    def _spans_of(self, boundary: Boundary) -> Sequence[CopySpan] | str:
        """Spans to copy, with optimizer state, or why not. Extra state is filled in at once."""
        words = self._words
        if boundary.fill_extra is not None:
            if words[Word.EXTRA_FOR] != boundary.number:
                return "the trainer did not note its extra state"
            if refusal := boundary.fill_extra():
                return refusal
            if words[Word.EXTRA_FOR] != boundary.number:
                return "a later request overtook its extra state"
        if boundary.state is None:
            return boundary.spans
        if not words[Word.MOMENTS_LIVE] and words[Word.MOMENTS_FOR] != boundary.number:
            return "the trainer did not copy the optimizer's state"
        of_state = boundary.state()
        if of_state is None:
            return (
                "the optimizer's state was not recorded at this boundary (PARAMD_KEEP_EVERY, or "
                "the script changes parameters between forward and update)"
            )
        return [*boundary.spans, *of_state]

    def _not_there(self, boundary: Boundary, announced: bool, reason: str) -> Outcome | None:
        """A miss once announced; before that the trainer is still writing words."""
        step = self._words[Word.STEP]
        if boundary.deferred_step is None:
            boundary.deferred_step = step
        if announced or step != boundary.deferred_step:
            return Outcome(-1, reason, missed=True)
        return None

    def _note_rate(self, size_bytes: int, took_ns: int) -> None:
        # Short copies measure overhead, not memory bandwidth.
        if size_bytes >= 1 << 20 and took_ns > 0:
            rate = size_bytes * 1e9 / took_ns
            self._bytes_per_s += _RATE_WEIGHT * (rate - self._bytes_per_s)
            self._measured = True

    def copy_ns(self, size_bytes: int) -> int:
        """Expected duration of a copy of that size, from earlier copies."""
        return int(size_bytes * 1e9 / self._bytes_per_s)

    def explain(self, size_bytes: int, longest_ns: int) -> str:
        """Why no copy fitted, with timings."""
        step_ms = self._words[Word.STEP_TIME_NS] / 1e6
        needs_ms = max(self.copy_ns(size_bytes) if self._measured else 0, longest_ns) / 1e6
        return (
            f"{self._what_overtook()} before {size_bytes:,} bytes were copied (needs at least "
            f"{needs_ms:.1f} ms, a whole step takes {step_ms:.1f} ms); ask for fewer "
            "tensors at once or raise the trainer's stall budget (PARAMD_STALL_BUDGET_MS)"
        )

    def _what_overtook(self) -> str:
        if not self._words[Word.STRICT]:
            return "an update began"
        if not self._words[Word.STRAY_COUNT]:
            return (
                "training continued (this attachment is new, or its model changes parameters in "
                "forward: copies are made at boundaries only)"
            )
        return (
            "training continued (parameters change between forward and the optimizer's step, so "
            "copies are made at boundaries only; put those changes into attachment.update())"
        )
