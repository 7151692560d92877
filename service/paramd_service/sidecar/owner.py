r"""Who owns the sidecar's memory, and what its rank is doing.

One trainer at a time owns it, identified by pid and start time:

    WAITING --attach--> OWNED --its process ends outside an update--> ORPHANED
                          \--------- inside an update ----------> TORN
    ORPHANED, GONE, TORN --attach of a newer incarnation--> OWNED
    WAITING, ORPHANED, GONE, TORN --linger--> the sidecar leaves
    WAITING --the trainer that started it ends--> the sidecar leaves

GONE is ORPHANED with a mirrored arena, which holds an earlier step: only existing snapshots are
served. In ORPHANED and TORN the memory stays unchanged, so that the last step is still served (or
refused, if torn).
"""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from paramd import places
from paramd.errors import ConflictError, UsageError
from paramd.memory import descriptors
from paramd.memory.arena import HostArena, is_mirror
from paramd.memory.control_page import MAGIC, ControlPage, Word, Words
from paramd.memory.device_arena import DeviceArenaRequest, DeviceReader
from paramd.memory.gate import CopySpan, Move
from paramd.memory.handover import MAX_ALLOCATIONS, Allocation, Descriptors, optimizer_bytes
from paramd.security.tickets import MAX_TICKET_BYTES, key_from_hex
from paramd.v1 import common_pb2
from paramd.version import __version__

# madvise(2): prefault all pages for reading (Linux 5.14).
_MADV_POPULATE_READ = 22


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """What the trainers exchanged at attach."""

    peers: tuple[common_pb2.Peer, ...]
    control_address: str
    layout_digest: str
    layout: bytes
    """A serialized paramd.v1.Layout."""
    buddies: tuple[int, ...] = ()
    """By rank, the rank whose sidecar keeps copies of its standing snapshots; empty: no copies."""

    def address_of(self, rank: int) -> str:
        """The address of that rank's sidecar; empty if unknown."""
        return next((peer.address for peer in self.peers if peer.rank == rank), "")

    def buddy_of(self, rank: int) -> int:
        """The rank that keeps that rank's copies; -1: none."""
        return self.buddies[rank] if 0 <= rank < len(self.buddies) else -1


NO_STATES = (
    "this training keeps no states to roll back to; attach it with resume='auto', and with "
    "schedulers and data loaders in extra_state"
)


def check_keeps_states(page: ControlPage) -> None:
    """Raise ConflictError unless the training keeps the parts of a state."""
    if not page[Word.LINEAGE]:
        raise ConflictError(NO_STATES)


def parse_mesh(message: dict[str, Any], layout: bytes) -> Mesh:
    """Parse a "mesh" message. Raises UsageError."""
    try:
        peers = tuple(
            common_pb2.Peer(
                rank=int(peer["rank"]),
                address=str(peer["address"]),
                socket_path=str(peer["socket_path"]),
                host_id=str(peer["host_id"]),
            )
            for peer in message["peers"]
        )
        control_address, digest = message["control_address"], message["layout_digest"]
        buddies = tuple(int(rank) for rank in message.get("buddies", ()))
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"mesh: {error!r} is missing or has the wrong type") from None
    if not isinstance(control_address, str | None) or not isinstance(digest, str):
        raise UsageError("mesh: control_address and layout_digest must be text")
    return Mesh(
        peers=tuple(sorted(peers, key=lambda peer: peer.rank)),
        control_address=control_address or "",
        layout_digest=digest,
        layout=layout,
        buddies=buddies,
    )


def process_state(pid: int) -> str:
    """The process's state letter ("R", "S", "T", ...); empty if it cannot be read."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2][1:2]


@dataclass(frozen=True, slots=True)
class Worked:
    """What a process has done since it began, and the children that it has waited for."""

    cpu_s: float
    io_bytes: int
    """Bytes of its read and write calls; 0 if they cannot be read."""


def worked(pid: int) -> Worked | None:
    """What a process has done so far; None if it cannot be read."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        cpu_s = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return None
    try:
        lines = Path(f"/proc/{pid}/io").read_text().split("\n")
        io_bytes = sum(int(line.split()[1]) for line in lines[:2])
    except (OSError, IndexError, ValueError):
        io_bytes = 0
    return Worked(cpu_s, io_bytes)


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended."""

    code: int = 0
    signal: int = 0
    """Number of the signal that killed it; 0: it exited by itself."""

    @property
    def text(self) -> str:
        """In words: "killed by SIGKILL", "exited with code 1"."""
        if not self.signal:
            return f"exited with code {self.code}"
        try:
            return f"killed by {signal.Signals(self.signal).name}"
        except ValueError:
            # Most real-time signals have no name.
            return f"killed by signal {self.signal}"


def exit_of(pid: int) -> Exit | None:
    """How a zombie process ended; None for others."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if not pid or status[0] not in "ZX":
            return None
        code, number = int(status[49]) >> 8, int(status[49]) & 0x7F
    except (OSError, IndexError, ValueError):
        return None
    return Exit(code, 0 if code else number)


