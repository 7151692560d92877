"""Ray Train (v2): a block around the loop of a TorchTrainer's train function.

from paramd.integrations.ray import attached, worker_runtime_env

def train(config):
    ...
    with attached(model, optimizer, job="my-run") as attachment:
        while attachment.step < steps:
            ...

TorchTrainer(
    train,
    run_config=RunConfig(
        failure_config=FailureConfig(max_failures=3),
        worker_runtime_env=worker_runtime_env(),
    ),
    ...
).fit()
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Unpack

from paramd.errors import UsageError
from paramd.integrations.training import FurtherOptions
from paramd.integrations.versions import require
from paramd.trainer.attaching.attach import attach
from paramd.trainer.attaching.attachment import Attachment

log = logging.getLogger("paramd")

# By default a worker that Ray ends kills its children first, sidecar and memory with them.
_KEEP_CHILDREN = {"RAY_kill_child_processes_on_worker_exit": "0"}


def worker_runtime_env(more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A `RunConfig(worker_runtime_env=...)` with which a restarted run resumes from memory.

    Without it Ray kills the sidecars of the workers that it ends, and a restart begins afresh.
    `more` is a further runtime environment; its `env_vars` take precedence.
    """
    merged = dict(more if more is not None else {})
    merged["env_vars"] = _KEEP_CHILDREN | dict(merged.get("env_vars", {}))
    return merged


@contextmanager
def attached(
    model: Any,
    optimizer: Any,
    *,
    job: str | None = None,
    resume: str = "auto",
    **options: Unpack[FurtherOptions],
) -> Iterator[Attachment]:
    """A block in which the training of a TorchTrainer's workers is served, and resumed.

    Collective: every worker enters it, after `prepare_model` or `fully_shard`. A block that ends
    detaches. After an exception it stays attached with resume="auto": the worker's process ends,
    and when Ray starts the workers again (`FailureConfig`), they resume from their sidecars'
    memory; `attachment.resumed` gives the step.

    Args:
        model, optimizer: as `paramd.attach`.
        job: name of the job; None takes the run's name.
        resume: "auto" or "never", see `paramd.attach`.
        options: further arguments of `paramd.attach`: extra_state, control, settings.

    Yields:
        The attachment.

    Raises:
        UsageError: not within a train function of Ray Train v2, or its version is not supported.
    """
    name = job if job is not None else _run_name()
    if resume == "auto" and not _KEEP_CHILDREN.items() <= os.environ.items():
        log.warning(
            "paramd: Ray ends the sidecars with their workers, so nothing is left to resume from; "
            "give RunConfig worker_runtime_env=paramd.integrations.ray.worker_runtime_env()"
        )
    attachment = attach(model, optimizer, job=name, resume=resume, **options)
    try:
        yield attachment
    except BaseException:
        if resume != "auto":
            attachment.detach()
        raise
    attachment.detach()


def _run_name() -> str:
    """Name of the Ray Train run that this worker belongs to."""
    require("ray", at_least="2.51", below="3", extra="ray")
    from ray import train

    try:
        return str(train.get_context().get_experiment_name())
    except RuntimeError as error:
        raise UsageError(
            f"attached() is for the train function of a TorchTrainer of Ray Train v2 ({error})"
        ) from error
