"""torchtitan's Trainer, through a hook of its optimizers' container.

from paramd.integrations.torchtitan import attached

trainer = Trainer(config)
with attached(trainer, job="my-run"):
    trainer.train()
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Unpack

from paramd.errors import UsageError
from paramd.integrations.training import AttachOptions, Training
from paramd.integrations.versions import require


@contextmanager
def attached(trainer: Any, *, job: str, **options: Unpack[AttachOptions]) -> Iterator[Training]:
    """A block in which a torchtitan Trainer's training is served.

    torchtitan has no callbacks, and loads its checkpoint within `train()`: so the model parts
    are attached at the end of the first update, at the Trainer's own step. Several parts (of a
    pipeline) are named `part0`, `part1` and so on. Every end of the block detaches them.

    Args:
        trainer: has `model_parts`, `optimizers` (an OptimizersContainer) and `step`.
        job: name of the job, see `paramd.attach`.
        options: further arguments of `paramd.attach`: control, arena, settings.

    Yields:
        An object with the attachment, once there is one: `.attachment`.

    Raises:
        UsageError: `trainer` is no Trainer of torchtitan's, or its version is not supported.
    """
    require("torchtitan", at_least="0.2", below="0.4", extra="torchtitan")
    for name in ("model_parts", "optimizers", "step"):
        if not hasattr(trainer, name):
            raise UsageError(
                f"trainer must be torchtitan's Trainer; {type(trainer).__qualname__} has no {name}"
            )
    training = Training(job, {**options})
    training.check_no_resume("torchtitan", "use its checkpoints")

    def after_the_first_step(*_: Any) -> None:
        hook.remove()
        parts = trainer.model_parts
        model = parts[0] if len(parts) == 1 else {f"part{i}": part for i, part in enumerate(parts)}
        training.begin(model, trainer.optimizers, step=trainer.step)

    hook = trainer.optimizers.register_step_post_hook(after_the_first_step)
    try:
        yield training
    finally:
        hook.remove()
        training.end()
