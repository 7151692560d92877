"""What a trainer and its sidecar share: six descriptors, always in this order."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

from paramd.errors import UsageError
from paramd.memory import descriptors
from paramd.memory.control_page import PAGE_BYTES
from paramd.memory.sparse import create_sparse, pages

ROOM_EXTRA_BYTES = 1 << 20
"""Size of a gradient slot, and of the moments memory, beyond their arena-shaped rooms."""

EDITS_EXTRA_BYTES = 64 << 20
EDIT_ARENAS = 4
GRADIENT_SLOTS = 2
MOMENT_ROOMS = 8


def slot_bytes(arena_bytes: int) -> int:
    """Size of one gradient slot: a room shaped like the arena, then program and notes."""
    return pages(arena_bytes) + ROOM_EXTRA_BYTES


def edits_bytes(arena_bytes: int) -> int:
    """Size of the edit memory."""
    return EDIT_ARENAS * pages(arena_bytes) + EDITS_EXTRA_BYTES


def gradients_bytes(arena_bytes: int) -> int:
    """Size of the gradient memory."""
    return GRADIENT_SLOTS * slot_bytes(arena_bytes)


def moments_bytes(arena_bytes: int) -> int:
    """Size of the moments memory: rooms shaped like the arena, then a table."""
    return MOMENT_ROOMS * pages(arena_bytes) + ROOM_EXTRA_BYTES


@dataclass(frozen=True, slots=True)
class Descriptors:
    """The kernel objects both processes share; each holds its own descriptors."""

    page: int
    wake: int
    arena: int
    edits: int
    gradients: int
    moments: int

    @classmethod
    def create(
        cls,
        arena_bytes: int,
        *,
        create_memory: Callable[[str, int], int] = descriptors.create_memory,
    ) -> Descriptors:
        """Create all of them, zeroed.

        Raises:
            ExhaustedError: not enough memory for the arena.
        """
        made: list[int] = []
        try:
            made.append(create_memory("paramd-page", PAGE_BYTES))
            made.append(descriptors.wake_event())
            made.append(create_memory("paramd-arena", arena_bytes))
            made.append(create_sparse("paramd-edits", edits_bytes(arena_bytes)))
            made.append(create_sparse("paramd-gradients", gradients_bytes(arena_bytes)))
            made.append(create_sparse("paramd-moments", moments_bytes(arena_bytes)))
        except BaseException:
            for descriptor in made:
                os.close(descriptor)
            raise
        return cls(*made)

    @classmethod
    def received(cls, fds: Sequence[int], arena_bytes: int) -> Descriptors:
        """Adopt descriptors from the Unix socket. On error the caller still owns `fds`.

        Raises:
            UsageError: they are not the expected objects.
        """
        if len(fds) != 6:
            raise UsageError(
                f"{len(fds)} descriptors; expected page, wake, arena, edits, gradients, moments"
            )
        found = cls(*fds)
        least = {
            found.page: PAGE_BYTES,
            found.arena: arena_bytes,
            found.edits: edits_bytes(arena_bytes),
            found.gradients: gradients_bytes(arena_bytes),
            found.moments: moments_bytes(arena_bytes),
        }
        if any(os.fstat(fd).st_size < size_bytes for fd, size_bytes in least.items()):
            raise UsageError("a descriptor is smaller than what it stands for")
        if "eventfd" not in os.readlink(f"/proc/self/fd/{found.wake}"):
            raise UsageError("the second descriptor is no eventfd")
        os.set_blocking(found.wake, False)
        return found

    def as_list(self) -> list[int]:
        """In handover order."""
        return list(astuple(self))

    def close(self) -> None:
        for descriptor in self.as_list():
            os.close(descriptor)
