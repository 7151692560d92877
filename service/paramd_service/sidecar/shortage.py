"""Watches memory for one rank, and gives back before the kernel looks for a victim.

Each look notes what the trainer is about to take, and compares what is left with the reserve. When
memory is short, what nobody holds is freed at once: memory kept for the next reader, idle pages of
edits and gradients, states kept for followers, the heap's free pages. The same but for the heap is
freed when another rank of the host asks for it (room.py). Standing snapshots and copies
of other ranks follow the decision for the whole host (room.py): one fewer, then none.

Looks come the sooner the less is left. The kernel's pressure events (PSI), where they are to be
had, call for a look at once.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import select
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from paramd.memory.control_page import Word
from paramd.memory.left import Growth, Spare, private_bytes
from paramd_service.sidecar.owner import AttachedMemory
from paramd_service.sidecar.rank import RankSidecar
from paramd_service.sidecar.room import MOST_STANDING, free_all

LOOK_LEAST_S, LOOK_MOST_S = 0.1, 1.0
"""Seconds between two looks, when little is left and when much is."""

GROWTH_BYTES_S = 8e9
"""Bytes per second that the trainings of a host are taken to grow by at most."""

TOLD_S = 300.0
"""Seconds for which the rank's status says that the kernel ended its sidecar."""

CALM_S = 60.0
"""Seconds with enough memory after which the log reports that a shortage is over. Available memory
may waver around the reserve for as long as a training runs."""

PRESSURE = Path("/proc/pressure/memory")
TRIGGER = b"some 150000 2000000\0"
"""An event when tasks waited for memory 150 ms of 2 s: the shortest window without privileges."""


class Shortage:
    """The watch of one rank. Event loop only."""

    def __init__(self, rank: RankSidecar, *, pressure: Path = PRESSURE) -> None:
        """`pressure`: file of the kernel's pressure events."""
        self._rank = rank
        self._pressure = Pressure(pressure)
        self._look_now = asyncio.Event()
        self._growth = Growth()
        self._of: AttachedMemory | None = None
        self._short = False
        self._spells = Spells()
        self._began_s = time.monotonic()

    async def run(self) -> None:
        """Look until cancelled; a look that fails is logged once and tried again."""
        self._pressure.open(self._look_now.set)
        self._rank.on_change.append(self._changed)
        if self._rank.room.predecessor_killed:
            self._rank.log(
                "killed-for-memory",
                meaning="the kernel ended this rank's last sidecar because memory had run out; "
                "one standing snapshot fewer is kept",
            )
        failed = False
        try:
            while True:
                pause_s = LOOK_MOST_S
                try:
                    pause_s = self.look()
                except (OSError, KeyError, ValueError) as error:
                    if not failed:
                        self._rank.log("memory-unknown", reason=repr(error))
                    failed = True
                self._look_now.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._look_now.wait()
        finally:
            self._rank.on_change.remove(self._changed)
            self._pressure.close()

    def look(self) -> float:
        """Look once, and act; return the seconds until the next look."""
        self._note_growth()
        room, rank = self._rank.room, self._rank
        spare = room.spare()
        if event := self._spells.see(time.monotonic(), short=spare.short):
            rank.log(event, figures=spare.text)
        if spare.short or room.is_asked:
            self._give_back(spare)
        self._short = spare.short
        room.show_idle(rank.idle_bytes)
        count = room.decide()
        # Without a trainer nothing grows here, and its states may be all that is left of it.
        if count is not None and rank.trainer_lives and rank.parts.keeps_for_restarts():
            rank.parts.shrink(count, reason=spare.text)
        rank.shortage = self._text(spare, count)
        return min(max(spare.spare_bytes / GROWTH_BYTES_S, LOOK_LEAST_S), LOOK_MOST_S)

    def _changed(self) -> None:
        """Note at once what a trainer that has just come will take: a reader may be as quick."""
        with suppress(OSError, KeyError, ValueError):
            self._note_growth()
        self._look_now.set()

    def _note_growth(self) -> None:
        attached = self._rank.attached
        if attached is not self._of:
            self._of, self._growth = attached, Growth()
        if attached is None or not self._rank.trainer_lives:
            self._rank.room.expect(step_bytes=0, coming_bytes=0)
            return
        page, pid = attached.page, attached.trainer_pid
        step = page[Word.STEP]
        # Of a trainer in another container, only what it says itself is known.
        taken_bytes = private_bytes(pid) if pid else None
        self._growth.see(taken_bytes if taken_bytes is not None else 0, step)
        self._rank.room.expect(
            step_bytes=self._growth.step_bytes,
            coming_bytes=self._growth.coming_bytes(
                page[Word.COMING_BYTES], page[Word.OPTIMIZER_BYTES], step
            ),
            trainer_pid=pid,
        )

    def _give_back(self, spare: Spare) -> None:
        rank = self._rank
        freeing = rank.take_idle()
        if spare.short and not self._short:
            freeing.append(_trim)
        if freeing:
            # Not on the thread that allocates: it may be waiting for other ranks to do the same.
            asyncio.get_running_loop().run_in_executor(None, free_all, freeing)

    def _text(self, spare: Spare, count: int | None) -> str:
        """What the rank's status says about memory; empty when there is nothing to say."""
        rank, parts = self._rank, []
        if rank.room.predecessor_killed and time.monotonic() - self._began_s < TOLD_S:
            parts.append("the kernel ended its last sidecar because memory had run out")
        wanted = rank.trainer_lives and rank.parts.keeps_for_restarts()
        if wanted and count is not None and count < MOST_STANDING:
            parts.append(f"memory is short: {count} of {MOST_STANDING} standing snapshots are kept")
        elif spare.short:
            parts.append("memory is short: readers may be refused")
        return "; ".join(parts)


class Spells:
    """Spells of shortage, each of which the log has twice: when it begins and when it is over."""

    def __init__(self) -> None:
        self._lasts = False
        self._enough_since_s: float | None = None

    def see(self, now_s: float, *, short: bool) -> Literal["memory-short", "memory-enough", ""]:
        """Take one look's result; return the event to log, or "" for none."""
        if short:
            self._enough_since_s = None
            begins, self._lasts = not self._lasts, True
            return "memory-short" if begins else ""
        if not self._lasts:
            return ""
        if self._enough_since_s is None:
            self._enough_since_s = now_s
        if now_s - self._enough_since_s < CALM_S:
            return ""
        self._lasts, self._enough_since_s = False, None
        return "memory-enough"


class Pressure:
    """The kernel's events of memory pressure, if this process may have them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._event = -1
        self._poll: select.epoll | None = None

    def open(self, tell: Callable[[], None]) -> bool:
        """Call `tell` on the event loop at each event; return whether there will be any."""
        try:
            self._event = os.open(self._path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            os.write(self._event, TRIGGER)
        except OSError:
            self.close()
            return False
        # asyncio waits for readable descriptors alone, and this one has an exceptional condition.
        poll = self._poll = select.epoll()
        poll.register(self._event, select.EPOLLPRI)

        def happened() -> None:
            # Else it would stay readable.
            if any(events & select.EPOLLERR for _, events in poll.poll(0)):
                asyncio.get_running_loop().remove_reader(poll)
            tell()

        asyncio.get_running_loop().add_reader(poll, happened)
        return True

    def close(self) -> None:
        """Idempotent."""
        if self._poll is not None:
            asyncio.get_running_loop().remove_reader(self._poll)
            self._poll.close()
            self._poll = None
        if self._event >= 0:
            os.close(self._event)
            self._event = -1


def _trim() -> None:
    """Give the heap's free pages back, where libc can (musl cannot)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
