"""A Trainer's run that goes on from memory: kills itself once, when told; else ends with a digest.

trainer_killed --folder F [--at STEP]
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from paramd.integrations.hf import ParamdCallback
from tests.ending import end
from tests.multiprocess.workers.trainers import Tokens, digest, full, llama

STEPS = 9


class Killer(TrainerCallback):
    def __init__(self, at: int) -> None:
        self._at = at

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # In the middle of a step: half of its gradients are there.
        if state.global_step == self._at:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    # A framework may hold parameters where attach() then does not see it, and refuses.
    gc.unfreeze()
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--at", type=int, default=-1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    model: Any = llama()
    model.config.attention_dropout = 0.1
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(options.folder), use_cpu=True, max_steps=STEPS, report_to=[],
            save_strategy="no", disable_tqdm=True, logging_strategy="no",
            per_device_train_batch_size=4, gradient_accumulation_steps=2,
        ),
        train_dataset=Tokens(),
        callbacks=[ParamdCallback(job="killed", resume="auto"), Killer(options.at)],
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == STEPS
    rate = trainer.lr_scheduler.get_last_lr()
    print(f"{digest(full(trainer.model))} {rate}", flush=True)


if __name__ == "__main__":
    end(main)
