"""A training of each framework, without paramd and with it; says whether both are the same.

    trainers hf-ddp --folder F

Each case trains twice from the same seed. In the second training rank 0 reads the job after some
step, as any other program would, and compares every value with the model's own.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paramd
from paramd.errors import ConflictError
from tests.ending import end

STEPS, READ_AT = 6, 3
WRAPPERS = re.compile(r"(^|(?<=\.))(module|_forward_module|_orig_mod|_checkpoint_wrapped_module)\.")
WORDS, LENGTH, BATCH = 61, 7, 4

Train = Callable[[bool, Path], tuple[nn.Module, list[int]]]
"""Trains, attached or not; the model as the framework leaves it, and the steps that were seen."""
CASES: dict[str, Train] = {}


def case(function: Train) -> Train:
    CASES[function.__name__.replace("_", "-")] = function
    return function


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=20, intermediate_size=28, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16,
        tie_word_embeddings=True, attn_implementation="eager",
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(WORDS, (LENGTH,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter whole, by its name without wrappers. Collective."""
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name.startswith("_original_module."):
            continue
        whole: Any = parameter.detach()
        whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
        found[WRAPPERS.sub("", name)] = whole.clone()
    return found


def digest(values: Mapping[str, torch.Tensor]) -> str:
    hashed = hashlib.sha256()
    for name in sorted(values):
        hashed.update(name.encode() + values[name].contiguous().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def read_and_compare(model: nn.Module, attachment: Any, step: int) -> None:
    """Rank 0 reads the job at rest; it has this step, and the model's values under its names."""
    mine = full(model)
    if attachment.rank == 0:
        with paramd.connect(job=attachment.job, timeout=30) as mesh:
            found = mesh.summon("*", timeout=30)
        assert found.step == step, (found.step, step)
        assert set(found) == set(mine), set(found) ^ set(mine)
        for name, value in mine.items():
            assert torch.equal(found[name], value), name
    if dist.is_initialized():
        dist.barrier()


def pretend_a_device() -> None:
    """accelerate offers FSDP only where it has found devices; this lets it run over gloo."""
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    AcceleratorState._reset_state()
    PartialState(cpu=True)._shared_state["distributed_type"] = DistributedType.MULTI_XPU


def hf(
    attached: bool,
    folder: Path,
    *,
    model: nn.Module | None = None,
    optimizers: Any = (None, None),
    pretended: bool = False,
    kinds: Any = None,
    given: Mapping[str, Any] | None = None,
    checkpoint: Path | None = None,
    read_at: int = READ_AT,
    **options: Any,
) -> tuple[nn.Module, list[int]]:
    """Trains with a Trainer, or with another of its `kinds`, a class and that of its arguments."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    trainer_kind, arguments_kind = kinds if kinds is not None else (Trainer, TrainingArguments)
    seen: list[int] = []

    class Reader(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if ours is not None:
                assert ours.attachment.step == state.global_step
                seen.append(state.global_step)
                if state.global_step == read_at:
                    read_and_compare(given["model"], ours.attachment, read_at)

    ours: Any = None
    if attached:
        from paramd.integrations.hf import ParamdCallback

        ours = ParamdCallback(job="hf")
    usual = {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "max_steps": STEPS}
    args = arguments_kind(
        output_dir=str(folder / f"out-{attached}"),
        per_device_train_batch_size=BATCH,
        use_cpu=True,
        logging_strategy="no",
        **(usual | options),
    )
    if pretended:
        # After the arguments, which begin by finding that there is no device.
        pretend_a_device()
    trainer = trainer_kind(
        model=model if model is not None else llama(),
        args=args,
        optimizers=optimizers,
        callbacks=[ours, Reader()] if ours is not None else [],
        **({"train_dataset": Tokens()} | dict(given if given is not None else {})),
    )
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint is not None else None)
    assert ours is None or ours.attachment is None, "detached at the end"
    return trainer.model_wrapped, seen


SHARDED = {
    "fsdp": True, "pretended": True,
    "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "hf-plain": {},
    "hf-accumulated": {"gradient_accumulation_steps": 3},
    "hf-compiled": {"torch_compile": True, "torch_compile_backend": "aot_eager"},
    "hf-fsdp2": SHARDED,
    "hf-fsdp2-accumulated": SHARDED | {"gradient_accumulation_steps": 2},
}
CASES |= {name: partial(hf, **options) for name, options in OPTIONS.items()}


@case
def hf_scaled(attached: bool, folder: Path) -> tuple[nn.Module, list[int]]:
    """The Trainer's own gradient scaler skips steps, which `global_step` counts."""
    from transformers import Trainer, TrainingArguments

    class Scaled(Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            self.accelerator.scaler = scaler

        def compute_loss(self, *given: Any, **more: Any) -> Any:
            loss = super().compute_loss(*given, **more)
            return loss * float("inf") if self.state.global_step in (1, READ_AT - 1) else loss

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    found = hf(attached, folder, kinds=(Scaled, TrainingArguments), max_grad_norm=0.0)
    assert scaler.get_scale() == 2.0 / 4, "no step was skipped"
    return found


@case
def hf_from_checkpoint(attached: bool, folder: Path) -> tuple[nn.Module, list[int]]:
    """Goes on from a checkpoint of the Trainer's; paramd begins at its step."""
    if not attached:
        return hf(attached, folder, save_strategy="steps", save_steps=READ_AT)
    checkpoint = folder / "out-False" / f"checkpoint-{READ_AT}"
    model, seen = hf(attached, folder, checkpoint=checkpoint, read_at=READ_AT + 1)
    assert seen == list(range(READ_AT + 1, STEPS + 1)), seen
    return model, list(range(1, STEPS + 1))


@case
def trl_adapters(attached: bool, folder: Path) -> tuple[nn.Module, list[int]]:
    """TRL's trainer for supervised fine-tuning, with LoRA."""
    from datasets import Dataset
    from peft import LoraConfig
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = models.WordLevel({str(i): i for i in range(WORDS)}, unk_token="0")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), eos_token="1", pad_token="2"
    )
    texts = [{"input_ids": Tokens()[i]["input_ids"].tolist()} for i in range(64)]
    given = {
        "train_dataset": Dataset.from_list(texts),
        "processing_class": tokenizer,
        "peft_config": LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    }
    torch.manual_seed(1)
    return hf(
        attached, folder, kinds=(SFTTrainer, SFTConfig), given=given, gradient_checkpointing=False,
        max_length=LENGTH, bf16=False,
    )  # fmt: skip


