"""`paramd.attach`: one line in the training script, on every rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from paramd.layout.codec import encode_layout
from paramd.layout.merge import layout_digest
from paramd.trainer.attaching.attachment import Attachment
from paramd.trainer.attaching.exchange import Exchange
from paramd.trainer.attaching.stages import Stages
from paramd.trainer.settings import AttachSettings

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


def attach(
    model: torch.nn.Module,
    optimizer: Optimizers | None,
    *,
    job: str,
    step: int | None = None,
    control: str | None = None,
    arena: str | None = None,
    settings: AttachSettings | None = None,
) -> Attachment:
    """Serve the parameters of `model` through sidecars, one per rank.

    Collective: every rank calls it at the same point, after wrapping the model (DDP, FSDP, TP),
    before the first step or between two steps. The training computes exactly what it would
    without. From then on anyone with the right to can read the running job's parameters, whole
    and at one step, with `paramd.connect(job=...)`.

    Args:
        model: plain, DDP, FSDP1, FSDP2, HSDP, TP or a composition of them, in host memory or on
            CUDA devices.
        optimizer: one optimizer or several, possibly in wrappers that keep it as `.optimizer`;
            None when all parameter changes happen inside `attachment.update()`.
        job: name of the job: letters, digits, `.`, `_`, `-`; the same on every rank.
        step: number of updates already done; None takes it from the optimizer's state.
        control: URL of a site's control plane, where rank 0 registers the job with the token
            in PARAMD_TOKEN or PARAMD_TOKEN_FILE. None takes `settings.control`; if that is
            empty too, rank 0 starts a control plane for this job alone. One that does not answer
            within `settings.control_timeout_s` costs this epoch the service, never the training.
        arena: "auto", "host" or "mirror", see AttachSettings; None takes `settings.arena`.
            Parameters on devices are always mirrored: they stay where they are and can be read
            only at agreed boundaries, never from a trainer that hangs or has ended.
        settings: None reads them from the environment (`PARAMD_*`).

    Returns:
        The attachment; `detach()` undoes everything.

    Raises:
        UsageError, ConflictError: on all ranks when an argument is wrong on any; the
            training is untouched.
        DeniedError: `control` refused the token; likewise.
        ExhaustedError: not enough memory for the arena; likewise.
        Exception: any other failure on any rank; likewise.
    """
    settings = settings if settings is not None else AttachSettings.from_environment()
    if control is not None:
        settings = replace(settings, control=control)
    if arena is not None:
        settings = replace(settings, arena=arena)
    exchange = Exchange(timeout_s=settings.attach_timeout_s)
    stages = Stages(exchange, settings, job)
    try:
        found = stages.discover(model, optimizer, step)
        identity = stages.identify()
        mesh = stages.open(identity, found.home.arena_bytes, layout_digest(found.layout))
        layout = encode_layout(found.layout).SerializeToString()
        return stages.move_in(model, found, identity, mesh, layout)
    except BaseException:
        stages.close()
        raise
