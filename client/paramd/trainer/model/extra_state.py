"""What a state dict has beside parameters and persistent buffers: `get_extra_state`, and what a
module's own `_save_to_state_dict` adds, such as the quant_state of bitsandbytes.

Its names are found when a training attaches, its values at a boundary at which an export wants
them: JSON, and tensors in host memory, up to `EXTRA_STATE_BYTES`. They are noted in the
continuation memory, {name: {"value": JSON}, {"dtype", "shape", "data": base64} or {"why": reason}}.
Nothing is pickled, so other values are left out, with the reason.
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

from paramd.errors import UsageError
from paramd.layout.dtypes import SAFETENSORS_NAMES
from paramd.layout.exports.extra import EXTRA_STATE_BYTES, too_large
from paramd.layout.merge import LocalLayout
from paramd.memory.continuation import EXTRA, KeptSlots
from paramd.memory.control_page import Word, Words
from paramd.memory.descriptors import SparseMemory
from paramd.memory.optimizer_state import MAX_TABLE_TEXT_BYTES, table_text
from paramd.trainer.model.local_shard import dtype_name, walk
from paramd.trainer.model.plain import has_plain_memory

log = logging.getLogger("paramd")


def names_of(local: LocalLayout) -> set[str]:
    """All names of a layout's tensors."""
    return {name for one in local.tensors for name in (one.fqn, *one.aliases)}


def extra_state(
    model: nn.Module, known: Collection[str], *, values: bool = True
) -> dict[str, object]:
    """By name what is in the state dict and not among the `known` names; an exception stands for a
    value that could not be had.

    `values`: False calls no `get_extra_state` that it need not, and has None for its value.
    """
    found: dict[str, object] = {}
    for prefix, module in walk(model):
        name, cls = f"{prefix}_extra_state", type(module)
        told: dict[str, Any] = {}
        try:
            with torch.no_grad():
                if cls._save_to_state_dict is not nn.Module._save_to_state_dict:
                    name = f"{prefix}({cls.__name__}'s own state)"
                    module._save_to_state_dict(told, prefix, True)
                elif cls.get_extra_state is not nn.Module.get_extra_state:
                    told[name] = module.get_extra_state() if values else None
        except Exception as error:
            log.debug("paramd: extra state of %s: %s", prefix, error)
            told = {name: error}
        found |= {key: value for key, value in told.items() if key not in known}
    return found


class ExtraState:
    """Notes one rank's extra state for requests. Training thread only."""

    def __init__(
        self,
        memory: SparseMemory,
        words: Words,
        model: nn.Module,
        known: Callable[[], Collection[str]],
    ) -> None:
        """`known`: the names of the tensors that have a place in the arena; asked for once."""
        self._slots = KeptSlots(memory, EXTRA)
        self._words = words
        self._model = model
        self._known = cache(known)

    def note_for(self, number: int) -> None:
        """Note it, for a request, as it is at this boundary. Costs what the modules' own functions
        do, and a copy to host memory of what is on a device. Never raises: the log tells, and
        what else the request wants does not wait for it.
        """
        self._words[Word.EXTRA_FOR] = 0
        try:
            self._slots.write(_text(plain(extra_state(self._model, self._known()))))
            # Last: it vouches for the slot.
            self._words[Word.EXTRA_FOR] = number
        except Exception:
            log.exception("paramd: extra state cannot be recorded, so exports lack it")


def _text(table: Mapping[str, Mapping[str, Any]]) -> bytes:
    """The table's text, without what the sidecar has no space for: reasons first, then all."""
    text = table_text(table)
    if len(text) > MAX_TABLE_TEXT_BYTES:
        why = {"why": "there was no space for the reason"}
        text = table_text({name: why if "why" in one else one for name, one in table.items()})
    if len(text) > MAX_TABLE_TEXT_BYTES:
        text = table_text({"(all extra state)": {"why": "its names and values take too much"}})
    return text


def plain(state: Mapping[str, object]) -> dict[str, dict[str, Any]]:
    """Extra state as JSON, see the module docstring."""
    found: dict[str, dict[str, Any]] = {}
    left_bytes = EXTRA_STATE_BYTES
    for name, value in state.items():
        try:
            found[name], size_bytes = _plain(value, left_bytes)
            left_bytes -= size_bytes
        except Exception as error:
            found[name] = {"why": str(error)[:300] or repr(error)[:300]}
    return found


def _plain(value: object, left_bytes: int) -> tuple[dict[str, Any], int]:
    if isinstance(value, Exception):
        raise value
    if isinstance(value, torch.Tensor):
        return _plain_tensor(value, left_bytes)
    try:
        text = json.dumps(value, allow_nan=False)
        same = json.loads(text) == value
    except (TypeError, ValueError, RecursionError):
        same = False
    if not same:
        raise UsageError(f"it is a {type(value).__name__} that is neither a tensor nor JSON")
    if len(text) > left_bytes:
        raise UsageError(too_large(len(text)))
    return {"value": value}, len(text)


def _plain_tensor(value: torch.Tensor, left_bytes: int) -> tuple[dict[str, Any], int]:
    dtype, size_bytes = dtype_name(value.dtype), value.numel() * value.itemsize
    plain = type(value) in (torch.Tensor, nn.Parameter) and has_plain_memory(value)
    if not plain or dtype not in SAFETENSORS_NAMES:
        raise UsageError(f"it is a {type(value).__name__} of {dtype}, not in plain memory")
    if size_bytes > left_bytes:
        raise UsageError(too_large(size_bytes))
    local = value.detach().cpu().contiguous()
    data = local.reshape(-1).view(torch.uint8).numpy().tobytes() if size_bytes else b""
    told = {"dtype": dtype, "shape": list(value.shape), "data": base64.b64encode(data).decode()}
    return told, size_bytes
