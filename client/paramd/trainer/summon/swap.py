"""Swap other parameters in for those that modules have registered, and back."""

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
    """A module's state before the swap."""

    module: nn.Module
    parameters: dict[str, nn.Parameter | None]
    """The whole table, since its order matters."""
    attributes: dict[str, Any]
    """Attributes that shadowed a parameter of the same name."""
    ours: set[str]


class Swap:
    """The places of one call. `restore` puts the original objects back."""

    def __init__(self) -> None:
        self._before: dict[int, _Before] = {}
        self._announced: list[tuple[int, str]] = []

    def announce(self, places: Iterable[Place], name: str) -> None:
        """Mark these places as summoned, whether or not this rank swaps them."""
        for module, attribute in places:
            summoned[id(module), attribute] = name
            self._announced.append((id(module), attribute))

    def hide(self, place: Place) -> None:
        """Hide a registered parameter."""
        module, name = place
        self._remember(module).ours.add(name)
        module._parameters.pop(name, None)

    def put(self, place: Place, param: nn.Parameter) -> None:
        """Register `param` at `place`."""
        module, name = place
        before = self._remember(module)
        before.ours.add(name)
        if name in vars(module):
            # FSDP1 leaves views of its flat parameter as plain attributes.
            before.attributes[name] = vars(module).pop(name)
        module._parameters[name] = param

    def found(self, place: Place) -> torch.Tensor | None:
        """The tensor at `place` now; the block may have put another one there."""
        module, name = place
        value = module._parameters.get(name)
        return value if value is not None else vars(module).get(name)

    def restore(self) -> None:
        """Restore everything, keeping what the block registered under new names."""
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
