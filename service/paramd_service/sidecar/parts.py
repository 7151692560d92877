"""The door by which a subject enters a sidecar: `SidecarPart`, and all that it may reach.

A sidecar is a list of parts (`paramd_service/parts.py`) around the kernel, which attaches, copies
and proves. A part adds calls over gRPC and operations over the Unix socket, reports its own
figures, and follows the trainer's life. It reaches the kernel through `SidecarHost`, and no other
part.
"""

from __future__ import annotations

import asyncio
import socket
from abc import ABC, abstractmethod
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias, TypeVar

from paramd.errors import ConflictError, UnreachableError, UsageError
from paramd.memory.gate import State, resting_state, state_of
from paramd.memory.left import Purpose
from paramd.parts import made
from paramd.security.tickets import Claims
from paramd.security.tls import Pems
from paramd.v1 import common_pb2
from paramd_service.aio import kept, uncancelled
from paramd_service.sidecar.calls import CallTable
from paramd_service.sidecar.config import SidecarConfig
from paramd_service.sidecar.faults import Faults
from paramd_service.sidecar.kept_states import KeptStates
from paramd_service.sidecar.log import Log
from paramd_service.sidecar.metrics import Row
from paramd_service.sidecar.orders import fenced
from paramd_service.sidecar.owner import AttachedMemory, AttachRequest, Exit, Mesh, Ownership
from paramd_service.sidecar.phase import Work
from paramd_service.sidecar.pins import Pins
from paramd_service.sidecar.revocations import Refusals, Revocations
from paramd_service.sidecar.room import HostRoom
from paramd_service.sidecar.snapshots.store import BlockMaker, Snapshot
from paramd_service.sidecar.uploads import Uploads

if TYPE_CHECKING:
    from paramd_service.tls import JobPems, ServerTls

Answer = TypeVar("Answer")


def log_failed(log: Log, part: str, what: str, error: Exception) -> None:
    """Log what an installed package's part failed to do."""
    log("part-failed", part=part, what=what, error=repr(error))


