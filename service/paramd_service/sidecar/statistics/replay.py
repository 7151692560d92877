"""One update of one rank repeated on copies with torch's own optimizers, compared bit by bit.

Anything an update read or wrote wrongly, such as a flipped bit, shows as elements that differ from
what the same arithmetic makes of the same parameters, gradients and state. The arithmetic is the
same only with the same code, memory layout and number of threads, so the trainer's are used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paramd.memory.control_page import NO_CHANGES, Changed, Changes
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.sidecar.statistics.pooling import WORDS

OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "torch.optim.adam.Adam": torch.optim.Adam,
    "torch.optim.adamw.AdamW": torch.optim.AdamW,
    "torch.optim.sgd.SGD": torch.optim.SGD,
}
"""Optimizers whose state is all in `facts`, element by element."""

FEW = 64
"""Damage changes few elements; a script's own arithmetic changes many."""

CHANGED_BEFORE = "not proven: the script changed parameters right before the update"
OTHER_INPUTS = (
    "not proven: the script set hyper-parameters or optimizer state after the step's record was "
    "made, right before the update"
)
CHANGED_AFTER = "not proven: the script changed it after the update, before training went on"

Place = Callable[[int, int], int | None]
"""(arena byte, size) -> byte of the snapshots; None unless they have all of it."""


@dataclass(frozen=True, slots=True)
class Captured:
    """An update of one rank, in snapshots of the same spans."""

    facts: Mapping[str, Any]
    """As of the step before; see `PinSnapshotResponse.optimizer`."""
    before: Mapping[str, memoryview]
    """By state key; "" is the parameters."""
    after: Mapping[str, memoryview]
    gradients: memoryview
    without_gradient: frozenset[int]
    """First arena bytes of pieces that had no gradient."""
    partial: frozenset[int]
    """First arena bytes of pieces whose gradient is a summand."""
    place: Place
    changes: Changes = NO_CHANGES
    """What the script has changed before and after the update."""


def replay(captured: Captured, stopped: Callable[[], bool]) -> list[pb.ReplayedTensor]:
    """Repeat the update; one row for each tensor, useless once `stopped` returns true."""
    facts = captured.facts
    torch.set_num_threads(max(int(facts["threads"]), 1))
    found: list[pb.ReplayedTensor] = []
    try:
        for number, name in enumerate(facts["classes"]):
            mine = [param for param in facts["params"] if param["optimizer"] == number]
            for param in mine:
                if stopped():
                    return found
                group = facts["groups"][number][param["group"]]
                found += _one(captured, param, group, name)
    finally:
        torch.set_num_threads(1)
    return without_the_scripts(found, captured.changes)


def without_the_scripts(
    rows: Sequence[pb.ReplayedTensor], changes: Changes
) -> list[pb.ReplayedTensor]:
    """The rows; those that differ are refused where the script's own changes outside of the update
    may be why: they prove no damage."""
    many = sum(row.differing_count for row in rows) > FEW

    def shows(changed: Changed) -> bool:
        return bool(changed & Changed.WRITTEN) or (many and bool(changed & Changed.SAMPLES))

    found = []
    for row in rows:
        why = ""
        after = bool(changes.after & Changed.INPUTS) if row.state_key else shows(changes.after)
        if not row.differing_count:
            pass
        elif shows(changes.before | changes.resting):
            # Weight decay takes such a change into the optimizer's state, too.
            why = CHANGED_BEFORE
        elif changes.before & Changed.INPUTS:
            why = OTHER_INPUTS
        elif after:
            why = CHANGED_AFTER
        unproven = pb.ReplayedTensor(
            arena_begin=row.arena_begin, state_key=row.state_key, numel=row.numel, refused=why
        )
        found.append(unproven if why else row)
    return found


def _one(
    captured: Captured, param: Mapping[str, Any], group: Mapping[str, Any], name: str
) -> list[pb.ReplayedTensor]:
    begin, size = param["begin"], param["end"] - param["begin"]
    at = captured.place(begin, size)
    if at is None or not size:
        return []
    why = _why_not(param, group, name, captured)
    if why:
        return [pb.ReplayedTensor(arena_begin=begin, refused=why)]
    dtype = getattr(torch, param["dtype"])

    def tensor(data: memoryview) -> torch.Tensor:
        flat = torch.frombuffer(bytearray(data[at : at + size]), dtype=dtype)
        return flat.as_strided(param["shape"], param["strides"])

    weight = tensor(captured.before[""]).requires_grad_()
    # Torch's types, from the recorded ones.
    given = {key: tuple(one) if isinstance(one, list) else one for key, one in group.items()}
    optimizer = OPTIMIZERS[name]([{**given, "params": [weight]}])
    state: dict[str, Any] = {key: tensor(captured.before[key]) for key in param["keys"]}
    for key, value in param["scalars"].items():
        state[key] = torch.tensor(float(value), dtype=torch.float32)
    if state:
        optimizer.state[weight] = state
    if begin not in captured.without_gradient:
        weight.grad = tensor(captured.gradients)
        optimizer.step()
    rows = [_compared(begin, "", weight.detach(), tensor(captured.after[""]))]
    made = optimizer.state.get(weight, {})
    for key, data in captured.after.items():
        if key and isinstance(made.get(key), torch.Tensor):
            rows.append(_compared(begin, key, made[key], tensor(data)))
    return rows


def _why_not(
    param: Mapping[str, Any], group: Mapping[str, Any], name: str, captured: Captured
) -> str:
    if name not in OPTIMIZERS:
        return f"{name} is not replayed; only torch's own Adam, AdamW and SGD are"
    for option in ("capturable", "differentiable"):
        if group.get(option):
            return f"an optimizer with {option}=True is not replayed"
    if param["left_out"]:
        key, why = next(iter(param["left_out"].items()))
        return f"its state {key!r} cannot be read: {why}"
    if param["begin"] in captured.partial:
        return "its gradient is a summand, which the optimizer did not consume as it is"
    absent = [key for key in param["keys"] if key not in captured.before]
    if absent:
        return f"its state {absent[0]!r} was not captured"
    return ""


def _compared(begin: int, key: str, ours: torch.Tensor, theirs: torch.Tensor) -> pb.ReplayedTensor:
    words = WORDS[ours.itemsize]
    one, other = (_memory(tensor).view(words) for tensor in (ours, theirs))
    differs = (one != other).nonzero().flatten()
    row = pb.ReplayedTensor(arena_begin=begin, state_key=key, numel=ours.numel())
    if len(differs):
        row.differing_count, row.element = len(differs), int(differs[0])
        row.bits = int(one[row.element] ^ other[row.element]) & ((1 << 8 * ours.itemsize) - 1)
    return row


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in the order in which they lie in memory."""
    # A tuple: without any dim nothing is passed otherwise.
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(tuple(order)).contiguous().flatten()
