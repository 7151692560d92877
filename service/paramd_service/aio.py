"""Waiting for work that cannot be stopped, and for several at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, TypeVar

Result = TypeVar("Result")


async def all_of(works: Iterable[Coroutine[Any, Any, object]]) -> None:
    """Does them at once. The first error ends the others and is raised as it is, in no group:
    whoever asked is told what is wrong, not that some group failed."""
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def uncancelled(
    work: Awaitable[Result], on_cancel: Callable[[], object] = lambda: None
) -> Result:
    """Awaits work on a thread; when cancelled, however often, not before it has ended.

    The thread uses memory or descriptors that the caller lets go of afterwards. `on_cancel` may
    ask it to end early. An error that comes after that is dropped: nobody waits for it.
    """
    running = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        on_cancel()
        # A call that ran out of time is cancelled by us, and again by gRPC.
        while not running.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([running])
        # Looked at, or the loop would log it with a traceback.
        if not running.cancelled():
            running.exception()
        raise
