"""The cases of Lightning; see trainers.py."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paramd
from paramd.errors import ConflictError
from tests.multiprocess.workers.trainers import (
    BATCH,
    READ_AT,
    STEPS,
    Tokens,
    case,
    llama,
    read_and_compare,
)


def fitted(
    attached: bool, strategy: Any, *, infinite: Collection[int] = (), **options: Any
) -> tuple[nn.Module, list[int]]:
    """Fits with a Trainer; the losses of some batches are `infinite`."""
    os.environ["TORCHELASTIC_RUN_ID"] = "tests"
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net: Any = llama()

        def configure_model(self) -> None:
            if getattr(strategy, "_data_parallel_size", None) is None or self._sharded:
                return
            from torch.distributed.fsdp import fully_shard

            mesh = self.device_mesh["data_parallel"]
            for layer in self.net.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.net, mesh=mesh)
            self._sharded = True

        _sharded = False

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(**batch).loss
            return loss * float("inf") if index in infinite else loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    seen: list[int] = []

    class Reader(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            assert ours.attachment.step == trainer.global_step
            if trainer.global_step and trainer.global_step not in seen:
                seen.append(trainer.global_step)
                if trainer.global_step == READ_AT:
                    read_and_compare(module, ours.attachment, READ_AT)

    ours: Any = None
    if attached:
        from paramd.integrations.lightning import ParamdCallback

        ours = ParamdCallback(job="lightning")
    trainer = pl.Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy,
        max_steps=STEPS, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[ours, Reader()] if ours is not None else [],
        **options,
    )  # fmt: skip
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(Tokens(), batch_size=BATCH))
    assert ours is None or ours.attachment is None, "detached at the end"
    return module, seen


@case
def lightning_plain(attached: bool, folder: Path) -> tuple[nn.Module, list[int]]:
    return fitted(attached, "auto")


@case
def lightning_ddp(attached: bool, folder: Path) -> tuple[nn.Module, list[int]]:
    return fitted(attached, "ddp", accumulate_grad_batches=2)


@case
def lightning_scaled(attached: bool, folder: Path) -> tuple[nn.Module, list[int]]:
    """Its gradient scaler skips steps, which `global_step` counts."""
    from lightning.pytorch.plugins import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    found = fitted(attached, "auto", infinite=(1, READ_AT - 1), plugins=[plugin])
    assert scaler.get_scale() == 2.0 / 4, "no step was skipped"
    return found


@case
def lightning_model_parallel(attached: bool, folder: Path) -> tuple[nn.Module, list[int]]:
    from lightning.pytorch.strategies import ModelParallelStrategy

    return fitted(attached, ModelParallelStrategy(process_group_backend="gloo"))


@case
def lightning_raises(attached: bool, folder: Path) -> tuple[nn.Module, list[int]]:
    """An exception in fit detaches; two callbacks of one job are refused, and nothing stays."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(3, 3)

        def training_step(self, batch: Any, index: int) -> Any:
            if index == 2:
                raise ArithmeticError
            return self.net(torch.ones(2, 3)).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def fit(*callbacks: Any) -> Module:
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, max_steps=STEPS, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, callbacks=list(callbacks),
        )  # fmt: skip
        module = Module()
        with contextlib.suppress(ArithmeticError):
            trainer.fit(module, torch.utils.data.DataLoader(range(8)))  # type: ignore[arg-type]
        return module

    if attached:
        from paramd.integrations.lightning import ParamdCallback

        ours = ParamdCallback(job="raises")
        fit(ours)
        assert ours.attachment is None
        with pytest.raises(ConflictError, match="already attached"):
            fit(ParamdCallback(job="raises"), ParamdCallback(job="raises-again"))
        fit(ours)
        assert not list_attached()
    return nn.Module(), list(range(1, STEPS + 1))


def list_attached() -> list[Any]:
    from paramd.trainer.attaching.attachment import attached

    return list(attached.values())


@case
def lightning_fabric(attached: bool, folder: Path) -> tuple[nn.Module, list[int]]:
    os.environ["TORCHELASTIC_RUN_ID"] = "tests"
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp")
    fabric.launch()
    model: Any = llama()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(model, optimizer)
    attachment = paramd.attach(model, optimizer, job="fabric") if attached else None
    seen = []
    for round_ in range(STEPS):
        batch = [Tokens()[8 * round_ + 4 * fabric.global_rank + i] for i in range(BATCH)]
        given = {key: torch.stack([one[key] for one in batch]) for key in batch[0]}
        fabric.backward(model(**given).loss)
        optimizer.step()
        optimizer.zero_grad()
        if attachment is not None:
            seen.append(attachment.step)
            if round_ == READ_AT - 1:
                read_and_compare(model, attachment, READ_AT)
    if attachment is not None:
        attachment.detach()
    return model, seen
