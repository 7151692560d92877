"""Shared by integrations: one attachment at a time with steps that keep up, for the trainers'
callbacks; for DeepSpeed and Megatron-Core, optimizers that keep partitions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from paramd import gone
from paramd.errors import ConflictError, UsageError
from paramd.trainer.attaching.attach import attach
from paramd.trainer.attaching.attachment import Attachment
from paramd.trainer.model.partitions import Partitions, declared
from paramd.trainer.settings import AttachSettings

if TYPE_CHECKING:
    import torch
    from torch import nn

log = logging.getLogger("paramd")


class Training:
    """One training of a framework: attached as it begins, detached as it ends."""

    def __init__(self, job: str, options: dict[str, Any]) -> None:
        """`options`: further arguments of `paramd.attach`."""
        self._job = job
        # Before the framework's own state is put beside the user's.
        self._options = gone.renamed("attach", options)
        self.attachment: Attachment | None = None

    @cached_property
    def resumes(self) -> bool:
        """Whether it resumes from memory after it was killed."""
        return bool(_chosen("resume", self._options) == "auto")

    def check_no_resume(self, framework: str, instead: str) -> None:
        """Raise UsageError for resume="auto" where the framework's loop cannot resume."""
        if self.resumes:
            raise UsageError(
                f'resume="auto" does not work with {framework}, because its loop cannot resume at '
                f"a given step and batch; {instead}, and paramd follows its step"
            )

    def begin(
        self, model: Any, optimizer: Any, *, step: int, extra_state: Mapping[str, Any] | None = None
    ) -> None:
        """Attach; a training that has ended without a callback is detached first.

        `step`: updates that the framework has counted; `extra_state`: the framework's own state,
        beside the user's.
        """
        self.end()
        options = self._options
        if extra_state:
            options = options | {"extra_state": {**extra_state, **options.get("extra_state", {})}}
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

    def begin_iteration(self) -> None:
        """A batch begins: earlier changes belong to the previous update."""
        if self.attachment is not None:
            self.attachment.begin_iteration()

    def counted(self, step: int) -> None:
        """Count the updates that the framework has counted although no optimizer stepped.

        Frameworks do that when a gradient scaler skips a step.
        """
        while self.attachment is not None and self.attachment.step < step:
            with self.attachment.update():
                pass

    def end_iteration(self) -> None:
        """A step is over for the framework, too: a killed training resumes here."""
        if self.attachment is not None and self.resumes:
            self.attachment.end_iteration()

    def end(self) -> None:
        """Detach. Idempotent."""
        if self.attachment is not None:
            self.attachment.detach()
            self.attachment = None


class FurtherOptions(TypedDict, total=False):
    """Arguments of `paramd.attach`, for what passes them on, but `resume`."""

    step: int | None
    control: str | None
    arena: str | None
    extra_state: Mapping[str, Any] | None
    replicas: int | None
    log: str | Sequence[str] | None
    settings: AttachSettings | None


class AttachOptions(FurtherOptions, total=False):
    """Arguments of `paramd.attach`, for what passes them on."""

    resume: str | None


class Callback:
    """The common part of trainers' callbacks, before the trainer's own class."""

    def __init__(self, *, job: str, **options: Unpack[AttachOptions]) -> None:
        """`job` and `options` (control, arena, settings) are as of `paramd.attach`."""
        self._training = Training(job, {**options})

    @property
    def attachment(self) -> Any:
        """The attachment while training; None before and after."""
        return self._training.attachment


def _chosen(name: str, options: Mapping[str, Any]) -> Any:
    """The option of this name for `attach`, else the setting."""
    settings = options.get("settings") or AttachSettings.from_environment()
    return options[name] if options.get(name) is not None else getattr(settings, name)


def attach_partitioned(
    module: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    partitions: Partitions,
    *,
    package: str,
    options: dict[str, Any],
) -> Attachment:
    """Attach a module whose parameters `partitions` knows, until `detach`.

    `package` names the optimizer's package in messages; `options` are arguments of `paramd.attach`,
    the job among them.

    Raises:
        UsageError, ConflictError: As `paramd.attach`, also for resume="auto".
    """
    if _chosen("resume", options) != "never" or _chosen("replicas", options):
        raise UsageError(
            f"resume and replicas are not supported with {package}, whose optimizer keeps its "
            "own state; resume from its checkpoint, then attach"
        )
    if module in declared:
        raise ConflictError("this model is already attached; detach it first")
    declared[module] = partitions
    try:
        attachment = attach(module, optimizers, **options)
    except BaseException:
        del declared[module]
        raise
    attachment._at_detach.callback(partial(declared.pop, module, None))
    return attachment


def refuse(there: Mapping[str, bool], supported: str) -> None:
    """Raise UsageError for the first feature of a package that is used and not supported."""
    for what, is_there in there.items():
        if is_there:
            raise UsageError(f"{what}: not supported; {supported}")


def override(attachment: Attachment, owner: Any, name: str, method: Callable[..., Any]) -> None:
    """Have `owner` use `method` under this name until the attachment ends."""
    before = vars(owner).get(name)
    setattr(owner, name, method)

    def undo() -> None:
        if vars(owner).get(name) is not method:
            return
        if before is not None:
            setattr(owner, name, before)
        else:
            delattr(owner, name)

    attachment._at_detach.callback(undo)
