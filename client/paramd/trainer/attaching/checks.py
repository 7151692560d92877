"""Resolves the arguments of `attach` to one module and its optimizers, and checks them.

Frameworks are recognised by their classes in modules that the script has loaded; none is imported.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from paramd import places
from paramd.errors import ConflictError, UsageError
from paramd.trainer.attaching.attachment import Missing, attached
from paramd.trainer.boundary.signals import members
from paramd.trainer.model import partitions
from paramd.trainer.model.local_shard import loaded_class, of_class

NOT_SERVED = {
    "DEEPSPEED": "DeepSpeed within accelerate",
    "MEGATRON_LM": "Megatron-LM",
    "XLA": "torch_xla",
    "TP": "accelerate's tensor parallelism without DTensor",
}
"""accelerate's distributed types that paramd does not serve."""

FABRIC_MODULES = ("lightning.fabric.wrappers", "lightning_fabric.wrappers")


def resolve(model: Any, optimizer: Any, job: Any, accelerator: Any) -> tuple[torch.nn.Module, Any]:
    """Return the module to attach and its optimizers; UsageError if one is missing or invalid."""
    if accelerator is not None:
        model, optimizer = _prepared(model, optimizer, accelerator)
    _refuse_megatron(model)
    if of_class(model, "deepspeed.runtime.engine", "DeepSpeedEngine"):
        raise UsageError(
            "this is a DeepSpeedEngine; attach it by "
            "paramd.integrations.deepspeed.attach(engine, job=NAME)"
        )
    if of_class(model, "torch.distributed.pipelining.stage", "_PipelineStageBase"):
        model = model.submod
    if isinstance(model, Mapping):
        model = _together(model)
    if any(of_class(model, name, "_FabricModule") for name in FABRIC_MODULES):
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
    """The arguments given to `accelerator.prepare`, by accelerate's own record."""
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


_HOOKS = "_optimizer_step_pre_hooks"


MOST_WRAPPERS = 8
"""Most wrappers to unwrap around one optimizer; more means a cycle."""


def optimizers_of(given: Any) -> list[torch.optim.Optimizer]:
    """The optimizers given to `attach`, unwrapped, each once; UsageError if one is no optimizer."""
    if given is None:
        return []
    one = isinstance(given, (str, bytes, torch.optim.Optimizer)) or not isinstance(given, Iterable)
    found = [_unwrapped(item) for item in ([given] if one else list(given))]
    # The state is in those that a container steps; its own step counts when it has parameters.
    found = [inner for outer in found for inner in members(outer) or [outer]]
    return list({id(optimizer): optimizer for optimizer in found}.values())


def _unwrapped(given: Any) -> torch.optim.Optimizer:
    """The optimizer whose steps can be followed: `given`, or the one that it wraps.

    Wrappers (accelerate's AcceleratedOptimizer, Lightning's LightningOptimizer) keep the real
    optimizer as `.optimizer`. Some subclass torch's Optimizer without initializing it, and so
    have no hooks. A scheduler has an optimizer but no parameter groups.
    """
    optimizer = given
    for _ in range(MOST_WRAPPERS):
        if isinstance(optimizer, type):
            break
        if isinstance(optimizer, torch.optim.Optimizer) and _HOOKS in vars(optimizer):
            return optimizer
        if not hasattr(optimizer, "param_groups"):
            break
        optimizer = getattr(optimizer, "optimizer", None)
    raise UsageError(
        f"optimizer must be a torch.optim.Optimizer or several, not {_kind(given)}"
        f"{_why_not(given)}, or pass None and make every change of parameters inside "
        "`with attachment.update():`"
    )


def _why_not(optimizer: Any) -> str:
    """The reason why `optimizer` cannot be followed, and how to fix it."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return (
            ": it was never initialised as one, so its steps are not reported; call "
            "super().__init__(params, defaults) in its __init__"
        )
    if callable(getattr(optimizer, "step", None)) and not isinstance(optimizer, type):
        return (
            ": the steps of a custom optimizer are not reported; derive its class from "
            "torch.optim.Optimizer"
        )
    return "; pass the optimizer that it stands for"


def _kind(thing: object) -> str:
    """The type's imported name; for a class, its name and that it is a class."""
    of = thing if isinstance(thing, type) else type(thing)
    name = of.__qualname__ if of.__module__ == "builtins" else f"{of.__module__}.{of.__qualname__}"
    return f"the class {name}" if isinstance(thing, type) else name


