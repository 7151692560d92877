"""Put a running training back to a state that its sidecars keep: one rank's part of a rollback.

The bytes have been staged in the edit memory. At the agreed boundary, where training is paused
right before a forward, they change places with the arena's and the optimizer memory's, so that the
same note undoes the rollback; optimizers, hyper-parameters, kept objects and random states follow,
as when a training is resumed. The batch that the script has fetched belongs to the discarded state,
so the forward ends with `Rewound`, which leaves the block of `attachment.rollback_scope()`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from paramd.errors import ConflictError, ParamdError, UsageError
from paramd.memory.arena import HostArena
from paramd.memory.continuation import read_pair
from paramd.memory.control_page import NEVER_REWINDABLE, ControlPage, Word, note_rewind
from paramd.memory.descriptors import SparseMemory, pages
from paramd.memory.edit_program import Kept, Note, branch_of, write_payload
from paramd.trainer.home.device import DeviceMemory
from paramd.trainer.home.moving import Memory, bytes_at
from paramd.trainer.home.owned import ParameterStorage
from paramd.trainer.resume.choice import signature_difference
from paramd.trainer.resume.codec import decode, set_random_state
from paramd.trainer.resume.keeper import Keeper, read_record
from paramd.trainer.resume.optimizer_home import OptimizerHome, signature
from paramd.trainer.resume.succession import give_back, keep_difference

SWAP_BYTES = 4 << 20

NO_BLOCK = (
    "the script is not in a block of attachment.rollback_scope(), so it would continue with the "
    "batch of another step; put one around its loop over batches (docs/rollback.md)"
)


class Rewound(BaseException):
    """Leaves the block of `attachment.rollback_scope()`, past any `except Exception`."""


class Rewinder:
    """One rank's rollbacks. Training thread only."""

    def __init__(
        self,
        page: ControlPage,
        arena: HostArena | DeviceMemory,
        *,
        home: ParameterStorage,
        state: OptimizerHome,
        keeper: Keeper,
        keep: Mapping[str, Any],
        copied: bool = False,
        at_point: Callable[[str], None] | None = None,
    ) -> None:
        """`copied`: standing snapshots go to other hosts, in the order of steps."""
        self.page = page
        self._copied = copied
        self.arena = arena
        self.home = home
        self.state = state
        self.keeper = keeper
        self.keep = dict(keep)
        self.at_point = at_point if at_point is not None else lambda _: None
        self.at_forward = False
        """Whether this boundary is right before a forward."""
        self.blocks: list[int] = []
        """The threads that are in a block, once for each."""
        self._pid = os.getpid()
        self._step: int | None = None
        self._leaving: BaseException | None = None

    @contextmanager
    def block(self) -> Iterator[None]:
        """The script can be put back from anywhere in this block."""
        thread = threading.get_ident()
        self.blocks.append(thread)
        self._tell()
        try:
            yield
        except Rewound:
            pass
        finally:
            self.blocks.remove(thread)
            self._tell()

    def _tell(self) -> None:
        # Not once detached, nor in a forked child: the page is not ours then.
        if self._pid == os.getpid():
            able = NEVER_REWINDABLE if self._copied else int(bool(self.blocks))
            self.page[Word.REWINDABLE] = able

    def close(self) -> None:
        """Put nothing back any more; the page may be closed."""
        self._pid = 0

    def moved(self, step: int) -> None:
        """The state is that of `step` now; the forward under way must not continue."""
        self._step, self._leaving = step, Rewound()

    def broke(self, error: BaseException) -> None:
        """The rollback failed half way: the script must not train with this state."""
        self._leaving = ConflictError(
            f"paramd: a rollback failed half way on this rank, whose state is a mixture now "
            f"({error}); start the training again"
        )

    def taken(self) -> int | None:
        """The step that the training was put back to at this boundary; None if it was not."""
        step, self._step = self._step, None
        return step

    def leave(self) -> None:
        """Leave the forward if the training was put back."""
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            raise leaving


