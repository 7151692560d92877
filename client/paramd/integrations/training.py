"""What the trainers' callbacks share: one attachment at a time, steps that keep up."""

from __future__ import annotations

import logging
from typing import Any

from paramd.trainer.attaching.attach import attach
from paramd.trainer.attaching.attachment import Attachment

log = logging.getLogger("paramd")


class Training:
    """One training of a framework: attached as it begins, detached as it ends."""

    def __init__(self, job: str, options: dict[str, Any]) -> None:
        """`options`: further arguments of `paramd.attach`."""
        self._job = job
        self._options = options
        self.attachment: Attachment | None = None

    def begin(self, model: Any, optimizer: Any, *, step: int) -> None:
        """Attach; a training that has ended without saying so is detached first."""
        self.end()
        self.attachment = attach(model, optimizer, job=self._job, step=step, **self._options)
        if self.attachment.rank == 0:
            # Frameworks show warnings by default, and no more.
            log.warning(
                "paramd: job %s attached at step %d; %s; paramd status --job %s",
                self._job,
                self.attachment.step,
                self.attachment.url or "no control plane answers yet",
                self._job,
            )

    def goes_on(self) -> None:
        """A batch begins: what was changed until now belongs to the last update."""
        if self.attachment is not None:
            self.attachment.goes_on()

    def counted(self, step: int) -> None:
        """Count the updates that the framework has counted although no optimizer stepped.

        That is what frameworks do when a gradient scaler skips a step.
        """
        while self.attachment is not None and self.attachment.step < step:
            with self.attachment.update():
                pass

    def end(self) -> None:
        """Detach. Idempotent."""
        if self.attachment is not None:
            self.attachment.detach()
            self.attachment = None
