"""Copies of standing snapshots on other hosts: their keepers, and their return.

    buddies      the keeper of each rank's copies, from the ranks' hosts (pure)
    with_copies  each rank's offer when copies of others count as its own (pure)
    ways         the ranks that need a copy, and a holder for each (pure)
    left_behind  sidecars of ranks that are on other hosts now, which a new rank takes care of
    Copies       this rank's part: finds the copies that its sidecar and those left behind keep,
                 checks them, and sends them to the ranks that need them

They come back over the process group, into memory of the trainer that needs them: at that time
there is no incarnation yet, so no sidecar could be asked with a ticket, and the group also
carries an incarnation's keys.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paramd.errors import ParamdError, UsageError, error_of_grpc
from paramd.memory import handover
from paramd.memory.continuation import digest_of
from paramd.memory.descriptors import close_all
from paramd.state_files import kernel_of
from paramd.trainer.resume.choice import HeldCopy, Mark, RankOffer
from paramd.trainer.resume.codec import legible

OWN = -1
"""Marks a rank's own sidecar as the holder of a copy."""

ASK_TIMEOUT_S = 30.0
CHUNK_BYTES = 16 << 20
_MAX_LABEL_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Damaged:
    """A snapshot that was found damaged, and where."""

    rank: int
    holder: int
    """The rank whose sidecar keeps it, or OWN."""
    mark: Mark


def buddies(hosts: Sequence[str]) -> list[int]:
    """By rank, the rank whose sidecar keeps copies of its standing snapshots.

    The hosts form a ring in the order of their lowest ranks; the ranks of each keep the copies of
    the one before, in turn. Containers on one kernel are one host: they are lost together.

    `hosts`: each rank's `host_id`. Returns an empty list if all ranks are on one host.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks_of.setdefault(kernel_of(host), []).append(rank)
    ring = list(ranks_of.values())
    if len(ring) < 2:
        return []
    found = [OWN] * len(hosts)
    for place, ranks in enumerate(ring):
        keepers = ring[(place + 1) % len(ring)]
        for number, rank in enumerate(ranks):
            found[rank] = keepers[number % len(keepers)]
    return found


def with_copies(offers: Sequence[RankOffer], damaged: Collection[Damaged]) -> list[RankOffer]:
    """The offers, as if every rank had its copies elsewhere itself."""
    return [
        replace(
            offer,
            snapshots=tuple(dict.fromkeys(mark for _, mark in _sources(rank, offers, damaged))),
        )
        for rank, offer in enumerate(offers)
    ]


def ways(offers: Sequence[RankOffer], mark: Mark, damaged: Collection[Damaged]) -> dict[int, int]:
    """For each rank without its own copy of `mark`, a rank that holds one."""
    found = {}
    for rank in range(len(offers)):
        holder = next((h for h, m in _sources(rank, offers, damaged) if m == mark), OWN)
        if holder != OWN:
            found[rank] = holder
    return found


def _sources(
    rank: int, offers: Sequence[RankOffer], damaged: Collection[Damaged]
) -> Iterator[tuple[int, Mark]]:
    """The places of a rank's snapshots, its own first."""
    for mark in offers[rank].snapshots:
        if Damaged(rank, OWN, mark) not in damaged:
            yield OWN, mark
    for holder, offer in enumerate(offers):
        for copy in offer.copies:
            if copy.rank == rank and Damaged(rank, holder, copy.mark) not in damaged:
                yield holder, copy.mark


def left_behind(socket_path: Path, rank: int, hosts: Sequence[str]) -> dict[int, Path]:
    """Sockets, by rank, of sidecars here whose ranks moved away; the host's first rank has them."""
    here = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    found = {}
    if rank == here[0]:
        for path in socket_path.parent.glob("rank-*.sock"):
            number = path.stem.removeprefix("rank-")
            if number.isdecimal() and int(number) not in here:
                found[int(number)] = path
    return found


