"""The part inside the training loop: updates, and the boundaries between them.

    begin     an optimizer step (or `attachment.update()`) begins: SEQ odd. A step that computes its
              gradients itself, in a closure, begins when the closure has returned
    end       the update ends. The state rests but is not settled: the script may still clamp
              weights, swap in averaged ones or load others, and a wrapper's step may still run
    continue  training continues with a forward that will be differentiated, the next update or
              process exit. Parameters are verified and the state is settled, SEQ even. This is
              the *boundary*, at the same point of the program on every rank: here rounds are
              launched and collected, and edits, holds and captures take place

So a value is served under a step only once the script has shown that it is done with that
step. A stray change, between a boundary and the next update, breaks this. Each update checks
for one (content samples, version counters); once one is found, or where a module is known to
make them, SEQ is even only at boundaries (*strict*): copies are made while the training thread
waits, within the stall budget. A new attachment starts out strict.

All of this is on the trainer's critical path. A failure here degrades the service, never the
training.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch

from paramd import inside
from paramd.memory.control_page import (
    MAX_SAMPLES,
    ControlPage,
    Word,
    in_time,
    note_settled,
    note_stray,
    write_samples,
    write_text,
)
from paramd.memory.descriptors import wake
from paramd.memory.gate import TrainerGate
from paramd.trainer import exit
from paramd.trainer.boundary.agreement import Agreement, Request
from paramd.trainer.boundary.hold import BoundaryHandler, Hold
from paramd.trainer.boundary.outside import Outside
from paramd.trainer.boundary.signals import (
    BackwardUpdate,
    is_stepping,
    replaced_for_a_call,
    runs_inside_itself,
)
from paramd.trainer.boundary.standins import CHANGED, StandIns
from paramd.trainer.boundary.untraced import untraced

if TYPE_CHECKING:
    from paramd.memory.device_arena import TrainerDevice
    from paramd.trainer.boundary.edits import Editor
    from paramd.trainer.boundary.gradients import GradientCapture
    from paramd.trainer.home.mirrored import MirroredHome
    from paramd.trainer.home.owned import ParameterStorage
    from paramd.trainer.home.watch import Contents
    from paramd.trainer.resume.keeper import Keeper
    from paramd.trainer.resume.rewinding import Rewinder

log = logging.getLogger("paramd")

PROBATION = 3
"""Settled spans without a stray change before a new attachment leaves strict mode."""

STRICT_SPANS = 1000
"""Settled spans without a stray change before strict mode ends after one."""

LOOK_S = 0.1
"""Seconds between checks of a resting state."""

SOON_S, SOON_FOR_S = 0.005, 1.0
"""Poll interval after LOOK_WANTED was raised, and its duration, in seconds: readers of a resting
state come in bursts."""

LEFT_AT_REST = (
    "parameters were replaced after the last update, and training has not gone on since; they are "
    "brought back when it does"
)

MOST_SEARCHES = 4
"""Boundaries in a row that search the process for users of parameters' memory before only readers
have it searched."""

NEW_MEMORY = (
    "paramd: parameters get new memory at each update (%r at first; `p.data = ...`, for example), "
    "so they are copied back into paramd's each time: %.1f ms now, counted in attachment.stalls(). "
    "Write into their own memory instead: `p.data.clamp_(...)`, or `p.copy_(...)` under "
    "torch.no_grad()"
)

MOST_PATIENCE = 256
"""Most boundaries between two attempts to bring parameters back, after failures."""

# Plain ints cost a fraction of enum lookups, and these are read on every step.
_WANT, _ARM_STEP, _STEP = int(Word.WANT), int(Word.ARM_STEP), int(Word.STEP)
_BOUNDARY_NS, _STEP_TIME_NS = int(Word.BOUNDARY_NS), int(Word.STEP_TIME_NS)
_SEQ, _CLIENTS_UNTIL_NS = int(Word.SEQ), int(Word.CLIENTS_UNTIL_NS)


@dataclass(slots=True)
class _Entry:
    """A step in progress on one thread."""

    thread: int
    owner: Callable[[], object]
    depth: int = 1
    outermost: bool = True
    """Not nested in another owner's step on this thread, so it counts as an update."""
    raised: bool = False
    """Whether its owner has said that it raised; the others are seen on the stack."""
    followed_by: set[int] = field(default_factory=set)
    """Ids of the owners whose update ended while this one was open."""
    leads: bool = False
    """Whether the update's frame of gradients is that of this owner."""
    consumed: bool = False
    """Whether the owner has begun that frame in this try."""
    evaluates: bool = False
    """Whether its step was given a closure."""
    evaluated: bool = False
    """Whether the closure has returned in this try."""
    was: Literal["settled", "resting", ""] = ""
    """What readers had before the window opened."""


