"""States for a restarted trainer: copies of other ranks' standing snapshots, and this rank's state.

Copies are kept in case their host is lost. Each arrives in parts, in order, over the one before the
last, so that a whole one is left meanwhile. The one that every rank is known to have (`keep_step`)
is overwritten only if there is memory for no other. A copy counts once all its bytes have arrived
and match their digest. All methods run on the event loop; memory is allocated on the executor.

Standing snapshots are always offered. This rank's live state is offered when the trainer ended
between two updates, with its weights not replaced and its samples unchanged. The restarted trainer
compares the ranks' offers and decides (paramd/trainer/resume).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from xxhash import xxh3_64

from paramd.errors import DataLossError, ExhaustedError, NotFoundError, UsageError
from paramd.memory.control_page import Word, label_of, sample_digest
from paramd.memory.gate import resting_state, state_of
from paramd_service.aio import in_executor
from paramd_service.resume.standing import BUFFERS, Standing, rebased
from paramd_service.sidecar.kept_states import StandingLabel
from paramd_service.sidecar.owner import AttachedMemory, Ownership
from paramd_service.sidecar.snapshots.store import Block, BlockMaker


@dataclass(eq=False, slots=True)
class _Copy:
    """Memory for a copy, and how much of it has arrived."""

    block: Block | None = None
    label: StandingLabel | None = None
    received_bytes: int = 0
    summed: xxh3_64 = field(default_factory=xxh3_64)

    @property
    def size_bytes(self) -> int:
        return self.block.size_bytes if self.block is not None else 0

    @property
    def whole(self) -> bool:
        return self.label is not None and self.received_bytes == self.label.size_bytes


@dataclass(eq=False, slots=True)
class _Kept:
    """The copies of one rank."""

    copies: list[_Copy] = field(default_factory=lambda: [_Copy() for _ in range(BUFFERS)])
    keep_step: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Copies:
    """Standing snapshots of other ranks. They outlive an attachment."""

    def __init__(
        self,
        blocks: BlockMaker,
        executor: Executor,
        *,
        budget_bytes: Callable[[], int | None],
        allowed: Callable[[], int] = lambda: BUFFERS,
    ) -> None:
        """`budget_bytes`: most bytes of all copies now; None: what there is room for. `allowed`:
        how many copies each rank may have now."""
        self._allowed = allowed
        self._blocks = blocks
        self._executor = executor
        self._budget_bytes = budget_bytes
        self._ranks: dict[int, _Kept] = {}

    @property
    def size_bytes(self) -> int:
        return sum(copy.size_bytes for kept in self._ranks.values() for copy in kept.copies)

    def labels(self) -> Iterator[tuple[int, StandingLabel]]:
        for rank, kept in self._ranks.items():
            yield from ((rank, copy.label) for copy in kept.copies if copy.label and copy.whole)

    def opened(self, rank: int, lineage: int, step: int) -> int:
        """A new descriptor of a whole copy's memory, read-only. Raises NotFoundError."""
        kept = self._ranks.get(rank)
        copies = kept.copies if kept is not None else []
        for copy in copies:
            label, block = copy.label, copy.block
            found = label is not None and (label.lineage, label.step) == (lineage, step)
            if found and copy.whole and block is not None:
                return opened(block)
        raise NotFoundError(f"no copy of rank {rank}'s step {step} is kept here")

    async def put(
        self, rank: int, label: StandingLabel, keep_step: int, offset: int, data: bytes
    ) -> int:
        """Take a part of a copy; return how many of its bytes have arrived.

        Idempotent: a part that does not begin where the last one ended changes nothing.

        Raises:
            UsageError: The part leaves the copy.
            ExhaustedError: There is no room.
            DataLossError: The bytes do not match their digest; they were dropped.
        """
        kept = self._ranks.setdefault(rank, _Kept())
        async with kept.lock:
            kept.keep_step = keep_step if keep_step else kept.keep_step
            copy = next((one for one in kept.copies if _is_of(one, label)), None)
            if copy is None:
                if offset:
                    return 0
                copy = await self._begin(kept, rank, label)
            if offset != copy.received_bytes or not data:
                return copy.received_bytes
            end = offset + len(data)
            if end > label.size_bytes or copy.block is None:
                raise UsageError(
                    f"offset_bytes: {offset:,} and {len(data):,} bytes; the copy has "
                    f"{label.size_bytes:,}"
                )
            copy.block.buffer[offset:end] = data
            copy.summed.update(data)
            if end == label.size_bytes and (copy.summed.intdigest() or 1) != label.digest:
                copy.label = None
                raise DataLossError(
                    f"the copy of rank {rank}'s step {label.step} does not match its digest"
                )
            copy.received_bytes = end
            return end

    def rebase(self, lineage: int, new_lineage: int, step: int) -> None:
        """As `Standing.rebase`; incomplete copies are dropped."""
        for copy in (copy for kept in self._ranks.values() for copy in kept.copies):
            label = copy.label if copy.whole else None
            copy.label = rebased(label, lineage, new_lineage, step) if label is not None else None

    def shrink(self, count: int) -> None:
        """Keep the memory of at most `count` copies of each rank: of the most needed ones. Those of
        a rank whose copy is being allocated or written stay as they are."""
        for kept in self._ranks.values():
            if kept.lock.locked():
                continue
            there = [copy for copy in kept.copies if copy.block is not None]
            there.sort(key=lambda one: _worth(one, kept.keep_step))
            for copy in there[: max(0, len(there) - count)]:
                self._free(copy)

    def keep_only(self, ranks: Collection[int]) -> None:
        """Free the memory of all other ranks' copies."""
        for rank in [rank for rank in self._ranks if rank not in ranks]:
            for copy in self._ranks.pop(rank).copies:
                self._free(copy)

    async def _begin(self, kept: _Kept, rank: int, label: StandingLabel) -> _Copy:
        """Allocate memory for another copy, or reuse that of the least needed one."""
        # Somewhat larger: the record's size changes from step to step.
        size_bytes = label.size_bytes + label.size_bytes // 64 + (64 << 10)
        copy = min(kept.copies, key=lambda one: _worth(one, kept.keep_step))
        more = sum(one.block is not None for one in kept.copies) < self._allowed()
        if copy.block is None and not (more and self._has_room(size_bytes, instead_of=copy)):
            with_memory = [one for one in kept.copies if one.block is not None]
            copy = min(with_memory, key=lambda one: _worth(one, kept.keep_step), default=copy)
        fits = copy.size_bytes >= label.size_bytes
        more = more or copy.block is not None
        if not fits and not (more and self._has_room(size_bytes, instead_of=copy)):
            raise ExhaustedError(
                f"no room for a copy of {label.size_bytes:,} bytes of rank {rank}; raise "
                "--standing-budget-bytes (PARAMD_STANDING_BUDGET_BYTES), or give the host more "
                "memory"
            )
        copy.label = None
        if not fits:
            self._free(copy)
            # Set on the thread: the next attempt has it if this caller leaves.
            make = self._blocks.make
            await in_executor(self._executor, lambda: setattr(copy, "block", make(size_bytes)))
        copy.label, copy.received_bytes, copy.summed = label, 0, xxh3_64()
        return copy

    def _has_room(self, size_bytes: int, *, instead_of: _Copy) -> bool:
        budget = self._budget_bytes()
        return budget is None or self.size_bytes - instead_of.size_bytes + size_bytes <= budget

    def _free(self, copy: _Copy) -> None:
        block, copy.block, copy.label = copy.block, None, None
        if block is not None:
            self._blocks.dispose(block)


