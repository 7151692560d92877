"""Prepare tensor-parallel modules for DistributedDataParallel.

DDP wants plain parameters; the forward of a tensor-parallel module wants DTensors. So the plain
local parameters stay registered, and for the duration of a forward their modules expose DTensors
over them as attributes, which shadow registered parameters. Nothing is unregistered, so at all
times, even inside a forward or after one that raised, `named_parameters`, `state_dict`,
`load_state_dict` and optimizers see them all.

Source: torch.distributed.tensor.parallel.ddp, whose module has no parameters after its first
forward.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from traceback import walk_stack
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paramd.trainer.model.dtensor import is_dtensor
from paramd.trainer.model.flatten import AsDTensor, as_dtensor, flatten, matching

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

# Function.apply without its functorch handling, which costs as much as the rest.
_apply: Any = super(torch.autograd.Function, AsDTensor).apply

_FORWARD_CODE = nn.Module._call_impl.__code__


def pre_dp_module_transform(
    module: nn.Module, ignored_params: Collection[nn.Parameter] | None = None
) -> nn.Module:
    """Prepare a tensor-parallel module for wrapping in DistributedDataParallel.

    Every DTensor parameter becomes its local tensor, in the same memory; forwards of `module`,
    and of its parts on their own, compute with DTensors as before. Gradients reach the local
    parameters complete and plain, so DDP can bucket and average them.

        parallelize_module(model, mesh["tp"], plan)
        pre_dp_module_transform(model)
        ddp = DistributedDataParallel(model, process_group=mesh.get_group("dp"))
        optimizer = torch.optim.AdamW(ddp.parameters())

    Create the optimizer afterwards: it updates the local parameters. A module without DTensors,
    or one already transformed, is left as it is.

    Args:
        module: tensor-parallel over any mesh, at any depth; parameters may be tied.
        ignored_params: DTensors that stay DTensors. DDP does not accept them, so they are added
            to its ignored names; averaging their gradients is then up to the caller.

    Returns:
        `module`.
    """
    ignored = {id(param) for param in ignored_params} if ignored_params is not None else set()
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    skipped = []
    for prefix, owner in module.named_modules():
        for name, param in owner._parameters.items():
            if not is_dtensor(param):
                continue
            if id(param) in ignored:
                skipped.append(f"{prefix}.{name}" if prefix else name)
            else:
                places.setdefault(id(param), []).append((owner, name))
    if skipped:
        known = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        module._ddp_params_and_buffers_to_ignore = [*known, *skipped]  # type: ignore[assignment]
    localized = [_localize(found) for found in places.values()]
    if localized:
        _Shows(module, localized).install()
    return module


@dataclass(slots=True)
class _Localized:
    places: list[tuple[nn.Module, str]]
    spec: DTensorSpec


def _localize(places: list[tuple[nn.Module, str]]) -> _Localized:
    owner, name = places[0]
    param = owner._parameters[name]
    assert param is not None
    local, spec = flatten(param)
    assert spec is not None
    replacement = nn.Parameter(local.detach(), requires_grad=param.requires_grad)
    if param.grad is not None:
        replacement.grad, _ = flatten(param.grad)
    replacement._st_info = spec  # type: ignore[attr-defined]
    for owner, name in places:
        owner._parameters[name] = replacement
    return _Localized(places, spec)


class _Shows:
    """The hooks of one transformed module, with their work precomputed."""

    def __init__(self, root: nn.Module, localized: list[_Localized]) -> None:
        self._root = root
        self._all = localized
        self._by_owner: dict[nn.Module, list[_Localized]] = {}
        for item in localized:
            for owner, _ in item.places:
                self._by_owner.setdefault(owner, []).append(item)
        self._tables: dict[nn.Module, tuple[dict[str, Any], dict[str, Any]]] = {}
        self._depth = 0
        self._alone: set[nn.Module] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Shows:
        """Hooks for the copied modules; meshes are shared: process groups cannot be copied."""
        copied = _Shows.__new__(_Shows)
        memo[id(self)] = copied
        items = [
            _Localized([(copy.deepcopy(owner, memo), name) for owner, name in i.places], i.spec)
            for i in self._all
        ]
        copied.__init__(copy.deepcopy(self._root, memo), items)  # type: ignore[misc]
        return copied

    def install(self) -> None:
        """Hook the root, and the owners for when they run without it."""
        self._root.register_forward_pre_hook(self._enter)
        self._root.register_forward_hook(self._leave, always_call=True)
        self._root.register_load_state_dict_post_hook(self._loaded)
        for owner in self._by_owner:
            if owner is not self._root:
                # Checkpoint recomputation in backward calls parts of the module on their own.
                owner.register_forward_pre_hook(self._enter_owner)
                owner.register_forward_hook(self._leave_owner, always_call=True)

    def _enter(self, root: nn.Module, _inputs: Any) -> None:
        if self._depth:
            # An interrupt may leave a forward without running its hooks: count again.
            self._depth = sum(1 for running in running_forwards() if running is root) - 1
        self._depth += 1
        self._show(self._all)

    def _leave(self, _root: nn.Module, _inputs: Any, _output: Any) -> None:
        self._depth = max(self._depth - 1, 0)
        if not self._depth:
            self._alone.clear()
            for owner in self._by_owner:
                self._hide(owner)

    def _enter_owner(self, owner: nn.Module, _inputs: Any) -> None:
        if not self._depth and owner not in self._alone:
            self._alone.add(owner)
            self._show(self._by_owner[owner], only=owner)

    def _leave_owner(self, owner: nn.Module, _inputs: Any, _output: Any) -> None:
        if owner in self._alone and not self._depth:
            self._alone.discard(owner)
            self._hide(owner)

    def _show(self, localized: list[_Localized], only: nn.Module | None = None) -> None:
        if not self._tables:
            # Lazily: while modules are being copied, they have no tables yet.
            self._tables = {owner: (owner._parameters, vars(owner)) for owner in self._by_owner}
        tables = self._tables
        for item in localized:
            shown: torch.Tensor | None = None
            shown_for: nn.Parameter | None = None
            for owner, name in item.places:
                if only is not None and owner is not only:
                    continue
                parameters, attributes = tables[owner]
                local = parameters[name]
                if local is not shown_for or shown is None:
                    shown, shown_for = self._as_dtensor(item, local), local
                attributes[name] = shown

    def _loaded(self, _root: nn.Module, _incompatible: Any) -> None:
        for item in self._all:
            for owner, name in item.places:
                self._spec_for(item, owner._parameters[name])

    def _spec_for(self, item: _Localized, local: Any) -> DTensorSpec:
        spec: Any = item.spec
        if local.__dict__.get("_st_info") is not spec or local.dtype is not spec.tensor_meta.dtype:
            # Assigned or converted since the last check.
            spec = item.spec = matching(spec, local)
            local._st_info = spec
        return item.spec

    def _as_dtensor(self, item: _Localized, local: Any) -> torch.Tensor:
        spec = self._spec_for(item, local)
        if not torch.is_grad_enabled():
            return as_dtensor(local, spec)
        functorch = torch._C._are_functorch_transforms_active()
        shown: torch.Tensor = (AsDTensor.apply if functorch else _apply)(local, spec, None)
        return shown

    def _hide(self, owner: nn.Module) -> None:
        attributes = vars(owner)
        for item in self._by_owner[owner]:
            for place, name in item.places:
                if place is owner:
                    attributes.pop(name, None)


def running_forwards() -> Iterator[nn.Module]:
    """Modules whose forward is running on this thread, innermost first."""
    for frame, _line in walk_stack(sys._getframe()):
        if frame.f_code is _FORWARD_CODE:
            running = frame.f_locals.get("self")
            if isinstance(running, nn.Module):
                yield running
