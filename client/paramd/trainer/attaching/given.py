"""What `attach` was given, as one module and its optimizers: a dict of modules, an accelerator.

Frameworks are told apart by their classes in the modules that the script has loaded; none is
imported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from paramd.errors import UsageError
from paramd.trainer.attaching.checks import Missing, check_given
from paramd.trainer.model import partitions
from paramd.trainer.model.local_shard import loaded_class

NOT_SERVED = {
    "DEEPSPEED": "DeepSpeed within accelerate",
    "MEGATRON_LM": "Megatron-LM",
    "XLA": "torch_xla",
    "TP": "accelerate's tensor parallelism without DTensor",
}
"""accelerate's distributed types that paramd does not serve."""

FABRIC_MODULES = (
    ("lightning.fabric.wrappers", "_FabricModule"),
    ("lightning_fabric.wrappers", "_FabricModule"),
)


def resolve(model: Any, optimizer: Any, job: Any, accelerator: Any) -> tuple[torch.nn.Module, Any]:
    """The module to attach and its optimizers, as `attach` was given them.

    Raises:
        UsageError: something is missing, or is not what it should be.
    """
    if accelerator is not None:
        model, optimizer = _prepared(model, optimizer, accelerator)
    _refuse_megatron(model)
    engine: Any = loaded_class("deepspeed.runtime.engine", "DeepSpeedEngine")
    if engine is not None and isinstance(model, engine):
        raise UsageError(
            "this is a DeepSpeedEngine; attach it by "
            "paramd.integrations.deepspeed.attach(engine, job=NAME)"
        )
    stage: Any = loaded_class("torch.distributed.pipelining.stage", "_PipelineStageBase")
    if stage is not None and isinstance(model, stage):
        model = model.submod
    if isinstance(model, Mapping):
        model = _together(model)
    for module_name, class_name in FABRIC_MODULES:
        fabric: Any = loaded_class(module_name, class_name)
        if fabric is not None and isinstance(model, fabric):
            # Fabric registers the original module a second time beside the one it calls.
            model = model._forward_module
    check_given(model, optimizer, job)
    return model, optimizer


def _refuse_megatron(model: Any) -> None:
    """Raise UsageError for a wrapper of Megatron-Core that its own integration did not give."""
    wrapper: Any = loaded_class("megatron.core.distributed.data_parallel_base", "_BaseDataParallel")
    if wrapper is None or not isinstance(model, torch.nn.Module) or model in partitions.declared:
        return
    found = next((module for module in model.modules() if isinstance(module, wrapper)), None)
    if found is not None:
        raise UsageError(
            f"this is Megatron-Core's {type(found).__qualname__}; attach it by "
            "paramd.integrations.megatron.attach(model, optimizer, job=NAME)"
        )


def _together(models: Mapping[Any, Any]) -> torch.nn.Module:
    """One module that holds several, each under its name."""
    if not models:
        raise UsageError("model is an empty dict; give each module a name: {'actor': actor}")
    for name, module in models.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise UsageError(
                f"model has the key {name!r}; its keys become the first part of parameters' names "
                "and must be identifiers, such as 'actor'"
            )
        if not isinstance(module, torch.nn.Module):
            raise UsageError(
                f"model[{name!r}] must be a torch.nn.Module, not {type(module).__qualname__}"
            )
    together = torch.nn.Module()
    for name, module in models.items():
        # Not `add_module`, which refuses names of Module's own methods, such as "train".
        together._modules[name] = module
    return together


def _prepared(model: Any, optimizer: Any, accelerator: Any) -> tuple[Any, Any]:
    """What `accelerator.prepare` was given, by accelerate's own record of it."""
    if model is not None or optimizer is not Missing.OPTIMIZER:
        raise UsageError(
            "pass either accelerator, or model and optimizer; an accelerator knows what it prepared"
        )
    models = getattr(accelerator, "_models", None)
    optimizers = getattr(accelerator, "_optimizers", None)
    if not isinstance(models, list) or not isinstance(optimizers, list):
        raise UsageError(
            f"accelerator must be an accelerate.Accelerator, not {type(accelerator).__qualname__}"
        )
    kind = getattr(getattr(accelerator, "distributed_type", None), "name", "")
    if kind in NOT_SERVED:
        raise UsageError(
            f"{NOT_SERVED[kind]} is not supported; paramd serves accelerate's plain, DDP, FSDP1 "
            "and FSDP2 trainings"
        )
    if not models or not optimizers:
        what = "model" if not models else "optimizer"
        raise UsageError(
            f"this accelerator has prepared no {what}; call accelerator.prepare(model, optimizer) "
            "before paramd.attach(accelerator=accelerator)"
        )
    if len(models) == 1:
        return models[0], optimizers
    # Named as `accelerator.save_state` names their files.
    names = ["model", *(f"model_{index}" for index in range(1, len(models)))]
    return dict(zip(names, models, strict=True)), optimizers
