"""Processes that are clients of the sidecars for REST: torch and tensors stay out of this one.

One JSON object goes in through standard input, so that a ticket is in no argument; one comes out.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from paramd.errors import CODES, NotFoundError, ParamdError
from paramd.mesh.peers.control import JobDocument
from paramd_service import core_dumps

START_S = 12.0
"""Additional time for a process to load torch."""

_ERRORS = {kind.__name__: kind for kind in CODES}

log = logging.getLogger("paramd.control")


async def ask_process(module: str, asked: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
    """Run a module that `answers`, and return what it answered. The process is ended in any case.

    Raises:
        TimeoutError: If it takes longer than `timeout_s` and its start, and the error that it
            answered with.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        module,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        # One thread: the training may run on this host.
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        async with asyncio.timeout(timeout_s + START_S):
            answer, complaint = await process.communicate(json.dumps(asked).encode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        log.error("%s ended with %s: %s", module, process.returncode, complaint.decode()[-2000:])
        raise ParamdError(
            "a process of the control plane ended unexpectedly; the control plane's log says why"
        )
    found = dict(json.loads(answer))
    if "error" in found:
        raise _ERRORS[found["error"]](str(found["message"]))
    return found


def answers(work: Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]]) -> None:
    """Answer the one request of `ask_process`, in the process that it started."""
    core_dumps.forbid()
    os.nice(5)

    async def answered() -> dict[str, Any]:
        return await work(json.load(sys.stdin))

    try:
        answer = asyncio.run(answered())
    except ParamdError as error:
        known = next(kind for kind in type(error).__mro__ if kind in CODES)
        answer = {"error": known.__name__, "message": str(error)}
    json.dump(answer, sys.stdout)


class GivenDirectory:
    """Knows only the jobs that it was given; implements `Directory`."""

    def __init__(self, jobs: Mapping[str, JobDocument]) -> None:
        self._jobs = jobs

    @property
    def url(self) -> str:
        return "the control plane"

    def look_again(self) -> None:
        """No-op: it never changes."""

    async def jobs(self) -> list[str]:
        return list(self._jobs)

    async def job(self, job: str) -> JobDocument:
        if job not in self._jobs:
            raise NotFoundError(f"job {job[:64]!r} was not given")
        return self._jobs[job]

    async def close(self) -> None:
        """No-op: nothing is open."""
