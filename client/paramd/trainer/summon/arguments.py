"""The arguments of one call."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass

from paramd.errors import UsageError

TIMEOUT_VARIABLE = "PARAMD_SUMMON_TIMEOUT_S"
DEFAULT_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The call's options; checked to be equal on all ranks."""

    recurse: bool
    writeback: bool
    rank0_only: bool
    offload_to_cpu: bool
    with_grads: bool

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in asdict(self).items())


def timeout_from(timeout_s: float | None) -> float:
    """The longest wait for other ranks: the argument, else the environment, else 60 s.

    Raises:
        UsageError: not a number above 0.
    """
    name, value = "timeout_s", timeout_s
    if value is None:
        name, text = TIMEOUT_VARIABLE, os.environ.get(TIMEOUT_VARIABLE)
        if text is None:
            return DEFAULT_TIMEOUT_S
        try:
            value = float(text)
        except ValueError:
            raise UsageError(f"{name} must be a number of seconds, is {text!r}") from None
    if not value > 0:
        raise UsageError(f"{name} must be above 0 seconds, is {value}")
    return value
