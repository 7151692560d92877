"""A model's adapters of PEFT: as its `save_pretrained` writes each, and as each is merged.

PEFT's own functions say so when a training attaches, on a copy of the module tree and on tensors
without memory: the training's modules are only looked at. What they say goes with the layout.
"""

from __future__ import annotations

import copy
import logging
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paramd.errors import UsageError
from paramd.layout.adapters import Adapter, Addend
from paramd.layout.types import TensorLayout
from paramd.trainer.model.local_shard import as_written, authors_class, of_class, walk

log = logging.getLogger("paramd")

_CONFIG = "adapter_config.json"
_BASE = "base_model.model."
"""What PEFT puts before each name of the model it wraps."""
_MERGED = ("Linear", "Embedding")
"""Classes of `peft.tuners.lora.layer` that are merged."""
_MOST_REASON_CHARS = 500


def adapters_of(
    model: nn.Module, tensors: Sequence[TensorLayout]
) -> list[tuple[Adapter, nn.Module]]:
    """Each adapter of the model, with the base model that it is merged into. Never raises: what
    PEFT's functions raise is the reason that the adapter has.

    `tensors`: those of this rank's layout.
    """
    names = {name: one for one in tensors for name in (one.fqn, *one.aliases)}
    found = []
    for prefix, module in _adapted(model):
        whole = as_written(module)
        within = {n.removeprefix(prefix): one for n, one in names.items() if n.startswith(prefix)}
        for name in list(whole.peft_config):
            adapter = Adapter(name=str(name), model=prefix)
            adapter = _with_merged(_with_written(adapter, whole, within), module, within)
            found.append((adapter, _base_of(whole)))
    return found


