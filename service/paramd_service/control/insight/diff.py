"""Two states compared for REST, by a separate process: torch and tensors stay out of this one."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from paramd import errors
from paramd.errors import ConflictError, DeadlineError, ParamdError, UsageError
from paramd_service.admission import CALLER, Shares

TIMEOUT_S = 30.0
"""Time for both states to exist and to be compared."""
START_S = 12.0
"""Additional time for the process to load torch."""
MAX_CONCURRENT = 2
"""Most comparisons at a time; each takes some 300 MiB and a core."""

PROCESS = "paramd_service.control.insight.diff_process"

log = logging.getLogger("paramd.control")


class Comparisons:
    """Compares states, a few at a time. Event loop only."""

    def __init__(self) -> None:
        self._shares = Shares(MAX_CONCURRENT, "comparisons")

    async def compare(
        self,
        job: str,
        a: Mapping[str, str],
        b: Mapping[str, str],
        patterns: Sequence[str],
        *,
        jobs: Mapping[str, Any],
        heat: bool,
    ) -> dict[str, Any]:
        """Labels of both states, and a row for each tensor. `a`, `b`: {"job": NAME}, {"path":
        DIRECTORY, "label": its name for callers, "export": id of the export expected there}, or
        {"text": a state of `job`}. `jobs`: job
        documents with the caller's ticket, by name. Raises ExhaustedError: other comparisons are
        running. ParamdError: as `AsyncMesh.diff`."""
        asked = {
            "job": job, "a": a, "b": b, "patterns": list(patterns), "jobs": jobs, "heat": heat,
            "timeout_s": TIMEOUT_S,
        }  # fmt: skip
        with self._shares.one(CALLER.get()):
            found = await _asked(json.dumps(asked).encode())
        if "error" in found:
            kind = getattr(errors, str(found["error"]), ParamdError)
            message = str(found["message"])
            if kind is DeadlineError:
                raise _too_long(message)
            for state in (a, b):
                # Callers know destinations by name, never their paths.
                if "path" in state:
                    message = message.replace(state["path"], state["label"])
            raise kind(message)
        return found


async def _asked(request: bytes) -> dict[str, Any]:
    """The answer of the process, which is ended in any case."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", PROCESS,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        # One thread: the training may run on this host.
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        async with asyncio.timeout(TIMEOUT_S + START_S):
            answer, complaint = await process.communicate(request)
    except TimeoutError as error:
        raise _too_long("training is slow, paused or over, or the model is large") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        log.error("comparison ended with %s: %s", process.returncode, complaint.decode()[-2000:])
        raise ParamdError("the comparison ended unexpectedly; the control plane's log says why")
    return dict(json.loads(answer))


def _too_long(why: str) -> ConflictError:
    # No server error: the request takes longer than REST waits.
    return ConflictError(
        f"the states were not there and compared within {TIMEOUT_S:.0f} s: {why}; ask for fewer "
        "parameters or steps, or use mesh.diff with a longer timeout"
    )


def state_of(text: str) -> tuple[str, str]:
    """(kind, rest) of a state in a request: "export" and "job" have a rest, else "text". Raises
    UsageError for any other text."""
    kind, colon, rest = text.partition(":")
    if kind in ("export", "job") and colon and rest:
        return kind, rest
    ahead = text[:1] == "+" and text[1:].isdecimal()
    if text == "now" or ahead or (kind == "mark" and rest):
        return "text", text
    raise UsageError(f"{text[:80]!r}: expected now, +N, mark:NAME, export:ID or job:NAME")
