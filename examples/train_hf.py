"""Train a small Llama with Hugging Face's Trainer, served by paramd.

    torchrun --standalone --nproc-per-node 2 examples/train_hf.py --job my-run

and in another terminal, for example: `paramd stats '*'`. Needs pip install 'paramd[hf]'.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from paramd.integrations.hf import ParamdCallback

VOCABULARY, LENGTH = 256, 32


class Counting(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences that count upwards from somewhere."""

    def __len__(self) -> int:
        return VOCABULARY

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(LENGTH) + index) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", default="train-hf")
    parser.add_argument("--steps", type=int, default=1000)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                max_steps=arguments.steps,
                use_cpu=not torch.cuda.is_available(),
                report_to=[],
                save_strategy="no",
            ),
            train_dataset=Counting(),
            callbacks=[ParamdCallback(job=arguments.job)],
        )
        trainer.train()


if __name__ == "__main__":
    main()
