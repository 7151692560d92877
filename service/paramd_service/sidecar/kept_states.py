"""States of a rank that are kept beside the present one: what they are, and who finds them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from paramd.errors import ConflictError, DataLossError, NotFoundError
from paramd.memory.continuation import digest_of


@dataclass(frozen=True, kw_only=True, slots=True)
class StandingLabel:
    """The contents of a buffer: arena, optimizer's state in host memory and on the device, record
    and table, one after the other."""

    lineage: int
    """History that the state belongs to (word LINEAGE)."""
    step: int
    edits: int
    """Edits applied in this history."""
    arena_bytes: int
    optimizer_bytes: int
    """Bytes of the optimizer's state, in host memory and on the device."""
    record_bytes: int
    table_bytes: int
    world_size: int
    layout_digest: str
    digest: int = 0
    """XXH3 of the bytes; 0 while it is being computed."""
    before: tuple[int, ...] = ()
    """Histories that it belonged to, newest first: those that were continued from it. A start that
    dies while it resumes may leave only some ranks with a new history."""
    device_bytes: int = 0
    """How many of the optimizer's bytes, the last ones, were on the device. Unknown for copies."""
    incarnation: int = 0
    """The incarnation that made it; 0 of copies, as the next two."""
    history: int = 0
    """Rollbacks in that incarnation before it."""
    edits_here: int = 0
    """Edits applied in that incarnation before it."""

    @property
    def size_bytes(self) -> int:
        return self.arena_bytes + self.optimizer_bytes + self.record_bytes + self.table_bytes


@dataclass(frozen=True, slots=True)
class Found:
    """The bytes of a state, mapped while they are needed."""

    label: StandingLabel
    buffer: memoryview
    descriptor: int

    def check(self) -> None:
        """Raise DataLossError unless the bytes are unchanged. Slow."""
        if digest_of(self.buffer) != self.label.digest:
            raise DataLossError(f"the kept state of step {self.label.step} is damaged on this rank")

    def read_into(self, target: memoryview, begin: int) -> None:
        """Fill `target` with the bytes from `begin` on, without holding the interpreter's lock."""
        done = 0
        while done < target.nbytes:
            moved = os.preadv(self.descriptor, [target[done:]], begin + done)
            if not moved:
                raise DataLossError("a kept state is shorter than its label says")
            done += moved


class KeptStates:
    """The kept states of a sidecar; this class has none. Thread-safe."""

    def found(
        self, name: str, step: int, lineage: int, edits: int
    ) -> AbstractContextManager[Found]:
        """The state that has this name (empty: any without one) and these numbers, mapped for the
        block.

        Raises:
            NotFoundError: There is none.
        """
        raise NotFoundError(f"this sidecar keeps no states, so not {name or f'step {step}'!r}")

    def read(
        self, name: str, layout_digest: str, spans: Sequence[tuple[int, int]], into: memoryview
    ) -> StandingLabel:
        """Copy half-open byte spans of a state's arena to `into`, one after the other. Slow.

        Raises:
            ConflictError: There is no such state, or it is of another layout.
            DataLossError: It is damaged.
        """
        raise ConflictError(f"this sidecar keeps no states, so not {name!r}")

    def beside_bytes(self) -> int:
        """Size of what is kept beside the parameters of the present state."""
        return 0

    async def stands(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` until the state of a rollback is kept, too. Event loop only."""
