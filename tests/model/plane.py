"""A control plane of one edit for the model: its machine, its store, its messages on the way."""

from collections import deque
from dataclasses import asdict, dataclass, replace

from paramd_service.edits.machine import (
    Action,
    Commit,
    EditMachine,
    EditState,
    Event,
    Forget,
    NotReached,
    Persist,
    Reach,
    Reached,
    Reported,
    Restarted,
    Show,
    Shown,
    Staged,
    Unreported,
    Withdraw,
)
from tests.model.mesh import Mesh

MANIFEST = b"manifest"


@dataclass(frozen=True)
class Kept:
    """What the store has."""

    state: EditState = EditState.STAGING
    reason: str = ""
    boundary: int = 0
    token: int = 0


@dataclass(eq=False)
class Message:
    """A call on its way to a sidecar, or its answer on the way back."""

    action: Reach | Withdraw | Show
    number: int
    token: int
    generation: int
    life: int
    """The sidecar's that it was sent to."""
    answer: Event | None = None
    waits: bool = False
    """A ReachBoundary that the sidecar has taken in."""
    orphan: bool = False
    """Nobody waits for its answer any more."""

    @property
    def failure(self) -> Event:
        rank = self.action.rank
        if isinstance(self.action, Reach):
            return NotReached(rank, "no answer")
        return Unreported(rank)


class Plane:
    """The control planes of one edit, one after the other, on one store."""

    def __init__(self, mesh: Mesh, kind: type[EditMachine]) -> None:
        self.mesh = mesh
        self.kind = kind
        self.kept = Kept()
        self.generation = 1
        self.messages: list[Message] = []
        self.todo: deque[tuple[Action, Kept]] = deque()
        self.up = True
        self.machine = self._machine()

    def _machine(self) -> EditMachine:
        world_size = len(self.mesh.pages)
        return self.kind(world_size=world_size, manifest_digest=MANIFEST, **asdict(self.kept))

    def handle(self, event: Event) -> None:
        if self.up:
            actions = self.machine.handle(event)
            machine = self.machine
            now = Kept(machine.state, machine.reason, machine.boundary, machine.token)
            self.todo.extend((action, now) for action in actions)

    def stage(self) -> None:
        for rank in range(len(self.mesh.pages)):
            self.handle(Staged(rank, MANIFEST))

    def commit(self) -> None:
        number = max(page.highest for page in self.mesh.pages) + 1
        self.handle(Commit(number, 1000 * self.generation + number))

    def act(self) -> None:
        """Takes the next action."""
        if not self.up or not self.todo:
            return
        action, then = self.todo.popleft()
        machine = self.machine
        if isinstance(action, Persist):
            self.kept = then
        elif isinstance(action, Forget):
            if machine.boundary:
                self.mesh.withdraw(action.rank, machine.boundary, self.generation)
        else:
            self.messages.append(
                Message(
                    action,
                    machine.boundary,
                    machine.token,
                    self.generation,
                    self.mesh.sidecars[action.rank].life,
                )
            )

    def crash(self) -> None:
        self.up = False
        self.todo.clear()
        for message in self.messages:
            message.orphan = True

    def restart(self) -> None:
        if self.up:
            return
        self.up = True
        self.generation += 1
        self.machine = self._machine()
        self.handle(Restarted())

    def deliver(self, at: int) -> None:
        """One message goes on by one: it arrives, or its answer does."""
        message = self.messages[at]
        rank = message.action.rank
        if message.answer is not None:
            self.messages.pop(at)
            if not message.orphan:
                self.handle(message.answer)
        elif message.life != self.mesh.sidecars[rank].life:
            message.answer = message.failure
        elif isinstance(message.action, Reach):
            self._reach(message)
        elif isinstance(message.action, Withdraw):
            fate = self.mesh.withdraw(rank, message.number, message.generation)
            message.answer = Reported(rank, fate) if fate is not None else Unreported(rank)
        else:
            message.answer = Shown(rank, self.mesh.show(rank))

    def _reach(self, message: Message) -> None:
        rank, number = message.action.rank, message.number
        page = self.mesh.pages[rank]
        if not message.waits:
            message.waits = True
            if not self.mesh.reach(rank, number, message.token, message.generation):
                message.answer = message.failure
        elif any(one[0] == number for one in page.applied):
            message.answer = Reached(rank)
        elif page.ready != number or page.refused == number:
            message.answer = message.failure

    def time_out(self, at: int) -> None:
        """Its caller gives up; the message may arrive all the same, later."""
        message = self.messages[at]
        if not message.orphan:
            message.orphan = True
            self.handle(message.failure)

    def repeat(self, at: int) -> None:
        """The network, or somebody's retry, delivers it twice."""
        self.messages.append(replace(self.messages[at]))
