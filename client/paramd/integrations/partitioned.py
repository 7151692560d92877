"""What the integrations of DeepSpeed and Megatron-Core share: optimizers that keep partitions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from paramd.errors import ConflictError, UsageError
from paramd.trainer.attaching.attach import attach
from paramd.trainer.attaching.attachment import Attachment
from paramd.trainer.model.partitions import Partitions, declared
from paramd.trainer.settings import AttachSettings

if TYPE_CHECKING:
    import torch
    from torch import nn


def attach_partitioned(
    module: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    partitions: Partitions,
    *,
    package: str,
    options: dict[str, Any],
) -> Attachment:
    """Attach a module whose parameters are those that `partitions` knows, until `detach`.

    Args:
        package: whose optimizer it is, for messages.
        options: arguments of `paramd.attach`, the job among them.

    Raises:
        UsageError, ConflictError: as `paramd.attach`; also if it is to resume.
    """
    settings = options.get("settings") or AttachSettings.from_environment()
    resume, replicas = (
        options[name] if options.get(name) is not None else getattr(settings, name)
        for name in ("resume", "replicas")
    )
    if resume != "never" or replicas:
        raise UsageError(
            f"resume and replicas are not supported with {package}, whose optimizer has a state "
            "of its own; resume from its checkpoint, then attach"
        )
    if module in declared:
        raise ConflictError("this model is already attached; detach it first")
    declared[module] = partitions
    try:
        attachment = attach(module, optimizers, **options)
    except BaseException:
        del declared[module]
        raise
    attachment.at_detach(partial(declared.pop, module, None))
    return attachment


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

    attachment.at_detach(undo)
