"""A session of a training with one of the loops; answers are compared with what it recorded."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol, runtime_checkable

import torch

import paramd
from paramd.errors import ConflictError, ParamdError
from paramd.mesh.frames.frames import ParamFrame
from paramd.mesh.mesh import Mesh
from paramd.mesh.results import OptimizerState, StatsTable, Summoned
from tests.sequences import changing, reading, striking
from tests.sequences.loops.loops import LOOPS, RESTS_S
from tests.sequences.loops.readers import ENDS_S, Readers
from tests.sequences.loops.truth import Name, Recorded, Truth, Update
from tests.sequences.model import TIED, State, names_of
from tests.sequences.reference import Incarnation, differing, value
from tests.sequences.session import (
    CALL_S,
    JOB,
    RETRYABLE,
    START_S,
    DefectError,
    NotNowError,
    Session,
    wait_for,
)

VERIFY_EVERY_S = 0.2
REST_BESIDE_READERS_S = 0.06
"""After each update: twice as long as else, so that readers have the processor meanwhile."""
HOW = {"fsdp2": "dim 0", "pipeline": "other tensors"}
"""What the ranks of a kind have of a tensor; the others have all of it."""


@runtime_checkable
class SaysResting(Protocol):
    """An answer that tells whether its state was settled."""

    unsettled: bool


@dataclass(eq=False)
class LoopSession(Session):
    """A training with the loop `loop`."""

    loop: str = ""
    verifies: bool = False
    """Whether updates are verified all the time beside the operations."""
    reader_count: int = 0
    """Threads that read without a pause beside the operations."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.way = LOOPS[self.loop]
        self.resume = self.way.resume
        self.stands_in = False
        self.names = names_of(self.kind)
        self.verifier: Verifier | None = None
        self.readers: Readers | None = None

    def launch(self) -> None:
        for path in self.folder.glob("truth-*"):
            path.unlink()
        for name in ("rest", *(f"resting-{rank}" for rank in range(self.world_size))):
            (self.folder / name).unlink(missing_ok=True)
        self.truth = Truth(self.folder, self.world_size, how=HOW.get(self.kind, "whole"))
        super().launch()

    def crowd(self) -> int:
        return self.reader_count + self.verifies

    def program(self) -> tuple[str, list[str]]:
        more = ["--rest-s", str(REST_BESIDE_READERS_S)] if self.reader_count else []
        return "tests.sequences.loops.training", ["--loop", self.loop, *more]

    def settings(self) -> dict[str, str]:
        return dict(self.way.settings)

    def begin(self, former: Incarnation | None = None, *, lost: bool = False) -> str:
        number, step, how = self.attached()
        self.held_at, self.marks = None, {}
        self.reference.incarnations[number] = Recorded(number, self.truth, step)  # type: ignore[assignment]
        self.struck()
        self.reconnect(number)
        self.ask("the first answer", lambda: self.mesh.summon("*", buffers=True, timeout=CALL_S))
        self.struck_s = -1e9
        if self.verifies and self.verifier is None:
            self.verifier = Verifier(self)
            self.verifier.start()
            self._stack.callback(self.verifier.end)
        if self.reader_count and self.readers is None:
            self.readers = Readers(self, self.reader_count)
            self.readers.start()
            self._stack.callback(self.readers.end)
        return how

    def end_beside(self) -> None:
        """Ends what runs beside the operations."""
        for one in (self.readers, self.verifier):
            if one is not None:
                one.end()

    def attached(self) -> tuple[int, int, str]:
        found = super().attached()

        def recorded() -> bool:
            self.truth.read()
            return bool(self.truth.states)

        wait_for(recorded, "the training goes on", CALL_S)
        return found

    def check_beside(self) -> None:
        """Raises DefectError: what runs beside the operations has found something."""
        self.truth.read()
        if self.verifier is not None and self.verifier.failed is not None:
            raise self.verifier.failed
        if self.readers is not None and self.readers.failed is not None:
            raise self.readers.failed

    def judge(
        self, what: str, found: Any, got: Mapping[str, Any] | None = None, *,
        wanted: Callable[[State, str], torch.Tensor] = value, edits: range | None = None,
        differs: Callable[[Any, torch.Tensor], str] = differing,
    ) -> State:  # fmt: skip
        history = self._history(what, found.incarnation)
        self.seen = found.step
        segments = edits if edits is not None else range(history.edits, history.edits + 1)
        return self.judge_by_name(
            f"{what}, edits {list(segments)[:3]}", found, got if got is not None else found,
            wanted=wanted, differs=differs, edits=segments,
        )  # fmt: skip

    def judge_by_name(
        self, what: str, found: Any, got: Mapping[str, Any], *,
        wanted: Callable[[State, str], torch.Tensor] = value, edits: range | None = None,
        differs: Callable[[Any, torch.Tensor], str] = differing,
    ) -> State:  # fmt: skip
        """Compares an answer with the recorded states of the name that it carries; any thread may.

        Args:
            edits: The edits that it may be after, as far as it does not say; None: any.
        """
        named, told = isinstance(found, Summoned), isinstance(found, OptimizerState)
        says_history = isinstance(found, Summoned | StatsTable | ParamFrame)
        history: int | None = found.history if says_history else None
        # What does not say it is of a settled state.
        resting = isinstance(found, SaysResting) and found.unsettled

        def fits(name: Name) -> bool:
            if history is not None and name.history != history:
                return False
            if (named or told) and name.edits != found.edits:
                return False
            return edits is None or name.edits in edits

        def look() -> list[tuple[Name, State]]:
            return self.truth.variants(found.incarnation, found.step, fits, resting=resting)

        variants = self.truth.wait(look)
        where = f"{what}, step {found.step}"
        if not variants:
            near = [n for n in self.truth.names() if abs(n.step - found.step) < 2]
            raise DefectError(f"{where}: there was no such state; beside it: {near[-6:]}")
        return self._matching(
            where + " (unsettled)" * resting, iter(variants), wanted, got, differs
        )

    def judge_gradients(
        self, what: str, frame: Any, got: Mapping[str, Any], edits: range, *,
        cut: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
        differs: Callable[[Any, torch.Tensor], str] = differing,
    ) -> None:  # fmt: skip
        update = Update(frame.incarnation, frame.history, frame.step)
        where = f"{what}, update {update.step}"
        variants = self.truth.gradients(update)
        if not variants:
            raise DefectError(f"{where}: there was no such update\n{self.ranks.outputs()}")
        said: list[str] = []
        for consumed in variants:
            bad = []
            for name, found in got.items():
                # Of parameters that the update does not change, it consumes no gradients.
                one = TIED.get(name, name)
                if one not in consumed:
                    continue
                expected = consumed[one]
                if (found is None) != (expected is None):
                    bad.append(f"{name}: {frame.none.get(name, 'has a gradient')!r}, expected "
                               f"{'none' if expected is None else 'one'}")  # fmt: skip
                elif expected is not None and (text := differs(found, cut(expected))):
                    bad.append(f"{name}: {text}")
            if not bad:
                return
            said = said or bad
        told = "\n  ".join(said[:6])
        raise DefectError(f"{where}: {len(said)} of {len(got)} are wrong\n  {told}")