def check_given(model: Any, optimizer: Any, job: Any) -> None:
    """Raise UsageError if a required argument of `attach` is missing."""
    form = "paramd.attach(model, optimizer, job=NAME)"
    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"model must be a torch.nn.Module or a dict of them, not {_kind(model)}; pass the "
            f"module whose parameters are trained, wrapped as you train it: {form}"
        )
    if optimizer is Missing.OPTIMIZER:
        raise UsageError(
            f"optimizer is missing; call {form}, with None for the optimizer only if every change "
            "of parameters is made inside `with attachment.update():`"
        )
    if not isinstance(job, str):
        raise UsageError(f"job must be a name, not {_kind(job)}; call {form}")


def check_attachable(
    model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], job: str
) -> None:
    """Validate the arguments; warn of trainable parameters that no optimizer updates.

    Raises:
        UsageError: Invalid job name, or an optimizer without the model's parameters.
        ConflictError: The model, or the job in this process, is already attached.
    """
    places.check_job_name(job)
    parameters = {id(parameter): name for name, parameter in model.named_parameters()}
    for other in attached.values():
        if not other._has(parameters.keys()):
            continue
        raise ConflictError(f"this model is already attached ({other!r}); detach it first")
    if any(other.job == job for other in attached.values()):
        raise ConflictError(
            f"another model is attached as job {job!r} in this process; detach it, or attach "
            "this one under another job name"
        )
    partitions.check_declared(model)
    if model in partitions.declared:
        # The groups list partitions, and DeepSpeed's not even those while it does not step.
        return
    known = {*check_trained(model, optimizers), *_averages(model)}
    if optimizers and not all(id(p) in known for p in model.parameters() if p.requires_grad):
        warnings.warn(
            "paramd.attach: some trainable parameters belong to none of the given optimizers; "
            "pass all optimizers, or change those parameters inside attachment.update()",
            stacklevel=2,
        )


def _averages(model: torch.nn.Module) -> Iterator[int]:
    """The `id` of every parameter that averages others. `AveragedModel` copies a model whole, so
    its parameters require gradients, although no optimizer is meant to update them."""
    # Not imported here: a model can only have one if its module has been imported.
    for module in model.modules():
        if of_class(module, "torch.optim.swa_utils", "AveragedModel"):
            yield from map(id, module.parameters())


def check_trained(
    model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> Collection[int]:
    """The `id` of every parameter that they update.

    Raises:
        UsageError: One has none of the model's.
    """
    parameters = {id(parameter) for parameter in model.parameters()}
    updated: set[int] = set()
    for index, optimizer in enumerate(optimizers):
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not parameters:
            raise UsageError("the model has no parameters; attach the one that is trained")
        if not mine & parameters:
            raise UsageError(
                f"optimizer {index} ({type(optimizer).__name__}) updates no parameter of this "
                "model; make the optimizer after wrapping the model, and pass that model"
            )
        updated |= mine
    return updated


def changes_in_forward(model: torch.nn.Module) -> str:
    """The part of the model that changes parameters in forward, outside updates; empty if none.

    Such a model is read only at boundaries, and large ones not at all.
    """
    for name, module in model.named_modules():
        if getattr(module, "max_norm", None) is not None and isinstance(
            module, torch.nn.Embedding | torch.nn.EmbeddingBag
        ):
            return f"{name or 'the model'} renormalises its weight in forward (max_norm)"
    return ""


def steps_done(optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """The updates that the optimizers have counted themselves; 0 if they do not count."""
    return max(
        (
            int(state["step"])
            for optimizer in optimizers
            for state in optimizer.state.values()
            if isinstance(state, dict) and "step" in state
        ),
        default=0,
    )


def check_versions(answers: Sequence[Mapping[str, Any]]) -> None:
    """Raise ConflictError unless all ranks' answers name the same version of paramd."""
    first = answers[0]
    for rank, answer in enumerate(answers):
        if answer["version"] != first["version"]:
            raise ConflictError(
                f"rank {rank} on host {answer['hostname']} runs paramd {answer['version']}, rank 0 "
                f"on host {first['hostname']} {first['version']}; install the same version on all "
                "hosts"
            )