class Copies:
    """The copies that sidecars here keep, and the one that this rank needs."""

    def __init__(self, *, job: str, rank: int, sockets: Mapping[int, Path]) -> None:
        """`sockets`: of this rank's sidecar and of those left behind, by rank."""
        self._job, self._rank = job, rank
        self._sockets = dict(sockets)
        self._labels: dict[tuple[int, Mark], tuple[int, dict[str, Any]]] = {}
        self._given: dict[int, tuple[dict[str, Any], memoryview]] = {}
        self._room = memoryview(b"")

    def look(self) -> RankOffer:
        """The offers for other ranks; a sidecar that does not answer has none."""
        looked = RankOffer()
        for number in sorted(self._sockets):
            with suppress(ParamdError, OSError, EOFError), legible():
                answer, _ = self._asked(number, {"op": "copies"})
                looked = self._heard(number, answer, looked)
        copies = tuple(
            HeldCopy(rank, mark, sum(sizes_of(label)))
            for (rank, mark), (_, label) in self._labels.items()
        )
        return replace(looked, copies=copies)

    def _heard(self, number: int, answer: dict[str, Any], looked: RankOffer) -> RankOffer:
        for told in answer["copies"]:
            # What is wrong with one copy must not hide the others.
            with suppress(UsageError), legible():
                rank, label = int(told["rank"]), told["label"]
                marks, size_bytes = marks_of(label), sum(sizes_of(label))
                # Now, while another copy can be chosen; at the exchange a rank waits for it.
                int(label["digest"])
                _packed_label(label)
                if size_bytes > 0 and (number, rank) != (self._rank, self._rank):
                    self._labels |= {(rank, mark): (number, label) for mark in marks}
        return RankOffer(
            living_pid=int(answer["pid"]) if answer["ownership"] == "OWNED" else looked.living_pid,
            incarnation=max(looked.incarnation, int(answer["incarnation"])),
            step=max(looked.step, int(answer["step"])),
        )

    def prepare(
        self, mark: Mark, found: Mapping[int, int], offers: Sequence[RankOffer]
    ) -> list[Damaged]:
        """Map and check copies to give, and make room for the one to get; return damaged ones."""
        damaged = []
        for rank, holder in found.items():
            if holder == self._rank:
                number, label = self._labels[rank, mark]
                memory = self._mapped(number, rank, mark, label)
                if memory is None or digest_of(memory) != label["digest"]:
                    damaged.append(Damaged(rank, holder, mark))
                else:
                    self._given[rank] = label, memory
            if rank == self._rank != holder:
                held = next(c for c in offers[holder].copies if (c.rank, c.mark) == (rank, mark))
                try:
                    room = mmap.mmap(-1, max(held.size_bytes, 1))
                except (OSError, ValueError, OverflowError, MemoryError):
                    # Of a size that no memory has: whoever holds it lies, or it is damaged.
                    damaged.append(Damaged(rank, holder, mark))
                else:
                    self._room = memoryview(room)[: held.size_bytes]
        return damaged

    def exchange(
        self, found: Mapping[int, int], group: dist.ProcessGroup | None
    ) -> tuple[dict[str, Any], memoryview] | None:
        """Send and receive, on all ranks of `found`; DataLossError if this rank's copy differs."""
        got = None
        # In the same order on all ranks, so that none waits for one that waits for it.
        for rank, holder in sorted(found.items()):
            if holder == rank == self._rank:
                got = self._given[rank]
            elif holder == self._rank:
                label, memory = self._given[rank]
                head = memoryview(bytearray(_packed_label(label)))
                for part in (head, *_parts(memory)):
                    dist.send(_tensor(part), dst=rank, group=group)
            elif rank == self._rank:
                told = bytearray(_MAX_LABEL_BYTES)
                for part in (memoryview(told), *_parts(self._room)):
                    dist.recv(_tensor(part), src=holder, group=group)
                got = _label_of(bytes(told)), self._room
        return got

    def close(self) -> None:
        self._given.clear()
        self._room = memoryview(b"")

    def _mapped(
        self, number: int, rank: int, mark: Mark, label: dict[str, Any]
    ) -> memoryview | None:
        wanted = {"op": "copy", "of": rank, "lineage": label["lineage"], "step": mark.step}
        try:
            _, descriptors = self._asked(number, wanted)
        except (ParamdError, OSError, EOFError):
            return None
        try:
            return mapped(descriptors[0], sum(sizes_of(label)))
        except (OSError, ValueError):
            return None
        finally:
            close_all(descriptors)

    def _asked(self, number: int, message: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        message |= {"job": self._job, "rank": number}
        answer, descriptors = asked(self._sockets[number], message)
        if answer["op"] != message["op"]:
            close_all(descriptors)
            raise error_of_grpc(str(answer.get("code")))(str(answer.get("message")))
        return answer, descriptors


def asked(path: Path, message: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """A sidecar's answer, with its descriptors. Raises as `handover.receive`, `connect`."""
    with handover.connect(path) as connection:
        connection.settimeout(ASK_TIMEOUT_S)
        handover.send(connection, message)
        return handover.receive(connection)


def marks_of(label: Mapping[str, Any]) -> list[Mark]:
    """A snapshot's names: one in each lineage that it belongs to, the present one first."""
    return [
        Mark(int(label["step"]), int(lineage), int(label["edits"]))
        for lineage in (label["lineage"], *label["before"])
    ]


def _packed_label(label: Mapping[str, Any]) -> bytes:
    """As a rank is sent it, always of one size. Raises UsageError if it is longer than that."""
    told = json.dumps(label).encode()
    if len(told) > _MAX_LABEL_BYTES:
        raise UsageError(f"the label of a copy has over {_MAX_LABEL_BYTES:,} bytes")
    return told.ljust(_MAX_LABEL_BYTES)


def _label_of(told: bytes) -> dict[str, Any]:
    """What a rank says of the copy that it gives; nothing if that cannot be read."""
    try:
        found = json.loads(told)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def sizes_of(label: Mapping[str, Any]) -> list[int]:
    """Bytes of a snapshot's parts: arena, optimizer state, record, table."""
    names = ("arena_bytes", "optimizer_bytes", "record_bytes", "table_bytes")
    return [int(label[name]) for name in names]


def mapped(descriptor: int, size_bytes: int) -> memoryview:
    """A map as long as its last view. Copy-on-write, since torch takes no read-only memory."""
    return memoryview(mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_PRIVATE))[:size_bytes]


def _parts(memory: memoryview) -> Iterator[memoryview]:
    for begin in range(0, memory.nbytes, CHUNK_BYTES):
        yield memory[begin : begin + CHUNK_BYTES]


def _tensor(part: memoryview) -> torch.Tensor:
    return torch.frombuffer(part, dtype=torch.uint8)
