"""Preconditions of a call, and the state of FSDP and DDP modules while one is open.

Refused in compiled code, in a forward or backward, and for places already summoned. The only code
of summon that reaches into FSDP: is it idle, are its parameters sharded, and does it report them
under their usual names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from paramd.errors import ConflictError, UsageError
from paramd.trainer.model import fsdp
from paramd.trainer.model.local_shard import of_class
from paramd.trainer.model.tp_ddp import running_forwards

TIMEOUT_VARIABLE = "PARAMD_SUMMON_TIMEOUT_S"
DEFAULT_TIMEOUT_S = 60.0

Place = tuple[nn.Module, str]

_DDP = ("torch.nn.parallel.distributed", "DistributedDataParallel")
_BETWEEN_STEPS = "call summon_full_params between two steps"


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
    """Longest wait: the argument, else the environment, else 60 s; UsageError unless above 0."""
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


summoned: dict[tuple[int, str], str] = {}
"""Names of the parameters summoned now, by place (module id, name in the module)."""


def check_not_compiling() -> None:
    """Raise ConflictError if called from code that torch.compile traces or runs."""
    compiled = torch.compiler.is_compiling()
    if not compiled:
        # Untraced parts of a compiled function run as usual, but with this callback set.
        callback = torch._C._dynamo.eval_frame.get_eval_frame_callback()
        compiled = callback is not None and callback is not False
    if compiled:
        raise ConflictError(
            "summon_full_params was called in a region of torch.compile; call it outside, or "
            "from a function under torch.compiler.disable"
        )


def check_idle(module: nn.Module) -> None:
    """Raise ConflictError in a backward, or in a forward of `module`, a part or a parent of it."""
    if torch._C._current_graph_task_id() != -1:
        raise ConflictError(
            "summon_full_params was called inside backward; call it between two steps"
        )
    inside = {id(inner) for inner in module.modules()}
    for running in running_forwards():
        if id(running) in inside or any(part is module for part in running.modules()):
            raise ConflictError(
                f"summon_full_params was called inside the forward of {type(running).__name__}; "
                "call it between two steps"
            )


def check_not_summoned(places: Iterable[tuple[nn.Module, str]]) -> None:
    """Raise ConflictError, naming it, for a place that is already summoned."""
    for module, name in places:
        inside = summoned.get((id(module), name))
        if inside is not None:
            raise ConflictError(
                f"parameter {inside!r} is already summoned by a surrounding summon_full_params; "
                "leave that block first"
            )


class FlatParameters:
    """The FSDP1 modules under a module, and their flat parameters."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.states = fsdp.flat_modules(modules)
        self._places: dict[tuple[int, str], tuple[Any, int]] = {
            (id(module), name): (state._handle, index)
            for state in self.states
            for module, name, index in fsdp.flat_places(state._handle)
        }

    def place(self, module: nn.Module, name: str) -> tuple[Any, int] | None:
        """The handle managing this parameter, and its index there."""
        return self._places.get((id(module), name))

    def hidden(self, places: Iterable[Place]) -> list[Place]:
        """Places where flat parameters are registered instead of these original ones."""
        # `module` looks through a checkpoint wrapper, as FSDP does when it registers them.
        return [
            (state.module, "_flat_param")
            for state in self._states_of(places)
            if "_flat_param" in state.module._parameters
        ]

    def parties(self) -> set[tuple[int, ...]]:
        """The global ranks of each FSDP module, replicas included."""
        found = set()
        for state in self.states:
            ranks = set(dist.get_process_group_ranks(state.process_group))
            replicas = getattr(state, "_inter_node_pg", None)
            if replicas is not None:
                # Replicas are at the same rank offset for every rank of the shard group.
                me = dist.get_rank()
                others = dist.get_process_group_ranks(replicas)
                ranks = {rank + other - me for rank in ranks for other in others}
            found.add(tuple(sorted(ranks)))
        return found

    def _states_of(self, places: Iterable[Place]) -> list[Any]:
        """The FSDP modules managing these places, and those managing nothing themselves."""
        handles = {id(found[0]) for found in (self.place(*place) for place in places) if found}
        return [s for s in self.states if s._handle is None or id(s._handle) in handles]

    def check_idle(self) -> None:
        """Raises ConflictError inside a forward or backward."""
        for state in self.states:
            handle = state._handle
            if state.training_state.name == "FORWARD_BACKWARD" or (
                handle is not None and handle._training_state.name != "IDLE"
            ):
                raise ConflictError(
                    "FullyShardedDataParallel is in a forward or backward, or summons its "
                    f"parameters itself; {_BETWEEN_STEPS}"
                )

    def settle(self) -> None:
        """Free low-precision unsharded memory left by a forward, as FSDP itself does."""
        for state, handle in fsdp.left_unsharded(self.states):
            if handle._uses_param_mixed_precision:
                fsdp.reshard_flat(state, handle)

    def refresh(self) -> None:
        """Gather again what a forward left unsharded, from the changed shards. Collective.

        Otherwise the next forward or backward would use the stale values.
        """
        for state, handle in fsdp.left_unsharded(self.states):
            fsdp.gather_flat_again(state, handle)

    @contextmanager
    def under_usual_names(self, places: Iterable[Place]) -> Iterator[None]:
        """Have FSDP modules' `named_parameters` omit their own name prefixes."""
        states = self._states_of(places)
        if not states:
            yield
            return
        from torch.distributed.fsdp._common_utils import TrainingState

        before = [(state, state.training_state) for state in states]
        try:
            for state in states:
                state.training_state = TrainingState.SUMMON_FULL_PARAMS
            yield
        finally:
            for state, training_state in before:
                state.training_state = training_state


class ShardedParameters:
    """The modules made by `fully_shard` under a module, and their parameters."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._states = fsdp.sharded_states(modules)
        self._groups = [group for state in self._states for group in fsdp.groups_of(state)]
        self._params: dict[tuple[int, str], Any] = {
            (id(module), name): fsdp_param
            for group in self._groups
            for fsdp_param in group.fsdp_params
            for module, name in fsdp.sharded_places(fsdp_param)
        }

    def find(self, module: nn.Module, name: str) -> Any | None:
        """FSDP's record of this parameter, if any."""
        return self._params.get((id(module), name))

    def parties(self) -> set[tuple[int, ...]]:
        """The sets of global ranks over which parameters are sharded or replicated."""
        return {
            tuple(sorted(fsdp_param.sharded_param._spec.mesh.mesh.flatten().tolist()))
            for fsdp_param in self._params.values()
        }

    def check_idle(self) -> None:
        for holder in (*self._states, *self._groups):
            if holder._training_state.name != "IDLE":
                raise ConflictError(
                    f"a module of fully_shard is in {holder._training_state.name.lower()}; "
                    f"{_BETWEEN_STEPS}"
                )

    def refresh(self) -> None:
        """Gather again what was left unsharded, from the changed shards. Collective."""
        for group in self._groups:
            fsdp.gather_group_again(group)


@contextmanager
def forwards_refused(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Make forwards of FSDP and DDP modules raise: they would use what is swapped out."""
    removers: list[Callable[[], None]] = []
    try:
        for module in modules:
            if fsdp.is_fsdp(module) or of_class(module, *_DDP):
                removers.append(module.register_forward_pre_hook(_refuse, prepend=True).remove)
        yield
    finally:
        for remove in removers:
            remove()


def _refuse(module: nn.Module, _inputs: tuple[torch.Tensor, ...]) -> NoReturn:
    raise ConflictError(
        f"a forward of {type(module).__name__} cannot run inside summon_full_params, its shards "
        "are not in place; leave the block first"
    )