class SidecarHost:
    """One rank's state that parts and servers may reach. Event loop only."""

    def __init__(
        self,
        config: SidecarConfig,
        *,
        blocks: BlockMaker,
        executor: Executor,
        stats_executor: Executor,
        faults: Faults,
        log: Log,
        parts: Sequence[type[SidecarPart]],
    ) -> None:
        self.config = config
        self.faults = faults
        self.log = replace(log, live=lambda: {"incarnation": self.incarnation, "step": self.step})
        self.executor = executor
        """One thread, for what must not run while memory is copied."""
        self.stats_executor = stats_executor
        """One thread, for what reduces a snapshot."""
        self.ownership = Ownership.WAITING
        self.attached: AttachedMemory | None = None
        """Memory shared with the trainer; None before the first attach."""
        self.mesh: Mesh | None = None
        """What the trainers have agreed on; None while they are attaching."""
        self.layout_digest = ""
        """The last mesh's."""
        self.detached = False
        """Whether the trainer has said that it leaves."""
        self.end: tuple[float, Exit | None] | None = None
        """When the trainer's process ended (monotonic clock), and how; None if unknown."""
        self.control_generation = 0
        """Highest control plane generation seen in this incarnation; lower ones are fenced."""
        self.stream_port = 0
        """TCP port for bulk streams; 0 if there is none."""
        self.tls: ServerTls | None = None
        """The gRPC server's, once it listens; None without TLS."""
        self.own_pems: JobPems | None = None
        """This rank's certificate from the job; None unless the job has its own TLS."""
        self.shortage = ""
        """What the rank's status says about memory; empty when there is enough."""
        self.leaving = asyncio.Event()
        """Set when the sidecar should drain: on detach, on a signal, or after the linger time."""
        self.on_change: list[Callable[[], None]] = []
        self.refusals = Refusals()
        self.work = Work()
        self.revocations = Revocations()
        self.room = HostRoom(config.socket_path, config.rank, reserve_bytes=config.host_reserve)
        """Grants all memory beside the training."""
        self.blocks = blocks.within(self.room, Purpose.SNAPSHOT)
        self.using_memory = asyncio.Lock()
        """Held to keep the attachment's memory mapped meanwhile."""
        self.attaching = asyncio.Lock()
        """Held while a trainer takes the sidecar over."""
        self._pins: Pins | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        # Last: they may look at all of the above.
        self.parts = Parts(
            made(
                parts,
                lambda kind: kind(self),
                SidecarPart,
                tell=self._tell_call,
                tell_failed=partial(log_failed, self.log),
            )
        )

    def _tell_call(self, part: str, method: str, took_s: float) -> None:
        self.log("part-called", part=part, method=method, took_us=round(1e6 * took_s))

    @property
    def incarnation(self) -> int:
        return self.attached.incarnation if self.attached is not None else 0

    @property
    def step(self) -> int:
        """Finished updates, settled or not; -1 before the first attach."""
        return self.state.step

    @property
    def state(self) -> State:
        """The current state; consistent only outside updates."""
        if self.attached is None:
            return State(-1, -1)
        page = self.attached.page
        rests = resting_state(page)
        return rests if rests is not None else state_of(page)

    @property
    def pins(self) -> Pins:
        """Snapshots of the current incarnation. Raises UnreachableError: no trainer has come."""
        if self._pins is None:
            raise UnreachableError(f"{Ownership.WAITING.value}; try again when training runs")
        return self._pins

    @property
    def has_pins(self) -> bool:
        """Whether a trainer has attached."""
        return self._pins is not None

    @property
    def trainer_lives(self) -> bool:
        """Whether a trainer is attached and its process has not ended."""
        return self.ownership is Ownership.OWNED

    @property
    def trainer_pid(self) -> int:
        """Pid of the trainer while it lives; 0 without one, and of one in another container."""
        attached = self.attached
        return attached.trainer_pid if attached is not None and self.trainer_lives else 0

    def ready_mesh(self) -> Mesh:
        """The mesh.

        Raises:
            UnreachableError: While the trainers are still attaching.
        """
        if self.mesh is None:
            raise UnreachableError("the trainers are still attaching; try again in a moment")
        return self.mesh

    def check_plan(self, incarnation: int, layout_digest: str) -> None:
        """Raise ConflictError if a plan was made for another incarnation or layout."""
        mesh = self.ready_mesh()
        if incarnation != self.incarnation or layout_digest != mesh.layout_digest:
            what = f"run {incarnation}" if incarnation != self.incarnation else "another layout"
            raise ConflictError(
                f"the request was planned for {what}, the job is in run "
                f"{self.incarnation}; fetch the layout again"
            )

    def identity(self) -> dict[str, Any]:
        """Job, rank and incarnation, for the Unix socket; gRPC responses have a header."""
        return {"job": self.config.job, "incarnation": self.incarnation, "rank": self.config.rank}

    def check_predecessor(self, rank: object, job: object) -> None:
        """Raise UsageError unless a trainer that asks is of this rank and job."""
        if (rank, job) != (self.config.rank, self.config.job):
            raise UsageError(
                f"this sidecar serves rank {self.config.rank} of job {self.config.job!r}, not "
                f"rank {rank} of job {job!r}"
            )

    async def trainer_gone(self) -> None:
        """Wait briefly for a trainer that is just ending."""

    def follow_control(self, generation: int) -> None:
        """Accept a control plane's generation; raise ConflictError if a later one has fenced it."""
        if generation < self.control_generation:
            raise ConflictError(fenced(generation, self.control_generation))
        self.control_generation = generation

    def job_tls(self) -> Pems | None:
        """The certificate for mutual TLS within the job; None without."""
        return self.own_pems.pems if self.own_pems is not None else None

    def budget_bytes(self, arena_bytes: int) -> int:
        """Snapshot budget for an arena of this size."""
        configured = self.config.budget_bytes
        # Two arenas for token holders, one for the control plane and the owner.
        return configured if configured is not None else 3 * arena_bytes + (1 << 20)

    async def reduced(self, work: Callable[[Sequence[bool]], Answer]) -> Answer:
        """Run `work` on the thread for reductions; it should end early once its argument is not
        empty."""
        stop: list[bool] = []
        running = asyncio.get_running_loop().run_in_executor(self.stats_executor, work, stop)
        return await uncancelled(running, lambda: stop.append(True))

    @asynccontextmanager
    async def held(self, snapshot_id: str, timeout_s: float) -> AsyncIterator[Snapshot]:
        """Hold a filled snapshot, for at most `timeout_s`; its lease may end meanwhile.

        Raises:
            NotFoundError: Its lease has ended.
            AbortedError: A stray change was found in it meanwhile.
            TimeoutError: The block took longer.
        """
        store = self.pins.store
        snapshot = store.hold(store.filled(snapshot_id))
        try:
            async with asyncio.timeout(timeout_s):
                yield snapshot
            if self.has_pins and self.pins.store is store:
                store.check(snapshot)
        finally:
            store.drop(snapshot)

    def start_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` in the background; closing waits for it."""
        return kept(self._tasks, work)


class Closing(Protocol):
    """What a connection keeps for an operation until it ends."""

    def close(self) -> None:
        """Idempotent."""


Kept = TypeVar("Kept", bound=Closing)


class Peer(ABC):
    """The other end of one connection to the Unix socket."""

    @abstractmethod
    def answer(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send one message; the descriptors stay the caller's.

        Raises:
            OSError: It has left.
        """

    @abstractmethod
    def check_owner(self, op: str) -> None:
        """Raise ConflictError unless it is the attached trainer."""

    @abstractmethod
    def caller(self, message: Mapping[str, Any]) -> Claims:
        """The claims of the message's ticket. Raises DeniedError, UnreachableError."""

    @abstractmethod
    def kept(self, kind: type[Kept]) -> Kept:
        """What this connection keeps of a kind, made at the first call; closed when it ends."""

    @property
    @abstractmethod
    def sock(self) -> socket.socket:
        """The connection, for an operation that reads on within its own message."""


Op: TypeAlias = Callable[[Peer, dict[str, Any], list[int]], Coroutine[Any, Any, None]]
"""An operation of the Unix socket: the peer, its message, and the descriptors that came with it.

Those left in the list, or added to it, are closed once the message has been served.
"""


def whole_number(message: Mapping[str, Any], name: str) -> int:
    """A field of a message to the Unix socket.

    Raises:
        UsageError: It is no whole number.
    """
    value = message.get(name)
    if type(value) is not int:
        raise UsageError(f"{message['op']}: {name} is {value!r}; expected a whole number")
    return value


class SidecarPart:
    """A subject in a sidecar. Event loop only, unless a method says otherwise.

    Made once, before the servers listen; then `started`. For each trainer `attached`,
    `trainer_ended` when its process is gone, and `released` before its memory is unmapped, whether
    or not it has ended. `closed` comes last, when no call runs any more.
    """

    name: ClassVar[str]

    def __init__(self, host: SidecarHost) -> None:
        """No I/O."""
        self.host = host

    def calls(self) -> CallTable:
        """Its methods of SidecarService by name; who may call them is in the table of roles."""
        return {}

    def ops(self) -> Mapping[str, Op]:
        """Its operations of the Unix socket by name."""
        return {}

    def started(self) -> None:
        """The servers listen; there is no trainer yet."""

    def attaching(self, request: AttachRequest, *, reached: int, refreshed: bool) -> None:
        """A trainer attaches; that of before has left its memory. Raises nothing.

        `reached`: the step at which that one was. `refreshed`: whether it lives on, and attaches
        its parameters anew.
        """

    def copying(self, memory: AttachedMemory) -> Callable[[], None] | None:
        """What the copying thread calls whenever the trainer has announced something; None:
        nothing. The next update may overtake it: the sequence word proves what it has copied."""
        return None

    async def attached(self, memory: AttachedMemory) -> None:
        """A trainer has attached, and its snapshots can be pinned. Raises nothing."""

    def meshed(self, mesh: Mesh) -> None:
        """The trainers have agreed on their mesh: from now on everything is served."""

    def trainer_ended(self, how: Ownership) -> None:
        """The trainer's process has ended; its memory is still mapped."""

    def report(self, state: common_pb2.RankState) -> None:
        """Add its own fields to the rank's state."""

    def activity(self) -> str:
        """Kind of what a trainer that is overdue was last seen doing; empty: not seen."""
        return ""

    def samples(self) -> Iterable[Row]:
        """Its metrics."""
        return ()

    def uploads(self) -> Uploads | None:
        """What clients upload to it; None: nothing."""
        return None

    def kept_states(self) -> KeptStates | None:
        """The states that it keeps beside the present one; None: it keeps none."""
        return None

    def keeps_for_restarts(self) -> bool:
        """Whether it keeps states from which a killed trainer would resume."""
        return False

    def shrink(self, count: int, *, reason: str) -> None:
        """Keep at most so many states of each rank, as memory is short or not any more."""

    def idle_bytes(self) -> int:
        """Bytes that `take_idle` would take."""
        return 0

    def take_idle(self) -> list[Callable[[], object]]:
        """Take away memory that is only kept for the next use; return what frees it, on any
        thread."""
        return []

    async def stopping(self) -> None:
        """The sidecar drains: begin nothing new. Running calls are served on."""

    async def released(self) -> None:
        """Stop using the trainer's memory, which is unmapped next. Idempotent."""

    async def closed(self) -> None:
        """The sidecar ends."""


_NO_STATES = KeptStates()


class Parts:
    """The parts of one sidecar, in the order of its list: ours, then those of packages."""

    def __init__(self, parts: Iterable[SidecarPart]) -> None:
        self._parts = tuple(parts)
        self._last_first = self._parts[::-1]

    def __iter__(self) -> Iterator[SidecarPart]:
        return iter(self._parts)

    def calls(self) -> CallTable:
        """The methods of all; of two with one name the first part's."""
        return {name: call for part in self._last_first for name, call in part.calls().items()}

    def ops(self) -> Mapping[str, Op]:
        """The operations of all, likewise."""
        return {name: op for part in self._last_first for name, op in part.ops().items()}

    def started(self) -> None:
        """As `SidecarPart.started`, of all; so are the others."""
        for part in self:
            part.started()

    def attaching(self, request: AttachRequest, *, reached: int, refreshed: bool) -> None:
        for part in self:
            part.attaching(request, reached=reached, refreshed=refreshed)

    def copying(self, memory: AttachedMemory) -> Callable[[], None]:
        of_parts = [part.copying(memory) for part in self]
        wanted = [copy for copy in of_parts if copy is not None]

        def copy_all() -> None:
            for copy in wanted:
                copy()

        return copy_all

    def meshed(self, mesh: Mesh) -> None:
        for part in self:
            part.meshed(mesh)

    def uploads(self) -> Uploads:
        """Raises ConflictError: no part takes uploads."""
        for part in self:
            if (uploads := part.uploads()) is not None:
                return uploads
        raise ConflictError("this sidecar takes no uploads")

    def kept_states(self) -> KeptStates:
        of_parts = (part.kept_states() for part in self)
        return next((states for states in of_parts if states is not None), _NO_STATES)

    def keeps_for_restarts(self) -> bool:
        return any(part.keeps_for_restarts() for part in self)

    def shrink(self, count: int, *, reason: str) -> None:
        for part in self:
            part.shrink(count, reason=reason)

    async def stopping(self) -> None:
        for part in self:
            await part.stopping()

    async def attached(self, memory: AttachedMemory) -> None:
        for part in self:
            await part.attached(memory)

    def trainer_ended(self, how: Ownership) -> None:
        for part in self:
            part.trainer_ended(how)

    def report(self, state: common_pb2.RankState) -> None:
        for part in self:
            part.report(state)

    def activity(self) -> str:
        return next(filter(None, (part.activity() for part in self)), "")

    def samples(self) -> Iterator[Row]:
        for part in self:
            yield from part.samples()

    def idle_bytes(self) -> int:
        return sum(part.idle_bytes() for part in self)

    def take_idle(self) -> list[Callable[[], object]]:
        return [free for part in self for free in part.take_idle()]

    async def released(self) -> None:
        for part in self:
            await part.released()

    async def closed(self) -> None:
        for part in self:
            await part.closed()