def copies_message(own: int, standing: Standing, copies: Copies) -> list[dict[str, Any]]:
    """The snapshots here as a restarted trainer is informed of them: ranks and labels."""
    mine = [(own, label) for label, _ in standing.labels() if label.digest]
    return [{"rank": rank, "label": asdict(label)} for rank, label in (*mine, *copies.labels())]


def opened(block: Block) -> int:
    """A new descriptor of a block's memory, read-only."""
    return os.open(f"/proc/self/fd/{block.descriptor}", os.O_RDONLY | os.O_CLOEXEC)


def opened_standing(standing: Standing, lineage: int, step: int) -> int:
    """A new descriptor of a whole standing snapshot's memory, read-only. Raises NotFoundError."""
    with standing.steady():
        for label, block in standing.labels():
            if (label.lineage, label.step) == (lineage, step):
                return opened(block)
    raise NotFoundError(f"no standing snapshot of step {step} is here")


def _is_of(copy: _Copy, label: StandingLabel) -> bool:
    """Whether it is a copy of that snapshot. Senders omit the earlier histories."""
    return copy.label is not None and replace(copy.label, before=()) == label


def _worth(copy: _Copy, keep_step: int) -> tuple[bool, bool, int]:
    """Copies in the order in which they are overwritten."""
    label = copy.label
    if label is None:
        return False, False, 0
    return label.step == keep_step and copy.whole, copy.whole, label.step


