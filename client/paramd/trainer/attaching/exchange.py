"""Exchanges between trainers while attaching: the next incarnation, and small messages over gloo.

Rank 0 takes the incarnation from a site's control plane or from this host. Messages are JSON or
text, never pickle.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paramd import places
from paramd.errors import ConflictError, ParamdError, UnreachableError
from paramd.security.tickets import Role, Signer, mint_of_ranks, new_private_key
from paramd.trainer import exit
from paramd.trainer.helpers.control_link import ControlLink, TakenIncarnation, register
from paramd.trainer.helpers.sidecar_link import Identity
from paramd.trainer.settings import AttachSettings

log = logging.getLogger("paramd")

_LAZY = "TORCH_GLOO_LAZY_INIT"
"""Read by torch whenever it makes a gloo device."""

SHORT_BYTES = 4096
"""Messages up to this size on all ranks need no second collective."""

_SIZE = struct.Struct("<q")

AGAIN_S = 0.5
"""Pause before asking an unresponsive control plane again."""


def take_incarnation(
    settings: AttachSettings,
    *,
    job: str,
    world_size: int,
    hosts: Sequence[str] = (),
    above: int = 0,
    former: Identity | None = None,
    control: ControlLink | None = None,
) -> TakenIncarnation:
    """Take the next incarnation, above any this host knows of; rank 0 only.

    `former`: this training's present incarnation, whose helpers go on in the next one, `control`
    among them where it is the job's own.

    An unresponsive control plane costs this incarnation the service, not the training. `hosts`:
    name or address of each rank, for ranks on several hosts, which then get certificates; `above`:
    the last incarnation that other hosts know of.

    Raises:
        DeniedError, ConflictError, UsageError: If the control plane refused the job, or the
            state dir cannot be used.
    """
    if settings.control:
        try:
            places.last_incarnation(job, at_least=above)
            succeeds = former.incarnation if former is not None else 0
            found = _registered(
                settings, job=job, world_size=world_size, hosts=hosts, succeeds=succeeds
            )
        except UnreachableError as error:
            # Its number, tickets and certificates are the site's to give. This host's own serve
            # the ranks' sidecars meanwhile; the site could not tell their tickets from forged ones.
            log.warning(
                "paramd: %s; training continues without a control plane. Once the site answers, "
                "attachment.refresh() on all ranks registers the running training there; to train "
                "without the site, leave PARAMD_CONTROL and attach(control=...) out",
                error,
            )
        else:
            # Remember it here too, so that a later incarnation of this host's own stays above it.
            places.last_incarnation(job, at_least=found.incarnation)
            return found
    if control is not None:
        try:
            return control.take_next(above, hosts)
        except ParamdError as error:
            log.warning("paramd: %s; it learns of the next run when the first rank joins", error)
    return _own_incarnation(settings, job, world_size, hosts, above, former)


def _registered(
    settings: AttachSettings, *, job: str, world_size: int, hosts: Sequence[str], succeeds: int
) -> TakenIncarnation:
    """Register the job, retrying while the control plane may be coming back.

    `register` is not idempotent, but a lost answer only leaves an incarnation that no rank joins;
    the next one is above it.
    """
    deadline_s = time.monotonic() + settings.control_timeout_s
    told = False
    while True:
        try:
            floor = places.last_incarnation(job)
            return register(
                settings,
                job=job,
                world_size=world_size,
                incarnation_floor=floor,
                hosts=hosts,
                succeeds=succeeds,
            )
        except UnreachableError as error:
            if time.monotonic() >= deadline_s:
                raise
            if not told:
                log.warning("paramd: %s; asking again for %g s", error, settings.control_timeout_s)
                told = True
            time.sleep(AGAIN_S)


def _own_incarnation(
    settings: AttachSettings,
    job: str,
    world_size: int,
    hosts: Sequence[str],
    above: int,
    former: Identity | None,
) -> TakenIncarnation:
    incarnation = places.next_incarnation(job, above=above)
    private_key, certified = new_private_key(), incarnation
    if former is not None and former.private_key is not None:
        # The control plane goes on, and knows the next incarnation's ranks by the key it has.
        private_key, certified = former.private_key, former.certified
    signer, pems = Signer(private_key), []
    if hosts:
        # Imported only with several hosts: it is slow to load.
        from paramd.security.authority import JobAuthority

        pems = JobAuthority(private_key, job=job, incarnation=certified).issue_ranks(hosts)

    def minted(role: Role) -> list[str]:
        ranks = range(world_size)
        return mint_of_ranks(signer, role, job=job, incarnation=incarnation, ranks=ranks)

    return TakenIncarnation(
        incarnation=incarnation,
        public_key=signer.public_key,
        rank_tickets=minted(Role.SIDECAR),
        copy_tickets=minted(Role.COPIER) if settings.replicas else [],
        private_key=private_key,
        certified=certified,
        rank_pems=pems,
    )


class Exchange:
    """The trainers' own gloo group, used to attach and later to agree.

    Creating one is collective over the default process group. Without a process group the
    world is this process alone.
    """

    def __init__(self, *, timeout_s: float) -> None:
        distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if distributed else 0
        self.world_size = dist.get_world_size() if distributed else 1
        self.group: dist.ProcessGroup | None = None
        if self.world_size > 1:
            self._call = _Roll(self.rank, self.world_size)
            with _connected_when_needed(), self._call.names_who_is_missing():
                self.group = dist.new_group(
                    backend="gloo", timeout=timedelta(seconds=timeout_s), group_desc="paramd"
                )
            exit.register_at_exit(self)

    def gather(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """All ranks' JSON messages, indexed by rank. Collective."""
        if self.group is None:
            return [message]
        # Through rank 0: an all-gather is a ring, whose turns cost seconds among hundreds of ranks.
        told = self._answer_of_first(
            json.dumps(message).encode(), lambda found: b"[" + b",".join(found) + b"]"
        )
        return list(json.loads(told))

    def collect(self, data: bytes) -> list[bytes]:
        """All ranks' bytes on rank 0, indexed by rank; empty on the others. Collective."""
        if self.group is None:
            return [data]
        kept: list[bytes] = []

        def keep(found: list[bytes]) -> bytes:
            kept.extend(found)
            return b""

        self._answer_of_first(data, keep)
        return kept

    def scatter(self, texts: list[str] | None) -> str:
        """Return rank 0's text for this rank; other ranks pass None. Collective."""
        if self.group is None:
            assert texts is not None
            return texts[0]
        # This group spans the world, so its ranks are the global ones.
        parts = [bytearray(text.encode()) for text in texts] if texts is not None else []
        size = torch.tensor([max((len(part) for part in parts), default=0)], device="cpu")
        dist.broadcast(size, src=0, group=self.group)
        mine = torch.zeros(int(size), dtype=torch.uint8, device="cpu")
        padded = [torch.frombuffer(part.ljust(int(size)), dtype=torch.uint8) for part in parts]
        dist.scatter(mine, padded if parts else None, src=0, group=self.group)
        return ctypes.string_at(mine.data_ptr(), int(size)).decode().rstrip(" ")

    def _answer_of_first(self, data: bytes, answer: Callable[[list[bytes]], bytes]) -> bytes:
        """Rank 0's `answer` to all ranks' bytes, on all ranks; `answer` must not raise.

        Two collectives if all messages are short, since each wakes every rank.
        """
        room, told, size = SHORT_BYTES, b"", -1
        while size < 0:
            # Sizes and the first `room` bytes of all ranks' data, on rank 0; empty on the others.
            with self._call.names_who_is_missing():
                found = self._gathered(_framed(len(data), data, room))
            if found:
                longest = max(size for size, _ in found)
                told = b"" if longest > room else answer([part for _, part in found])
                # Negative: the size that a message needs, for a second try.
                size = -longest if longest > room else len(told)
            size, begin = _unframed(self._broadcast(_framed(size, told, SHORT_BYTES)))
            room = max(room, -size)
        if size <= SHORT_BYTES:
            return begin
        # Ranks without the rest receive it.
        rest = bytearray(told[SHORT_BYTES:]) if told else bytearray(size - SHORT_BYTES)
        return begin + self._broadcast(torch.frombuffer(rest, dtype=torch.uint8))

    def _gathered(self, mine: torch.Tensor) -> list[tuple[int, bytes]]:
        first = self.rank == 0
        parts = [torch.empty_like(mine) for _ in range(self.world_size)] if first else []
        dist.gather(mine, parts if first else None, dst=0, group=self.group)
        return [_unframed(_bytes_of(part)) for part in parts]

    def _broadcast(self, tensor: torch.Tensor) -> bytes:
        with self._call.names_who_is_missing():
            dist.broadcast(tensor, src=0, group=self.group)
        return _bytes_of(tensor)

    def close(self) -> None:
        """Destroy the group. Local; other ranks may still hold theirs."""
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)
        self.group = None

    def leave(self) -> None:
        """Process exit; an unfinished round keeps the group alive (see agreement.py)."""
        self.close()


