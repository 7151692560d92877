"""What state an optimizer has: which tensors under which keys, scalars, groups. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from paramd.errors import UsageError
from paramd.layout.dtypes import ITEM_BYTES

MAX_TABLE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class StateScalar:
    """A 0-dim state such as Adam's "step"; the same on all ranks."""

    key: str
    dtype: str
    value: float


@dataclass(frozen=True, slots=True)
class OptimizerTable:
    """The state of one optimizer at one step, by names of parameters."""

    states: Mapping[str, Mapping[str, str]]
    """State key -> name of the parameter -> dtype of that state, which has its shape."""
    scalars: Mapping[str, tuple[StateScalar, ...]]
    """Name of the parameter -> its 0-dim states."""
    groups: tuple[Mapping[str, Any], ...]
    """Parameter groups: settings, and the names of their parameters under "params"."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of tensors, in order."""
        return tuple(self.states)

    def tensors(self, key: str) -> Iterator[tuple[str, str]]:
        """(name of the parameter, dtype of its state) for one key."""
        return iter(self.states[key].items())

    def to_json(self) -> bytes:
        """The table as text; equal tables have equal text."""
        return json.dumps(
            {
                "states": {key: dict(names) for key, names in self.states.items()},
                "scalars": {
                    fqn: [[s.key, s.dtype, s.value] for s in scalars]
                    for fqn, scalars in self.scalars.items()
                },
                "groups": [dict(group) for group in self.groups],
            },
            separators=(",", ":"),
        ).encode()

    @classmethod
    def from_json(cls, text: bytes) -> OptimizerTable:
        """The way back.

        Raises:
            UsageError: it is no such table.
        """
        if len(text) > MAX_TABLE_BYTES:
            raise UsageError(f"an optimizer's table of {len(text):,} bytes; at most 64 MiB")
        try:
            found = json.loads(text)
            states = {str(k): _names(v) for k, v in found["states"].items()}
            scalars = {str(fqn): _scalars(items) for fqn, items in found["scalars"].items()}
            return cls(states, scalars, tuple(dict(group) for group in found["groups"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"the optimizer's table cannot be read: {error!r}") from None


def _names(table: Mapping[str, str]) -> dict[str, str]:
    for fqn, dtype in table.items():
        if dtype not in ITEM_BYTES:
            raise ValueError(f"{fqn}: dtype {dtype!r}")
    return dict(table)


def _scalars(items: Iterable[Any]) -> tuple[StateScalar, ...]:
    return tuple(StateScalar(str(key), str(dtype), value) for key, dtype, value in items)
