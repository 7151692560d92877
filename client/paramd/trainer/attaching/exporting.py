"""An export that the training itself asks for, at the boundary where all ranks ask for it.

Rank 0 asks the control plane like any client, on a thread. Meanwhile the training's threads of all
ranks stay at this boundary and act on what is agreed, as in a pause, until rank 0 has its answer.
"""

from __future__ import annotations

import importlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypedDict

from paramd.errors import (
    ConflictError,
    DeadlineError,
    ExhaustedError,
    ParamdError,
    UnreachableError,
    codes_of,
    error_of_grpc,
)
from paramd.trainer.attaching.exchange import Exchange
from paramd.trainer.boundary.boundary import Boundary

CANCEL_S = 2.0
"""How long, in seconds, an export that took too long may take to be cancelled."""


LEAST_S = 1.0
"""Shortest timeout, in seconds, of a call to the control plane."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MadeExport:
    """An export that the training itself has made."""

    id: str
    destination: str
    """"NAME/KEY"."""
    step: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a job is found by its own trainer."""

    job: str
    url: str
    """Of a site; empty: the job's own control plane, by its name."""
    token: str


Look = Callable[[], tuple[str, Place | None]]
"""Why this rank cannot export, empty if it can, and on rank 0 where the job is found."""


class ExportOptions(TypedDict, total=False):
    """Those of `Mesh.export` that `Attachment.export` passes on as they are."""

    format: str
    max_shard_size: str | int | None
    dtype: str | None
    tied: str
    names: Sequence[str] | None
    replica: int
    overwrite: bool
    name_map: Mapping[str, str] | None
    adapter: str | None
    merge: bool
    weights_from: str | None
    assets: str | Path | None
    verify: bool


def export(
    exchange: Exchange,
    boundary: Boundary,
    look: Look,
    destination: str | None,
    options: dict[str, Any],
    grace_s: float,
) -> MadeExport:
    """Collective. Raises as `Attachment.export`, on all ranks the same."""
    try:
        why, place = look()
    except Exception as error:
        # Told, not raised: the other ranks wait for this one's answer.
        why, place = f"could not prepare the export: {error}", None
    for rank, found in enumerate(exchange.gather({"why": why})):
        if found["why"]:
            raise ConflictError(f"export: rank {rank} {found['why']}")
    until_s = time.monotonic() + grace_s
    asking = _Asking(place, destination, options, grace_s) if exchange.rank == 0 else None
    # The other ranks stay for as long as rank 0 does: all leave in the same round.
    boundary.stay(lambda: asking is None or (asking.runs and time.monotonic() < until_s))
    answer: dict[str, Any] = {}
    if asking is not None:
        answer = asking.ended(max(until_s - time.monotonic(), 0.0) + CANCEL_S)
    texts = [json.dumps(answer)] * exchange.world_size if asking is not None else None
    told: dict[str, Any] = json.loads(exchange.scatter(texts))
    if "error" in told:
        raise error_of_grpc(told["code"])(told["error"])
    return MadeExport(**told)


class _Asking:
    """Rank 0's request to the control plane, on a thread of its own."""

    def __init__(
        self, place: Place | None, destination: str | None, options: dict[str, Any], grace_s: float
    ) -> None:
        self._place = place
        self._answer: dict[str, Any] = {}
        self._thread = threading.Thread(
            target=self._run,
            args=(destination, options, grace_s),
            name="paramd-export",
            daemon=True,
        )
        try:
            self._thread.start()
        except RuntimeError as error:
            # Not raised here: the other ranks are on their way to this boundary.
            self._answer = _told(ExhaustedError(f"export: rank 0 cannot start a thread: {error}"))

    @property
    def runs(self) -> bool:
        return self._thread.is_alive()

    def ended(self, timeout_s: float) -> dict[str, Any]:
        """The answer for all ranks; an error if there is none in time."""
        if self.runs:
            self._thread.join(timeout_s)
        if self._answer:
            return self._answer
        return _told(DeadlineError("the export did not end in time; its outcome is not known"))

    def _run(self, destination: str | None, options: dict[str, Any], grace_s: float) -> None:
        try:
            self._answer = self._made(destination, options, grace_s)
        except ParamdError as error:
            self._answer = _told(error)
        except Exception as error:
            # All ranks wait for this answer.
            self._answer = _told(ParamdError(f"the export failed: {error!r}"))

    def _made(
        self, destination: str | None, options: dict[str, Any], grace_s: float
    ) -> dict[str, Any]:
        if self._place is None:
            raise UnreachableError("export: the job has no control plane yet")
        until_s = time.monotonic() + grace_s
        # By name: the client and the trainer stand side by side, and neither loads the other.
        connect = importlib.import_module("paramd.mesh.connect").connect
        place = self._place
        named = {"url": place.url, "token": place.token} if place.url else {}
        with connect(job=place.job, timeout=max(grace_s, LEAST_S), **named) as mesh:
            # The control plane has longer: it is cancelled here, and then removes what it wrote.
            begun = mesh.export(destination, timeout=grace_s + 2 * CANCEL_S, **options)
            try:
                made = begun.wait(max(until_s - time.monotonic(), 0.1))
            except DeadlineError:
                with suppress(ParamdError):
                    begun.cancel()
                raise DeadlineError(
                    f"the export to {begun.info.destination} did not end within {grace_s:g} s and "
                    "is cancelled; allow more time (timeout=)"
                ) from None
            return asdict(
                MadeExport(
                    id=made.id,
                    destination=made.destination,
                    step=made.step,
                    size_bytes=made.size_bytes,
                )
            )


def _told(error: ParamdError) -> dict[str, Any]:
    return {"error": str(error), "code": codes_of(error).grpc}
