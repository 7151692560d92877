"""Hooks that detect when training continues: optimizer steps, forwards, backwards.

    optimizer hooks   global, so they also cover optimizers made after `attach`, and a step
                      inside another class's step
    forward           of the attached module, in a call that will be differentiated; of a
                      stage of a pipeline, the beginning of the schedule's step
    backward          of that forward's output; counted once a pass, however many modules a rank
                      attached were in it, so that the count is the same on all ranks

The computation is unaffected: the hooks draw no random numbers and stay out of torch.compile's
traces. They return None, except that a closure is wrapped. Copies and pickles of the model and of
optimizers do not carry them.

An optimizer has two of our pre-hooks. The first, which is global, sees its step begin. The last,
its own, runs after all others, which may change gradients, refuse the step or wrap its closure:
only then does the optimizer read gradients. If there are no others, the update begins there, too.

A step that is given a closure computes its gradients itself. torch's own optimizers do that before
anything else: their update begins when the closure has returned. Others, LBFGS among them, may
change parameters first: their update begins at once, and is suspended while the closure runs for
the first time, if nothing has changed until then.

Pipelines: the boundary is where a schedule begins a step, and a step is one backward (stages.py).

Optimizers that step within the backward, as soon as a gradient exists: all steps within one
backward make one update. The update begins with the first of them and ends with the backward, so
it cannot be read, not even at rest, while some parameters are new and others old. If the backward
raises, the update stays open until one succeeds.

A step that only fills an optimizer's empty state, with learning rate 0 and gradients of zeros, is
no update: checkpointing code takes one before it saves or loads (`only_fills`).
"""

from __future__ import annotations