def _adapted(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(prefix, module) of models whose adapters can be written, outermost ones only."""
    inside: list[str] = []
    for prefix, module in walk(model):
        is_peft = of_class(module, "peft.peft_model", "PeftModel")
        # A model of transformers into which its own `add_adapter` put them.
        injected = (
            of_class(module, "transformers.modeling_utils", "PreTrainedModel")
            and "peft_config" in module.__dict__
        )
        if (is_peft or injected) and not any(prefix.startswith(one) for one in inside):
            inside.append(prefix)
            yield prefix, module


def _is_peft(whole: Any) -> bool:
    return of_class(whole, "peft.peft_model", "PeftModel")


def _base_of(whole: Any) -> Any:
    """The model that PEFT wraps: itself where adapters were put into it."""
    return whole.get_base_model() if _is_peft(whole) else whole


def _with_written(adapter: Adapter, whole: Any, within: Mapping[str, TensorLayout]) -> Adapter:
    try:
        return replace(
            adapter,
            config=_config_text(whole, adapter.name),
            written=_written(whole, adapter.name, within),
        )
    except Exception as error:
        # PEFT's own code failed, or it computes what it writes.
        log.debug("paramd: adapter %s as PEFT writes it", adapter.title, exc_info=True)
        return replace(adapter, why_not_written=_reason(error))


def _written(
    whole: Any, name: str, within: Mapping[str, TensorLayout]
) -> dict[str, tuple[str, ...]]:
    """By fqn, the names that PEFT gives the tensors of an adapter. Raises UsageError if one is not
    a whole tensor of the model."""
    from peft.utils.save_and_load import get_peft_model_state_dict

    config = whole.peft_config[name]
    if config.is_prompt_learning:
        raise UsageError(f"what {config.peft_type} writes is computed from its parameters")
    if str(config.peft_type.value) == "ADALORA":
        raise UsageError("AdaLoRA changes its ranks, and so what it writes, while it trains")
    with torch.device("meta"):
        made = {one.fqn: torch.empty(one.shape, dtype=torch.uint8) for one in within.values()}
    sources = {id(tensor): fqn for fqn, tensor in made.items()}
    state = {key: made[one.fqn] for key, one in within.items()}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        told = get_peft_model_state_dict(_offline(whole, name), state_dict=state, adapter_name=name)
    head = "" if _is_peft(whole) else _BASE
    found: dict[str, tuple[str, ...]] = {}
    for key, tensor in told.items():
        if id(tensor) not in sources:
            raise UsageError(f"{key} is no whole tensor of the model")
        fqn = sources[id(tensor)]
        found[fqn] = (*found.get(fqn, ()), f"{head}{key}")
    if not found:
        raise UsageError("PEFT writes no tensor of it")
    return found


def _offline(whole: Any, name: str) -> Any:
    """The model with a base whose configuration is on this disk, or with none: to find out whether
    the vocabulary was resized, PEFT would ask a server on the network."""
    config = copy.copy(whole.peft_config[name])
    config.base_model_name_or_path = _on_disk(config.base_model_name_or_path)
    configs = {**whole.peft_config, name: config}
    found = copy.copy(whole)
    if _is_peft(whole):
        found._modules = {**whole._modules, "base_model": copy.copy(whole.base_model)}
        found.base_model.peft_config = configs
    else:
        found.peft_config = configs
    return found


def _on_disk(base: str | None) -> str | None:
    if not base or Path(base, "config.json").is_file():
        return base
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(base, "config.json")
    except HFValidationError:
        return None
    return str(Path(cached).parent) if isinstance(cached, str) else None


def _config_text(whole: Any, name: str) -> str:
    """The adapter's configuration as `save_pretrained` writes it."""
    config = copy.deepcopy(whole.peft_config[name])
    mapping = None
    if _is_peft(whole):
        config.inference_mode = True
        base = whole.get_base_model()
        if config.base_model_name_or_path is None:
            config.base_model_name_or_path = base.__dict__.get("name_or_path") or None
        if config.task_type is None:
            kind = type(base)
            mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    with tempfile.TemporaryDirectory(prefix="paramd-adapter-") as folder:
        config.save_pretrained(folder, auto_mapping_dict=mapping)
        return Path(folder, _CONFIG).read_text(encoding="utf-8")


def _with_merged(adapter: Adapter, module: Any, within: Mapping[str, TensorLayout]) -> Adapter:
    try:
        merging = _Merging(module, adapter.name, within)
        return replace(
            adapter,
            merged={f"{adapter.model}{key}": name for key, name in merging.names().items()},
            addends={
                f"{adapter.model}{key}": Addend(
                    a=f"{adapter.model}{one.a}" if one.a else "",
                    b=f"{adapter.model}{one.b}",
                    scale=one.scale,
                    transposed=one.transposed,
                )
                for key, one in merging.addends.items()
            },
        )
    except Exception as error:
        log.debug("paramd: adapter %s merged", adapter.title, exc_info=True)
        return replace(adapter, why_not_merged=_reason(error))


class _Merging:
    """How one adapter is merged; names are within its model. Raises UsageError if it cannot be."""

    def __init__(self, module: Any, adapter: str, within: Mapping[str, TensorLayout]) -> None:
        self.addends: dict[str, Addend] = {}
        self._within = within
        self._head = _BASE if of_class(module, "peft.peft_model", "PeftModel") else ""
        self._kept: dict[str, str] = {}
        """By prefix of what wraps a module, the part of it that stays in its place."""
        kind = module.peft_config[adapter].peft_type.value
        if kind != "LORA":
            raise UsageError(f"it is {kind}; paramd merges LoRA")
        layer: Any
        for prefix, layer in walk(module):
            if of_class(layer, "peft.tuners.tuners_utils", "BaseTunerLayer"):
                self._kept[prefix] = "base_layer."
                self._add(prefix, layer, adapter)
            elif of_class(layer, "peft.utils.other", "ModulesToSaveWrapper"):
                own = adapter in layer.modules_to_save
                self._kept[prefix] = f"modules_to_save.{adapter}." if own else "original_module."
            elif of_class(layer, "peft.utils.other", "AuxiliaryTrainingWrapper"):
                raise UsageError(f"{prefix.rstrip('.')} is a {type(layer).__name__}")
        self._wrapping = sorted(self._kept, key=len)
        targets = [self._within[key].fqn for key in self.addends]
        twice = next((one for one in targets if targets.count(one) > 1), None)
        if twice is not None:
            raise UsageError(f"{twice} is tied, and has the adapter in several places")

    def names(self) -> dict[str, str]:
        """By name, that in the merged model, of what it has."""
        found = {}
        for key in self._within:
            merged = self._merged(key)
            if merged is not None:
                found[key] = merged
        return found

    def _merged(self, key: str) -> str | None:
        parts, at = [], 0
        # From the outside to the inside: what is kept may have adapters of its own.
        for prefix in self._wrapping:
            if key.startswith(prefix) and len(prefix) >= at:
                kept = self._kept[prefix]
                if not key.startswith(kept, len(prefix)):
                    return None
                parts.append(key[at : len(prefix)])
                at = len(prefix) + len(kept)
        return "".join((*parts, key[at:])).removeprefix(self._head)

    def _add(self, prefix: str, layer: Any, adapter: str) -> None:
        where = prefix.rstrip(".")
        if layer.merged_adapters:
            raise UsageError(f"{where} had {layer.merged_adapters} merged by the training already")
        kind = authors_class(layer)
        linear = of_class(layer, "peft.tuners.lora.layer", "Linear")
        if kind.__module__ != "peft.tuners.lora.layer" or kind.__name__ not in _MERGED:
            raise UsageError(f"{where} is a {kind.__name__}; paramd merges {' and '.join(_MERGED)}")
        if adapter in layer.lora_variant or layer.use_dora.get(adapter):
            variant = type(layer.lora_variant.get(adapter)).__name__.removesuffix("Variant")
            raise UsageError(f"{where} is of LoRA's variant {variant}; paramd merges plain LoRA")
        if adapter not in layer.scaling:
            return
        scale = float(layer.scaling[adapter])
        if not linear:
            parts = f"{prefix}lora_embedding_A.{adapter}", f"{prefix}lora_embedding_B.{adapter}"
            transposed = True
        else:
            parts = f"{prefix}lora_A.{adapter}.weight", f"{prefix}lora_B.{adapter}.weight"
            transposed = bool(layer.fan_in_fan_out)
        weight = f"{prefix}base_layer.weight"
        self._check(weight, parts, transposed=transposed)
        self.addends[weight] = Addend(a=parts[0], b=parts[1], scale=scale, transposed=transposed)
        if layer.lora_bias[adapter]:
            bias, added = f"{prefix}base_layer.bias", f"{prefix}lora_B.{adapter}.bias"
            if bias not in self._within:
                raise UsageError(f"{where} adds a bias to a base without one")
            self.addends[bias] = Addend(a="", b=added, scale=scale)

    def _check(self, weight: str, parts: tuple[str, str], *, transposed: bool) -> None:
        """Parameters may be quantised, or packed: then they have other shapes."""
        found = [self._within.get(one) for one in (weight, *parts)]
        if any(one is None for one in found):
            # Another rank has it: a stage of a pipeline.
            raise UsageError(f"{weight} and its adapter are not all parameters of the training")
        whole, a, b = (one.shape for one in found if one is not None)
        wide = whole[::-1] if transposed else whole
        if len(a) != 2 or len(b) != 2 or a[0] != b[1] or wide != (b[0], a[1]):
            raise UsageError(f"{weight} has shape {whole}, its adapter {a} and {b}")
        for one in found:
            if one is not None and one.dtype not in ("float64", "float32", "float16", "bfloat16"):
                raise UsageError(f"{one.fqn} is of {one.dtype}")


def _reason(error: Exception) -> str:
    return (str(error) or repr(error))[:_MOST_REASON_CHARS]