class Verifier(threading.Thread):
    """Verifies one update after the other, of any rank, by a client of its own."""

    def __init__(self, session: LoopSession) -> None:
        super().__init__(daemon=True)
        self._session, self._ends = session, threading.Event()
        self.failed: DefectError | None = None
        self.told: Counter[str] = Counter()

    def run(self) -> None:
        rng = Random(self._session.loop)
        while not self._ends.is_set() and self.failed is None:
            try:
                mesh = paramd.connect(job=JOB, timeout=CALL_S)
            except ParamdError as error:
                self._refused(error)
            else:
                with mesh:
                    self._verify(mesh, rng)
            self._ends.wait(VERIFY_EVERY_S)

    def _verify(self, mesh: Mesh, rng: Random) -> None:
        while not self._ends.is_set() and self.failed is None:
            try:
                found = mesh.verify(rank=rng.randrange(self._session.world_size), timeout=8)
            except ParamdError as error:
                self._refused(error)
            else:
                self.told["verified" if found.clean else "nothing to verify"] += 1
                if found.differing:
                    self.failed = DefectError(
                        f"verify: a false alarm: {found.summary()}; {found.differing[:3]}"
                    )
            self._ends.wait(VERIFY_EVERY_S)

    def _refused(self, error: ParamdError) -> None:
        if isinstance(error, RETRYABLE):
            self.told[type(error).__name__] += 1
        elif isinstance(error, ConflictError):
            # Without the rank's name.
            self.told[str(error).partition("): ")[2][:100]] += 1
        elif not self._session.disturbed and not self._ends.is_set():
            self.failed = DefectError(f"verify: {error!r}")

    def end(self) -> None:
        """Ends it."""
        self._ends.set()
        if self.is_alive():
            self.join(ENDS_S)


