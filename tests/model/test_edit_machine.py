"""Searches histories of losses, repeats, reorderings, deaths and restarts for a lie.

All ranks have the edit or none; what the control plane says of it is true and stays. And the
search is worth something: with a bug planted in the machine it finds a history that shows it.
"""

from collections.abc import Callable
from enum import Enum
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from paramd_service.edits.machine import (
    EDIT_ENDS,
    Action,
    CallOff,
    EditMachine,
    EditState,
    Event,
    IncarnationEnded,
    Outcome,
    Persist,
    Restarted,
)
from tests.model.mesh import Mesh, Page, Trainer
from tests.model.plane import MANIFEST, Kept, Plane

RANKS = 2
STEPS = 50
FAIR_TURNS = 400
MAX_FAULTS = 2
"""Of each kind in one history."""

RANK = st.integers(0, RANKS - 1)


class Fault(Enum):
    """What may go wrong. A history has few kinds of it, or no history would get anywhere."""

    TIME_OUT = "a caller gives up"
    REPEAT = "a message comes twice"
    CALL_OFF = "it shall not happen any more"
    SIDECAR = "a sidecar is killed and respawned"
    TRAINER = "a trainer is killed"
    CRASH = "the control plane is killed"
    INCARNATION = "the incarnation ends"


def _may(fault: Fault) -> Callable[[Any], bool]:
    return lambda self: self.faults_left.get(fault, 0) > 0


class Histories(RuleBasedStateMachine):
    """One edit, from staging to its end, and whatever may come between."""

    machine: type[EditMachine] = EditMachine
    trainers: type[Mesh] = Mesh

    @initialize(
        faults=st.sets(st.sampled_from(Fault), max_size=2),
        order=st.integers(0, 1 << 32),
        begun=st.integers(0, 90),
        if_step=st.sampled_from([None, None, None, None, 2, 3]),
        apart=st.integers(0, 1),
    )
    def begin(
        self, faults: set[Fault], order: int, begun: int, if_step: int | None, apart: int
    ) -> None:
        """Faults come anywhere in the life of an edit, not only near its beginning."""
        self.faults_left = dict.fromkeys(faults, MAX_FAULTS)
        self.mesh = self.trainers(RANKS, MANIFEST, if_step=if_step, apart=apart)
        self.plane = Plane(self.mesh, self.machine)
        self.told = Kept()
        if begun:
            self.stage_and_commit()
        self.go_on(order, begun)

    @rule()
    def stage_and_commit(self) -> None:
        if self.plane.up and self.plane.machine.state is EditState.STAGING:
            self.plane.stage()
        if self.plane.up and self.plane.machine.state is EditState.STAGED:
            self.plane.commit()

    @rule(order=st.integers(0, 1 << 32), count=st.integers(1, 6))
    def go_on(self, order: int, count: int) -> None:
        """The processes take some of their next steps, in some order."""
        chosen = Random(order)
        for _ in range(count):
            self._one(chosen)

    @rule(rank=RANK, count=st.integers(1, 3))
    def train(self, rank: int, count: int) -> None:
        """One rank runs ahead, as far as the others let it."""
        for _ in range(count):
            self.mesh.boundary(rank)

    @precondition(_may(Fault.TIME_OUT))
    @rule(pick=st.integers(0, 1 << 16))
    def time_out(self, pick: int) -> None:
        if self.plane.messages:
            self._spend(Fault.TIME_OUT)
            self.plane.time_out(pick % len(self.plane.messages))

    @precondition(_may(Fault.REPEAT))
    @rule(pick=st.integers(0, 1 << 16))
    def repeat(self, pick: int) -> None:
        if self.plane.messages:
            self._spend(Fault.REPEAT)
            self.plane.repeat(pick % len(self.plane.messages))

    @precondition(_may(Fault.CALL_OFF))
    @rule()
    def call_off(self) -> None:
        self._spend(Fault.CALL_OFF)
        self.plane.handle(CallOff("not agreed in time"))

    @precondition(_may(Fault.SIDECAR))
    @rule(rank=RANK, forgets=st.booleans())
    def kill_sidecar(self, rank: int, forgets: bool) -> None:
        self._spend(Fault.SIDECAR)
        self.mesh.kill_sidecar(rank, forgets=forgets)

    @precondition(_may(Fault.TRAINER))
    @rule(rank=RANK)
    def kill_trainer(self, rank: int) -> None:
        self._spend(Fault.TRAINER)
        self.mesh.kill_trainer(rank)

    @precondition(_may(Fault.CRASH))
    @rule()
    def crash(self) -> None:
        self._spend(Fault.CRASH)
        self.plane.crash()

    @precondition(lambda self: not self.plane.up)
    @rule()
    def restart(self) -> None:
        self.plane.restart()

    @precondition(_may(Fault.INCARNATION))
    @rule()
    def end_incarnation(self) -> None:
        if self.plane.up:
            self._spend(Fault.INCARNATION)
            self.mesh.over = True
            self.plane.handle(IncarnationEnded("the incarnation ended"))

    @invariant()
    def what_is_told_is_true_and_stays(self) -> None:
        kept = self.plane.kept
        if self.told.state in EDIT_ENDS:
            assert kept.state is self.told.state, "a terminal state has changed"
        self.told = kept
        dead = self.mesh.over or not all(trainer.alive for trainer in self.mesh.trainers)
        if kept.state is EditState.APPLIED:
            assert self.mesh.whole, "APPLIED was said, and some rank has it not"
        elif kept.state is EditState.ABORTED:
            assert not self.mesh.agreed_somewhere, "ABORTED was said, and some rank has it"
        elif kept.state is EditState.LOST:
            assert dead, "LOST was said, and nobody had died"
        assert dead or all(len(page.applied) < 2 for page in self.mesh.pages), "applied twice"
        steps = {step for page in self.mesh.pages for step in page.applied_steps}
        assert self.mesh.if_step is None or steps <= {self.mesh.if_step}, "at another step"

    def teardown(self) -> None:
        """With no further faults it ends, on all ranks or on none."""
        self.plane.restart()
        for turn in range(FAIR_TURNS):
            for rank in range(RANKS):
                self.mesh.boundary(rank)
            self.plane.act()
            if self.plane.messages:
                self.plane.deliver(turn % len(self.plane.messages))
            self.what_is_told_is_true_and_stays()
        if self.mesh.over or not all(trainer.alive for trainer in self.mesh.trainers):
            return
        assert len(self.mesh.applied_on) in (0, RANKS), "some ranks have it, and some have not"
        known = all(sidecar.staged for sidecar in self.mesh.sidecars)
        if known and self.plane.machine.state is EditState.COMMITTED:
            raise AssertionError("nothing is wrong, and yet it does not end")

    def _spend(self, fault: Fault) -> None:
        self.faults_left[fault] -= 1

    def _one(self, chosen: Random) -> None:
        which = chosen.randrange(5)
        if which < 2:
            self.mesh.boundary(which % RANKS)
        elif which == 2 or not self.plane.messages:
            self.plane.act()
        else:
            self.plane.deliver(chosen.randrange(len(self.plane.messages)))


