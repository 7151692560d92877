"""The layout of files that transformers would write.

Since version 5 transformers renames tensors and fuses experts when it loads a model, and reverts
that in `save_pretrained`. Its own function does so here on tensors without memory: the position of
each result in its source shows which part of which tensor it is.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from paramd.layout.adapters import Adapter
from paramd.layout.merge import LocalLayout
from paramd.layout.types import Box, HubPart, TensorLayout, row_major
from paramd.trainer.model.adapters import adapters_of
from paramd.trainer.model.extra_state import extra_state, names_of
from paramd.trainer.model.local_shard import as_written, loaded_class, walk

log = logging.getLogger("paramd")


def described(model: nn.Module, local: LocalLayout) -> LocalLayout:
    """A layout with the names of a state dict's other entries, and with transformers' layout."""
    found = replace(
        local,
        missing=tuple(extra_state(model, names_of(local), values=False)),
        adapters=tuple(_as_saved(*one, local) for one in adapters_of(model, local.tensors)),
    )
    kind = loaded_class("transformers.modeling_utils", "PreTrainedModel")
    root = next((module for prefix, module in walk(model) if not prefix), model)
    if kind is None or not isinstance(root, kind):
        return found
    try:
        parts = _converted(root, local.tensors)
    except Exception as error:
        # transformers' own code failed: the export then has the layout in memory, and says so.
        log.debug("paramd: the layout of %s", type(root).__name__, exc_info=True)
        told = f"{type(root).__name__} is as in memory, not as save_pretrained writes it: {error}"
        return replace(found, hub_note=told[:500])
    tensors = (replace(one, hub=parts.get(one.fqn, ())) for one in local.tensors)
    return replace(found, tensors=tuple(tensors))


def _as_saved(adapter: Adapter, base: nn.Module, local: LocalLayout) -> Adapter:
    """An adapter with the names that transformers writes the merged model's tensors under."""
    kind = loaded_class("transformers.modeling_utils", "PreTrainedModel")
    if adapter.why_not_merged or kind is None or not isinstance(base, kind):
        return adapter
    known = {name: one for one in local.tensors for name in (one.fqn, *one.aliases)}
    merged = [
        replace(known[name], fqn=target, aliases=())
        for name, target in adapter.merged.items()
        if name in known
    ]
    try:
        parts = _converted(base, merged)
        several = next((fqn for fqn, of in parts.items() if len(of) != 1), None)
        if several is not None:
            raise ValueError(f"{several} is written in parts")
    except Exception as error:
        log.debug("paramd: the merged layout of %s", type(base).__name__, exc_info=True)
        told = f"{type(base).__name__} is as in memory, not as save_pretrained writes it: {error}"
        return replace(adapter, merged_note=told[:500])
    names = {fqn: of[0].name for fqn, of in parts.items() if of[0].box.sizes == of[0].shape}
    return replace(adapter, merged={name: names.get(to, to) for name, to in adapter.merged.items()})


class _KeepViews(TorchDispatchMode):
    """Replaces copies by their sources."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            return args[0]
        return func(*args, **(kwargs if kwargs is not None else {}))


def _converted(model: nn.Module, tensors: Sequence[TensorLayout]) -> dict[str, tuple[HubPart, ...]]:
    """By fqn, the parts that transformers writes; only for tensors that it changes.

    Raises ValueError if a result is no part of one tensor.
    """
    from transformers.core_model_loading import revert_weight_conversion

    with torch.device("meta"):
        state = {one.fqn: torch.empty(one.shape, dtype=torch.uint8) for one in tensors}
    sources = {each.untyped_storage()._cdata: name for name, each in state.items()}
    with _KeepViews(), torch.no_grad():  # type: ignore[no-untyped-call]
        written = revert_weight_conversion(as_written(model), dict(state))
    parts: dict[str, list[HubPart]] = {}
    for name, tensor in written.items():
        source = sources.get(tensor.untyped_storage()._cdata)
        if source is None:
            raise ValueError(f"{name} is made of several tensors, or of other values")
        parts.setdefault(source, []).append(_part(name, tensor, state[source].shape))
    for name, whole in state.items():
        if sum(prod(one.box.sizes) for one in parts.get(name, ())) != whole.numel():
            raise ValueError(f"{name} is not written once")
    return {
        name: tuple(of)
        for name, of in parts.items()
        if [(one.name, one.shape) for one in of] != [(name, tuple(state[name].shape))]
    }


def _part(name: str, tensor: torch.Tensor, shape: Sequence[int]) -> HubPart:
    sizes, strides = [1] * len(shape), row_major(shape)
    wanted = [one for one in zip(tensor.shape, tensor.stride(), strict=True) if one[0] != 1]
    for dim, size in enumerate(shape):
        if wanted and size > 1 and wanted[0][1] == strides[dim]:
            sizes[dim] = wanted.pop(0)[0]
    begin, rest = [], tensor.storage_offset()
    for stride in strides:
        begin.append(rest // stride)
        rest %= stride
    end = tuple(b + s for b, s in zip(begin, sizes, strict=True))
    if wanted or any(e > size for e, size in zip(end, shape, strict=True)):
        raise ValueError(f"{name} is not a box of its tensor in memory")
    return HubPart(name, Box(tuple(begin), end), tuple(tensor.shape))