def offer_of(
    attached: AttachedMemory, ownership: Ownership, layout_digest: str, standing: Standing
) -> tuple[dict[str, Any], list[int]]:
    """The offer, and its descriptors: new ones, which the caller closes. They are arena, optimizer
    memory, continuation memory and the state's allocations on a device if the live state is
    offered, then one for each snapshot, read-only."""
    page, request = attached.page, attached.request
    resting = resting_state(page)
    state = resting if resting is not None else state_of(page)
    why_not = _why_not_live(attached, ownership)
    descriptors: list[int] = []
    if not why_not:
        shared = attached.shared
        descriptors += map(os.dup, (shared.arena, shared.optimizer, shared.continuation))
        descriptors += [os.dup(one.descriptor) for one in shared.state]
    snapshots = _snapshots(standing, descriptors)
    offer = {
        "op": "offered",
        "ownership": ownership.name,
        "pid": request.pid,
        "incarnation": request.incarnation,
        "world_size": request.world_size,
        "arena_bytes": request.arena_bytes,
        "device": request.device.uuid.hex() if request.device is not None else "",
        "layout_digest": layout_digest,
        "lineage": page[Word.LINEAGE],
        "step": state.step,
        "edits": page[Word.EDITS] + page[Word.EDITS_BEFORE],
        "why_not_live": why_not,
        "optimizer_bytes": page[Word.OPTIMIZER_BYTES],
        "allocations": [one.size_bytes for one in attached.shared.state],
        "digests": standing.left_digests(attached),
        "reached": standing.reached,
        "snapshots": snapshots,
    }
    return offer, descriptors


def offer_of_snapshots(
    ownership: Ownership, standing: Standing
) -> tuple[dict[str, Any], list[int]]:
    """As `offer_of`, when a trainer that was to take over the memory died meanwhile."""
    descriptors: list[int] = []
    snapshots = _snapshots(standing, descriptors)
    newest = snapshots[0] if snapshots else {}
    offer = {
        "op": "offered",
        "ownership": ownership.name,
        "incarnation": 0,
        "world_size": newest.get("world_size", 0),
        "layout_digest": newest.get("layout_digest", ""),
        # Not known: what that trainer was in went with it.
        "lineage": 0,
        "step": -1,
        "reached": standing.reached,
        "why_not_live": "a trainer that was to continue in it died while it attached",
        "snapshots": snapshots,
    }
    return offer, descriptors


def _snapshots(standing: Standing, descriptors: list[int]) -> list[dict[str, Any]]:
    """The labels of whole snapshots; adds their descriptors."""
    found = []
    with standing.steady():
        for label, block in standing.labels():
            found.append(asdict(label))
            descriptors.append(opened(block))
    return found


def _why_not_live(attached: AttachedMemory, ownership: Ownership) -> str:
    page = attached.page
    if ownership is not Ownership.ORPHANED:
        return str(ownership.value)
    if not page[Word.LINEAGE]:
        return "its trainer did not keep what a restarted trainer needs (attach with resume='auto')"
    if label := label_of(page):
        return f"the trainer ended while other weights ({label!r}) stood in for the training's"
    digest = sample_digest(page, attached.host_bytes)
    if page[Word.REST]:
        changed = digest != page[Word.REST_DIGEST]
    else:
        settled = page[Word.SETTLED_SEQ] == page[Word.SEQ]
        changed = settled and digest != page[Word.SETTLED_DIGEST]
    return "parameters were changed after the last update" if changed else ""
