"""A process that compares two states for REST, then ends: torch and tensors stay out of REST's.

It is an ordinary client of the sidecars, with the caller's ticket. One JSON object comes in through
standard input, so that the ticket is in no argument; one goes out.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paramd.errors import ConflictError
from paramd.mesh.insight.diff import compute_diff
from paramd.mesh.peers.control import parse_job
from paramd.mesh.peers.discovery import SidecarFinder
from paramd.mesh.reading.transfer import Transfer
from paramd_service.control.base.processes import GivenDirectory, answers
from paramd_service.destinations.directory import export_of

CELLS = 64
"""Most rows and columns of a heat map."""


async def compare(asked: Mapping[str, Any]) -> dict[str, Any]:
    """As `Comparisons.compare`."""
    jobs = {job: parse_job(document) for job, document in asked["jobs"].items()}
    directory = GivenDirectory(jobs)
    finders = {job: SidecarFinder(directory, job) for job in jobs}
    transfer = Transfer()
    states = [_state(asked[side], finders) for side in ("a", "b")]
    _check_places(asked)
    try:
        for finder in finders.values():
            await finder.start()
        found = await compute_diff(
            finders[asked["job"]],
            transfer,
            states[0],
            states[1],
            asked["patterns"],
            time.monotonic() + asked["timeout_s"],
            lambda state: state if isinstance(state, SidecarFinder) else None,
            cells=CELLS if asked["heat"] else 0,
        )
    finally:
        for finder in finders.values():
            await finder.close()
        transfer.close()
    # Once more: another export may have taken the place while files were read.
    _check_places(asked)
    return {"a": found.a, "b": found.b, "rows": [asdict(row) for row in found]}


def _check_places(asked: Mapping[str, Any]) -> None:
    """Raise ConflictError if another export, perhaps of another job, lies where one was."""
    for given in (asked["a"], asked["b"]):
        if "path" not in given:
            continue
        if export_of(Path(given["path"])).export_id != given["export"]:
            raise ConflictError(f"{given['label']} was replaced or removed; choose another")


def _state(given: Mapping[str, str], finders: Mapping[str, SidecarFinder]) -> Any:
    if "job" in given:
        return finders[given["job"]]
    return Path(given["path"]) if "path" in given else given["text"]


if __name__ == "__main__":
    answers(compare)
