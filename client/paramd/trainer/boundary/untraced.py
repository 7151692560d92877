"""Functions that torch.compile leaves alone.

Torch's own decorators load the compiler, seconds of every start. What they set can be set without
it: how the interpreter's hook of torch treats a code object, and an attribute that a trace looks
for before it goes into a function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _marked(function: _Function, *, calls_too: bool) -> _Function:
    actions = eval_frame._FrameAction
    its_calls = actions.SKIP if calls_too else actions.DEFAULT
    how = eval_frame._FrameExecStrategy(actions.SKIP, its_calls)
    eval_frame.set_code_exec_strategy(function.__code__, how)
    # A trace that comes to a call of it ends there, and compiled code calls it as it is.
    vars(function)["_torchdynamo_disable"] = True
    return function


def untraced(function: _Function) -> _Function:
    """The function, which is not traced, and nothing that it calls."""
    return _marked(function, calls_too=True)


def untraced_itself(function: _Function) -> _Function:
    """The function, which is not traced; what it calls is."""
    return _marked(function, calls_too=False)


@untraced_itself
def is_compiled() -> bool:
    """Whether compiled code has called the function that asks, which is `untraced_itself`."""
    return eval_frame.get_eval_frame_callback() is not None