class Rollback:
    """One rollback, from its note."""

    exact = True

    def __init__(self, owner: Rewinder, note: Note, edits: SparseMemory) -> None:
        self._owner = owner
        self._edits = edits
        self._note = note
        self._arena_begin, optimizer_begin, *self._rooms = note.numbers
        self._begins = (optimizer_begin, optimizer_begin + pages(self._rooms[0]))
        """The places of the host's and the device's part of the state."""
        end = max(begin + size for begin, size in zip(self._begins, self._rooms, strict=True))
        end = max(end, self._arena_begin + owner.arena.size_bytes)
        if min(note.numbers) < 0 or end > edits.size_bytes:
            raise UsageError(f"a rollback names bytes up to {end:,} of {edits.size_bytes:,}")
        self._kept = Kept.unpacked(note.payload)
        self._record = read_record(self._kept.record)
        self._table = decode(self._kept.table)
        limits = [*(places.memory.size_bytes for places in owner.state.places), 0]
        if any(room > limit for room, limit in zip(self._rooms, limits, strict=False)):
            raise UsageError(f"a rollback has {self._rooms} bytes of state for {limits}")

    @property
    def spans(self) -> list[tuple[int, int]]:
        arena = self._arena_begin
        parts = [
            (self._note.begin, self._note.begin + self._note.capacity),
            (arena, arena + self._owner.arena.size_bytes),
            *((at, at + size) for at, size in zip(self._begins, self._rooms, strict=True)),
        ]
        return [(begin, end) for begin, end in parts if end > begin]

    def refusal(self) -> str:
        owner = self._owner
        if threading.get_ident() not in owner.blocks:
            return NO_BLOCK
        if not owner.at_forward:
            return "training is not paused before a forward; let it pass a step (paramd step)"
        present = self._present()
        if isinstance(present, str):
            return present
        needed = zip(self._rooms, owner.state.used_bytes, self._table["used_bytes"], strict=False)
        small = any(room < max(sizes) for room, *sizes in needed)
        if small or len(present.packed()) > self._note.capacity:
            return "the state has grown since the rollback was staged; try again"
        try:
            optimizers = owner.state.alive()
            self._have_room()
        except ParamdError as error:
            return str(error)
        found = signature_difference(self._table["optimizers"], signature(optimizers))
        return found or keep_difference(self._record, owner.keep)

    def apply(self, token: int) -> str:
        """Change places. SEQ is odd meanwhile."""
        try:
            self._apply(token)
        except BaseException as error:
            self._owner.broke(error)
            raise
        return ""

    def _apply(self, token: int) -> None:
        owner, kept, record = self._owner, self._kept, self._record
        present = self._present()
        if isinstance(present, str):
            raise ConflictError(present)
        step = int(record["step"])
        self._have_room()
        self._change_places(present)
        owner.home.restore_buffers()
        owner.state.adopt(self._table, record["others"])
        give_back(record, owner.state.alive(), owner.keep)
        owner.keeper.rewound(step, record, kept.record, kept.table)
        set_random_state(decode(record["early"])["random"])
        self._publish(step, kept.lineage or branch_of(token))
        owner.moved(step)

    def _change_places(self, present: Kept) -> None:
        """Swap the staged state with the present one, whose record the note has from now on."""
        owner, edits = self._owner, self._edits.buffer
        owner.home.finish()
        _swap(edits, self._arena_begin, owner.arena.buffer, owner.arena.size_bytes)
        owner.at_point("applying")
        for begin, room, places in zip(self._begins, self._rooms, owner.state.places, strict=False):
            _swap(edits, begin, places.memory.buffer, room)
        write_payload(edits, self._note.begin, present.packed())

    def _publish(self, step: int, lineage: int) -> None:
        """Tell on the page that the state is that of `step` now, in that lineage."""
        page = self._owner.page
        # Readers wait for these words by step: later steps come again, earlier ones have passed.
        page[Word.GRADIENTS_STEP] = min(page[Word.GRADIENTS_STEP], step)
        page[Word.BUFFERS_FOR], page[Word.BUFFERS_STEP] = 0, step
        note_rewind(page, step)
        page[Word.STEP] = step
        page[Word.REWOUND] += 1
        page[Word.LINEAGE] = lineage

    def _have_room(self) -> None:
        """Have memory for as much state as may change places."""
        for room, places in zip(self._rooms, self._owner.state.places, strict=False):
            if room:
                places.memory.reserve(0, pages(room))

    def _present(self) -> Kept | str:
        """The present state's record, or why it is not known."""
        page = self._owner.page
        pair = read_pair(self._owner.keeper.memory.buffer)
        if pair is None or read_record(pair[0])["step"] != page[Word.STEP]:
            return (
                f"what belongs to step {page[Word.STEP]} was not kept (PARAMD_KEEP_EVERY, or "
                "attachment.end_iteration() is missing); let training pass a step and try again"
            )
        return Kept(
            lineage=page[Word.LINEAGE],
            optimizer_bytes=sum(self._owner.state.used_bytes),
            record=pair[0],
            table=pair[1],
        )


def _swap(one: memoryview, begin: int, other: Memory, size_bytes: int) -> None:
    """Swap `size_bytes` of `one` from `begin` on with the first of `other`."""
    spare = torch.empty(min(SWAP_BYTES, size_bytes), dtype=torch.uint8, device="cpu")
    for at in range(0, size_bytes, SWAP_BYTES):
        size = min(SWAP_BYTES, size_bytes - at)
        left, right = bytes_at(one, begin + at, size), bytes_at(other, at, size)
        part = spare[:size]
        part.copy_(left)
        left.copy_(right)
        right.copy_(part)
