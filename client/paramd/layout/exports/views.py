"""What an export writes when it is not the model as it is in memory: an adapter, the base that one
is merged into, one of several models, or weights that an optimizer keeps. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paramd.errors import NotFoundError, UsageError
from paramd.layout.adapters import Addend, find_adapter
from paramd.layout.exports.files import Blend, BlendKind
from paramd.layout.exports.optimizer import OptimizerTable
from paramd.layout.types import HubPart, Layout, TensorKind, TensorLayout, full_box

SCHEDULE_FREE = "schedule-free"
"""Weights that schedulefree's optimizers make of a parameter and of its state `z`."""
_Z = "z"

_AVERAGED = "module."
"""What `swa_utils.AveragedModel` puts before the names of the model it averages."""
_COUNT = "n_averaged"


@dataclass(frozen=True, slots=True)
class View:
    """The tensors of an export and their names, where they are not those of the layout."""

    tensors: Sequence[TensorLayout]
    """With the aliases that are kept."""
    names: Mapping[str, str]
    """Names in the files, by name in the model."""
    addends: Mapping[str, Addend] = field(default_factory=dict)
    """By fqn, what is added to a tensor."""
    config: str = ""
    """Text of the adapter's configuration, if that is written."""
    note: str = ""
    """As `Layout.hub_note`."""

    def beside(self, layout: Layout, chosen: Collection[str]) -> tuple[TensorLayout, ...]:
        """The tensors that are read, and not written, for the `chosen` ones."""
        wanted = {name for fqn, one in self.addends.items() if fqn in chosen for name in one.inputs}
        return tuple(
            one for one in layout.tensors if not wanted.isdisjoint((one.fqn, *one.aliases))
        )


def adapter_view(layout: Layout, name: str) -> View:
    """An adapter as PEFT writes it. Raises as `find_adapter` and `Adapter.check_written`."""
    adapter = find_adapter(layout.adapters, name)
    adapter.check_written()
    tensors = []
    for tensor in layout.tensors:
        names = adapter.written.get(tensor.fqn, ())
        if names:
            # PEFT writes a copy under each name.
            parts = tuple(HubPart(name, full_box(tensor.shape), tensor.shape) for name in names)
            tensors.append(replace(tensor, hub=parts, aliases=()))
    first_names = {tensor.fqn: tensor.hub[0].name for tensor in tensors}
    return View(tensors, first_names, config=adapter.config)


def merged_view(layout: Layout, name: str) -> View:
    """The base of an adapter with that merged into it. Raises as `find_adapter` and
    `Adapter.check_merged`."""
    adapter = find_adapter(layout.adapters, name)
    adapter.check_merged()
    canonical = {name: one.fqn for one in layout.tensors for name in (one.fqn, *one.aliases)}
    inputs = [name for addend in adapter.addends.values() for name in addend.inputs]
    lost = [name for name in inputs if name not in canonical]
    if lost:
        raise UsageError(f"adapter {adapter.title!r}: this training has no {lost[0]!r} any more")
    addends = {canonical[key]: one for key, one in adapter.addends.items() if key in canonical}
    tensors, names = _renamed(layout, adapter.merged)
    return View(tensors, names, addends, note=adapter.merged_note)


def model_view(layout: Layout, name: str) -> View | None:
    """The model that `attach` was given under a name, with names of its own; None without one."""
    head = f"{name}."
    inside = {
        key: key.removeprefix(head)
        for one in layout.tensors
        for key in (one.fqn, *one.aliases)
        if key.startswith(head)
    }
    if not inside:
        return None
    if _COUNT in inside.values() and all(
        own.startswith(_AVERAGED) or own == _COUNT for own in inside.values()
    ):
        inside = {key: own.removeprefix(_AVERAGED) for key, own in inside.items() if own != _COUNT}
    return View(*_renamed(layout, inside))


def _renamed(layout: Layout, names: Mapping[str, str]) -> tuple[list[TensorLayout], dict[str, str]]:
    """The tensors that have a name, the first of which stands for the tensor, and all names."""
    tensors = []
    own: dict[str, str] = {}
    for tensor in layout.tensors:
        kept = [key for key in (tensor.fqn, *tensor.aliases) if key in names]
        if kept:
            tensors.append(replace(tensor, aliases=tuple(kept[1:]), hub=()))
            own |= {tensor.fqn: names[kept[0]]} | {key: names[key] for key in kept[1:]}
    return tensors, own


