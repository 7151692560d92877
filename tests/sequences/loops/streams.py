"""Subscriptions that stay open beside the operations of a loop; each frame is an answer.

One thread and one client have all of them. A frame is compared, by the whole name that it carries,
with the parameters that the ranks have recorded, or with the gradients that the optimizer consumed
in that update. Frames of one subscription go forward, and none is silent while training goes on.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator
from random import Random
from typing import TYPE_CHECKING, Any

import torch

from paramd.errors import ConflictError, ParamdError
from paramd.mesh.amesh import AsyncMesh
from paramd.mesh.connect import async_connect
from paramd.mesh.frames.frames import ParamFrame
from tests.sequences.model import FROZEN, TIED
from tests.sequences.reading import LANES, summary_differs
from tests.sequences.session import JOB, RETRYABLE, DefectError, patience_s

if TYPE_CHECKING:
    from tests.sequences.loops.session import LoopSession

MOST_FRAMES = 150
"""Of one subscription; then another one is opened."""
WRITES_SHARE = 0.3
"""How many readers write into the frames that they were given."""
AFTER_REFUSAL_S = 0.2
SILENT_S = 30.0
"""Within this time a subscription has a frame of a training that goes on undisturbed."""
SILENT_STEPS = 100
"""So many updates of it without a frame are silence."""
Frames = AsyncGenerator[Any, None]


class Streams(threading.Thread):
    """All subscriptions of one session."""

    def __init__(self, session: LoopSession, count: int) -> None:
        super().__init__(daemon=True)
        self._session, self._count = session, count
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        self.ends = threading.Event()
        self.failed: Exception | None = None
        self.answers: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()

    def run(self) -> None:
        try:
            self._task = self._loop.create_task(self._all())
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            pass
        except Exception as error:
            self._fail("connect", error)
        finally:
            self._loop.close()

    def end(self) -> None:
        """Has it end."""
        self.ends.set()
        if self._task is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._task.cancel)

    async def _all(self) -> None:
        while not self.ends.is_set():
            try:
                mesh = await async_connect(job=JOB, timeout=15).__aenter__()
            except RETRYABLE as error:
                self.refused[type(error).__name__] += 1
                await asyncio.sleep(AFTER_REFUSAL_S)
            else:
                break
        else:
            return
        try:
            async with asyncio.TaskGroup() as tasks:
                for number in range(self._count):
                    rng = Random(f"stream {self._session.loop} {number}")
                    tasks.create_task(self._one_after_the_other(mesh, rng))
        finally:
            await mesh.close()

    async def _one_after_the_other(self, mesh: AsyncMesh, rng: Random) -> None:
        while not self.ends.is_set() and self.failed is None:
            kind, frames, options = self._opened(mesh, rng)
            try:
                await self._followed(kind, frames, options, rng)
            except (*RETRYABLE, ConflictError) as error:
                self.refused[type(error).__name__] += 1
                await asyncio.sleep(AFTER_REFUSAL_S)
            except ParamdError as error:
                # After a fault there may be nobody who knows the job.
                if not self._session.disturbed:
                    self._fail(kind, error)
                self.refused[type(error).__name__] += 1
                await asyncio.sleep(AFTER_REFUSAL_S)
            except Exception as error:
                self._fail(kind, error)
            finally:
                await frames.aclose()

    def _opened(self, mesh: AsyncMesh, rng: Random) -> tuple[str, Frames, dict[str, Any]]:
        shown = self._session.shown
        patterns = rng.choice([["*"], ["blocks.*"], [rng.choice(shown)], rng.sample(shown, 3)])
        options: dict[str, Any] = {"every": rng.choice([1, 1, 1, 2])}
        gradients = "grads" not in self._session.way.without
        if gradients and (self._session.mirrored or rng.random() < 0.5):
            options["kind"] = rng.choice(["full", "full", "stats"])
            if options["kind"] == "full":
                options["dtype"] = rng.choice([None, None, torch.bfloat16])
                options["transport"] = rng.choice(LANES)
            return "grads", mesh.grads(*patterns, **options), options
        options |= {"deltas": rng.random() < 0.5, "transport": rng.choice(LANES)}
        return "follow", mesh.follow(*patterns, **options), options

    async def _followed(
        self, kind: str, frames: Frames, options: dict[str, Any], rng: Random
    ) -> None:
        newest, writes = (0, 0, 0), rng.random() < WRITES_SHARE
        for _ in range(rng.randint(1, MOST_FRAMES)):
            if self.ends.is_set() or self.failed is not None:
                return
            frame = await self._next(kind, frames, options)
            if frame is None:
                return
            self._judge(kind, frame, options)
            name = (frame.incarnation, frame.history, frame.step)
            if name <= newest:
                raise DefectError(f"{kind} {options}: {name} after {newest}")
            newest = name
            self.answers[kind] += 1
            if writes and isinstance(frame, ParamFrame):
                for tensor in frame.values():
                    tensor.zero_()
            # Others have their turn, also where frames are there already.
            await asyncio.sleep(0)

    async def _next(self, kind: str, frames: Frames, options: dict[str, Any]) -> Any:
        """The next frame; None: it has ended."""
        waiting = asyncio.ensure_future(anext(frames, None))
        since_s, since = time.monotonic(), self._session.truth.count
        try:
            while not waiting.done():
                await asyncio.wait([waiting], timeout=1.0)
                if self._session.held_at is not None or self._session.disturbed:
                    since_s, since = time.monotonic(), self._session.truth.count
                passed = self._session.truth.count - since
                late_s = time.monotonic() - since_s
                if passed > SILENT_STEPS and late_s > patience_s(SILENT_S):
                    raise DefectError(
                        f"{kind} {options}: silent for {late_s:.0f} s and {passed} updates"
                    )
            return waiting.result()
        finally:
            # The generator can be closed once nothing runs in it.
            waiting.cancel()
            await asyncio.wait([waiting])

    def _judge(self, kind: str, frame: Any, options: dict[str, Any]) -> None:
        what = f"{kind} {options}"
        if isinstance(frame, ParamFrame):
            self._session.judge_by_name(what, frame, frame)
            return
        got = {n: frame[n] for n in frame if TIED.get(n, n) not in FROZEN}
        whatever = range(0)
        if options["kind"] == "stats":
            self._session.judge_gradients(what, frame, got, whatever, differs=summary_differs)
            return
        dtype = options["dtype"]
        self._session.judge_gradients(
            what, frame, got, whatever, cut=lambda x: x.to(dtype) if dtype is not None else x
        )

    def _fail(self, what: str, error: Exception) -> None:
        # The end of a session breaks calls, but makes no answer wrong.
        if self.failed is None and (isinstance(error, DefectError) or not self.ends.is_set()):
            self.failed = DefectError(f"stream, {what}: {error!r}")
