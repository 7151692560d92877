"""A running job, its reference, and what counts as a defect.

A `Session` starts the training, asks it through one client, and compares. Operations run one after
another, so what an answer may be of is known: the present segment of the reference, or for frames
of streams any since the last frame.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import psutil
import torch

import paramd
from paramd.errors import (
    AbortedError,
    ConflictError,
    DeadlineError,
    ExhaustedError,
    ParamdError,
    PartialError,
    UnreachableError,
)
from paramd.layout.edits.ops import EditState
from paramd.mesh.edits.calls import Edit
from paramd.mesh.mesh import Mesh
from paramd.mesh.peers.grpc import LeaseEndedError
from paramd.mesh.results import Summoned
from tests import longer
from tests.gpu.driver import environment
from tests.launch import Ranks, start_ranks
from tests.multiprocess.striking import allowed_s
from tests.sequences import model
from tests.sequences.model import PARTITIONED, TIED, WORLD_SIZES, State, names_of
from tests.sequences.reference import Event, Incarnation, Reference, differing, same, value

TRAINING = "tests.sequences.training"
JOB = "main"
START_S = 60.0
CALL_S = 15.0
"""Deadline of a call of a healthy job; longer on a busy machine."""
RECOVERY_S = 25.0
"""Within this time after a fault a call may be refused as unreachable, and is made again."""
MOST_PATIENCE = 2
RETRYABLE = (UnreachableError, AbortedError, ExhaustedError, PartialError, DeadlineError)
STAND_IN_EVERY, STAND_IN_S = 60, 0.8
"""Longer than the half second after which a training counts as resting, or nobody sees them."""
SHORT = {
    "PARAMD_IDLE_MEMORY_S": "0.3",
    "PARAMD_DEFAULT_LEASE_S": "2",
    "PARAMD_EDIT_EXPIRY_S": "2",
    "PARAMD_GRACE_S": "0.5",
    "PARAMD_STANDING_EVERY": "10",
    "PARAMD_LINGER_S": "120",
}
"""Every time that can be set, so that each way to release or expire is walked again and again."""

STARVED = 4.0
"""Runnable processes for each core."""
LEASES = ("PARAMD_DEFAULT_LEASE_S", "PARAMD_EDIT_EXPIRY_S")
LONGEST_LEASE_S = 60.0

Result = TypeVar("Result")


class DefectError(AssertionError):
    """A wrong value, an unfit refusal, or a hang."""


class NotNowError(Exception):
    """The operation has nothing to do in this state."""


@dataclass(eq=False)
class Stream:
    """A subscription that is kept over other operations."""

    frames: Iterator[Any]
    kind: str
    since: tuple[int, int]
    """Incarnation and edits when the last frame came."""
    how: str
    lives: int


@dataclass
class Counts:
    """What a session has done."""

    answers: int = 0
    edits: int = 0
    rollbacks: int = 0
    kills: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(mine + its for mine, its in zip(
            vars(self).values(), vars(other).values(), strict=True)))  # fmt: skip

    def __str__(self) -> str:
        return ", ".join(f"{number} {name}" for name, number in vars(self).items())


@dataclass(eq=False)
class Session:
    """One training with its client and reference. Use as a context manager."""

    kind: str
    stands_in: bool = True
    """Whether other weights stand in for the training's own now and then."""
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        self.names = names_of(self.kind)
        self.shown = [*self.names, *TIED]
        self.world_size = WORLD_SIZES[self.kind]
        self.resume = "never" if self.kind in ("mirror", *PARTITIONED) else "auto"
        self.mirrored = self.kind in ("mirror", "megatron")
        self.stands_in = self.stands_in and self.kind not in PARTITIONED
        self.has_gradients = self.kind != "deepspeed"
        """DeepSpeed frees them partition by partition; frames say so."""
        self.reference = Reference(model.beginning(self.kind))
        self.mesh: Mesh = None  # type: ignore[assignment]
        self.streams: dict[str, Stream] = {}
        self.marks: dict[str, tuple[int, State, int]] = {}
        self.exports: dict[str, tuple[int, State]] = {}
        self.schedules: list[tuple[str, str, float]] = []
        self.summoned: list[Summoned] = []
        self.captured: dict[str, int] = {}
        """The update of the last frame, by kind of subscription."""
        self.log: Any = None
        """What is logged into a tracker meanwhile (`reading.Log`)."""
        self.held_at: int | None = None
        self.struck_s = -1e9
        self.lives = 0
        """Counts what ended the memory of a sidecar."""
        self.seen, self.bare_until = 0, 0
        """Step of the last answer; and up to which one new sidecars may have kept no snapshot."""
        self.subjects: Sequence[str] = ()
        """Patterns that operations take instead of drawing some."""
        self.number = 0
        self._newest = (0, 0, 0)

    def __enter__(self) -> Session:
        with ExitStack() as stack:
            self.folder = Path(tempfile.mkdtemp(prefix="sequences-"))
            stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
            for name in ("state", "exports", "device"):
                (self.folder / name).mkdir(mode=0o700)
            self._stack = stack
            self.launch()
            os.environ["PARAMD_STATE_DIR"] = str(self.folder / "state")
            stack.callback(self._close)
            self.connect()
            self.begin()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def slower(self) -> float:
        """How many times as long what renews a lease may take: by the load, and the readers."""
        return max(longer.busy(), 1.0 + self.crowd() / 2)

    def crowd(self) -> int:
        """Threads that read beside the operations."""
        return 0

    # The job

    def launch(self) -> None:
        """Starts all ranks."""
        env = (
            SHORT
            | leases(self.slower())
            | {
                "PARAMD_DESTINATIONS": json.dumps({"disk": str(self.folder / "exports")}),
                "PARAMD_ARENA": self.kind if self.kind in ("mirror", "device") else "auto",
                **self.settings(),
            }
        )
        if self.kind == "device":
            env |= environment(self.folder / "device", late_us=100) | {"PARAMD_GPU_TESTS_ON": "cpu"}
        for told in ("again", "end"):
            (self.folder / told).unlink(missing_ok=True)
        module, more = self.program()
        args = ["--kind", self.kind, "--folder", str(self.folder), "--resume", self.resume, *more]
        if self.stands_in:
            args += ["--stand-in-every", str(STAND_IN_EVERY), "--stand-in-s", str(STAND_IN_S)]
        self.ranks: Ranks = self._stack.enter_context(
            start_ranks(
                module, self.world_size, args=args, env=env, state_dir=self.folder / "state"
            )
        )
        self.attachments = 0

    def program(self) -> tuple[str, list[str]]:
        """The module that each rank runs, and what it is told beside kind and folder."""
        return TRAINING, []

    def settings(self) -> dict[str, str]:
        """More settings of the job."""
        return {}

    def check_beside(self) -> None:
        """Raises DefectError: what runs beside the operations has found something."""

    def check_alive(self) -> None:
        """Raises DefectError: ranks have ended by themselves."""
        dead = [r.rank for r in self.ranks if r.process.poll() is not None]
        if dead:
            raise DefectError(f"ranks {dead} ended by themselves\n{self.ranks.outputs()}")

    def attached(self) -> tuple[int, int, str]:
        """Waits for the next incarnation that rank 0 tells of: its number, step, and how."""
        pattern = r"attached incarnation (\d+) step (\d+) (\w+ .*)\n"

        def told() -> list[Any]:
            self.check_alive()
            return re.findall(pattern, self.ranks[0].stdout)[self.attachments :]

        wait_for(told, "the training attaches", START_S)
        number, step, how = told()[0]
        self.attachments += 1
        return int(number), int(step), how

    def begin(self, former: Incarnation | None = None, *, lost: bool = False) -> str:
        """Finds out what a new incarnation goes on from, and checks that it may.

        Args:
            former: Whose states it may go on from; None: it begins afresh.
            lost: Nothing was kept in memory, so it may begin afresh.
        """
        number, step, how = self.attached()
        self.held_at, self.marks = None, {} if lost else self.marks
        if former is None:
            self.reference.begin(number, step, self.reference.first)
            self.reconnect(number)
            self.ask(
                "the first answer", lambda: self.mesh.summon("*", buffers=True, timeout=CALL_S)
            )
            return how
        if how.startswith("export") and not lost:
            raise DefectError(
                f"incarnation {number} goes on from an export, at step {step}, though the training "
                f"or its memory was there; it was in segment {former.edits}, begun at step "
                f"{former.begins[-1][0]}"
            )
        candidates = self._candidates(step)
        if (lost or self.seen < self.bare_until) and step == 0:
            candidates = [("afresh", self.reference.first), *candidates]
        self.struck()
        self.reconnect(number)
        found = self.ask("the first answer", lambda: self.mesh.summon("*", timeout=CALL_S))
        if found.incarnation != number:
            raise NotNowError("another incarnation")
        for name, state in candidates:
            begun = Incarnation(step, state).state(0, found.step)
            if found.edits == 0 and all(same(x, value(begun, n)) for n, x in found.items()):
                self.reference.begin(number, step, state)
                return f"{how} at step {step}, {name}"
        left = [
            edits for edits in range(former.edits + 1) if former.had(edits, step)
            and all(
                same(x, value(Incarnation(step, former.state(edits, step)).state(0, found.step), n))
                for n, x in found.items()
            )
        ]  # fmt: skip
        what = f"the steps that were left, edits {left}" if left else "no state that there was"
        raise DefectError(
            f"incarnation {number} goes on ({how}) at step {step} from {what}; "
            f"the training was in segment {former.edits}, begun at {former.begins[-1][0]}"
        )

    def _candidates(self, step: int) -> list[tuple[str, State]]:
        """What a successor may go on from: nothing from before the last rollback. A training that
        died before a snapshot was kept goes on from one of the incarnation before."""
        found = []
        for number in sorted(self.reference.incarnations, reverse=True):
            one = self.reference.incarnations[number]
            for edits in range(one.edits, -1, -1):
                if one.had(edits, step):
                    found.append((f"run {number}, edits {edits}", one.state(edits, step)))
                event = one.events[edits]
                if event is not None and event.back_to is not None:
                    return found
            if one.begins[0][0] <= step:
                break
        return found

    def connect(self) -> None:
        """A client; waits until there is somebody to answer."""

        def connected() -> bool:
            try:
                self.mesh = paramd.connect(job=JOB, timeout=CALL_S)
            except ParamdError:
                self.check_alive()
                return False
            return True

        wait_for(connected, "the job can be connected to", START_S)

    def reconnect(self, number: int) -> None:
        """Another client, once a new incarnation answers."""

        def there() -> bool:
            if self.mesh.incarnation >= number:
                return True
            self.disconnect()
            self.connect()
            with suppress(ParamdError):
                self.mesh.summon("one.weight", timeout=2)
            return self.mesh.incarnation >= number

        wait_for(there, f"incarnation {number} answers", START_S)

    def disconnect(self) -> None:
        """Ends the client with its streams."""
        for name in list(self.streams):
            self.drop(name)
        self.held_at = None
        self.mesh.close()

    def drop(self, name: str) -> None:
        """Ends a stream."""
        with suppress(ParamdError, RuntimeError, ValueError):
            self.streams.pop(name).frames.close()  # type: ignore[attr-defined]

    def end_log(self) -> None:
        """Ends what logs."""
        if self.log is not None:
            self.log.end()
        self.log = None

    def _close(self) -> None:
        self.end_log()
        if self.mesh is not None:
            with suppress(ParamdError, DefectError):
                bounded(self.disconnect, patience_s(10))

    def helpers(self, program: str, rank: int | None = None) -> list[psutil.Process]:
        """Living sidecars or control planes of the job."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                command = process.cmdline()
                if f"paramd_service.{program}" not in command:
                    continue
                if process.environ().get("PARAMD_STATE_DIR") != str(self.folder / "state"):
                    continue
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if rank is None or command[command.index("--rank") + 1] == str(rank):
                    found.append(process)
        return found

    # What counts as a defect

    def struck(self, *, lives: bool = False) -> None:
        """A fault begins, or ends, now."""
        self.struck_s = time.monotonic()
        self.lives += lives
        if lives:
            self.bare_until = sys.maxsize

    @property
    def disturbed(self) -> bool:
        """Whether a fault may still be felt."""
        return time.monotonic() < self.struck_s + patience_s(RECOVERY_S)

    def ask(
        self, what: str, call: Callable[[], Result], *, fit: tuple[type[Exception], ...] = ()
    ) -> Result:
        """Makes a call until it is answered.

        Raises:
            NotNowError: it was refused with one of `fit`.
            DefectError: it was refused otherwise without a fault, or not answered long after one.
        """
        until_s = time.monotonic() + patience_s(RECOVERY_S)
        unmended: Exception | None = None
        while True:
            disturbed = self.disturbed
            try:
                found = call()
            except (*fit, *late_ones()) as error:
                raise NotNowError(f"{type(error).__name__}: {str(error)[:90]}") from error
            except RETRYABLE as error:
                self.check_alive()
                if not disturbed:
                    raise DefectError(f"{what}: refused without a fault: {error!r}") from error
                if time.monotonic() > until_s:
                    raise DefectError(f"{what}: not mended in time: {error!r}") from error
                time.sleep(0.2)
            except (ParamdError, ValueError, LookupError, TypeError) as error:
                self.check_alive()
                if (unmended is not None and time.monotonic() > until_s) or not disturbed:
                    raise DefectError(f"{what}: refused: {error!r}") from error
                unmended = error
                time.sleep(1.0)
            else:
                if unmended is not None:
                    raise DefectError(
                        f"{what}: a later try mended what nobody retries: {unmended!r}"
                    )
                self.counts.answers += 1
                return found

    @property
    def now(self) -> Incarnation:
        return self.reference.incarnations[max(self.reference.incarnations)]

    @property
    def incarnation(self) -> int:
        return max(self.reference.incarnations)

    def judge(
        self, what: str, found: Any, got: Mapping[str, Any] | None = None, *,
        wanted: Callable[[State, str], torch.Tensor] = value, edits: range | None = None,
        differs: Callable[[Any, torch.Tensor], str] = differing,
    ) -> State:  # fmt: skip
        """Compares an answer with the state that it says it is of, and returns that.

        Args:
            found: Has `incarnation` and `step`, and is `got` by default: values by name.
            edits: The segments that it may be of; None: the last one of its incarnation.
        """
        history = self._history(what, found.incarnation)
        self.seen = found.step
        self.bare_until = min(self.bare_until, found.step + 3 * int(SHORT["PARAMD_STANDING_EVERY"]))
        segments = edits if edits is not None else range(history.edits, history.edits + 1)
        possible = [e for e in segments if 0 <= e <= history.edits and history.had(e, found.step)]
        where = f"{what}, step {found.step}, edits {list(segments)[:3]}"
        values = got if got is not None else found
        states = ((e, history.state(e, found.step)) for e in reversed(possible))
        return self._matching(where, states, wanted, values, differs)

    def judge_gradients(
        self, what: str, frame: Any, got: Mapping[str, Any], edits: range, *,
        cut: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
        differs: Callable[[Any, torch.Tensor], str] = differing,
    ) -> None:  # fmt: skip
        """The same for a frame of gradients."""
        history, update = self._history(what, frame.incarnation), frame.step
        possible = [e for e in edits if 0 <= e <= history.edits and history.made(e, update)]
        where = f"{what}, update {update}, edits {list(edits)[:3]}"
        for name in got:
            given = self.has_gradients and model.takes_part(TIED.get(name, name), update)
            if given != (got[name] is not None):
                raise DefectError(f"{where}: {name} {frame.none.get(name, 'has a gradient')!r}")
        self._matching(
            where, ((e, history.state(e, update - 1)) for e in reversed(possible)),
            lambda state, n: cut(model.gradient(TIED.get(n, n), value(state, n), update)),
            {n: x for n, x in got.items() if x is not None}, differs,
        )  # fmt: skip

    def _history(self, what: str, incarnation: int) -> Incarnation:
        if incarnation not in self.reference.incarnations:
            raise DefectError(f"{what}: of incarnation {incarnation}, which never was")
        return self.reference.incarnations[incarnation]

    def _matching(
        self, where: str, states: Iterator[tuple[object, State]],
        wanted: Callable[[State, str], torch.Tensor], got: Mapping[str, Any],
        differs: Callable[[Any, torch.Tensor], str],
    ) -> State:  # fmt: skip
        said: list[str] = []
        for _, state in states:
            texts = {n: differs(x, wanted(state, n)) for n, x in got.items()}
            bad = [f"{n}: {text}" for n, text in texts.items() if text]
            if not bad:
                return state
            said = said or bad
        if not said:
            raise DefectError(f"{where}: there was no such state")
        told = "\n  ".join(said[:6])
        raise DefectError(f"{where}: {len(said)} of {len(got)} are wrong\n  {told}")

    def in_order(self, incarnation: int, step: int) -> None:
        """No later answer of a settled state is of a lower step, but for rollbacks."""
        rollbacks = sum(
            event is not None and event.back_to is not None
            for event in self.reference.incarnations[incarnation].events
        )
        if (incarnation, rollbacks, step) < self._newest and not self.disturbed:
            raise DefectError(f"step {step} after {self._newest}")
        self._newest = max(self._newest, (incarnation, rollbacks, step))

    # Changes

    def note(self) -> str:
        """A text that no other edit has."""
        self.number += 1
        return f"sequence {self.number}"

    def change(
        self, event: Event, call: Callable[[], Edit], note: str, *, refused: bool | None = False
    ) -> Edit:
        """Makes an edit and takes it into the reference.

        Args:
            note: By which it is found if the call did not learn its end; or what it undoes.
            refused: Whether a ConflictError is what belongs here; None: it may be.
        """
        disturbed = self.disturbed
        edit: Edit | None = None
        try:
            edit = call()
        except RETRYABLE as error:
            if not disturbed and not isinstance(error, DeadlineError):
                raise DefectError(f"{event.what}: refused without a fault: {error!r}") from error
            edit = self._found(note)
            if edit is None:
                raise NotNowError(f"not begun: {str(error)[:80]}") from error
        except ConflictError as error:
            if refused is False and not disturbed and not self.disturbed:
                raise DefectError(f"{event.what}: refused: {error}") from error
            # What it wrote at all must have been written nowhere; the next answers show it.
            raise NotNowError(f"refused: {str(error)[:100]}") from error
        edit = self._ended(edit)
        if edit.state is not EditState.APPLIED:
            if refused is False and not disturbed and not self.disturbed:
                raise DefectError(f"{event.what}: {edit.state} without a fault: {edit.reason}")
            raise NotNowError(f"{edit.state}: {edit.reason[:80]}")
        if refused:
            raise DefectError(f"{event.what}: applied at step {edit.step}, expected a refusal")
        if edit.incarnation != self.incarnation:
            raise DefectError(f"{event.what}: of incarnation {edit.incarnation}")
        event.id, event.lives = edit.id, self.lives
        self.now.add(event, edit.step)
        self.counts.edits += 1
        return edit

    def _ended(self, edit: Edit) -> Edit:
        until_s = time.monotonic() + patience_s(RECOVERY_S)
        while not edit.ended:
            if time.monotonic() > until_s:
                raise DefectError(f"edit {edit.id} stays {edit.state} for ever: {edit.reason}")
            with suppress(*RETRYABLE):
                edit = self.mesh.get_edit(edit.id, wait=True, timeout=3)
        return edit

    def _found(self, note: str) -> Edit | None:
        rows = self.ask("the edits", lambda: self.mesh.edits(limit=5))
        return next((row for row in rows if note in (row.note, row.undo_of)), None)

    # What operations draw

    def patterns(self, rng: Random) -> list[str]:
        """Some parameters."""
        if self.subjects:
            return list(self.subjects)
        return rng.choice(
            [["*"], ["*"], ["blocks.*"], [rng.choice(self.shown)], rng.sample(self.shown, 3)]
        )

    def running(self, *, perhaps: bool = False) -> None:
        """Lets go of what is held; `perhaps`: it may be held without our knowing."""
        if self.held_at is not None or perhaps:
            self.held_at = None
            self.ask("resume", lambda: self.mesh.resume(timeout=CALL_S))


def late_ones() -> tuple[type[Exception], ...]:
    """Errors that say that something came too late, where everything does; a hang is still one."""
    return (DeadlineError, LeaseEndedError) if longer.busy() > STARVED else ()


def leases(slower: float) -> dict[str, str]:
    """As in `SHORT` on a calm machine. On a busy one nothing that is alive renews them in time."""
    return {name: f"{min(LONGEST_LEASE_S, float(SHORT[name]) * slower):g}" for name in LEASES}


def patience_s(seconds: float) -> float:
    """What a limit means on a busy machine, but never much longer: what hangs is to be told."""
    return min(allowed_s(seconds), MOST_PATIENCE * seconds)


def wait_for(done: Callable[[], Any], what: str, seconds: float) -> None:
    """Polls a condition; a defect when it does not come true in time."""
    until_s = time.monotonic() + patience_s(seconds)
    while not done():
        if time.monotonic() > until_s:
            raise DefectError(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.02)


def bounded(work: Callable[[], Result], seconds: float) -> Result:
    """Runs an operation in a thread of its own; a defect if it hangs."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append((work(), None))
        except BaseException as error:
            result.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not result:
        raise DefectError(f"hangs for {seconds:.0f} s")
    found, error = result[0]
    if error is not None:
        raise error
    return found  # type: ignore[no-any-return]
