"""What runs in the training loop: updates, and the boundaries between them.

    begin  an optimizer's step begins (or `attachment.update()`): SEQ odd
    end    it is over. The state rests, it is not settled: the script may still clamp weights,
           swap averaged ones in, load others, and a wrapper's step may go on
    go on  training goes on: a forward that will be differentiated, the next update, the end of
           the process. Parameters are verified and the state is settled, SEQ even. This is
           the *boundary*, at the same place of the program on every rank: rounds are
           launched and collected here, and edits, holds and captures happen here

So a value is served under a step only after the script has shown that it is done with that
step. What changes parameters later, between a boundary and the next update, breaks that; it is
looked for at the next update (samples of contents, version counters), and once found, or where
a module is known to do it, SEQ is even at boundaries alone (*strict*): copies are made while the
training's own thread waits for them, within the stall budget. A new attachment begins so.

Everything here is on the trainer's critical path. Whatever fails here costs the service,
never the training.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from paramd.memory.control_page import ControlPage, Word
from paramd.memory.descriptors import wake
from paramd.memory.gate import TrainerGate
from paramd.memory.rest import MAX_SAMPLES, write_samples, write_text
from paramd.trainer import exit
from paramd.trainer.boundary.agreement import Agreement
from paramd.trainer.boundary.hold import Hold
from paramd.trainer.boundary.requests import Acting, EditorLike, MirrorLike
from paramd.trainer.boundary.signals import backward_id, replaced_for_a_call, runs_inside_itself
from paramd.trainer.home.watch import Contents

log = logging.getLogger("paramd")

PROBATION = 3
"""Settled spans without a stray change, after which a new attachment is trusted."""

STRICT_SPANS = 1000
"""The same after a stray change was found."""

LOOK_S = 0.1
"""Seconds between two looks at what rests."""

SOON_S, SOON_FOR_S = 0.005, 1.0
"""Seconds between two glances at LOOK_WANTED after it was raised, and for how long: who reads at
rest reads on."""

LEFT_AT_REST = (
    "parameters were replaced after the last update, and training has not gone on since; they are "
    "brought back when it does"
)

MOST_PATIENCE = 256
"""Boundaries at most between two tries to bring back parameters that could not be."""

# Plain numbers cost a fraction of enumerations, and these are looked at in every step.
_WANT, _ARM_STEP, _STEP = int(Word.WANT), int(Word.ARM_STEP), int(Word.STEP)
_BOUNDARY_NS, _STEP_TIME_NS = int(Word.BOUNDARY_NS), int(Word.STEP_TIME_NS)
_SEQ = int(Word.SEQ)


def _nothing(_owner: object) -> None:
    """What happens before an update unless somebody wants gradients."""


class HomeLike(Protocol):
    """What the boundary needs of the parameters' home (see home/)."""

    contents: Contents | None

    def check(self) -> list[str]:
        """Names of parameters that are no longer in the arena; cheap."""

    def in_place(self) -> bool:
        """Whether all is where it was; on any thread."""

    def take_back(self) -> list[str]:
        """Copies them into the arena again and returns their names."""

    def gathered(self) -> bool:
        """Whether a sharded model has full copies of its parameters at work now."""


@dataclass(slots=True)
class _Entry:
    """A step under way on one thread."""

    thread: int
    depth: int = 1
    outermost: bool = True
    """Not within another owner's step on the same thread: it counts as an update."""