@dataclass(frozen=True, slots=True)
class Averages:
    """Where an optimizer keeps the weights that are written instead of the parameters."""

    table: OptimizerTable
    """The part of the optimizers' table that is read."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """By parameter, the key of the state that is written."""
    lerps: Mapping[str, float] = field(default_factory=dict)
    """By parameter, the weight of its state `z` in what is written."""
    values: Mapping[str, float] = field(default_factory=dict)
    """By parameter of one element, the number that is written."""


def averages(
    layout: Layout, tensors: Sequence[TensorLayout], table: OptimizerTable, name: str
) -> Averages:
    """The weights that the optimizers keep under a state's key, or schedule-free ones.

    A parameter without any state is its own average: no update has changed it.

    Args:
        layout: The job's layout.
        tensors: What is exported of it.
        table: The optimizers' table.
        name: The state's key, or `SCHEDULE_FREE`.

    Raises:
        NotFoundError: If there is no such state.
        UsageError: If a parameter has other state alone.
    """
    key = _Z if name == SCHEDULE_FREE else name
    scalars = {
        fqn: scalar.value
        for fqn, kept in table.scalars.items()
        for scalar in kept
        if scalar.key == key
    }
    states = table.states.get(key, {})
    params = [tensor for tensor in tensors if tensor.kind is TensorKind.PARAMETER]
    if not states and not any(param.fqn in scalars and not param.shape for param in params):
        raise NotFoundError(_unknown(layout, table, name))
    _check_kept(params, table, key, scalars)
    part = OptimizerTable(
        {key: dict(states)} if states else {},
        {fqn: tuple(s for s in kept if s.key == key) for fqn, kept in table.scalars.items()},
        table.groups if name == SCHEDULE_FREE else (),
        table.replicas,
    )
    if name == SCHEDULE_FREE:
        weights = _schedule_free(table.groups)
        lerps = {fqn: weights[fqn] for fqn in states if weights.get(fqn) is not None}
        return Averages(part, lerps=lerps)
    values = {
        param.fqn: scalars[param.fqn]
        for param in params
        if not param.shape and param.fqn in scalars
    }
    return Averages(part, dict.fromkeys(states, key), values=values)


def _check_kept(
    params: Sequence[TensorLayout], table: OptimizerTable, key: str, scalars: Mapping[str, float]
) -> None:
    """Raise UsageError if a parameter has state, but none under the key.

    `scalars`: the numbers under the key, by parameter; they stand for one element.
    """
    having = {fqn for states in table.states.values() for fqn in states} | set(table.scalars)
    states = table.states.get(key, {})
    lost = [
        param.fqn
        for param in params
        if param.fqn in having
        and param.fqn not in states
        and (param.shape or param.fqn not in scalars)
    ]
    if lost:
        raise UsageError(
            f"weights_from: {lost[0]!r} and {len(lost) - 1} more have state, but no {key!r}; "
            "choose the parameters that have it with names"
        )


def _schedule_free(groups: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """By parameter, the weight with which `optimizer.eval()` blends it with `z`; none where the
    optimizer is in that mode already."""
    weights: dict[str, float] = {}
    for group in groups:
        if not isinstance(group.get("train_mode"), bool):
            raise UsageError(
                f"weights_from: {SCHEDULE_FREE!r} is for the optimizers of schedulefree, whose "
                "groups have train_mode"
            )
        betas = group.get("betas")
        beta = betas[0] if isinstance(betas, list | tuple) else group.get("momentum")
        if group["train_mode"] and isinstance(beta, int | float) and beta:
            weights |= dict.fromkeys(group.get("params", ()), 1 - 1 / beta)
    return weights


def _unknown(layout: Layout, table: OptimizerTable, name: str) -> str:
    models = sorted({one.fqn.partition(".")[0] for one in layout.tensors if "." in one.fqn})
    return (
        f"weights_from: {name!r} is no model of this training, and no state of its optimizers; "
        f"its models and modules begin with {', '.join(models[:20])}; its optimizers' state is "
        f"{', '.join(table.keys) if table.keys else 'empty: the first update makes it'}"
    )


def blends(
    positions: Mapping[str, int],
    addends: Mapping[str, Addend],
    lerps: Mapping[str, float],
    states: Mapping[tuple[str, str], int],
) -> dict[str, Blend]:
    """By fqn, what is computed of a tensor and of what is read beside it.

    `positions`: index of each tensor, by any of its names, among those of the model's source;
    `states`: as of `state_positions`.
    """
    additions = {
        fqn: Blend(
            BlendKind.LOW_RANK if addend.a else BlendKind.ADD,
            tuple(("", positions[name]) for name in addend.inputs),
            addend.scale,
            addend.transposed,
        )
        for fqn, addend in addends.items()
    }
    return additions | {
        fqn: Blend(BlendKind.LERP, ((_Z, states[_Z, fqn]),), weight)
        for fqn, weight in lerps.items()
    }
