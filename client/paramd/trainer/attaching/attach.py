"""`paramd.attach`: its stages in order."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from paramd import gone
from paramd.trainer.attaching.attachment import Attachment, Missing, Optimizers
from paramd.trainer.attaching.exchange import Exchange
from paramd.trainer.attaching.refreshing import Refreshing
from paramd.trainer.attaching.stages import Stages
from paramd.trainer.settings import AttachSettings


# A tensor made in inference mode can never be trained, and moving in creates many.
@gone.keywords("attach")
@torch.inference_mode(False)
def attach(
    model: torch.nn.Module | Mapping[str, torch.nn.Module] | None = None,
    optimizer: Optimizers | Missing | None = Missing.OPTIMIZER,
    *,
    job: str | None = None,
    accelerator: Any = None,
    step: int | None = None,
    control: str | None = None,
    arena: str | None = None,
    resume: str | None = None,
    extra_state: Mapping[str, Any] | None = None,
    replicas: int | None = None,
    log: str | Sequence[str] | None = None,
    settings: AttachSettings | None = None,
) -> Attachment:
    """Serve the parameters of `model` through sidecars, one per rank.

    Collective: every rank calls it at the same point, after wrapping the model (DDP, FSDP, TP),
    before the first step or between two steps. The training computes exactly what it would
    without paramd. While it runs, anyone with a reader token can read its parameters, whole and
    at one step, with `paramd.connect(job=...)`.

    Args:
        model: plain, DDP, FSDP1, FSDP2, HSDP, TP or a composition of them, in host memory or on
            CUDA devices; or several in a dict, whose keys prefix their parameters' names.
        optimizer: one optimizer or several, possibly in wrappers that keep it as `.optimizer`;
            None when all parameter changes happen inside `attachment.update()`.
        job: name of the job: letters, digits, `.`, `_`, `-`; the same on every rank.
        accelerator: an `accelerate.Accelerator`, instead of model and optimizer: all models and
            optimizers that it has prepared are attached.
        step: number of updates already done; None takes it from the optimizer's state.
        control: URL of a site's control plane, where rank 0 registers the job with the token
            in PARAMD_TOKEN or PARAMD_TOKEN_FILE. None takes `settings.control`; if that is
            empty too, rank 0 starts a control plane for this job alone. If the control plane does
            not answer within `settings.control_timeout_s`, the job trains without the service until
            `refresh` registers it.
        arena: "auto", "host", "device" or "mirror", see AttachSettings; None takes
            `settings.arena`. By default, parameters on devices stay there and are mirrored: they
            can be read only at agreed boundaries, never from a trainer that hangs or has ended.
            With "device" they move into memory of their device that the sidecar owns.
        resume: "auto" or "never"; None takes `settings.resume`. With "auto", a script that was
            killed and is started again continues in the memory that its sidecars have kept, at
            the same step on all ranks; `attachment.resumed` gives the step. If the ranks are at
            different steps, or one died inside an update, training continues from the newest
            standing snapshot that all of them have; if nothing is in memory, from the newest
            export of the job; otherwise it starts afresh. The log says which and why. See
            docs/resume.md for how to write the loop.
        extra_state: with resume="auto", other objects that belong to the state, by name: objects
            with `state_dict` and `load_state_dict` (schedulers, a gradient scaler, a stateful data
            loader). Random states and the optimizers' own state need not be named.
        replicas: with resume="auto", copies of each standing snapshot on other hosts: 0 or 1; None
            takes `settings.replicas`. With 1, a training that loses a host continues on another
            one, from the last copied snapshot. Costs twice the state in memory there.
        log: trackers to log this job's statistics to, one or several of "tensorboard", "wandb",
            "mlflow", "trackio", "prometheus"; None takes `settings.log`. Rank 0 starts
            `paramd track` for each, which ends with the attachment.
        settings: None reads them from the environment (`PARAMD_*`).

    Returns:
        The attachment; `detach()` undoes everything.

    Raises:
        UsageError, ConflictError: on all ranks when an argument is wrong on any; the
            training is untouched. With resume="auto" also if the model, the optimizers,
            `extra_state` or the world size differ from the state in memory, or its trainer still
            runs.
        DeniedError: `control` refused the token; likewise.
        ExhaustedError: not enough memory for the arena; likewise.
        Exception: any other failure on any rank; likewise.
    """
    settings = settings if settings is not None else AttachSettings.from_environment()
    trackers = log if log is None or isinstance(log, str) else ",".join(log)
    given: dict[str, Any] = {
        "control": control,
        "arena": arena,
        "resume": resume,
        "replicas": replicas,
        "log": trackers,
    }
    settings = replace(settings, **{name: one for name, one in given.items() if one is not None})
    exchange = Exchange(timeout_s=settings.attach_timeout_s)
    stages = Stages(exchange, settings, job, extra_state if extra_state is not None else {})
    try:
        found = stages.look_back(stages.discover(model, optimizer, accelerator, step))
        identity = stages.identify()
        mesh = stages.open(identity, found)
        found = stages.look_at_exports(found)
        attachment = stages.move_in(found, identity, mesh)
    except BaseException:
        stages.close()
        raise
    attachment._again = Refreshing(model, accelerator, extra_state)
    if attachment.rank == 0:
        for warning in gone.variables(os.environ):
            logging.getLogger("paramd").warning("paramd: %s", warning)
        if settings.trackers:
            attachment._track(settings)
    return attachment
