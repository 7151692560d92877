"""Hugging Face's Trainer, and what builds upon it (TRL): a callback.

from paramd.integrations.hf import ParamdCallback

trainer = Trainer(model=model, args=args, ..., callbacks=[ParamdCallback(job="my-run")])
trainer.train()
"""

from __future__ import annotations

import logging
from typing import Any

from paramd.errors import UsageError
from paramd.integrations.training import Callback
from paramd.integrations.versions import require
from paramd.trainer.resume.codec import random_state, set_random_state

require("transformers", at_least="5.0", below="6", extra="hf")
require("accelerate", at_least="1.10", below="2", extra="hf")

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments  # noqa: E402

log = logging.getLogger("paramd")


class ParamdCallback(Callback, TrainerCallback):
    """Attaches a Trainer's model when its training begins and detaches it when it ends.

    The model is attached as the Trainer has prepared it: plain, in DDP, or sharded by FSDP.
    paramd's step is the Trainer's `global_step`, also after a checkpoint was resumed, with
    accumulated gradients, and where a gradient scaler skipped a step. A training that raises
    calls no callback: use the callback as a context manager to detach then, too. The next
    `train()` detaches a model that an earlier one left attached.

        with ParamdCallback(job="my-run") as paramd_callback:
            Trainer(..., callbacks=[paramd_callback]).train()

    With resume="auto", a training that was killed resumes from memory when its script is started
    again: parameters, optimizer, scheduler, gradient scaler, random states and `global_step`. In
    the first epoch it continues with the next batch, and computes the same bits; later the data
    begins again, and the log says so. The Trainer's other counts (`log_history`, flos, the losses
    that the first line after a restart averages) begin again, too.
    """

    _skipping: Any = None
    """A loader without the batches that the epoch has had."""
    _random: dict[str, Any] | None = None
    """Random states to begin the first step with, after a resume."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Attach, after wrapping and after a checkpoint was loaded."""
        if getattr(args, "deepspeed", None):
            raise UsageError(
                "a Trainer with DeepSpeed is not supported; paramd serves plain, DDP, FSDP1 and "
                "FSDP2 trainings"
            )
        state_of = {}
        if self._training.resumes:
            if state.global_step:
                raise UsageError(
                    'resume="auto" and resume_from_checkpoint cannot be combined; choose one'
                )
            scaler = getattr(given["optimizer"], "scaler", None)
            state_of = {"trainer.lr_scheduler": given["lr_scheduler"]}
            state_of |= {"trainer.scaler": scaler} if scaler is not None else {}
        self._training.begin(
            given["model"], given["optimizer"], step=state.global_step, extra_state=state_of
        )
        if self._training.resumes:
            self._go_on(args, state, given["train_dataloader"])

    def _go_on(self, args: TrainingArguments, state: TrainerState, loader: Any) -> None:
        """Bring the Trainer to the step of the memory."""
        assert self.attachment is not None
        step = state.global_step = self.attachment.step
        if self.attachment.resumed is None:
            return
        # A loop over batches begins by drawing a number; the resumed one did not.
        self._random = random_state()
        done = step * args.gradient_accumulation_steps
        batches = len(loader) if hasattr(loader, "__len__") else 0
        whole = batches % args.gradient_accumulation_steps == 0
        if (
            hasattr(loader, "skip_batches")
            and done < batches
            and (whole or state.max_steps * args.gradient_accumulation_steps <= batches)
        ):
            self._skipping = loader
            loader.skip_batches = done
        else:
            log.warning(
                "paramd: the Trainer continues at step %d with the first batch of its data: a "
                "callback can only skip batches of the first epoch",
                step,
            )

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        """The next epoch has all its batches."""
        if self._skipping is not None:
            self._skipping.skip_batches = 0
            self._skipping = None

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Settle the last update."""
        if self._random is not None:
            set_random_state(self._random)
            self._random = None
        self._training.begin_iteration()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Keep up with `global_step`, which counts skipped steps, too."""
        self._training.counted(state.global_step)
        self._training.end_iteration()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._training.end()

    def __enter__(self) -> ParamdCallback:
        return self

    def __exit__(self, *_: object) -> None:
        self._training.end()
