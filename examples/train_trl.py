"""Fine-tune LoRA adapters of a small Llama with TRL's SFTTrainer, served by paramd.

    torchrun --standalone --nproc-per-node 2 examples/train_trl.py --job my-run

and in another terminal, for example: `paramd stats '*lora*'`. Needs pip install 'paramd[hf]' trl
peft. Nothing is downloaded: the model and the tokenizer are made here.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from paramd.integrations.hf import ParamdCallback

VOCABULARY, LENGTH = 256, 32


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", default="train-trl")
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
    words = models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="0")
    counting = [{"input_ids": [(i + k) % VOCABULARY for k in range(LENGTH)]} for i in range(256)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model=model,
            args=SFTConfig(
                output_dir=folder,
                max_steps=arguments.steps,
                max_length=LENGTH,
                use_cpu=not torch.cuda.is_available(),
                bf16=False,
                report_to=[],
                save_strategy="no",
            ),
            train_dataset=Dataset.from_list(counting),
            processing_class=PreTrainedTokenizerFast(
                tokenizer_object=Tokenizer(words), eos_token="1", pad_token="2"
            ),
            peft_config=LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
            callbacks=[ParamdCallback(job=arguments.job)],
        )
        trainer.train()


if __name__ == "__main__":
    main()