class Ownership(Enum):
    """The states of the module's diagram."""

    WAITING = "no trainer has attached yet"
    OWNED = "the trainer is attached"
    ORPHANED = "the trainer has ended; its last step is still served"
    GONE = "the trainer has ended; its parameters were in its own memory and are lost"
    TORN = "the trainer ended inside an update or an edit; its parameters mix two states"


@dataclass(frozen=True, kw_only=True, slots=True)
class AttachRequest:
    """A trainer's claims about itself; only types and ranges are checked."""

    job: str
    incarnation: int
    rank: int
    world_size: int
    pid: int
    start: int
    arena_bytes: int
    public_key: bytes
    version: str
    rank_ticket: str = field(repr=False)
    """Ticket with which this sidecar joins the control plane as its rank."""
    continues: tuple[int, int, int] = (0, 0, -1)
    """Lineage, the lineage it becomes, and the last step whose standing snapshots stay."""
    copy_ticket: str = field(default="", repr=False)
    """Ticket with which this sidecar sends copies to another host; empty: it sends none."""
    device: DeviceArenaRequest | None = None
    """Where the arena is; None: host memory."""
    allocations: tuple[int, ...] = ()
    """Sizes of the allocations for optimizer state that the trainer hands over."""


def parse_attach(message: dict[str, Any]) -> AttachRequest:
    """Parse an "attach" message.

    Raises:
        UsageError: A field is missing or wrong.
    """
    incarnation = _number(message, "incarnation", least=1)
    rank, world_size = _number(message, "rank", least=0), _number(message, "world_size", least=1)
    pid, start = _number(message, "pid", least=1), _number(message, "start", least=1)
    arena_bytes = _number(message, "arena_bytes", least=0)
    job, rank_ticket = _text(message, "job"), _text(message, "rank_ticket")
    version = _text(message, "version")
    copy_ticket = str(message.get("copy_ticket", ""))
    for name, ticket in (("rank_ticket", rank_ticket), ("copy_ticket", copy_ticket)):
        if len(ticket) > MAX_TICKET_BYTES:
            raise UsageError(f"attach: {name} is longer than {MAX_TICKET_BYTES} characters")
    continues, allocations = _continues(message), _allocations(message)
    device = message.get("device")
    return AttachRequest(
        device=DeviceArenaRequest.from_message(device) if device is not None else None,
        allocations=allocations,
        continues=continues,
        public_key=key_from_hex(message, "public_key"),
        job=job,
        incarnation=incarnation,
        rank=rank,
        world_size=world_size,
        pid=pid,
        start=start,
        arena_bytes=arena_bytes,
        version=version,
        rank_ticket=rank_ticket,
        copy_ticket=copy_ticket,
    )


def _number(message: Mapping[str, object], name: str, *, least: int) -> int:
    value = message.get(name)
    # Not isinstance: a bool is an int, too.
    if type(value) is not int or value < least:
        raise UsageError(f"attach: {name} is {value!r}; expected a number from {least} on")
    return value


def _text(message: Mapping[str, object], name: str) -> str:
    value = message.get(name)
    if not isinstance(value, str):
        raise UsageError(f"attach: {name} is missing; expected text")
    return value


def _continues(message: Mapping[str, object]) -> tuple[int, int, int]:
    numbers = message.get("continues", [0, 0, -1])
    if not (isinstance(numbers, list) and [type(number) for number in numbers] == [int] * 3):
        raise UsageError(f"attach: continues is {numbers!r}; expected three numbers")
    return numbers[0], numbers[1], numbers[2]


def _allocations(message: Mapping[str, object]) -> tuple[int, ...]:
    sizes = message.get("allocations", [])
    if not isinstance(sizes, list) or any(type(size) is not int or size <= 0 for size in sizes):
        raise UsageError(f"attach: allocations is {sizes!r}; expected numbers above 0")
    return tuple(sizes)


