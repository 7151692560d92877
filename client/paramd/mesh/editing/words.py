"""What callers of `mesh.edit` write, as operations of the REST contract."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paramd.errors import UsageError

if TYPE_CHECKING:
    import torch

Number = float | int
Operand = "Number | torch.Tensor | Mapping[str, torch.Tensor]"

_FORMS = "fill=, add=, mul=, set=, lerp= or clamp="


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One operation on what a pattern matches."""

    pattern: str
    op: str
    """set, add, mul, lerp, fill or clamp."""
    value: float | None = None
    weight: float | None = None
    min: float | None = None
    max: float | None = None
    operand: torch.Tensor | None = None
    """Shaped like the one region that the pattern matches."""

    def document(self) -> dict[str, Any]:
        """As the REST side takes it; the operand travels to the sidecars."""
        found: dict[str, Any] = {"pattern": self.pattern, "op": self.op}
        for name in ("value", "weight", "min", "max"):
            number = getattr(self, name)
            if number is not None:
                found[name] = number if math.isfinite(number) else str(number)
        if self.operand is not None:
            found["data"] = True
        return found


def ops_of(
    patterns: Sequence[str],
    *,
    fill: Number | None = None,
    add: Any = None,
    mul: Any = None,
    set: Any = None,
    lerp: Any = None,
    weight: Number | None = None,
    clamp: tuple[Number | None, Number | None] | None = None,
) -> list[Op]:
    """The operations that one call of `mesh.edit` means.

    Raises:
        UsageError: not exactly one form, or its operand does not suit it.
    """
    forms = {"fill": fill, "add": add, "mul": mul, "set": set, "lerp": lerp, "clamp": clamp}
    given = {name: operand for name, operand in forms.items() if operand is not None}
    if len(given) != 1:
        found = ", ".join(f"{name}=" for name in given) or "none"
        raise UsageError(f"edit: expected exactly one of {_FORMS} (given: {found})")
    ((kind, operand),) = given.items()
    if weight is not None and kind not in ("add", "lerp"):
        raise UsageError(f"weight: only add= and lerp= have one, not {kind}=")
    if isinstance(operand, Mapping):
        if patterns:
            raise UsageError(
                f"edit: {kind}= is given by name, so no pattern may be given ({patterns[0]!r})"
            )
        return [_op(name, kind, tensor, _weight(kind, weight)) for name, tensor in operand.items()]
    if not patterns:
        raise UsageError("edit: no pattern was given; expected at least one, '*' means all")
    if kind == "clamp":
        low, high = _bounds(clamp)
        return [Op(pattern=pattern, op=kind, min=low, max=high) for pattern in patterns]
    return [_op(pattern, kind, operand, _weight(kind, weight)) for pattern in patterns]


def _op(pattern: str, kind: str, operand: Any, weight: float | None) -> Op:
    if isinstance(operand, int | float) and not isinstance(operand, bool):
        if kind in ("set", "lerp"):
            raise UsageError(f"{kind}: {operand!r}; expected a tensor (fill= takes a number)")
        return Op(pattern=pattern, op=kind, value=float(operand), weight=weight)
    if kind == "fill" or not hasattr(operand, "data_ptr"):
        raise UsageError(
            f"{kind}: {type(operand).__name__}; expected "
            f"{'a number' if kind == 'fill' else 'a tensor, or a number where it suits'}"
        )
    return Op(pattern=pattern, op=kind, operand=operand.detach(), weight=weight)


def _weight(kind: str, weight: Number | None) -> float | None:
    if kind == "lerp" and weight is None:
        raise UsageError("lerp: needs weight=, the share of the way from the parameter to the data")
    return float(weight) if weight is not None else None


def _bounds(clamp: tuple[Number | None, Number | None] | None) -> tuple[float | None, float | None]:
    if not isinstance(clamp, tuple) or len(clamp) != 2 or clamp == (None, None):
        raise UsageError(f"clamp: {clamp!r}; expected (min, max), one of which may be None")
    low, high = (float(bound) if bound is not None else None for bound in clamp)
    if low is not None and high is not None and low > high:
        raise UsageError(f"clamp: {low:g} is above {high:g}; give the smaller bound first")
    return low, high
