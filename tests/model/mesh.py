"""A small model of sidecars and trainers that follow the promise protocol of docs/step.md.

Every step here is one that processes cannot see divided: a word read or written, a message
handled. In which order they come is for the test to choose. Trainers never do what the design
does not let them; whether the control plane's conclusions are right is what the test finds out.
"""

from dataclasses import dataclass, field

from paramd_service.edits.machine import Applied, Outcome


@dataclass(eq=False)
class Page:
    """Words of one rank; they outlive its sidecar and its trainer."""

    ready: int = 0
    token: int = 0
    highest: int = 0
    promised: int = 0
    launched: int = 0
    collected: int = 0
    agreed: int = 0
    edit_agreed: int = 0
    refused: int = 0
    applied: list[tuple[int, int, int]] = field(default_factory=list)
    """(number, token, boundary that it was applied at) of each edit applied."""
    applied_steps: list[int] = field(default_factory=list)
    step: int = 0


@dataclass(eq=False)
class Trainer:
    """One rank's trainer, between two of its steps."""

    page: Page
    offer: tuple[int, int] | None = None
    """What it read at launch, before it has promised and looked again."""
    alive: bool = True
    to_apply: tuple[int, int] | None = None


@dataclass(eq=False)
class Sidecar:
    """One rank's sidecar."""

    page: Page
    staged: bool = True
    generation: int = 0
    life: int = 0
    """Messages for an earlier life never arrive: its address has changed."""


class Mesh:
    """All ranks. Rounds of the trainers' collective are numbered from 0 on."""

    def __init__(
        self, world_size: int, manifest: bytes, *, if_step: int | None = None, apart: int = 0
    ) -> None:
        """`if_step` is the edit's; the last rank is `apart` steps ahead of the others."""
        self.manifest = manifest
        self.if_step = if_step
        self.pages = [Page() for _ in range(world_size)]
        self.pages[-1].step = apart
        self.trainers = [Trainer(page) for page in self.pages]
        self.sidecars = [Sidecar(page) for page in self.pages]
        self.rounds: list[dict[int, tuple[int, int]]] = []
        self.over = False

    # The trainers.

    def boundary(self, rank: int) -> None:
        """The next thing that a rank's trainer does; nothing when it is dead or must wait."""
        trainer, page = self.trainers[rank], self.pages[rank]
        if not trainer.alive or self.over:
            return
        if trainer.to_apply is not None:
            self._apply(trainer)
        elif page.launched > page.collected:
            self._collect(trainer)
        elif trainer.offer is None:
            wanted = page.ready > page.agreed and self._accepts(page)
            trainer.offer = (page.ready, page.token) if wanted else (0, 0)
            page.promised = trainer.offer[0]
            if not page.promised:
                self._launch(rank, trainer)
        else:
            self._launch(rank, trainer)

    def _accepts(self, page: Page) -> bool:
        """Whether the edit is for the step that the round's end will have."""
        if self.if_step in (None, page.step + 1):
            return True
        page.refused = page.ready
        return False

    def _launch(self, rank: int, trainer: Trainer) -> None:
        page = trainer.page
        assert trainer.offer is not None
        wanted = trainer.offer if trainer.offer == (page.ready, page.token) else (0, 0)
        trainer.offer = None
        if page.launched == len(self.rounds):
            self.rounds.append({})
        self.rounds[page.launched][rank] = wanted
        page.launched += 1

    def _collect(self, trainer: Trainer) -> None:
        page = trainer.page
        offers = self.rounds[page.collected]
        if len(offers) < len(self.pages):
            return  # it waits in the collective
        found = set(offers.values())
        number, token = next(iter(found))
        if len(found) == 1 and number > page.agreed:
            page.agreed = number
            page.edit_agreed = number
            trainer.to_apply = (number, token)
        else:
            page.promised = 0
        page.step += 1
        page.collected += 1

    def _apply(self, trainer: Trainer) -> None:
        assert trainer.to_apply is not None
        number, token = trainer.to_apply
        trainer.page.applied.append((number, token, trainer.page.collected))
        trainer.page.applied_steps.append(trainer.page.step)
        trainer.page.promised = 0
        trainer.to_apply = None

    def kill_trainer(self, rank: int) -> None:
        self.trainers[rank].alive = False

    # The sidecars.

    def kill_sidecar(self, rank: int, *, forgets: bool) -> None:
        """It is respawned at once; `forgets`: what it had staged is gone."""
        before = self.sidecars[rank]
        self.sidecars[rank] = Sidecar(
            before.page, staged=before.staged and not forgets, life=before.life + 1
        )

    def reach(self, rank: int, number: int, token: int, generation: int) -> bool:
        """ReachBoundary's first half. False: refused."""
        sidecar, page = self.sidecars[rank], self.pages[rank]
        if generation < sidecar.generation or not sidecar.staged:
            return False
        sidecar.generation = generation
        if number <= page.highest:
            return (page.ready, page.token) == (number, token)
        page.highest = number
        page.ready, page.token = number, token
        return True

    def withdraw(self, rank: int, number: int, generation: int) -> Outcome | None:
        """WithdrawBoundary. None: refused."""
        sidecar, page = self.sidecars[rank], self.pages[rank]
        if generation < sidecar.generation:
            return None
        sidecar.generation = generation
        page.highest = max(page.highest, number)
        if page.ready == number:
            page.ready = 0
        if any(one[0] == number for one in page.applied):
            return Outcome.DONE
        if page.edit_agreed == number:
            return Outcome.AGREED if self.trainers[rank].alive else Outcome.TORN
        return Outcome.IN_DOUBT if page.promised == number else Outcome.WITHDRAWN

    def show(self, rank: int) -> Applied | None:
        """GetEdit."""
        page = self.pages[rank]
        if not page.applied or not self.sidecars[rank].staged:
            return None
        number, token, at = page.applied[-1]
        return Applied(
            boundary=number,
            token=token,
            step=at,
            edits=len(page.applied),
            manifest_digest=self.manifest,
        )

    # The truth.

    @property
    def applied_on(self) -> list[int]:
        """Ranks that have the edit."""
        return [rank for rank, page in enumerate(self.pages) if page.applied]

    @property
    def whole(self) -> bool:
        """Every rank has it, once, from one boundary."""
        return all(len(page.applied) == 1 for page in self.pages) and (
            len({tuple(page.applied) for page in self.pages}) == 1
        )

    @property
    def agreed_somewhere(self) -> bool:
        """A trainer has it, or is about to."""
        return any(page.edit_agreed for page in self.pages)
