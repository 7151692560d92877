"""Await work that cannot be stopped, and several pieces of work at once."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Executor
from contextlib import suppress
from typing import Any, TypeVar

Result = TypeVar("Result")


async def all_of(works: Iterable[Coroutine[Any, Any, object]]) -> None:
    """Run them concurrently; the first error cancels the others and is raised, not in a group."""
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


def kept(
    tasks: set[asyncio.Task[Any]], work: Coroutine[Any, Any, Result], name: str | None = None
) -> asyncio.Task[Result]:
    """Start `work` as a task that stays in `tasks` until it has ended."""
    task = asyncio.create_task(work, name=name)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


def post(loop: asyncio.AbstractEventLoop, action: Callable[..., object], *args: object) -> None:
    """Call into an event loop from another thread; a no-op once the loop is closed."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(action, *args)


async def stopped(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel those that are tasks, and wait for them; their errors stay in them."""
    there = [task for task in tasks if task is not None]
    for task in there:
        task.cancel()
    if there:
        await asyncio.wait(there)


async def ended(task: asyncio.Future[Any]) -> None:
    """Cancel a task if it still runs and wait for it, discarding its outcome."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.exception()


async def in_executor(executor: Executor, work: Callable[[], Result]) -> Result:
    """Run blocking work on a thread; cancellation waits for its end, as with `uncancelled`."""
    return await uncancelled(asyncio.get_running_loop().run_in_executor(executor, work))


async def uncancelled(
    work: Awaitable[Result], on_cancel: Callable[[], object] = lambda: None
) -> Result:
    """Await work on a thread; cancellation, however often, takes effect only once it has ended.

    For threads that use memory or descriptors which the caller releases afterwards. `on_cancel`
    may ask the work to end early; its errors after cancellation are dropped.
    """
    running = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        on_cancel()
        # A timed-out call is cancelled twice: by its timeout, then by gRPC.
        while not running.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([running])
        # Retrieved, or the loop would log it with a traceback.
        if not running.cancelled():
            running.exception()
        raise
