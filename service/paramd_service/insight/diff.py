"""Two states compared for REST, by a separate process: torch and tensors stay out of this one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paramd.errors import ConflictError, DeadlineError, ParamdError, UsageError
from paramd_service.admission import CALLER, Shares
from paramd_service.control.base.processes import ask_process

TIMEOUT_S = 30.0
"""Time for both states to exist and to be compared."""
MAX_CONCURRENT = 2
"""Most comparisons at a time; each takes some 300 MiB and a core."""

PROCESS = "paramd_service.insight.diff_process"


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
        """Labels of both states, and a row for each tensor.

        `a`, `b`: {"job": NAME}, {"path": DIRECTORY, "label": its name for callers, "export": id of
        the export expected there}, or {"text": a state of `job`}. `jobs`: job documents with the
        caller's ticket, by name.

        Raises:
            ExhaustedError: Other comparisons are running.
            ParamdError: As `AsyncMesh.diff`.
        """
        asked = {
            "job": job,
            "a": a,
            "b": b,
            "patterns": list(patterns),
            "jobs": jobs,
            "heat": heat,
            "timeout_s": TIMEOUT_S,
        }
        with self._shares.one(CALLER.get()):
            try:
                return await ask_process(PROCESS, asked, timeout_s=TIMEOUT_S)
            except TimeoutError as error:
                why = "training is slow, paused or over, or the model is large"
                raise _too_long(why) from error
            except DeadlineError as error:
                raise _too_long(str(error)) from error
            except ParamdError as error:
                message = str(error)
                for state in (a, b):
                    # Callers know destinations by name, never their paths.
                    if "path" in state:
                        message = message.replace(state["path"], state["label"])
                raise type(error)(message) from error


def _too_long(why: str) -> ConflictError:
    # No server error: the request takes longer than REST waits.
    return ConflictError(
        f"the states were not available and compared within {TIMEOUT_S:.0f} s: {why}; ask for "
        "fewer parameters or steps, or use mesh.diff with a longer timeout"
    )


def state_of(text: str) -> tuple[str, str]:
    """(kind, rest) of a state in a request: "export" and "job" have a rest, else "text".

    Raises:
        UsageError: For any other text.
    """
    kind, colon, rest = text.partition(":")
    if kind in ("export", "job") and colon and rest:
        return kind, rest
    ahead = text[:1] == "+" and text[1:].isdecimal()
    if text == "now" or ahead or (kind == "mark" and rest):
        return "text", text
    raise UsageError(f"{text[:80]!r}: expected now, +N, mark:NAME, export:ID or job:NAME")
