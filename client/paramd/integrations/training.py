"""What the trainers' callbacks share: one attachment at a time, steps that keep up."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from paramd.errors import UsageError
from paramd.trainer.attaching.attach import attach
from paramd.trainer.attaching.attachment import Attachment
from paramd.trainer.settings import AttachSettings

log = logging.getLogger("paramd")


class Training:
    """One training of a framework: attached as it begins, detached as it ends."""

    def __init__(self, job: str, options: dict[str, Any]) -> None:
        """`options`: further arguments of `paramd.attach`."""
        self._job = job
        self._options = options
        self.attachment: Attachment | None = None

    @cached_property
    def resumes(self) -> bool:
        """Whether it is to go on from memory after it was killed."""
        chosen = self._options.get("resume")
        if chosen is None:
            settings = self._options.get("settings") or AttachSettings.from_environment()
            chosen = settings.resume
        return bool(chosen == "auto")

    def check_no_resume(self, framework: str, instead: str) -> None:
        """Refuse to go on from memory where the framework's loop cannot be told of it.

        Raises:
            UsageError: resume="auto".
        """
        if self.resumes:
            raise UsageError(
                f'resume="auto" does not work with {framework}, whose loop cannot be told from '
                f"which step and batch it goes on; {instead}, and paramd follows its step"
            )

    def begin(
        self, model: Any, optimizer: Any, *, step: int, keep: Mapping[str, Any] | None = None
    ) -> None:
        """Attach; a training that has ended without saying so is detached first.

        Args:
            step: Updates that the framework has counted.
            keep: What of the framework's belongs to the state, beside what the user has named.
        """
        self.end()
        options = self._options
        if keep:
            options = options | {"keep": {**keep, **options.get("keep", {})}}
        self.attachment = attach(model, optimizer, job=self._job, step=step, **options)
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

    def kept(self) -> None:
        """A step is over for the framework, too: what was killed goes on from here."""
        if self.attachment is not None and self.resumes:
            self.attachment.kept()

    def end(self) -> None:
        """Detach. Idempotent."""
        if self.attachment is not None:
            self.attachment.detach()
            self.attachment = None
