"""Puts parameters in the place of those that modules have registered, and back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paramd.trainer.summon.guards import summoned

Place = tuple[nn.Module, str]


@dataclass(slots=True)
class _Before:
    """What a module had."""

    module: nn.Module
    parameters: dict[str, nn.Parameter | None]
    """The whole table, for its order counts."""
    attributes: dict[str, Any]
    """Attributes that hid a parameter of the same name."""
    ours: set[str]


class Swap:
    """The places of one call. `restore` brings the very same objects back."""

    def __init__(self) -> None:
        self._before: dict[int, _Before] = {}
        self._announced: list[tuple[int, str]] = []

    def announce(self, places: Iterable[Place], name: str) -> None:
        """Notes that these places are summoned, whether or not this rank swaps them."""
        for module, attribute in places:
            summoned[id(module), attribute] = name
            self._announced.append((id(module), attribute))

    def hide(self, place: Place) -> None:
        """Takes a registered parameter out of sight."""
        module, name = place
        self._remember(module).ours.add(name)
        module._parameters.pop(name, None)

    def put(self, place: Place, param: nn.Parameter) -> None:
        """Registers `param` there."""
        module, name = place
        before = self._remember(module)
        before.ours.add(name)
        if name in vars(module):
            # FSDP1 leaves views of its flat parameter as plain attributes.
            before.attributes[name] = vars(module).pop(name)
        module._parameters[name] = param

    def found(self, place: Place) -> torch.Tensor | None:
        """What stands there now: a block may have put something else there."""
        module, name = place
        value = module._parameters.get(name)
        return value if value is not None else vars(module).get(name)

    def restore(self) -> None:
        """Everything is as before, but for what the block registered under new names."""
        for before in self._before.values():
            table = before.module._parameters
            new = {
                k: v for k, v in table.items() if k not in before.ours | before.parameters.keys()
            }
            table.clear()
            table.update(before.parameters)
            table.update(new)
            for name in before.ours:
                vars(before.module).pop(name, None)
            vars(before.module).update(before.attributes)
        self._before.clear()
        for key in self._announced:
            summoned.pop(key, None)
        self._announced.clear()

    def _remember(self, module: nn.Module) -> _Before:
        before = self._before.get(id(module))
        if before is None:
            before = _Before(module, dict(module._parameters), {}, set())
            self._before[id(module)] = before
        return before