def at_rest(s: Session, rng: Random) -> str:
    """The script does nothing for a while; what its loop has left is read on every lane."""
    if not isinstance(s, LoopSession) or not s.way.rests or s.held_at is not None:
        raise NotNowError("it cannot be told")
    (s.folder / "rest").touch()
    try:
        wait_for(lambda: len(list(s.folder.glob("resting-*"))) == s.world_size, "a rest", START_S)
        time.sleep(RESTS_S)
        lanes = rng.sample([reading.summon, reading.stats, reading.view, reading.download], 2)
        # By name, so none asks for buffers, which a boundary has to copy: none comes at rest.
        subjects, s.subjects = s.subjects, rng.choice([s.names, s.names[:3]])
        try:
            told = [operation(s, rng) for operation in (reading.summon, *lanes, reading.unsettled)]
        finally:
            s.subjects = subjects
    finally:
        (s.folder / "rest").unlink()
        wait_for(lambda: not list(s.folder.glob("resting-*")), "the rest's end", START_S)
    return "; ".join(told)


def optimizer(s: Session, rng: Random) -> str:
    """Momentum of one step, perhaps with the parameters of it."""
    patterns = s.patterns(rng)
    s.running()
    if rng.random() < 0.5:
        both = s.ask("optimizer", lambda: s.mesh.summon(*patterns, optimizer=True, timeout=CALL_S))
        s.judge("summon(optimizer)", both)
        assert both.optimizer is not None
        state: OptimizerState = both.optimizer
    else:
        state = s.ask("optimizer", lambda: s.mesh.optimizer(*patterns, timeout=CALL_S))
    moments = {n: x["momentum_buffer"] for n, x in state.items() if "momentum_buffer" in x}
    nothing = torch.tensor(float("nan"))
    s.judge("optimizer", state, moments,
            wanted=lambda found, n: found.momentum.get(TIED.get(n, n), nothing))  # fmt: skip
    return f"step {state.step}"


OPERATIONS: dict[Callable[[Session, Random], str], int] = {
    reading.summon: 12, reading.summon_slice: 2, reading.unsettled: 4, reading.stats: 5,
    optimizer: 4, at_rest: 5, reading.view: 4, reading.grads: 16, reading.follow: 7,
    reading.made_again: 4,
    reading.open_stream: 5, reading.next_frames: 9, reading.close_stream: 2, reading.diff: 3,
    reading.updates: 3, reading.replay: 5, reading.download: 3, reading.together: 4,
    reading.burst: 3, reading.logged: 3,
    changing.edit: 9, changing.edit_late: 1, changing.edit_dry: 1,
    changing.edit_without_waiting: 2, changing.undo: 6, changing.hyperparameters: 4,
    changing.mark: 4, changing.rollback: 5, changing.pause: 4, changing.step: 4,
    changing.resume: 4, changing.writeback: 2, changing.export: 3, changing.restore: 1,
    striking.idle: 10, striking.sidecar_killed: 2, striking.sidecar_ended: 2,
    striking.sidecar_stopped: 1, striking.control_killed: 3, striking.reader_killed: 1,
    striking.reader_cancelled: 2,
}  # fmt: skip
"""Operations of these sessions, with how often they come."""
