"""Hugging Face's Trainer, and what builds upon it (TRL): a callback.

from paramd.integrations.hf import ParamdCallback

trainer = Trainer(model=model, args=args, ..., callbacks=[ParamdCallback(job="my-run")])
trainer.train()
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from paramd.errors import UsageError
from paramd.integrations.training import Training
from paramd.integrations.versions import require

require("transformers", at_least="5.0", below="6", extra="hf")
require("accelerate", at_least="1.10", below="2", extra="hf")

from transformers import (  # noqa: E402
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)


class ParamdCallback(TrainerCallback):
    """Attaches a Trainer's model when its training begins and detaches it when it ends.

    The model is attached as the Trainer has prepared it: plain, in DDP, or sharded by FSDP.
    paramd's step is the Trainer's `global_step`, also after a checkpoint was resumed, with
    accumulated gradients, and where a gradient scaler skipped a step. A training that raises
    calls no callback: use the callback as a context manager to detach then, too. The next
    `train()` detaches what an earlier one has left.

        with ParamdCallback(job="my-run") as paramd_callback:
            Trainer(..., callbacks=[paramd_callback]).train()
    """

    def __init__(self, *, job: str, **options: Any) -> None:
        """Args:
        job: name of the job, see `paramd.attach`.
        options: further arguments of `paramd.attach`: control, arena, settings.
        """
        self._training = Training(job, options)

    @property
    def attachment(self) -> Any:
        """The attachment while training; None before and after."""
        return self._training.attachment

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **given: Any,
    ) -> None:
        """Attach, after wrapping and after a checkpoint was loaded."""
        if getattr(args, "deepspeed", None):
            raise UsageError(
                "a Trainer with DeepSpeed is not supported; paramd serves plain, DDP, FSDP1 and "
                "FSDP2 trainings"
            )
        self._training.begin(given["model"], given["optimizer"], step=state.global_step)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Settle the last update."""
        self._training.goes_on()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Keep up with `global_step`, which counts skipped steps, too."""
        self._training.counted(state.global_step)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Detach."""
        self._training.end()

    def __enter__(self) -> ParamdCallback:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._training.end()