class _Roll:
    """The ranks that have come to attach, kept in the store of the training's group."""

    _count = 0

    def __init__(self, rank: int, world_size: int) -> None:
        """Record that this rank has come. Collective over attaching, but waits for nobody."""
        _Roll._count += 1
        self._keys = [f"paramd/attach/{_Roll._count}/{one}" for one in range(world_size)]
        # Torch's own store, since the group has no name for it; without it no rank can be named.
        self._store = getattr(dist.distributed_c10d, "_get_default_store", lambda: None)()
        if self._store is not None:
            self._store.set(self._keys[rank], "here")

    @contextmanager
    def names_who_is_missing(self) -> Iterator[None]:
        """Errors of torch in this block become ConflictError if ranks are missing."""
        try:
            yield
        except RuntimeError as error:
            store = self._store
            missing = [n for n, key in enumerate(self._keys) if store and not store.check([key])]
            if not missing:
                raise
            told = ", ".join(map(str, missing[:16])) + " ..." * (len(missing) > 16)
            raise ConflictError(
                f"rank {told} of {len(self._keys)} has not called paramd.attach, which every rank "
                f"has to call at the same point; torch said: {str(error).splitlines()[0]}"
            ) from error


def _framed(size: int, data: bytes, room: int) -> torch.Tensor:
    """A frame of constant length: the size and the first `room` bytes of `data`."""
    frame = bytearray(_SIZE.pack(size) + data[:room])
    return torch.frombuffer(frame.ljust(_SIZE.size + room), dtype=torch.uint8)


def _unframed(frame: bytes) -> tuple[int, bytes]:
    """The size, and the part of the data that was framed."""
    size: int = _SIZE.unpack_from(frame)[0]
    return size, frame[_SIZE.size : _SIZE.size + max(size, 0)]


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.numel())


@contextmanager
def _connected_when_needed() -> Iterator[None]:
    """In this block, ranks of new gloo groups connect when they first exchange something.

    Otherwise each rank connects to all others: ranks squared, of which rounds use a few.
    """
    before = os.environ.get(_LAZY)
    os.environ[_LAZY] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_LAZY]
        else:
            os.environ[_LAZY] = before


def collective_timeout_s() -> float | None:
    """The shortest timeout of the training's collectives; None when unknown."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group: Any = dist.group.WORLD
    try:
        backends = [group._get_backend(device) for device in group._device_types]
        return float(min(b.options._timeout.total_seconds() for b in backends))
    except (AttributeError, RuntimeError, ValueError):
        # Another torch, or a backend without options.
        return None
