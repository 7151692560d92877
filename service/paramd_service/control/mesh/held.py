"""Snapshots held by REST callers: pinned on all ranks at one step until a lease ends.

While a lease lasts, this control plane renews the sidecars' own leases; if it dies, those expire
within half a minute.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paramd.errors import DeniedError, NotFoundError
from paramd_service.admission import CALLER, Shares, Who
from paramd_service.aio import kept

if TYPE_CHECKING:
    from paramd.mesh.peers.sidecars import Pinned

MAX_HELD = 16
"""Most snapshots held at a time."""


@dataclass(eq=False, slots=True)
class LeasedSnapshot:
    """One snapshot under lease."""

    id: str
    filter: str
    incarnation: int
    step: int
    expires_s: float
    """On the monotonic clock."""
    pins: Mapping[int, tuple[str, int]]
    """Snapshot id and size in bytes, by rank."""
    who: Who = None
    """The token that pinned it; None for the owner."""
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    released: bool = False

    @property
    def left_s(self) -> float:
        return max(self.expires_s - time.monotonic(), 0.0)


Pin = Callable[[Callable[["Pinned"], Coroutine[Any, Any, None]]], Coroutine[Any, Any, None]]
"""Runs its argument while the tensors are pinned."""


class HeldSnapshots:
    """Snapshots by id. Event loop only."""

    def __init__(self) -> None:
        self._held: dict[str, LeasedSnapshot] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._shares = Shares(MAX_HELD, "snapshots held")

    def all(self) -> Sequence[LeasedSnapshot]:
        """Live snapshots, earliest expiry first."""
        return sorted(self._held.values(), key=lambda held: held.expires_s)

    def get(self, held_id: str) -> LeasedSnapshot:
        """The live snapshot of an id. Raises NotFoundError."""
        held = self._held.get(held_id)
        if held is None:
            raise NotFoundError("snapshot: none of that id; its lease has ended, pin it again")
        return held

    async def pin(self, pin: Pin, *, filter_text: str, lease_s: float) -> LeasedSnapshot:
        """Pin, and hold until the lease ends, `release` or `close`.

        Raises:
            ExhaustedError: too many are held. ParamdError: what `pin` raises.
        """
        who = CALLER.get()
        self._shares.take(who)
        pinned_now: asyncio.Future[LeasedSnapshot] = asyncio.get_running_loop().create_future()

        async def hold(pinned: Pinned) -> None:
            held = LeasedSnapshot(
                id=secrets.token_hex(16),
                filter=filter_text,
                incarnation=pinned.incarnation,
                step=pinned.step,
                expires_s=time.monotonic() + lease_s,
                pins={r: (p.snapshot_id, p.size_bytes) for r, p in pinned.pins.items()},
                who=who,
            )
            # The caller gave up while the ranks were pinning; returning releases the pins.
            if pinned_now.cancelled():
                return
            pinned_now.set_result(held)
            self._held[held.id] = held
            try:
                await _until_over(held)
            finally:
                del self._held[held.id]

        task = kept(self._tasks, pin(hold), "paramd-held-snapshot")
        task.add_done_callback(lambda _: self._shares.give_back(who))
        try:
            both: set[asyncio.Future[Any]] = {task, pinned_now}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not pinned_now.done():
                task.result()  # raises: the pin has failed
        except asyncio.CancelledError:
            task.cancel()
            raise
        finally:
            pinned_now.cancel()
        return pinned_now.result()

    def renew(self, held_id: str, lease_s: float, *, by_admin: bool = False) -> LeasedSnapshot:
        """Restart a lease from now. Raises NotFoundError; DeniedError if it is another's."""
        held = self.get(held_id)
        _check_holder(held, by_admin=by_admin)
        held.expires_s = time.monotonic() + lease_s
        held.moved.set()
        return held

    def release(self, held_id: str, *, by_admin: bool = False) -> LeasedSnapshot | None:
        """End a lease; None when there is none. Raises DeniedError if it is another's."""
        held = self._held.get(held_id)
        if held is not None:
            _check_holder(held, by_admin=by_admin)
            held.released = True
            held.moved.set()
        return held

    async def close(self) -> None:
        """Release all."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))


def _check_holder(held: LeasedSnapshot, *, by_admin: bool) -> None:
    if not by_admin and held.who != CALLER.get():
        raise DeniedError(
            "snapshot: another token pinned it; ask its holder or an admin to release it"
        )


async def _until_over(held: LeasedSnapshot) -> None:
    while not held.released and held.left_s:
        held.moved.clear()
        try:
            async with asyncio.timeout(held.left_s):
                await held.moved.wait()
        except TimeoutError:
            continue  # `renew` may have moved the expiry meanwhile: check it again