def check_sidecar(job: str, rank: int, request: AttachRequest) -> None:
    """Return if the trainer belongs to the sidecar of this job's rank.

    Raises:
        UsageError: If it belongs to another job or rank.
        ConflictError: If the versions differ.
    """
    if (request.job, request.rank) != (job, rank):
        raise UsageError(
            f"this sidecar serves rank {rank} of job {job!r}, not rank "
            f"{request.rank} of job {request.job!r}; start one for it"
        )
    if request.version != __version__:
        raise ConflictError(
            f"the sidecar runs paramd {__version__}, the trainer {request.version}; "
            "stop the sidecar, and attach starts the right one"
        )


def check_successor(
    owner: AttachRequest,
    ownership: Ownership,
    request: AttachRequest,
    *,
    elsewhere: bool = False,
    holds_page: bool = False,
) -> None:
    """Return if the trainer may take over the sidecar from its current or last owner.

    Args:
        elsewhere: The owner runs in another container, where pids mean other processes.
        holds_page: It hands back the owner's control page, which proves that it is the owner, even
            from another container.

    Raises:
        ConflictError: another trainer is alive, or the incarnation is stale.
    """
    same = (request.pid, request.start) == (owner.pid, owner.start)
    same = same and (holds_page or not elsewhere)
    if ownership is Ownership.OWNED and not same:
        raise ConflictError(
            f"another training process (pid {owner.pid}{' in its container' * elsewhere}) is "
            f"attached as rank {owner.rank} of job {owner.job!r}; end it, or attach under another "
            "job name"
        )
    stale = request.incarnation < owner.incarnation
    if stale or (request.incarnation == owner.incarnation and not same):
        raise ConflictError(
            f"run {request.incarnation} is stale: the sidecar has served run "
            f"{owner.incarnation}; all ranks must attach again"
        )


def ownership_after_end(words: Words) -> Ownership:
    """The ownership after the trainer's process ended with these words.

    An edit agreed but not fully applied tears the rank, even before its first byte: other ranks
    have applied it.
    """
    # A resting state has odd SEQ too, but no update is in progress.
    inside = words[Word.SEQ] & 1 and not words[Word.REST]
    torn = inside or words[Word.EDIT_AGREED] > words[Word.EDIT_APPLIED]
    if torn:
        return Ownership.TORN
    return Ownership.GONE if is_mirror(words) else Ownership.ORPHANED


class AttachedMemory:
    """The memory that a trainer shares with its sidecar. Owns the descriptors."""

    def __init__(
        self, request: AttachRequest, shared: Descriptors, pidfd: int, *, elsewhere: bool = False
    ) -> None:
        self.request = request
        self.shared = shared
        self.pidfd = pidfd
        self.trainer_pid = 0 if elsewhere else request.pid
        """The trainer's process; 0: it runs in another container, whose pids mean nothing here."""
        self.page = ControlPage(shared.page)
        device, words = request.device, self.page.words
        self.arena: HostArena | DeviceReader = (
            DeviceReader(device, shared.arena, request.arena_bytes, words, shared.state)
            if device is not None
            else HostArena(shared.arena, request.arena_bytes)
        )

    @property
    def incarnation(self) -> int:
        return self.request.incarnation

    @property
    def device(self) -> DeviceReader | None:
        return self.arena if isinstance(self.arena, DeviceReader) else None

    @property
    def host_bytes(self) -> memoryview:
        """The arena's bytes if it is in host memory; otherwise empty."""
        return self.arena.buffer if isinstance(self.arena, HostArena) else memoryview(b"")

    @property
    def move(self) -> Move | None:
        """Copies bytes from the arena's device, or from host memory; None without a device."""
        return self.arena.move if isinstance(self.arena, DeviceReader) else None

    def copy(self, spans: Sequence[CopySpan]) -> None:
        """Copy bytes that nobody changes during the copy. Raises as `move`."""
        if isinstance(self.arena, DeviceReader):
            self.arena.move(spans)
            return
        for span in spans:
            span.copy()

    def add_state(self, known_count: int, size_bytes: int) -> Allocation:
        """Allocate device memory for more optimizer state. Slow.

        Args:
            known_count: Allocations that the trainer has; later ones never reached it and are
                freed.

        Raises:
            UsageError: there is no device, or the size exceeds its limit.
            ExhaustedError, DeviceError: the driver refused.
        """
        request, known = self.request, self.shared.state
        if request.device is None or not isinstance(self.arena, DeviceReader):
            raise UsageError("state: the parameters are in host memory")
        before_bytes = sum(one.size_bytes for one in known[:known_count])
        most_bytes = optimizer_bytes(request.arena_bytes)
        if not 0 <= known_count <= min(len(known), MAX_ALLOCATIONS - 1):
            raise UsageError(
                f"state: {known_count} allocations are known; there are {len(known)}, and at most "
                f"{MAX_ALLOCATIONS}"
            )
        if not 0 < size_bytes <= most_bytes - before_bytes:
            raise UsageError(
                f"state: {size_bytes:,} bytes after {before_bytes:,}; at most {most_bytes:,} have "
                "a place beside these parameters"
            )
        allocation = request.device.create_allocation(size_bytes)
        gone = known[known_count:]
        known[known_count:] = [allocation]
        self.arena.has_state(known)
        for one in gone:
            os.close(one.descriptor)
        return allocation

    def fault_in(self) -> None:
        """Prefault the arena for reading, so that the first copy does not pay for it. Slow."""
        memory = self.host_bytes.obj
        if self.request.arena_bytes and isinstance(memory, mmap.mmap):
            with suppress(OSError):  # older kernels: the first copy takes the faults
                memory.madvise(_MADV_POPULATE_READ)

    def close(self) -> None:
        self.page.close()
        self.arena.close()
        self.shared.close()
        os.close(self.pidfd)


