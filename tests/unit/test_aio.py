"""Work on threads is waited for when its caller is cancelled."""

import asyncio
import threading
from typing import Any

import pytest

from paramd.errors import DataLossError
from paramd_service.aio import all_of, uncancelled


async def test_cancelling_waits_for_the_thread_and_drops_its_error() -> None:
    loop = asyncio.get_running_loop()
    logged: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: logged.append(context))
    begun, told, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert told.wait(10)
        ended.set()
        raise ValueError("late")

    waiting = asyncio.create_task(uncancelled(asyncio.to_thread(work), told.set))
    await asyncio.to_thread(begun.wait, 10)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended.is_set()
    del waiting
    await asyncio.sleep(0)
    assert logged == []


async def test_a_second_cancelling_waits_too() -> None:
    begun, told = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert told.wait(10)

    waiting = asyncio.create_task(uncancelled(asyncio.to_thread(work)))
    await asyncio.to_thread(begun.wait, 10)
    for _ in range(3):
        waiting.cancel()
        await asyncio.sleep(0.01)
        assert not waiting.done(), "its caller would let go of memory that the thread uses"
    told.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_of_several_the_first_error_is_raised_as_it_is_and_ends_the_others() -> None:
    ended = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def fails() -> None:
        await asyncio.sleep(0)
        raise DataLossError("this one")

    with pytest.raises(DataLossError, match="this one"):
        await all_of([waits(), fails()])
    assert ended == [True]
