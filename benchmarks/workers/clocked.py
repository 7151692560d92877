"""An optimizer that says when all pre-hooks of its step are over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def clocked(
    kind: type[torch.optim.SGD] | type[torch.optim.AdamW], mark: Callable[[Any], None]
) -> type[torch.optim.Optimizer]:
    """The optimizer's class, with `mark` called first thing in each step.

    paramd's last pre-hook is the optimizer's own and runs after all others: a hook cannot time it.
    """

    class Clocked(kind):  # type: ignore[misc, valid-type]
        def step(self, closure: Any = None) -> Any:
            mark(self)
            return super().step(closure)

    return Clocked