@case
def hf_twice(attached: bool, folder: Path) -> tuple[nn.Module, list[int]]:
    """Two callbacks in one Trainer: the second is refused by name, and the first detached."""
    from transformers import Trainer, TrainingArguments

    if attached:
        from paramd.integrations.hf import ParamdCallback

        args = TrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[], max_steps=2)
        with ParamdCallback(job="first") as ours:
            trainer = Trainer(
                model=llama(), args=args, train_dataset=Tokens(),
                callbacks=[ours, ParamdCallback(job="second")],
            )  # fmt: skip
            with pytest.raises(ConflictError, match=r"already attached.*first"):
                trainer.train()
        assert ours.attachment is None
    return nn.Module(), list(range(1, STEPS + 1))


def accelerated(attached: bool, plugin: Any = None) -> tuple[nn.Module, list[int]]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state()
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, fsdp_plugin=plugin)
    model: Any = llama()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    attachment = paramd.attach(accelerator=accelerator, job="accelerate") if attached else None
    seen = []
    for round_ in range(2 * STEPS):
        batch = [Tokens()[8 * round_ + 4 * accelerator.process_index + i] for i in range(BATCH)]
        given = {key: torch.stack([one[key] for one in batch]) for key in batch[0]}
        with accelerator.accumulate(model):
            loss = model(**given).loss
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if attachment is not None:
            seen.append(attachment.step)
            if round_ == 2 * READ_AT - 1:
                read_and_compare(model, attachment, READ_AT)
    if attachment is not None:
        assert seen == [(round_ + 1) // 2 for round_ in range(2 * STEPS)], seen
        attachment.detach()
    return model, list(range(1, STEPS + 1))


@case
def accelerate_ddp(attached: bool, folder: Path) -> tuple[nn.Module, list[int]]:
    return accelerated(attached)


@case
def accelerate_fsdp2(attached: bool, folder: Path) -> tuple[nn.Module, list[int]]:
    from accelerate import FullyShardedDataParallelPlugin

    pretend_a_device()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    return accelerated(attached, plugin)


@case
def hf_adapters(attached: bool, folder: Path) -> tuple[nn.Module, list[int]]:
    """LoRA over a frozen base, with its gradients checkpointed."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    model = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    model.enable_input_require_grads()
    return hf(attached, folder, model=model, gradient_checkpointing=True, max_grad_norm=0.5)


@case
def hf_layer_wise(attached: bool, folder: Path) -> tuple[nn.Module, list[int]]:
    """An optimizer for each parameter, stepping within the backward."""
    model = llama()
    optimizer: Any = LayerWise(model)
    return hf(attached, folder, model=model, optimizers=(optimizer, None))


class LayerWise(torch.optim.Optimizer):
    """As transformers' own for GaLore: empty itself, it has one for each parameter."""

    def __init__(self, model: nn.Module) -> None:
        self.optimizer_dict = {p: torch.optim.AdamW([p], lr=1e-2) for p in model.parameters()}
        super().__init__([nn.Parameter(torch.zeros(1))], {"lr": 1e-2})
        for parameter in self.optimizer_dict:
            parameter.register_post_accumulate_grad_hook(self._step_of)

    def _step_of(self, parameter: torch.Tensor) -> None:
        self.optimizer_dict[parameter].step()
        self.optimizer_dict[parameter].zero_grad()

    def step(self, closure: Any = None) -> None:
        pass


@case
def hf_raises(attached: bool, folder: Path) -> tuple[nn.Module, list[int]]:
    """The training raises, which calls no callback; the same callback then serves another."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Raiser(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            raise ArithmeticError

    if attached:
        from paramd.integrations.hf import ParamdCallback

        args = TrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[], max_steps=2)
        first, second = llama(), llama()
        with ParamdCallback(job="raises") as ours:
            for model in (first, second):
                address = next(model.parameters()).data_ptr()
                trainer = Trainer(
                    model=model, args=args, train_dataset=Tokens(), callbacks=[ours, Raiser()]
                )
                with contextlib.suppress(ArithmeticError):
                    trainer.train()
                assert ours.attachment.step == 1
                assert next(model.parameters()).data_ptr() != address
            served = next(second.parameters()).data_ptr()
        assert ours.attachment is None
        assert next(second.parameters()).data_ptr() != served, "detached when the block ended"
    return nn.Module(), list(range(1, STEPS + 1))


@case
def two_models(attached: bool, folder: Path) -> tuple[nn.Module, list[int]]:
    """Two networks in one job, each in DDP with an optimizer of its own, that train by turns."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    nets = [nn.parallel.DistributedDataParallel(nn.Linear(5, 5)) for _ in range(2)]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2) for net in nets]
    both = dict(zip(("actor", "critic"), nets, strict=True))
    attachment = paramd.attach(both, optimizers, job="two") if attached else None
    for round_ in range(STEPS):
        torch.manual_seed(10 * round_ + dist.get_rank())
        for turn, optimizer in enumerate(optimizers):
            optimizer.zero_grad()
            (nets[0](torch.randn(3, 5)) - nets[1](torch.randn(3, 5))).square().mean().backward()
            optimizer.step()
            if attachment is not None:
                assert attachment.step == 2 * round_ + turn + 1
        if attachment is not None and round_ == READ_AT:
            read_and_compare(nn.ModuleDict(both), attachment, 2 * round_ + 2)
    if attachment is not None:
        with pytest.raises(ConflictError, match="already attached"):
            paramd.attach(nets[0], optimizers[0], job="other")
        attachment.detach()
    return nn.ModuleDict(both), list(range(1, STEPS + 1))


@case
def scaled(attached: bool, folder: Path) -> tuple[nn.Module, list[int]]:
    """A gradient scaler skips updates, which frameworks count all the same."""
    from paramd.integrations.training import Training

    torch.manual_seed(0)
    model = nn.Linear(5, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    training = Training("scaled", {})
    if attached:
        training.begin(model, optimizer, step=0)
    seen = []
    for step in range(1, STEPS + 1):
        training.begin_iteration()
        optimizer.zero_grad()
        loss = model(torch.ones(2, 5)).square().mean()
        scaler.scale(loss * float("inf") if step in (2, READ_AT) else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        training.counted(step)
        if training.attachment is not None:
            seen.append(training.attachment.step)
            if step == READ_AT:
                read_and_compare(model, training.attachment, READ_AT)
    training.end()
    return model, seen


@case
def titan(attached: bool, folder: Path) -> tuple[nn.Module, list[int]]:
    return titanic(attached, "OptimizersContainer")


@case
def titan_in_backward(attached: bool, folder: Path) -> tuple[nn.Module, list[int]]:
    return titanic(attached, "OptimizersInBackwardContainer")


def titanic(attached: bool, container: str) -> tuple[nn.Module, list[int]]:
    """torchtitan's containers over FSDP2, stepped as by its Trainer, which needs a device."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torchtitan.components import optimizer as titans

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = llama()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    trainer = Titan([model], getattr(titans, container))
    seen: list[int] = []
    if not attached:
        trainer.train(lambda: None)
        return model, seen
    from paramd.integrations.torchtitan import attached as titan_attached

    def look() -> None:
        assert training.attachment.step == trainer.step
        seen.append(trainer.step)
        if trainer.step == READ_AT:
            read_and_compare(model, training.attachment, READ_AT)

    with titan_attached(trainer, job="titan") as training:
        trainer.train(look)
    assert training.attachment is None
    return model, seen


class Titan:
    """What torchtitan's Trainer is to the integration; `train` does what its `train_step` does."""

    def __init__(self, model_parts: list[nn.Module], container: Any) -> None:
        self.model_parts = model_parts
        if hasattr(container, "Config"):
            # From torchtitan 0.3 on.
            from torchtitan.components.optimizer import ParamGroupConfig

            group = ParamGroupConfig(
                pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2}
            )
            config = container.Config(param_groups=[group], implementation="foreach")
            self.optimizers = container(config, model_parts=model_parts)
        else:
            self.optimizers = container(model_parts, torch.optim.AdamW, {"lr": 1e-2})
        self.step = 0

    def train(self, look: Callable[[], None]) -> None:
        rank = dist.get_rank()
        while self.step < STEPS:
            self.step += 1
            self.optimizers.zero_grad()
            batch = [Tokens()[8 * self.step + 4 * rank + i] for i in range(BATCH)]
            given = {key: torch.stack([one[key] for one in batch]) for key in batch[0]}
            self.model_parts[0](**given).loss.backward()
            self.optimizers.step()
            look()


def main() -> None:
    import tests.multiprocess.workers.trainers_lightning  # noqa: F401

    # A framework may hold parameters where attach() then does not see it, and refuses.
    gc.unfreeze()
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=sorted(CASES))
    parser.add_argument("--folder", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    train = CASES[arguments.case]
    plain, _ = train(False, arguments.folder)
    if "fsdp2" in arguments.case or "parallel" in arguments.case:
        assert all(hasattr(p, "full_tensor") for p in plain.parameters()), "not sharded at all"
    without = digest(full(plain))
    model, seen = train(True, arguments.folder)
    assert seen == list(range(1, STEPS + 1)), seen
    assert digest(full(model)) == without, "paramd changed the training"
    print("the same", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    # The cases are those of the module under its own name, not of this copy.
    from tests.multiprocess.workers.trainers import main as run

    end(run)
