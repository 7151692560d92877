"""One attempt to attach: how a stage learns the outcome on all ranks, and how all are undone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from paramd import errors
from paramd.errors import ConflictError
from paramd.trainer import faults
from paramd.trainer.attaching.exchange import Exchange
from paramd.trainer.settings import AttachSettings

log = logging.getLogger("paramd")

Answer = dict[str, Any]
"""What a stage tells the other ranks, JSON."""


class Attempt:
    """What all stages share."""

    def __init__(
        self,
        exchange: Exchange,
        settings: AttachSettings,
        job: str | None,
        keep: Mapping[str, Any],
    ) -> None:
        self._exchange = exchange
        self._settings = settings
        self._keep = keep
        # `discover` refuses a missing one, on all ranks, before it is used.
        self._job: str = job  # type: ignore[assignment]
        self._at_point = faults.from_environment(exchange.rank)
        self._undo = ExitStack()
        """Undoes everything begun so far, last first."""
        self._undo.callback(exchange.close)

    def close(self) -> None:
        """Undo the stages after a failure; the caller re-raises that failure."""
        try:
            self._undo.close()
        except Exception:
            log.exception("paramd: a failed attach could not be undone completely")

    def _pass(self, point: str) -> None:
        if self._at_point is not None:
            self._at_point(point)

    def _together(self, stage: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
        """Run a stage on every rank; a failure on one is raised on all."""
        failure: Exception | None = None
        try:
            message = stage()
        except Exception as error:
            failure = error
            message = {"error": str(error), "kind": type(error).__name__}
        # Also after a failure: gathering is collective, and the others would hang without us.
        answers = self._exchange.gather(message)
        if failure is not None:
            raise failure
        for rank, answer in enumerate(answers):
            if "error" in answer:
                kind = getattr(errors, answer["kind"], ConflictError)
                raise kind(f"rank {rank}: {answer['error']}")
        return answers