def attach_memory(
    request: AttachRequest,
    handed_back: Sequence[int],
    *,
    elsewhere: int | None = None,
    create_memory: Callable[[str, int], int] = descriptors.create_memory,
) -> AttachedMemory:
    """Create memory for a trainer, or adopt what it hands back after its sidecar died.

    Slow: call it off the event loop. Takes ownership of `handed_back`, even on failure.

    Args:
        elsewhere: A pidfd of a trainer in another container; the caller closes it.

    Raises:
        UsageError: the descriptors or the process do not match the message.
        ExhaustedError: not enough memory for the arena.
    """
    fds = list(handed_back)
    try:
        if not fds:
            fds = Descriptors.create(
                request.arena_bytes,
                create_memory=create_memory,
                create_arena=request.device.create if request.device is not None else None,
            ).as_list()
        shared = Descriptors.received(
            fds,
            request.arena_bytes,
            on_device=request.device is not None,
            allocations=request.allocations,
        )
        fds.append(_trainer_pidfd(request) if elsewhere is None else os.dup(elsewhere))
        attached = AttachedMemory(request, shared, fds[-1], elsewhere=elsewhere is not None)
    except BaseException:
        for descriptor in fds:
            os.close(descriptor)
        raise
    try:
        _greet(attached)
        attached.fault_in()
    except BaseException:
        attached.close()
        raise
    return attached


def _trainer_pidfd(request: AttachRequest) -> int:
    try:
        descriptor = descriptors.pidfd(request.pid)
    except OSError as error:
        raise UsageError(f"attach: there is no process {request.pid} ({error.strerror})") from error
    # After opening the pidfd: a pid checked before could have been reused.
    if places.process_start(request.pid) != request.start:
        os.close(descriptor)
        raise UsageError(f"attach: process {request.pid} did not start at {request.start}")
    return descriptor


def _greet(attached: AttachedMemory) -> None:
    """Initialize the sidecar's words; after a respawn, settle what the dead sidecar left open."""
    page = attached.page
    # 0: a fresh page. The trainer makes the page if no sidecar could be started.
    if page[Word.MAGIC] not in (0, MAGIC):
        raise ConflictError("attach: the control page is of another version of paramd")
    page[Word.MAGIC] = MAGIC
    page[Word.SIDECAR_PID] = os.getpid()
    # The dead sidecar's requests must be repeated under a higher number; the trainer keeps its
    # promises.
    page[Word.READY] = 0
    page[Word.ARM_STEP] = page[Word.ARM_SLOT0] = page[Word.ARM_SLOT1] = 0
    # Otherwise the trainer's next update would wait for copies that died with the old sidecar.
    page[Word.COPY_ENDED] = page[Word.COPY_BEGUN]
    page[Word.SERVED] = page[Word.ANNOUNCE]