class Boundary:
    """Opens update windows, and settles them when training goes on.

    An optimizer whose step raised leaves its window open: its parameters may mix two
    steps. The window closes with that owner's next good step. Any thread may call; an update
    is settled when every thread that made a part of it has gone on.
    """

    def __init__(
        self,
        page: ControlPage,
        wake_descriptor: int,
        home: HomeLike,
        agreement: Agreement,
        *,
        editor: EditorLike,
        copy_buffers: Callable[[], None],
        mirror_moments: Callable[[], None],
        hold_cap_s: float,
        stall_budget_ns: int,
        mirror: MirrorLike | None = None,
        always_strict: str = "",
    ) -> None:
        """`always_strict` says what in the model changes parameters outside of updates."""
        self._page = page
        self._words = page.words
        self._wake_descriptor = wake_descriptor
        self._home = home
        self._editor = editor
        self._gate = TrainerGate(page, stall_budget_ns=stall_budget_ns, mirrored=mirror is not None)
        self._acting = Acting(
            page,
            agreement,
            self._gate,
            hold=Hold(page.words, cap_s=hold_cap_s, clock_ns=time.monotonic_ns),
            editor=editor,
            copy_buffers=copy_buffers,
            mirror_moments=mirror_moments,
            answer=self._answer,
            mirror=mirror,
            gathered=home.gathered,
        )
        self._lock = threading.RLock()
        self._open: dict[tuple[int, int], _Entry] = {}
        self._ended_by: set[int] = set()
        # Before the first forward a script may load or change weights, too.
        self._pending = True
        self._backward = -1
        self._done: int = page.words[Word.STEP]
        self._backwards = 0
        self._iteration = 0
        self._trains_in_eval = False
        self._eval_forward = False
        self._want_seen = page.words[Word.WANT]
        self._armed_seen = 0
        self._tries = self._patience = 0
        self._why = ""
        self._always_strict = always_strict
        self._strict_left = PROBATION
        self._forgotten = False
        self.before_update: Callable[[object], None] = _nothing
        """Called with the owner right before an update window opens; must not raise."""
        if home.contents is not None:
            write_samples(page, home.contents.indices[:MAX_SAMPLES])
        page.words[_SEQ] |= 1
        self._tell_strictness()
        self._rest()
        exit.owe(self)
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch_rest, name="paramd-rest", daemon=True)

    def start(self) -> None:
        """Begins to look after what rests."""
        self._watcher.start()

    @property
    def step(self) -> int:
        """Updates that are over, settled or not."""
        return self._done

    def iteration(self) -> int:
        """Backward passes that this rank has seen; the same on all in lock-step."""
        return self._backwards

    def begin(self, owner: object) -> None:
        """Opens an update window unless one is open already."""
        if self._forgotten:
            return
        with self._lock:
            thread = threading.get_ident()
            entry = self._open.get((thread, id(owner)))
            if entry is not None:
                # A subclass's step calls its base's, or the owner's last step raised.
                entry.depth = entry.depth + 1 if runs_inside_itself(owner) else 1
                return
            if self._open:
                self._drop_dead(owner)
            alone = not self._open
            outermost = alone or all(e.thread != thread for e in self._open.values())
            self._open[thread, id(owner)] = _Entry(thread, outermost=outermost)
            if alone:
                self._open_window(owner)

    def end(self, owner: object) -> None:
        """The owner's step is over; the state rests when no other step is under way."""
        if self._forgotten:
            return
        with self._lock:
            thread = threading.get_ident()
            entry = self._open.get((thread, id(owner)))
            if entry is None:
                return
            entry.depth -= 1
            if entry.depth:
                return
            del self._open[thread, id(owner)]
            backward = backward_id()
            # Optimizers that step within one backward make one update together.
            if entry.outermost and (backward == -1 or backward != self._backward):
                self._done += 1
            self._backward = backward
            self._ended_by.add(thread)
            self._pending = True
            if not self._open:
                self._rest()

    def forward(self, *, trains: bool) -> None:
        """A forward begins that may be differentiated."""
        if not self._pending:
            return
        self._eval_forward = not trains
        if trains or self._trains_in_eval:
            self._go_on()

    def backward(self) -> None:
        """The backward of one forward has begun: training, also of a model in eval mode.

        No boundary: gradients are on their way, so nothing may be edited here. But a state that
        no forward has settled may be read from now on.
        """
        self._backwards += 1
        if self._eval_forward:
            self._trains_in_eval = True
        if self._pending and not self._open and not self._forgotten:
            with self._lock:
                self._confirm()

    def settle(self) -> None:
        """The caller knows that nothing more of this update comes."""
        if self._pending and not self._open and not self._forgotten:
            with self._lock:
                self._ended_by.clear()
                self._boundary()

    def forget(self) -> None:
        """In a forked child: the words and the rounds are the parent's alone."""
        self._forgotten = True
        self._pending = False
        self._lock = threading.RLock()
        self._acting.forget()

    def close(self) -> None:
        """Ends a round under way; no boundary follows."""
        self._forgotten = True
        self._closing.set()
        if self._watcher.is_alive():
            self._watcher.join()
        self._acting.close()

    def leave(self) -> None:
        """The process ends: what rests unchanged is what the training leaves behind."""
        contents = self._home.contents
        if self._forgotten or not self._pending or self._open or contents is None:
            return
        self._forgotten = True
        if contents.digest() == self._words[Word.REST_DIGEST] and self._verified():
            self._gate.settle(self._done, self._iteration, proven=True)

    def _drop_dead(self, owner: object) -> None:
        """What this owner began on threads that have ended is its present thread's to end."""
        alive = {t.ident for t in threading.enumerate()}
        for thread, number in list(self._open):
            if number == id(owner) and thread not in alive:
                del self._open[thread, number]

    def _open_window(self, owner: object) -> None:
        """SEQ is odd from here on; what was not settled yet is now, if it can be."""
        if self._pending and not (self._backward != -1 and self._backward == backward_id()):
            self._boundary()
        self._look_for_strays()
        # While SEQ is even, unless strict: copies of parameters go on meanwhile.
        self.before_update(owner)
        self._gate.begin_update()
        self._iteration = self._backwards

    def _rest(self) -> None:
        """Says that the state rests, if it is in the arena at all."""
        contents = self._home.contents
        try:
            if contents is None:
                # A mirror is never read at rest; this only says that no update is under way.
                self._gate.rest(self._done, self._iteration, 0)
            elif not self._editor.failed and not self._home.check():
                self._gate.rest(self._done, self._iteration, contents.digest())
        except Exception:
            log.debug("paramd: the parameters cannot be looked at", exc_info=True)

    def _watch_rest(self) -> None:
        words = self._words
        seen, soon_until_s, looked_s = words[Word.LOOK_WANTED], 0.0, 0.0
        while not self._closing.wait(SOON_S if time.monotonic() < soon_until_s else LOOK_S):
            wanted, now_s = words[Word.LOOK_WANTED], time.monotonic()
            if wanted == seen and now_s - looked_s < LOOK_S:
                continue
            looked_s = now_s
            self.look_at_rest()
            if wanted != seen:
                seen, soon_until_s = wanted, now_s + SOON_FOR_S
                wake(self._wake_descriptor)

    def look_at_rest(self) -> None:
        """Says whether what rests is still where it was when the update ended.

        Between updates a script may put other tensors in the parameters' place, without a change
        in the arena that a sample could show. So a sidecar counts what it copied at rest only
        when a look that began after the copy has found everything in its place.
        """
        words = self._words
        if self._forgotten or self._home.contents is None or not words[Word.REST]:
            return
        # Held by the training's own thread, which is at a boundary: then nothing rests.
        if not self._lock.acquire(blocking=False):
            return
        try:
            now_ns = time.monotonic_ns()
            # Full copies of sharded parameters stand in their place during a forward.
            if not words[Word.REST] or self._home.gathered():
                return
            if self._home.in_place():
                words[Word.REST_SEEN_NS] = now_ns
                if self._why == LEFT_AT_REST:
                    self._say("")
            elif not self._why and not self._home.gathered():
                self._say(LEFT_AT_REST)
        except Exception:
            log.debug("paramd: the parameters cannot be looked at", exc_info=True)
        finally:
            self._lock.release()

    def _go_on(self) -> None:
        if self._open or self._forgotten:
            return
        with self._lock:
            self._ended_by.discard(threading.get_ident())
            if self._ended_by:
                self._ended_by &= {t.ident for t in threading.enumerate() if t.ident is not None}
            if not self._ended_by and self._pending and not self._open:
                self._boundary()

    def _confirm(self) -> None:
        """Settles the state; its boundary comes with the next update."""
        try:
            proven = self._verified()
            self._gate.settle(self._done, self._iteration, proven=proven)
            if proven:
                self._trust()
        except Exception:
            log.exception("paramd: parameters could not be verified")

    def _trust(self) -> None:
        """The state is settled: nothing may change until the next update, or SEQ is odd again."""
        contents = self._home.contents
        if contents is None:
            return
        contents.remember()
        if self._strict_left or self._always_strict:
            # SEQ was even for as long as this waits; what is read from now on rests.
            self._gate.begin_update()
            self._rest()

    def _boundary(self) -> None:
        """Training goes on: settles the state and acts on what the boundary brings."""
        self._pending = False
        try:
            proven = self._verified()
            self._gate.settle(self._done, self._iteration, proven=proven)
            self._note_time(time.monotonic_ns())
            self._acting.at_boundary(proven, self._backwards)
            if proven:
                self._trust()
        except Exception:
            log.exception("paramd: a boundary failed; the service degrades, training goes on")

    def _verified(self) -> bool:
        """Whether the arena holds what the training uses; if not, the page says why."""
        if self._editor.failed:
            self._say("an edit failed half way on this rank; the trainer's log says why")
            return False
        try:
            if self._home.check() and not self._brought_back():
                return False
        except Exception as error:
            self._tries += 1
            self._patience = min(1 << min(self._tries, 30), MOST_PATIENCE)
            if self._why != str(error):
                log.error("paramd: parameters are not served: %s", error)
            self._say(str(error))
            return False
        self._tries = self._patience = 0
        if self._why:
            self._say("")
        return True

    def _brought_back(self) -> bool:
        if replaced_for_a_call():
            # The next boundary outside of it will do; nothing has left.
            self._say(
                "the forward runs within torch.func.functional_call, with other tensors; put the "
                "optimizer's step into attachment.update(), which settles it outside of the call"
            )
            return False
        if self._patience:
            # To look for all users of memory takes tens of milliseconds.
            self._patience -= 1
            return False
        names = self._home.take_back()
        log.info("paramd: took %d parameters back, first %s", len(names), names[:1])
        return True

    def _say(self, why: str) -> None:
        if why != self._why:
            self._why = why
            write_text(self._page, why)
            self._words[Word.UNSERVED] = int(bool(why))

    def _look_for_strays(self) -> None:
        """Parameters must be now what they were when the state was settled."""
        contents, words = self._home.contents, self._words
        if contents is None:
            return
        try:
            strayed = contents.strayed()
        except Exception:
            log.exception("paramd: parameters could not be compared")
            strayed = True
        if not strayed:
            if self._strict_left:
                self._strict_left -= 1
                self._tell_strictness()
            return
        if not words[_SEQ] & 1:
            words[Word.STRAY_SEQ] = words[_SEQ]
        words[Word.STRAY_COUNT] += 1
        if words[Word.STRAY_COUNT] == 1:
            log.warning(
                "paramd: parameters changed between the forward and the optimizer's step; they are "
                "read at boundaries only from now on. Put what changes them into "
                "attachment.update(), or make it the optimizer's"
            )
        self._strict_left = STRICT_SPANS
        self._tell_strictness()

    def _tell_strictness(self) -> None:
        self._words[Word.STRICT] = int(bool(self._strict_left or self._always_strict))

    def _answer(self, announce: bool) -> None:
        """Wakes the sidecar for what was agreed, or when it asked for this boundary."""
        words = self._words
        want, armed = words[_WANT], words[_ARM_STEP]
        if armed and armed != self._armed_seen and armed == words[_STEP]:
            self._armed_seen = armed
            announce = True
        if announce or want != self._want_seen:
            self._want_seen = want
            words[Word.ANNOUNCE] += 1
            wake(self._wake_descriptor)

    def _note_time(self, now_ns: int) -> None:
        words = self._words
        last_ns, words[_BOUNDARY_NS] = words[_BOUNDARY_NS], now_ns
        if last_ns:
            smoothed, latest = words[_STEP_TIME_NS], now_ns - last_ns
            words[_STEP_TIME_NS] = latest if smoothed == 0 else (7 * smoothed + latest) // 8
