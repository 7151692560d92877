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
    rows: list[pb.ReplayedTensor] = []
    try:
        for number, name in enumerate(facts["classes"]):
            mine = [param for param in facts["params"] if param["optimizer"] == number]
            for param in mine:
                if stopped():
                    return rows
                group = facts["groups"][number][param["group"]]
                rows += _replayed(captured, param, group, name)
    finally:
        torch.set_num_threads(1)
    return without_the_scripts(rows, captured.changes)


def without_the_scripts(
    rows: Sequence[pb.ReplayedTensor], changes: Changes
) -> list[pb.ReplayedTensor]:
    """The rows; those that differ are refused where the script's own changes outside of the update
    may be why: they prove no damage."""
    many = sum(row.differing_count for row in rows) > FEW

    def shows(changed: Changed) -> bool:
        return bool(changed & Changed.WRITTEN) or (many and bool(changed & Changed.SAMPLES))

    judged = []
    for row in rows:
        refusal = ""
        after = bool(changes.after & Changed.INPUTS) if row.state_key else shows(changes.after)
        if not row.differing_count:
            pass
        elif shows(changes.before | changes.resting):
            # Weight decay takes such a change into the optimizer's state, too.
            refusal = CHANGED_BEFORE
        elif changes.before & Changed.INPUTS:
            refusal = OTHER_INPUTS
        elif after:
            refusal = CHANGED_AFTER
        unproven = pb.ReplayedTensor(
            arena_begin=row.arena_begin, state_key=row.state_key, numel=row.numel, refused=refusal
        )
        judged.append(unproven if refusal else row)
    return judged


@dataclass(frozen=True, slots=True)
class _Elements:
    """Where a parameter's elements, and those of its state, lie in the snapshots."""

    begin: int
    """First byte in each snapshot."""
    size_bytes: int
    dtype: torch.dtype
    shape: Sequence[int]
    strides: Sequence[int]

    def copied(self, data: memoryview) -> torch.Tensor:
        """A copy of the elements in a snapshot."""
        own = bytearray(data[self.begin : self.begin + self.size_bytes])
        return torch.frombuffer(own, dtype=self.dtype).as_strided(self.shape, self.strides)


def _replayed(
    captured: Captured, param: Mapping[str, Any], group: Mapping[str, Any], name: str
) -> list[pb.ReplayedTensor]:
    """Repeat a parameter's update; one row for it, and one for each of its state's tensors."""
    arena_begin, size_bytes = param["begin"], param["end"] - param["begin"]
    begin = captured.place(arena_begin, size_bytes)
    if begin is None or not size_bytes:
        return []
    refusal = _refusal(param, group, name, captured)
    if refusal:
        return [pb.ReplayedTensor(arena_begin=arena_begin, refused=refusal)]
    dtype = getattr(torch, param["dtype"])
    elements = _Elements(begin, size_bytes, dtype, param["shape"], param["strides"])
    weight = elements.copied(captured.before[""]).requires_grad_()
    optimizer = _optimizer_before(captured, param, group, name, elements, weight)
    if arena_begin not in captured.without_gradient:
        weight.grad = elements.copied(captured.gradients)
        optimizer.step()
    after = elements.copied(captured.after[""])
    rows = [_compared(arena_begin, "", weight.detach(), after)]
    state = optimizer.state.get(weight, {})
    for key, data in captured.after.items():
        if key and isinstance(state.get(key), torch.Tensor):
            rows.append(_compared(arena_begin, key, state[key], elements.copied(data)))
    return rows


def _optimizer_before(
    captured: Captured,
    param: Mapping[str, Any],
    group: Mapping[str, Any],
    name: str,
    elements: _Elements,
    weight: torch.Tensor,
) -> torch.optim.Optimizer:
    """An optimizer of this parameter alone, with its options and state before the update."""
    # Torch's types, from the recorded ones.
    options = {key: tuple(it) if isinstance(it, list) else it for key, it in group.items()}
    optimizer = OPTIMIZERS[name]([{**options, "params": [weight]}])
    state = {key: elements.copied(captured.before[key]) for key in param["keys"]}
    for key, value in param["scalars"].items():
        state[key] = torch.tensor(float(value), dtype=torch.float32)
    if state:
        optimizer.state[weight] = state
    return optimizer


def _refusal(
    param: Mapping[str, Any], group: Mapping[str, Any], name: str, captured: Captured
) -> str:
    """Why a parameter's update is not repeated; empty: it is."""
    if name not in OPTIMIZERS:
        return f"{name} is not replayed; only torch's own Adam, AdamW and SGD are"
    for option in ("capturable", "differentiable"):
        if group.get(option):
            return f"an optimizer with {option}=True is not replayed"
    if param["left_out"]:
        key, reason = next(iter(param["left_out"].items()))
        return f"its state {key!r} cannot be read: {reason}"
    if param["begin"] in captured.partial:
        return "its gradient is a summand, which the optimizer did not consume as it is"
    absent = [key for key in param["keys"] if key not in captured.before]
    if absent:
        return f"its state {absent[0]!r} was not captured"
    return ""


def _compared(begin: int, key: str, ours: torch.Tensor, theirs: torch.Tensor) -> pb.ReplayedTensor:
    words = WORDS[ours.itemsize]
    our_words, their_words = (_memory(tensor).view(words) for tensor in (ours, theirs))
    differs = (our_words != their_words).nonzero().flatten()
    row = pb.ReplayedTensor(arena_begin=begin, state_key=key, numel=ours.numel())
    if len(differs):
        row.differing_count, row.element = len(differs), int(differs[0])
        bits = int(our_words[row.element] ^ their_words[row.element])
        row.bits = bits & ((1 << 8 * ours.itemsize) - 1)
    return row


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in the order in which they lie in memory."""
    # A tuple: without any dim nothing is passed otherwise.
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(tuple(order)).contiguous().flatten()