class AppliedOnTheFirstAnswer(EditMachine):
    """The others will have it, too, will they not?"""

    def _shown(self, rank: int, applied: object) -> list[Action]:
        if applied is None:
            return super()._shown(rank, None)
        self.state = EditState.APPLIED
        return [Persist()]


class DoubtMeansWithdrawn(EditMachine):
    """It has not agreed yet, and we did say that it should not."""

    def _told(self, rank: int, fate: Outcome) -> list[Action]:
        return super()._told(rank, Outcome.WITHDRAWN if fate is Outcome.IN_DOUBT else fate)


class CommittedInMemory(EditMachine):
    """The store is slow; it is enough that it hears of the end."""

    def _commit(self, boundary: int, token: int) -> list[Action]:
        return super()._commit(boundary, token)[1:]


class RestartForgets(EditMachine):
    """We have only just begun, so nothing can be under way."""

    def handle(self, event: Event) -> list[Action]:
        if isinstance(event, Restarted) and not self.ended:
            return self._abort("the control plane was restarted")
        return super().handle(event)


BUGS = [AppliedOnTheFirstAnswer, DoubtMeansWithdrawn, CommittedInMemory, RestartForgets]


class NotCompared(Mesh):
    """The control plane has looked at the step; it was right a moment ago."""

    def _accepts(self, page: Page) -> bool:
        return True


class ComparedWhenApplied(NotCompared):
    """Each rank looks at its step when it applies; they have all the same one."""

    def _apply(self, trainer: Trainer) -> None:
        if self.if_step in (None, trainer.page.step):
            super()._apply(trainer)
            return
        # Undone without a trace: it was never agreed, as far as this rank is concerned.
        trainer.page.promised, trainer.page.edit_agreed, trainer.to_apply = 0, 0, None


def search(
    machine: type[EditMachine], *, examples: int, phases: list[Phase], trainers: type[Mesh] = Mesh
) -> None:
    kind = type("History", (Histories,), {"machine": machine, "trainers": trainers})
    run_state_machine_as_test(
        kind,
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS,
            deadline=None,
            derandomize=True,
            database=None,
            phases=phases,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_no_history_makes_the_control_plane_lie() -> None:
    search(EditMachine, examples=400, phases=[Phase.generate])


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_found(bug: type[EditMachine]) -> None:
    with pytest.raises(AssertionError, match=r"was said|has changed|applied twice"):
        search(bug, examples=5_000, phases=[Phase.generate])


@pytest.mark.parametrize(
    ("trainers", "found"),
    [
        (NotCompared, "at another step"),
        (ComparedWhenApplied, "was said|some ranks have it|does not end"),
    ],
)
def test_trainers_that_compare_the_step_too_early_or_too_late_are_found(
    trainers: type[Mesh], found: str
) -> None:
    with pytest.raises(AssertionError, match=found):
        search(EditMachine, examples=5_000, phases=[Phase.generate], trainers=trainers)