import contextlib
import inspect
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import fields, is_dataclass
from functools import lru_cache, partial, wraps
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import nn
from torch.optim.optimizer import (
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from paramd.trainer.boundary.stack import frames
from paramd.trainer.boundary.stages import Stages
from paramd.trainer.boundary.untraced import is_compiled, untraced, untraced_itself
from paramd.trainer.model.dtensor import split

if TYPE_CHECKING:
    from paramd.trainer.boundary.boundary import Boundary

_Args: TypeAlias = tuple[Any, ...]
_Kwargs: TypeAlias = dict[str, Any]
_Changed: TypeAlias = tuple[_Args, _Kwargs] | None
"""What a pre-hook of an optimizer's step gets, and what it may return in their place."""

SILENT_UPDATES = 3
"""Updates without any forward or backward before falling back to a hook on one parameter."""

MAX_OUTPUTS = 8
"""Most output tensors hooked to see the backward begin."""

LATEST_PASSES = 16
"""Backward passes remembered as counted: those of all threads that run at once."""

FILLING = ("torch.distributed.checkpoint.state_dict", "_init_optim_state")
"""Module and name of torch's own function that takes a step to fill an optimizer's state."""


class Followed(Collection[torch.optim.Optimizer]):
    """The optimizers over a model, held weakly: given ones first, others by their first step."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, bool]] = (
            weakref.WeakKeyDictionary()
        )

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter([optimizer for optimizer, (_, ours) in self._known.items() if ours])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, optimizer: object) -> bool:
        return isinstance(optimizer, torch.optim.Optimizer) and any(o is optimizer for o in self)

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Count an optimizer as the model's, whatever its parameters."""
        self._known[optimizer] = (_size(optimizer), True)

    def has(self, optimizer: torch.optim.Optimizer, model: nn.Module | None) -> bool:
        """Whether it has a parameter of the model; checked again when it gains parameters."""
        known = self._known.get(optimizer)
        if known is not None and known[1]:
            return True
        size = _size(optimizer)
        if known is not None and known[0] == size:
            return False
        mine = {id(p) for p in model.parameters()} if model is not None else set()
        ours = any(id(p) in mine for group in optimizer.param_groups for p in group["params"])
        self._known[optimizer] = (size, ours)
        return ours


def members(optimizer: object) -> list[torch.optim.Optimizer]:
    """The optimizers that a container consists of; empty when it updates parameters itself.

    torchtitan's containers have them as `.optimizers`, transformers' layer-wise ones as
    `.optimizer_dict`.
    """
    found = getattr(optimizer, "optimizers", None)
    if found is None:
        found = getattr(optimizer, "optimizer_dict", None)
    found = list(found.values()) if isinstance(found, dict) else found
    if not isinstance(found, list | tuple) or not found:
        return []
    inner = [one for one in found if isinstance(one, torch.optim.Optimizer)]
    return inner if len(inner) == len(found) else []


class _Last:
    """The last pre-hook of one optimizer's step."""

    def __init__(self, signals: Signals, optimizer: torch.optim.Optimizer) -> None:
        self._signals = signals
        handle = optimizer.register_step_pre_hook(self)
        self.id: int = handle.id
        self.remove = handle.remove
        self.passes = True
        """Whether the present step is no update."""
        self.has_begun = False
        """Whether the present step's update began before this hook."""
        self.evaluates = False
        """Whether the optimizer is known to call its closure."""

    @untraced
    def __call__(self, optimizer: torch.optim.Optimizer, args: _Args, kwargs: _Kwargs) -> _Changed:
        return self._signals.last(self, optimizer, args, kwargs)


class Signals:
    """One attachment's hooks, from `open` to `close`."""

    def __init__(self, model: nn.Module, listener: Boundary) -> None:
        self._model = weakref.ref(model)
        self._listener = listener
        self.optimizers = Followed()
        self._remove: list[Callable[[], None]] = []
        self._silent = 0
        self._leaf: Any = None
        self._in_backward: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Optimizers that have stepped within a backward."""
        self._stages = Stages(listener)
        self._counted: deque[int] = deque(maxlen=LATEST_PASSES)
        self._filling: torch.optim.Optimizer | None = None
        """The optimizer whose present step only fills its state."""
        self._first_id = -1
        self._last: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Last] = (
            weakref.WeakKeyDictionary()
        )

    def open(self) -> None:
        model = self._model()
        first = register_optimizer_step_pre_hook(self._before)
        self._first_id = first.id
        self._remove += [first.remove, register_optimizer_step_post_hook(self._after).remove]
        roots = callable_roots(model) if model is not None else ()
        for module in roots:
            # Prepended: FSDP's own pre-hook gathers parameters, and edits must precede it.
            before = module.register_forward_pre_hook(_Forward(module, self), prepend=True)
            after = module.register_forward_hook(_Output(module, self))
            self._remove += [before.remove, after.remove]

    def forward(self, module: nn.Module) -> None:
        """A forward of a root begins that may be differentiated."""
        # The steps of its schedule are boundaries instead.
        if not self._stages.forward(module):
            self._listener.forward(trains=module.training)

    def backward(self, module: nn.Module, within: int) -> None:
        """The backward of one of its forwards has begun.

        `within`: the backward in which that forward ran, or -1. Reentrant checkpointing computes
        the forward again there, and runs a separate backward for it.
        """
        self._silent = 0
        if not self._stages.runs(module):
            self._count(within if within != -1 else backward_id())

    def _count(self, number: int) -> None:
        # Compiled autograd may have no number.
        if number == -1 or number not in self._counted:
            self._counted.append(number)
            self._listener.backward()

    def close(self) -> None:
        """Remove all hooks. Idempotent."""
        for remove in self._remove:
            remove()
        for last in self._last.values():
            last.remove()
        self._stages.close()
        self._remove.clear()
        self._last.clear()
        self._leaf = None

    def _listen_to_a_leaf(self) -> None:
        """Detect backwards through one parameter's graph node.

        For modules compiled as a whole or never called themselves, whose hooks stay silent.
        Sharded parameters (FSDP) have no such node.
        """
        model = self._model()
        parameters = model.parameters() if model is not None else ()
        for parameter in parameters:
            plain = type(parameter) is nn.Parameter and parameter.device.type == "cpu"
            if plain and parameter.requires_grad and parameter.is_leaf:
                # A parameter does not keep its own node alive, so we do.
                self._leaf = torch.autograd.graph.get_gradient_edge(parameter).node
                handle = self._leaf.register_prehook(self._at_the_leaf)
                self._remove.append(handle.remove)
                return
        self._leaf = False

    @untraced
    def _at_the_leaf(self, _gradients: Any) -> None:
        self._count(backward_id())

    # Compiled code calls these hooks as they are: traced, they would be part of it, or missing.

    @untraced_itself
    def _before(self, optimizer: torch.optim.Optimizer, args: _Args, kwargs: _Kwargs) -> None:
        # Early: the trace may have gone through the hooks before the last one was among them.
        self._first(optimizer, args, kwargs, early=is_compiled())

    @untraced
    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._end(optimizer)

    @untraced
    def _first(
        self, optimizer: torch.optim.Optimizer, args: _Args, kwargs: _Kwargs, *, early: bool
    ) -> None:
        last = self._last.get(optimizer)
        if last is None and not self.optimizers.has(optimizer, self._model()):
            return
        others, last = self._place_last(optimizer, last)
        # Until the end of this method, and where it returns.
        last.passes = True
        at = closure_place(optimizer, args, kwargs)
        # With state, it cannot be such a step.
        if (self._filling is not None or not optimizer.state) and self._only_fills(
            optimizer, closure=at is not None
        ):
            return
        in_backward = backward_id() != -1
        if in_backward:
            self._in_backward.add(optimizer)
        elif self._in_backward and any(one in self._in_backward for one in members(optimizer)):
            # Its members have stepped already: this step is empty, and no update.
            return
        self._silent += 1
        if self._silent > SILENT_UPDATES and self._leaf is None:
            self._listen_to_a_leaf()
        last.passes = False
        waits = at is not None and not in_backward and evaluates_first(optimizer)
        last.has_begun = early or (others and not waits)
        if last.has_begun:
            # The other hooks may change parameters.
            self._listener.begin(optimizer, consumes=False, evaluates=at is not None)

    def last(
        self, last: _Last, optimizer: torch.optim.Optimizer, args: _Args, kwargs: _Kwargs
    ) -> _Changed:
        """The optimizer takes its step next; returns the arguments if its closure is wrapped."""
        if last.passes:
            return None
        at = closure_place(optimizer, args, kwargs)
        if at is None:
            if last.has_begun:
                self._listener.consumes(optimizer)
            else:
                self._listener.begin(optimizer)
            return None
        closure = kwargs["closure"] if at == "closure" else args[1]
        if not last.has_begun and evaluates_first(optimizer) and backward_id() == -1:
            closure = _computing(closure, partial(self._listener.begin, optimizer))
        else:
            # An optimizer that is known to call its closure does not read what is there before.
            if not last.has_begun:
                consumes = not last.evaluates
                self._listener.begin(optimizer, consumes=consumes, evaluates=True)
            elif not last.evaluates:
                self._listener.consumes(optimizer)
            closure = self._suspending(closure, last, optimizer)
        if at == "closure":
            return args, {**kwargs, "closure": closure}
        return (args[0], closure, *args[2:]), kwargs

    def _suspending(
        self, closure: Callable[..., Any], last: _Last, optimizer: torch.optim.Optimizer
    ) -> Callable[..., Any]:
        listener = self._listener

        @untraced_itself
        @wraps(closure)
        def evaluate(*args: Any, **kwargs: Any) -> Any:
            last.evaluates = True
            suspended = listener.suspend(optimizer)
            try:
                loss = closure(*args, **kwargs)
            except BaseException:
                # The optimizer may catch it, and update all the same.
                if suspended is not None:
                    listener.resume(optimizer, suspended, consumes=False)
                raise
            if suspended is not None:
                listener.resume(optimizer, suspended, consumes=True)
            else:
                listener.evaluated(optimizer)
            return loss

        return evaluate

    def _place_last(
        self, optimizer: torch.optim.Optimizer, last: _Last | None
    ) -> tuple[bool, _Last]:
        """Make our own pre-hook the optimizer's last; return whether others may run before it."""
        hooks, everywhere = optimizer._optimizer_step_pre_hooks, _global_optimizer_pre_hooks
        if last is None or last.id not in hooks:
            last = self._last[optimizer] = _Last(self, optimizer)
            return True, last
        if len(hooks) > 1 and next(reversed(hooks)) != last.id:
            hooks[last.id] = hooks.pop(last.id)
        after_ours = len(everywhere) > 1 and next(reversed(everywhere)) != self._first_id
        return after_ours or len(hooks) > 1, last

    def _only_fills(self, optimizer: torch.optim.Optimizer, *, closure: bool) -> bool:
        """Whether this step only fills the optimizer's state; the listener knows then."""
        if self._filling is optimizer and runs_inside_itself(optimizer):
            # A subclass's step calls its base's.
            return True
        self._filling = None
        # A closure computes gradients: those of a step that fills are there before.
        if closure or not only_fills(optimizer, trained=self._listener.trained):
            return False
        self._filling = optimizer
        self._listener.begin_filling()
        return True

    def _end(self, optimizer: torch.optim.Optimizer) -> None:
        if self._filling is optimizer:
            if not runs_inside_itself(optimizer):
                self._filling = None
                self._listener.end_filling()
            return
        # Unfiltered: the listener ignores steps that it never saw begin.
        self._listener.end(optimizer)


def _computing(closure: Callable[..., Any], then: Callable[[], None]) -> Callable[..., Any]:
    """The closure, with `then` called once it has returned."""

    @untraced_itself
    @wraps(closure)
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        loss = closure(*args, **kwargs)
        then()
        return loss

    return evaluate


def closure_place(
    optimizer: torch.optim.Optimizer, args: _Args, kwargs: _Kwargs
) -> Literal["closure", 1] | None:
    """The name or index of the closure that a step was given; None if it was given none."""
    if not kwargs and len(args) == 1:
        return None
    if callable(kwargs.get("closure")):
        return "closure"
    # Something else may be called, too: a model that a step takes, for example.
    if len(args) > 1 and callable(args[1]) and _step_of(type(optimizer).step)[0] == "closure":
        return 1
    return None


def evaluates_first(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step calls the closure before it reads or changes anything."""
    return _step_of(type(optimizer).step)[1]


@lru_cache(maxsize=64)
def _step_of(step: Callable[..., Any]) -> tuple[str, bool]:
    """Name of a step's first argument, and whether it `evaluates_first`."""
    module = inspect.unwrap(step).__module__
    try:
        names = [*inspect.signature(step).parameters, "", ""]
    except (TypeError, ValueError):
        names = ["", ""]
    # LBFGS has read its learning rate before, which an edit in the closure's forward would change.
    return names[1], module.startswith("torch.optim.") and module != "torch.optim.lbfgs"


def callable_roots(model: nn.Module) -> Iterator[nn.Module]:
    """The model, or for a mere container, its callable descendants."""
    if type(model).forward is not nn.Module.forward:
        yield model
        return
    for child in model.children():
        yield from callable_roots(child)


def only_fills(optimizer: torch.optim.Optimizer, *, trained: bool) -> bool:
    """Whether the step that begins only makes the optimizer's state, and is no update.

    torch's optimizer state-dict functions take such a step on an empty optimizer before they save
    or load; frameworks have copies of them. The state is empty, every learning rate is 0, and the
    gradients are zeros that no backward computed. The first step of a warm-up from 0 differs: its
    gradients come from a backward. `trained`: whether there was one since the last update.

    Nearly free: an optimizer with state, or with a learning rate, ends the check at once. Equal on
    all ranks, also where a rank's shards of the gradients happen to be zeros.
    """
    groups = optimizer.param_groups
    if optimizer.state or not all(_is_zero(group.get("lr", 0.0)) for group in groups):
        return False
    if backward_id() != -1:
        return False
    if any(_is_function(frame, *FILLING) for frame in frames()):
        return True
    trainable = [p for group in groups for p in group["params"] if p.requires_grad]
    return not trained and bool(trainable) and all(_has_zeros(p.grad) for p in trainable)


def _is_zero(rate: object) -> bool:
    if isinstance(rate, torch.Tensor):
        # Reading one on a device would wait for it; torch's own step has one on the host.
        return rate.device.type == "cpu" and not rate.any().item()
    return rate == 0


def _has_zeros(gradient: torch.Tensor | None) -> bool:
    if gradient is None or gradient.layout is not torch.strided:
        return False
    return not split(gradient)[0].any().item()


def _is_function(frame: FrameType, module: str, name: str) -> bool:
    return frame.f_code.co_name == name and frame.f_globals.get("__name__") == module


def runs_inside_itself(optimizer: object) -> bool:
    """Whether this optimizer's hook runs nested inside a step of its own.

    torch wraps `step` once per instantiated class, so a subclass that calls `super().step()`
    runs all hooks twice, the second time within the first.
    """
    return sum(_is_step_of(frame, optimizer) for frame in frames()) > 1


def is_stepping(optimizer: object, thread: int) -> bool:
    """Whether a step of this optimizer is in progress on that thread."""
    return any(_is_step_of(frame, optimizer) for frame in frames(thread))


def replaced_for_a_call() -> bool:
    """Whether `torch.func.functional_call` has swapped the modules' tensors."""
    return any(frame.f_globals.get("__name__") == "torch.nn.utils.stateless" for frame in frames())


def backward_id() -> int:
    """Id of the backward running on this thread, or -1."""
    return int(torch._C._current_graph_task_id())


def _size(optimizer: torch.optim.Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _is_step_of(frame: FrameType, optimizer: object) -> bool:
    name = frame.f_code.co_name
    # Compiled, it is cut into several functions.
    if name != "wrapper" and not name.startswith("torch_dynamo_resume_in_wrapper"):
        return False
    if frame.f_globals.get("__name__") != "torch.optim.optimizer":
        return False
    return frame.f_locals.get("self") is optimizer


class _Hook:
    """A hook of one module that its copies and pickles do not inherit."""

    def __init__(self, module: nn.Module, listener: Any) -> None:
        self._module = weakref.ref(module)
        self._listener = listener

    def __reduce__(self) -> tuple[Any, ...]:
        # The stand-in takes any arguments, does nothing, and unpickles without paramd.
        return getattr, (contextlib.nullcontext(), "__exit__")

    def __deepcopy__(self, _memo: object) -> Any:
        return contextlib.nullcontext().__exit__


class _Forward(_Hook):
    def __call__(self, module: nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if torch.is_grad_enabled() and not _in_transform() and module is self._module():
            self._listener.forward(module)


class _Output(_Hook):
    def __call__(self, module: nn.Module, _args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if not torch.is_grad_enabled() or _in_transform() or module is not self._module():
            return
        told, within = False, backward_id()

        def tell(_gradient: torch.Tensor) -> None:
            # Once for a forward, whichever of its outputs the backward reaches first.
            nonlocal told
            if not told:
                told = True
                self._listener.backward(module, within)

        for tensor in _tensors(output):
            tensor.register_hook(tell)


def _in_transform() -> bool:
    """Whether inside `torch.func.grad`, `vmap` or the like, where tensors take no hooks."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _tensors(output: Any, depth: int = 3) -> list[torch.Tensor]:
    """The first few tensors of an output that were computed; a parameter would keep its hooks."""
    if isinstance(output, torch.Tensor):
        return [output] if output.grad_fn is not None else []
    if depth == 0:
        return []
    if isinstance(output, dict):
        parts: Iterable[Any] = output.values()
    elif isinstance(output, list | tuple):
        parts = output
    elif is_dataclass(output) and not isinstance(output, type):
        parts = (getattr(output, field.name) for field in fields(output))
    else:
        return []
    found: list[torch.Tensor] = []
    for part in parts:
        found += _tensors(part, depth - 1)
        if len(found) >= MAX_OUTPUTS:
            break
    return found[:MAX_OUTPUTS]


class BackwardUpdate:
    """The owner of these updates at the boundary; tracks which backward runs on which thread."""

    def __init__(self, end: Callable[[object, int], None]) -> None:
        """`end` is called with this owner and the thread when a backward that had steps is over."""
        self._end = end
        self._running: dict[int, tuple[int, int]] = {}
        """Outermost backwards by thread: id and depth of the stack."""
        self._stepping: set[int] = set()
        """Threads whose backward has had a step."""

    def started(self) -> None:
        """Track the backward on this thread, if any, until it is over."""
        now = backward_id()
        if now == -1:
            return
        thread = threading.get_ident()
        known = self._running.get(thread)
        if known is not None and (known[0] == now or _depth() > known[1]):
            # Checkpointing runs separate backwards within this one.
            return
        self._stepping.discard(thread)
        try:
            _at_the_end(partial(self._last, thread, now))
            self._running[thread] = now, _depth()
        except RuntimeError:
            # Compiled autograd may take no callbacks; then each step is a separate update.
            self._running.pop(thread, None)

    def begins(self) -> bool:
        """Whether the step that begins is the first within the present backward."""
        if backward_id() == -1:
            return False
        self.started()
        thread = threading.get_ident()
        if thread in self._stepping or thread not in self._running:
            return False
        self._stepping.add(thread)
        return True

    def runs(self, thread: int) -> bool:
        """Whether a backward that updates is in progress on that thread, as far as is known."""
        if thread == threading.get_ident():
            return backward_id() != -1
        return thread in self._running

    @untraced
    def _last(self, thread: int, now: int) -> None:
        # FSDP reduces the root's gradients in another callback, which may be after this.
        _at_the_end(partial(self._over, thread, now))

    @untraced
    def _over(self, thread: int, now: int) -> None:
        known = self._running.get(thread)
        if known is None or known[0] != now:
            return
        del self._running[thread]
        if thread in self._stepping:
            self._stepping.discard(thread)
            self._end(self, thread)


def _at_the_end(call: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(call)


def _depth() -> int:
    """Number of backwards in this thread's Python stack."""
    return sum(frame.f_code is _ENGINE for frame in frames())


_ENGINE: CodeType | None = getattr(
    getattr(torch.autograd.graph, "_engine_run_backward", None), "__code__", None
)