class Boundary:
    """Opens update windows, and settles them when training continues.

    An optimizer whose step raised leaves its window open, since its parameters may mix two
    steps; that owner's next successful step closes it. If it never tries again, the window closes
    when training continues after another owner's update: then these are the parameters that it
    trains with, and the step that raised counts as none. Any thread may call. An update is
    settled once every thread that took part in it has continued.
    """

    def __init__(
        self,
        page: ControlPage,
        wake_descriptor: int,
        home: ParameterStorage,
        agreement: Agreement,
        *,
        editor: Editor,
        copy_state: Callable[[Request], None] = lambda _: None,
        note_extra: Callable[[int], None] = lambda _: None,
        settles: Callable[[int], None] = lambda _: None,
        hold_cap_s: float,
        stall_budget_ns: int,
        mirror: MirroredHome | None = None,
        order: Callable[[], None] | None = None,
        device: TrainerDevice | None = None,
        always_strict: str = "",
        after_edit: Callable[[], None] = lambda: None,
    ) -> None:
        """`order`, `device`: as of `TrainerGate`. `settles`: called with the step at every proven
        boundary, while SEQ is odd; must not raise. `always_strict`: the parts of the model that
        change parameters outside updates.
        """
        self._page = page
        self._words = page.words
        self._wake_descriptor = wake_descriptor
        self._home = home
        self._editor = editor
        self._settles = settles
        self._gate = TrainerGate(
            page,
            stall_budget_ns=stall_budget_ns,
            mirrored=mirror is not None,
            order=order,
            device=device,
        )
        self._acting = BoundaryHandler(
            page,
            agreement,
            self._gate,
            home=home,
            hold=Hold(page.words, cap_s=hold_cap_s, clock_ns=time.monotonic_ns),
            editor=editor,
            copy_state=copy_state,
            note_extra=note_extra,
            answer=self._answer,
            mirror=mirror,
            after_edit=after_edit,
        )
        self._standing = StandIns(page, self._gate, self._digest, self._say)
        self._filled_from: tuple[bool, int] | None = None
        """Whether the state was settled before a step that only fills an optimizer's state, and the
        digest that it had at rest; None: no such step is in progress."""
        self._only_confirms = False
        self._lock = threading.RLock()
        self._open: dict[tuple[int, int], _Entry] = {}
        self._ended_by: set[int] = set()
        # Pending from the start: before the first forward a script may still load weights.
        self._pending = True
        self._in_backward = BackwardUpdate(self._end_on)
        self._done: int = page.words[Word.STEP]
        self._backwards = self._ended_at = 0
        self._iteration = 0
        self._trains_in_eval = False
        self._eval_forward = False
        self._ran_ahead = self._meets_forwards = False
        """Whether a forward has begun since the update without its boundary; whether boundaries of
        this training are at forwards."""
        self._want_seen = page.words[Word.WANT]
        self._armed_seen = 0
        self._tries = self._patience = 0
        self._refused: set[str] = set()
        """What was out of place when it was last tried to bring it back."""
        self._moved = self._searched = 0
        """Times in a row, update for update, that parameters came with new memory, and that the
        process was searched for it."""
        self._moved_at = self._done
        self._told_moved = False
        self._why = ""
        # Both are set later.
        self._outside = Outside(page, lambda: home.contents, lambda: [*home.states()])
        self._always_strict = always_strict
        self._strict_left = PROBATION
        self._forgotten = False
        self.by = [inside.who(), inside.who()]
        """Who trains: the callers of the last forward and of the last update."""
        self.keeper: Keeper | None = None
        self._keeper_announces = False
        self.rewinder: Rewinder | None = None
        self.gradients: GradientCapture | None = None
        if home.contents is not None:
            write_samples(page, home.contents.indices[:MAX_SAMPLES])
        # Odd until the first boundary: nothing has been verified yet.
        page.words[_SEQ] |= 1
        self._tell_strictness()
        self._rest()
        exit.register_at_exit(self)
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch_rest, name="paramd-rest", daemon=True)

    def start(self) -> None:
        """Start checking resting states in the background."""
        self._watcher.start()

    @property
    def step(self) -> int:
        """Finished updates, settled or not."""
        return self._done

    def iteration(self) -> int:
        """Backward passes this rank has seen; equal on all ranks in lock-step."""
        return self._backwards

    @property
    def trained(self) -> bool:
        """Whether a backward was seen since the last update."""
        return self._backwards != self._ended_at

    def follow_record(self, recorded: Callable[[], bool]) -> None:
        """Set what tells whether the last record has the hyper-parameters as they are."""
        self._outside.recorded = recorded

    def begin_filling(self) -> None:
        """A step begins that only fills an optimizer's state, and changes no parameter.

        Not an update, and no boundary: ranks may take it alone, to save a checkpoint. SEQ is odd
        meanwhile all the same: whether parameters keep their values is up to the optimizer.
        """
        with self._lock:
            if self._forgotten or self._open:
                return
            settled = not self._pending
            if settled:
                if not (self._standing.open or self._standing.void):
                    self._look_for_strays()
                # If the step raises, the next forward settles the state again.
                self._pending = self._only_confirms = True
            words = self._words
            digest = words[Word.REST_DIGEST] if words[Word.REST] else CHANGED
            self._filled_from = settled, digest
            self._gate.begin_update()

    def end_filling(self) -> None:
        """The step is over: the state is settled again, or rests as before."""
        with self._lock:
            before, self._filled_from = self._filled_from, None
            if before is None or self._forgotten or self._open:
                return
            settled, digest = before
            if settled and self._may_settle():
                self._pending = self._only_confirms = False
                self._confirm()
            else:
                # Its digest from before: what the script changed since the update still shows.
                self._rest(digest)

    @untraced
    def begin(self, owner: object, *, consumes: bool = True, evaluates: bool = False) -> None:
        """Open an update window unless one is open.

        `consumes`: the owner reads gradients next; False: `consumes` tells when. `evaluates`: its
        step was given a closure.
        """
        if self._forgotten:
            return
        self.by[1] = inside.who()
        if owner is not self._in_backward and self._in_backward.begins():
            self.begin(self._in_backward)
        with self._lock:
            thread = threading.get_ident()
            entry = self._open.get((thread, id(owner)))
            if entry is not None:
                # A subclass step calling its base's, or the owner's last step raised.
                if runs_inside_itself(owner):
                    entry.depth += 1
                else:
                    entry.depth = 1
                    entry.evaluates, entry.evaluated, entry.was = evaluates, False, ""
                    entry.consumed = False
                    self._gave_up_on_gradients()
                entry.raised = False
                entry.followed_by.clear()
                if consumes:
                    self._consume(owner, entry)
                return
            if self._open:
                self._drop_dead(owner)
                self._drop_given_up(owner)
            alone = not self._open
            under_way = [e for e in self._open.values() if not self._gave_up(e)]
            outermost = all(e.thread != thread for e in under_way)
            entry = _Entry(thread, weakref.ref(owner), outermost=outermost, evaluates=evaluates)
            self._open[thread, id(owner)] = entry
            # If none is under way, the window of a step that raised is open still.
            entry.leads = alone or not under_way
            if alone:
                self._open_window(owner, entry, consumes=consumes)
            elif consumes:
                self._consume(owner, entry)

    def consumes(self, owner: object) -> None:
        """The owner, whose update has begun, reads gradients next."""
        with self._lock:
            entry = self._open.get((threading.get_ident(), id(owner)))
            if entry is not None and not self._forgotten:
                self._consume(owner, entry)

    @untraced
    def suspend(self, owner: object) -> _Entry | None:
        """The owner's closure begins: it computes gradients with the parameters as they are.

        Returns what `resume` needs. Until then the update has not begun, and readers have the
        state before it. None if the window stays open: the owner may have changed parameters, or
        another update is in progress. The first evaluation alone is suspended: later ones are of
        parameters within the update.
        """
        with self._lock:
            key = threading.get_ident(), id(owner)
            entry = self._open.get(key)
            if entry is None or len(self._open) > 1 or self._forgotten:
                return None
            if entry.evaluated or not entry.was or self._strayed():
                return None
            del self._open[key]
            words = self._words
            if entry.was == "settled":
                self._gate.settle(words[_STEP], words[Word.ITERATION], proven=True)
                # Its digest is there already.
                words[Word.SETTLED_SEQ] = words[_SEQ]
            else:
                self._rest()
            return entry

    @untraced
    def resume(self, owner: object, entry: _Entry, *, consumes: bool) -> None:
        """The closure is over: the update begins. `consumes`: it has computed gradients."""
        with self._lock:
            if self._forgotten:
                return
            alone = not self._open
            self._open[entry.thread, id(owner)] = entry
            entry.evaluated, entry.leads, entry.consumed = True, alone, False
            if alone:
                self._open_window(owner, entry, consumes=consumes)

    @untraced
    def evaluated(self, owner: object) -> None:
        """The owner's closure has computed gradients amid the update.

        Those of the first evaluation count, and of later ones until parameters change.
        """
        with self._lock:
            entry = self._open.get((threading.get_ident(), id(owner)))
            if entry is None or self._forgotten:
                return
            first, entry.evaluated = not entry.evaluated, True
            if first or not self._strayed():
                self._consume(owner, entry)

    def raised(self, owner: object) -> None:
        """The owner's update raised on this thread: it stays open."""
        with self._lock:
            entry = self._open.get((threading.get_ident(), id(owner)))
            if entry is not None:
                entry.raised = True

    def end(self, owner: object) -> None:
        """End the owner's step; the state rests once no other step is in progress."""
        self._end_on(owner, threading.get_ident())

    def _end_on(self, owner: object, thread: int) -> None:
        if self._forgotten:
            return
        with self._lock:
            entry = self._open.get((thread, id(owner)))
            if entry is None:
                return
            entry.depth -= 1
            if entry.depth:
                return
            del self._open[thread, id(owner)]
            for other in self._open.values():
                other.followed_by.add(id(owner))
            if entry.outermost:
                self._done += 1
            if entry.leads and self.gradients is not None:
                self.gradients.publish(self._done, owner)
            self._ended_by.add(thread)
            self._pending, self._only_confirms, self._ended_at = True, False, self._backwards
            self._ran_ahead = False
            self._standing.void = ""
            if not self._open:
                if self.keeper is not None:
                    self.keeper.rested(self._done)
                self._outside.update_is_over(self._done)
                self._rest()

    def forward(self, *, trains: bool) -> None:
        """Note the start of a forward that may be differentiated."""
        if not self._pending:
            return
        self.by[0] = inside.who()
        self._eval_forward = not trains
        if trains or self._trains_in_eval:
            self._go_on()
            if self.rewinder is not None:
                # Out of the lock: it may raise.
                self.rewinder.leave()
        # A boundary that comes later finds the buffers that this forward leaves.
        self._ran_ahead = self._pending

    def backward(self) -> None:
        """Note the start of a backward, which proves training even in eval mode.

        Not a boundary: gradients are in flight, so no edit may be applied here. But a state
        that no forward has settled becomes readable.
        """
        self._backwards += 1
        self._in_backward.started()
        if self._eval_forward:
            self._trains_in_eval = True
        if self._may_settle() and self._all_over():
            with self._lock:
                self._confirm()

    def settle(self) -> None:
        """Settle now: the caller knows that this update is complete."""
        if self._may_settle() and self._all_over():
            with self._lock:
                self._ended_by.clear()
                self._boundary()

    @property
    def is_inside(self) -> bool:
        """Whether an update is open, or other weights stand in: no boundary can be here."""
        return bool(self._open or self._standing.open)

    def stay(self, wants: Callable[[], bool]) -> None:
        """Make this a boundary and stay at it, acting on what is agreed, while all ranks want to.

        Collective: all ranks call it at the same point, outside of updates.
        """
        with self._lock:
            if self._forgotten or self.is_inside:
                return
            self._acting.stays = wants
            try:
                # Also where this state is settled already: what is agreed needs a boundary.
                self._ended_by.clear()
                self._only_confirms = False
                self._boundary()
            finally:
                self._acting.stays = None

    def kept(self) -> None:
        """Complete the record of the state: the script changes nothing more of it."""
        with self._lock:
            idle = self._all_over() and not (self._forgotten or self._standing.open)
            # Not amid the next update, of which there are gradients.
            idle = idle and self._backwards == self._ended_at
            if self.keeper is not None and idle and self._trusted() and self._all_home():
                self._keep(self.keeper)

    def _keep(self, keeper: Keeper) -> None:
        """Write the record, and the buffers as they are now, under a SEQ that is odd.

        A forward may have settled the state already, or have changed buffers since: readers that
        copy it under an even SEQ, or at rest, copy it again.
        """
        words = self._words
        digest = words[Word.REST_DIGEST] if words[Word.REST] else CHANGED
        self._end_changed()
        settled = not words[_SEQ] & 1
        self._gate.begin_update()
        if words[Word.BUFFERS_STEP] >= 0:
            # Those of a boundary until now, which a reader may have been promised.
            words[Word.BUFFERS_STEP] = -1
        keeper.kept(self._done)
        if settled:
            self._outside.settles_again(self._done)
            self._gate.settle(self._done, self._iteration, proven=True)
            self._trust()
        else:
            self._rest(digest)

    def stand_in(self, label: str) -> bool:
        """Begin a block of other weights (standins.py); False once nothing is served any more."""
        with self._lock:
            if self._forgotten:
                return False
            # Strays until now came before the block; changes inside the block are no strays.
            settled = not self._pending or not self._words[_SEQ] & 1
            if settled and not (self._standing.open or self._standing.void):
                self._look_for_strays()
            try:
                self._standing.enter(label, self._done, self._iteration, why=self._why)
            except Exception:
                log.exception("paramd: the label %r could not be published", label)
            return True

    def training_weights_again(self, label: str, *, failed: bool) -> None:
        """End a block that `stand_in` began; `failed`: it raised."""
        with self._lock:
            if self._forgotten:
                return
            try:
                self._standing.leave(label, self._done, self._iteration, failed=failed)
            except Exception:
                log.exception("paramd: the label %r could not be withdrawn", label)
            if not self._standing.open and not self._pending:
                # Its boundary was before the block: settle again, without a round of the ranks.
                self._pending = self._only_confirms = True

    def forget(self) -> None:
        """Go inert in a forked child: words and rounds belong to the parent."""
        self._forgotten = True
        self._pending = False
        # A parent thread may have held the old lock at the fork; nobody here would release it.
        self._lock = threading.RLock()
        self._acting.forget()

    def close(self) -> None:
        """Finish the round in flight; no boundary follows."""
        self._forgotten = True
        self._closing.set()
        if self._watcher.is_alive():
            self._watcher.join()
        self._acting.close()

    def leave(self) -> None:
        """Process exit: settle a resting state that is unchanged, as the final one."""
        contents = self._home.contents
        if self._forgotten or not self._pending or self._open or contents is None:
            return
        self._forgotten = True
        if contents.digest() == self._words[Word.REST_DIGEST] and self._verified():
            self._gate.settle(self._done, self._iteration, proven=True)
            self._acting.leave()

    def _drop_dead(self, owner: object) -> None:
        """Drop entries of owners that are gone after an error, and this one's of dead threads."""
        alive = {t.ident for t in threading.enumerate()}
        for (thread, number), entry in list(self._open.items()):
            if entry.owner() is None or (number == id(owner) and thread not in alive):
                del self._open[thread, number]
                self._gave_up_on_gradients()

    def _gave_up(self, entry: _Entry) -> bool:
        """Whether an update that is open is in progress no more: it raised."""
        owner = entry.owner()
        if entry.raised or owner is None:
            return True
        if owner is self._in_backward:
            return not self._in_backward.runs(entry.thread)
        # An owner that is no optimizer says so itself.
        return isinstance(owner, torch.optim.Optimizer) and not is_stepping(owner, entry.thread)

    def _drop_given_up(self, owner: object = None) -> bool:
        """Drop the open updates that raised, when training goes on without them.

        That shows once another update has ended since. `owner`: begins an update, which shows it
        only if it has ended one since: until then its own iteration may be the one that raised.
        Returns whether any was dropped.
        """
        found = [
            key
            for key, entry in self._open.items()
            if (entry.followed_by if owner is None else id(owner) in entry.followed_by)
            and self._gave_up(entry)
        ]
        for key in found:
            del self._open[key]
        if found:
            self._gave_up_on_gradients()
            log.info("paramd: %d updates raised and were not tried again", len(found))
        return bool(found)

    def _all_over(self) -> bool:
        """Whether no update is in progress, now that training continues."""
        if not self._open:
            return True
        with self._lock:
            self._drop_given_up()
            return not self._open

    def _open_window(self, owner: object, entry: _Entry, *, consumes: bool) -> None:
        """Make SEQ odd, after settling what is still pending, if possible."""
        if self._pending:
            self._boundary()
        words, contents = self._words, self._home.contents
        self._outside.update_begins(self._done)
        if not (self._standing.open or self._standing.void):
            # A step that was suspended has had its span counted.
            self._look_for_strays(counts=not entry.evaluated)
            if entry.evaluates and contents is not None and self._remembered(contents):
                at_rest: Literal["resting", ""] = "resting" if words[Word.REST] else ""
                entry.was = at_rest if words[_SEQ] & 1 else "settled"
        # SEQ is still even here unless strict, so parameter copies keep running meanwhile.
        if consumes:
            self._consume(owner, entry)
        self._gate.begin_update()
        self._iteration = self._backwards

    def _remembered(self, contents: Contents) -> bool:
        """Record all of the contents: whether a step has changed anything is asked right away."""
        try:
            contents.remember()
        except Exception:
            # A module has given a parameter up, so this state is not served, and no reader has it.
            log.debug("paramd: the parameters cannot be recorded", exc_info=True)
            contents.forget()
            return False
        return True

    def _consume(self, owner: object, entry: _Entry) -> None:
        """The owner reads gradients next: have them captured."""
        self._outside.consumes()
        if self.gradients is None:
            return
        within = not entry.outermost or (entry.depth > 1 and entry.consumed)
        if within or entry.leads:
            self.gradients.capture(owner, self._done + 1, within=within)
            entry.consumed = True

    def _gave_up_on_gradients(self) -> None:
        """A try to update has raised: what was said of its gradients is not of later ones."""
        if self.gradients is not None:
            self.gradients.retried()

    def _rest(self, digest: int | None = None) -> None:
        """Publish that the state rests, if it is in the arena. `digest`: of its samples; None: as
        they are now.
        """
        contents = self._home.contents
        try:
            if contents is None:
                # A mirror is never read at rest; this only records that no update is running.
                self._gate.rest(self._done, self._iteration, 0)
            elif not self._editor.failed and not self._home.check():
                if self._standing.open:
                    digest = CHANGED
                elif digest is None:
                    digest = contents.digest()
                self._gate.rest(self._done, self._iteration, digest)
        except Exception:
            log.debug("paramd: the parameters cannot be checked", exc_info=True)

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
        """Publish whether a resting state is still where it was when the update ended.

        Between updates a script may replace parameters by other tensors, which no sample of the
        arena shows. So the sidecar accepts a copy at rest only once a look that began after the
        copy has found everything in place.
        """
        words = self._words
        if self._forgotten or self._home.contents is None or not words[Word.REST]:
            return
        # Busy: the training thread is at a boundary, so nothing rests.
        if not self._lock.acquire(blocking=False):
            return
        try:
            # Before the look: REST_SEEN_NS is when it began, and vouches for copies before that.
            now_ns = time.monotonic_ns()
            if not words[Word.REST]:
                return
            # Of fully_shard the shards, which stay where they are while a forward, or what an
            # evaluation has left, works on gathered copies.
            if self._home.in_place():
                words[Word.REST_SEEN_NS] = now_ns
                if self._why == LEFT_AT_REST:
                    self._say("")
            elif not self._why:
                self._say(LEFT_AT_REST)
        except Exception:
            log.debug("paramd: the parameters cannot be checked", exc_info=True)
        finally:
            self._lock.release()

    def _may_settle(self) -> bool:
        return self._pending and not self._forgotten and not self._standing.open

    def _digest(self) -> int:
        contents = self._home.contents
        return contents.digest() if contents is not None else CHANGED

    def _go_on(self) -> None:
        if not self._may_settle() or not self._all_over():
            return
        with self._lock:
            self._ended_by.discard(threading.get_ident())
            if self._ended_by:
                self._ended_by &= {t.ident for t in threading.enumerate() if t.ident is not None}
            if not self._ended_by and self._may_settle() and not self._open:
                self._boundary(keeps=True)

    def _confirm(self) -> None:
        """Settle the state; its boundary comes with the next update."""
        try:
            proven = self._verified()
            self._end_changed()
            self._outside.settles(self._done, moved=self._moved_at == self._done)
            self._gate.settle(self._done, self._iteration, proven=proven)
            if proven:
                self._trust()
        except Exception:
            log.exception("paramd: parameters could not be verified")

    def _end_changed(self) -> None:
        """End a settled state that was changed since: settled again, it needs another SEQ."""
        if self._words[Word.SETTLED_SEQ] == self._words[_SEQ] and self._strayed():
            self._note_stray()
            self._gate.begin_update()

    def _trust(self) -> None:
        """Record the settled contents to detect stray changes; when strict, make SEQ odd again."""
        contents = self._home.contents
        if contents is None:
            return
        words = self._words
        # Without readers or earlier strays, a tensor that strays may wait its turn to be noticed.
        quiet = words[_CLIENTS_UNTIL_NS] < words[_BOUNDARY_NS]
        contents.remember(sparing=quiet and not self._strict_left)
        digest = contents.digest()
        self._note_settled(digest)
        # The digest first: a reader that finds the SEQ takes the digest for that state's.
        words[Word.SETTLED_DIGEST] = digest
        words[Word.SETTLED_SEQ] = words[_SEQ]
        self._outside.has_settled(self._done)
        if self._strict_left or self._always_strict:
            # Copies got their even SEQ while this waits; later reads find a resting state.
            self._gate.begin_update()
            self._rest()

    def _note_settled(self, digest: int) -> None:
        """Publish whether the state that has settled is what its update left, by its samples.

        Before another rest begins under the same step (strict mode), whose digest is of that.
        """
        words = self._words
        moment = in_time(self._done, rewound=words[Word.REWOUND])
        if words[Word.SETTLED_AS] >> 1 == moment:
            left = words[Word.SETTLED_DIGEST]
        else:
            left = words[Word.REST_DIGEST] if words[Word.REST_STEP] == self._done else CHANGED
        note_settled(self._page, moment, changed=digest != left)

    def _boundary(self, *, keeps: bool = False) -> None:
        """Settle the state and do what this boundary calls for.

        `keeps`: at a forward, where the script has finished the step. Elsewhere it may not have,
        or the next step's forward is over.
        """
        self._pending = False
        self._meets_forwards |= keeps
        self._acting.buffers_fit = keeps or not (self._ran_ahead and self._meets_forwards)
        if self._only_confirms:
            self._only_confirms = False
            self._confirm()
            return
        try:
            proven = self._verified()
            self._end_changed()
            if proven:
                self._settles(self._done)
            if proven and self.keeper is not None:
                ask = self.keeper.settling if keeps else self.keeper.ended
                self._keeper_announces = ask(self._done, trusted=self._trusted())
            self._outside.settles(self._done, moved=self._moved_at == self._done)
            self._gate.settle(self._done, self._iteration, proven=proven)
            self._note_time(time.monotonic_ns())
            self._act(proven, at_forward=keeps)
            if proven:
                self._trust()
        except Exception:
            log.exception("paramd: a boundary failed; the service degrades, training continues")

    def _act(self, proven: bool, *, at_forward: bool) -> None:
        rewinder = self.rewinder
        if rewinder is None:
            self._acting.at_boundary(proven, self._backwards)
            return
        rewinder.at_forward = at_forward
        try:
            self._acting.at_boundary(proven, self._backwards)
        finally:
            rewinder.at_forward = False
            step = rewinder.taken()
            if step is not None:
                # Settled again when training continues from there.
                self._done, self._pending, self._armed_seen = step, True, 0
                self._outside.forget()

    def _trusted(self) -> bool:
        """Whether nothing is known to change the parameters outside of updates."""
        strays = self._words[Word.STRAY_COUNT] and self._strict_left
        return not (self._always_strict or strays)

    def _all_home(self) -> bool:
        """As `_verified`; but for a settled state, whose SEQ is even, only its place is checked."""
        if self._pending:
            return self._verified()
        try:
            return not self._home.check()
        except Exception:
            log.debug("paramd: the parameters cannot be checked", exc_info=True)
            return False

    def _verified(self) -> bool:
        """Whether the arena holds what training uses; if not, the page says why."""
        if self._standing.open:
            return False
        if self._standing.void:
            self._say(self._standing.void)
            return False
        if self._editor.failed:
            self._say("an edit failed half way on this rank; the trainer's log says why")
            return False
        try:
            left = self._home.check()
            if left and not self._brought_back(left):
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

    def _brought_back(self, left: list[str]) -> bool:
        if replaced_for_a_call():
            # Nothing has left the arena; a boundary outside the call will find it.
            self._say(
                "the forward runs within torch.func.functional_call, with other tensors; put the "
                "optimizer's step into attachment.update(), which settles it outside of the call"
            )
            return False
        if self.gradients is not None:
            # Replaced parameters need no memory, and would get some for whoever still has them.
            self.gradients.forget_plans()
        if self._patience and not set(left) < self._refused:
            # Finding every user of the memory takes tens of milliseconds: back off, unless some of
            # what was refused is in place again.
            self._patience -= 1
            return False
        self._refused = set(left)
        begin_ns = time.monotonic_ns()
        if self._done > self._moved_at + 1:
            self._moved = self._searched = 0
        self._moved_at = self._done
        names = self._home.copy_back()
        if names:
            self._searched = 0
        elif self._searched >= MOST_SEARCHES and not self._wanted():
            # The state stays unsettled: whoever reads it asks for a boundary, and it is searched.
            if self._home.contents is not None:
                self._home.contents.forget()
            return False
        else:
            names = self._home.take_back()
            self._searched += 1
            log.info("paramd: brought %d parameters back, first %s", len(names), names[:1])
        took_ns = time.monotonic_ns() - begin_ns
        self._gate.note_stall(took_ns)
        self._moved += 1
        if self._moved == MOST_SEARCHES and not self._told_moved:
            self._told_moved = True
            log.warning(NEW_MEMORY, names[0] if names else "", took_ns / 1e6)
        return True

    def _wanted(self) -> bool:
        """Whether anybody needs this boundary's state: readers, or a later trainer."""
        words = self._words
        return bool(
            self.keeper is not None
            or words[_WANT] != self._want_seen
            or words[Word.READY] > words[Word.AGREED]
            or words[Word.EXPECTED_NS] > time.monotonic_ns()
            or words[Word.HELD]
            # All ranks stay here for what this state is asked for.
            or self._acting.stays is not None
        )

    def _say(self, why: str, *, unserved: int = 1) -> None:
        if why != self._why:
            self._why = why
            write_text(self._page, why)
            self._words[Word.UNSERVED] = unserved if why else 0

    def _look_for_strays(self, *, counts: bool = True) -> None:
        """Compare parameters with the settled ones; go strict if they differ.

        `counts`: if they do not, this was one more clean span.
        """
        if self._home.contents is None:
            return
        if self._strayed():
            self._note_stray()
        elif self._strict_left and counts:
            self._strict_left -= 1
            self._tell_strictness()

    def _strayed(self) -> bool:
        contents = self._home.contents
        try:
            return contents is not None and contents.strayed()
        except Exception:
            log.exception("paramd: parameters could not be compared")
            return True

    def _note_stray(self) -> None:
        words = self._words
        if not words[_SEQ] & 1:
            note_stray(words, words[_SEQ])
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
        """Wake the sidecar for an agreed request, or if it asked for this boundary."""
        words = self._words
        want, armed = words[_WANT], words[_ARM_STEP]
        if armed and armed != self._armed_seen and armed == words[_STEP]:
            self._armed_seen = armed
            announce = True
        if self._keeper_announces:
            self._keeper_announces, announce = False, True
        if announce or want != self._want_seen:
            self._want_seen = want
            # Before the wake: the sidecar answers the ANNOUNCE it reads, and we wait for SERVED.
            words[Word.ANNOUNCE] += 1
            wake(self._wake_descriptor)

    def _note_time(self, now_ns: int) -> None:
        words = self._words
        last_ns, words[_BOUNDARY_NS] = words[_BOUNDARY_NS], now_ns
        if last_ns:
            smoothed, latest = words[_STEP_TIME_NS], now_ns - last_ns
            words[_STEP_TIME_NS] = latest if smoothed == 0 else (7 * smoothed + latest) // 8
