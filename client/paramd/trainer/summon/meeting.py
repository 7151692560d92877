"""The ranks of a call, their holdings, gradients too, and a barrier that names missing ranks.

The barrier works over the process group's store, not collectives: a collective that one rank
never joins hangs until the group's own timeout, and with NCCL kills the process.

Calls are numbered. The first verdict written decides a meeting for all: the last rank to arrive
writes "go" (or why not), a rank that times out writes "failed". A rank that arrives at a call
which failed without it moves on to the next number, so ranks meet again after a failure.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from paramd.errors import AbortedError, ConflictError, DeadlineError, ParamdError
from paramd.layout.types import TensorKind
from paramd.trainer.model import dtensor, fsdp, partitions, plain
from paramd.trainer.model.dtensor import leaf_of
from paramd.trainer.model.flatten import wait_for_gradient
from paramd.trainer.model.local_shard import LocalShard, dtype_name, walk
from paramd.trainer.model.shards import find_tensors
from paramd.trainer.summon.guards import FlatParameters, ShardedParameters
from paramd.trainer.summon.wire import Wire


@dataclass(frozen=True, slots=True, eq=False)
class LocalParam:
    """One parameter. Its shards are views of the training's own memory."""

    names: tuple[str, ...]
    """Canonical name first, then the aliases."""
    places: tuple[tuple[nn.Module, str], ...]
    """Every module that has it, and its name there."""
    shards: tuple[LocalShard, ...]
    requires_grad: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Global and unsharded."""
        return self.shards[0].shape

    @property
    def dtype(self) -> torch.dtype:
        return self.shards[0].tensor.dtype

    @property
    def device(self) -> torch.device:
        return self.shards[0].tensor.device


def find_holdings(module: nn.Module, *, recurse: bool) -> list[LocalParam]:
    """The parameters under `module`, in tree order; tied ones once.

    Without `recurse`, those managed by FSDP modules below are left out: the rest is managed by
    `module` itself, if it is an FSDP module, or by no FSDP module.

    Raises:
        ConflictError: For a parameter of a kind whose elements cannot be determined exactly.
    """
    partitions.check_local(module)
    left_out = set() if recurse else _managed_below(module)
    found = []
    for tensor in find_tensors(module):
        if tensor.kind is TensorKind.PARAMETER and tensor.entry.key not in left_out:
            shards = tuple(tensor.shards())
            found.append(
                LocalParam(
                    names=tuple(tensor.names),
                    places=tuple(tensor.places),
                    shards=shards,
                    requires_grad=shards[0].trainable is True,
                )
            )
    return found


def _managed_below(module: nn.Module) -> set[object]:
    modules = [inner for _, inner in walk(module)]
    root = next((inner for inner in modules if fsdp.is_fsdp(inner)), None)
    # Only wrappers (DDP, torch.compile, ...) are between the two.
    own = root if any(inner is root for prefix, inner in walk(module) if prefix == "") else None
    mine = _keys([own]) if own is not None else set()
    return _keys([inner for inner in modules if inner is not own]) - mine


def _keys(modules: Sequence[nn.Module]) -> set[object]:
    return {entry.key for names in fsdp.managed(modules).values() for entry in names.values()}


def digest(holdings: Sequence[LocalParam]) -> str:
    """A short digest, equal on all ranks that have the same parameters."""
    text = repr([(h.names, h.shape, h.shards[0].dtype, h.requires_grad) for h in holdings])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


_groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
"""Process groups created for parties smaller than the world."""


def find_party(flat: FlatParameters, sharded: ShardedParameters) -> tuple[int, ...]:
    """The ranks of a call, ascending, this one included.

    All ranks, or those of the FSDP modules if these all span the same subset. So each pipeline
    stage, a separate model, can be summoned separately.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return (0,)
    parties = flat.parties() | sharded.parties()
    return parties.pop() if len(parties) == 1 else tuple(range(dist.get_world_size()))


def wire_of(ranks: tuple[int, ...], devices: Sequence[torch.device]) -> Wire:
    """The wire between these ranks, for tensors on these devices. Collective on first use."""
    if len(ranks) == 1:
        return Wire(world_size=1, index=0, group=None, device=torch.device("cpu"))
    group = _group_of(ranks)
    return Wire(
        world_size=len(ranks),
        index=ranks.index(dist.get_rank()),
        group=group,
        device=_wire_device(group, devices),
    )


def _group_of(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    if len(ranks) == dist.get_world_size():
        return world
    key = (world.group_name, ranks)
    if key not in _groups:
        group = dist.new_group(list(ranks), use_local_synchronization=True, group_desc="paramd")
        assert isinstance(group, dist.ProcessGroup)
        _groups[key] = group
    return _groups[key]


def _wire_device(group: dist.ProcessGroup, devices: Sequence[torch.device]) -> torch.device:
    """The tensors' device, if the backend supports it; else the backend's own."""
    types = [device.type for device in group._device_types]
    for device in devices:
        if device.type in types:
            return device
    if types[0] == "cpu":
        return torch.device("cpu")
    return torch.device(types[0], torch.accelerator.current_device_index())


FIRST_POLL_S = 0.0002


LONGEST_POLL_S = 0.02


LEAVE_TIMEOUT_S = 1800.0
"""Longest wait for ranks still in their block."""


_next_numbers: dict[str, int] = {}
"""Next call number of each series. Outlives process groups, since their store may too."""


_stale_keys: dict[str, list[str]] = {}
"""Keys of finished meetings, by series, that this rank will delete."""


@dataclass(frozen=True, slots=True)
class _Verdict:
    state: str
    text: str = ""


class Rendezvous:
    """The meetings of some ranks, in ascending order. A single rank has no one to wait for."""

    def __init__(self, name: str, ranks: tuple[int, ...]) -> None:
        self._name = name
        self._ranks = ranks
        self._alone = len(ranks) == 1
        self._me = ranks[0] if self._alone else dist.get_rank()
        # None: the rank is alone. `enter` and `leave` look; what they call needs not.
        self._store: Any = None if self._alone else distributed_c10d._get_default_store()
        everybody = self._alone or len(ranks) == dist.get_world_size()
        self._series = "all" if everybody else "-".join(map(str, ranks))

    def enter(self, question: str, refusal: str = "", *, timeout_s: float) -> int:
        """Wait until all ranks have arrived. Return the number of the call.

        All or none: returns on all ranks, or raises on every rank that arrived. `question` must be
        the same on all. `refusal`: why this rank cannot proceed; then none does.

        Raises:
            DeadlineError: If ranks are missing after `timeout_s` (it names them).
            ConflictError: If one refused, or they asked different questions.
        """
        if self._store is None:
            if refusal:
                raise ConflictError(refusal)
            return 0
        while True:
            number = _next_numbers.get(self._series, 0)
            _next_numbers[self._series] = number + 1
            # A call decided without this rank has failed: meet the others at the next.
            if not self._has(number, "enter", "verdict"):
                break
        verdict = self._meet(number, "enter", json.dumps([question, refusal]), timeout_s)
        if verdict.state == "failed":
            raise DeadlineError(f"{self._name}: {verdict.text}")
        if verdict.state == "refused":
            raise ConflictError(f"{self._name}: {verdict.text}")
        return number

    def leave(self, number: int, problem: str, *, timeout_s: float = LEAVE_TIMEOUT_S) -> None:
        """Wait until all ranks have reached the end of their block, unless one has a problem.

        `problem`: why no rank should proceed; with one, returns at once.

        Raises:
            AbortedError: If another rank had a problem.
            DeadlineError: If ranks are missing after `timeout_s`.
        """
        if self._store is None:
            return
        if problem:
            self._decide(number, "leave", _Verdict("refused", f"rank {self._me} {problem}"))
            return
        verdict = self._meet(number, "leave", json.dumps(["", ""]), timeout_s)
        if verdict.state != "go":
            kind: type[ParamdError] = DeadlineError if verdict.state == "failed" else AbortedError
            raise kind(f"{self._name}: {verdict.text}; no rank keeps its edits")

    def _meet(self, number: int, part: str, message: str, timeout_s: float) -> _Verdict:
        deadline = time.monotonic() + timeout_s
        # The message before the count: the last rank counted judges all messages.
        self._store.set(self._key(number, part, str(self._me)), message)
        if self._store.add(self._key(number, part, "came"), 1) == len(self._ranks):
            self._decide(number, part, self._judged(number, part))
        pause_s = FIRST_POLL_S
        while not self._has(number, part, "verdict"):
            if time.monotonic() > deadline:
                # May lose to a verdict written meanwhile; the one read below counts.
                self._decide(number, part, self._missing(number, part, timeout_s))
                break
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, LONGEST_POLL_S)
        state, text = json.loads(self._store.get(self._key(number, part, "verdict")))
        if state == "go":
            self._tidy(number, part)
        return _Verdict(state, text)

    def _judged(self, number: int, part: str) -> _Verdict:
        store = self._store
        words = {r: json.loads(store.get(self._key(number, part, str(r)))) for r in self._ranks}
        refusals = [f"rank {rank}: {refusal}" for rank, (_, refusal) in words.items() if refusal]
        if refusals:
            return _Verdict("refused", "; ".join(refusals[:3]))
        first = self._ranks[0]
        for rank, (question, _) in words.items():
            if question != words[first][0]:
                return _Verdict(
                    "refused",
                    f"rank {first} asks for {words[first][0]}, but rank {rank} for {question}; "
                    "call it alike on every rank",
                )
        return _Verdict("go")

    def _missing(self, number: int, part: str, timeout_s: float) -> _Verdict:
        missing = [rank for rank in self._ranks if not self._has(number, part, str(rank))]
        return _Verdict(
            "failed",
            f"ranks {missing} of {len(self._ranks)} did not arrive in {timeout_s:g} s; every rank "
            "must call it at the same place",
        )

    def _decide(self, number: int, part: str, verdict: _Verdict) -> None:
        message = json.dumps([verdict.state, verdict.text])
        # Only sets a missing key: the first verdict stands.
        self._store.compare_set(self._key(number, part, "verdict"), "", message)

    def _has(self, number: int, part: str, name: str) -> bool:
        return bool(self._store.check([self._key(number, part, name)]))

    def _tidy(self, number: int, part: str) -> None:
        """Delete keys of earlier meetings: all ranks here have read those verdicts."""
        stale = _stale_keys.setdefault(self._series, [])
        if part == "enter":
            for key in stale:
                self._store.delete_key(key)
            stale.clear()
        names = [str(self._me)]
        if self._me == self._ranks[0]:
            names += ["came", "verdict"]
        stale += [self._key(number, part, name) for name in names]

    def _key(self, number: int, part: str, name: str) -> str:
        return f"paramd/summon/{self._series}/{number}/{part}/{name}"


@dataclass(frozen=True, slots=True, eq=False)
class GradientHolding:
    """One gradient. No shards: this rank has no gradient, or no element of it."""

    shards: tuple[LocalShard, ...]
    expected: bool
    """Whether this rank holds elements of the parameter, so has the gradient if any rank does."""
    commit: Callable[[], None] | None = None
    """Copies the shards back to the gradient, where they are not views of it."""


def check_gradients(
    holdings: Iterable[LocalParam], flat: FlatParameters, sharded: ShardedParameters
) -> None:
    """Raise ConflictError for a gradient that is still unsharded, because backwards without
    synchronization accumulate it.
    """
    for holding in holdings:
        module, name = holding.places[0]
        place, fsdp_param = flat.place(module, name), sharded.find(module, name)
        accumulating = False
        if place is not None:
            parameter = place[0].flat_param
            grad = parameter.grad
            accumulating = grad is not None and grad.numel() != parameter._sharded_size.numel()
        elif fsdp_param is not None:
            unsharded = getattr(fsdp_param, "_unsharded_param", None)
            accumulating = fsdp_param.unsharded_accumulated_grad is not None or (
                unsharded is not None and unsharded.grad is not None
            )
        if accumulating:
            raise ConflictError(
                f"the gradient of {holding.names[0]!r} is being accumulated without "
                "synchronization, so it is unsharded and differs between ranks; summon with_grads "
                "after a backward that synchronizes"
            )


def find_gradient(
    holding: LocalParam, flat: FlatParameters, sharded: ShardedParameters
) -> GradientHolding:
    """The gradient of a parameter, as this rank holds it.

    Collective for DTensors whose gradient has other placements than the parameter.

    Raises:
        ConflictError: If it is sparse or otherwise not a plain tensor.
    """
    expected = any(shard.region.numel for shard in holding.shards)
    module, name = holding.places[0]
    place = flat.place(module, name)
    if place is not None:
        handle, index = place
        return GradientHolding(tuple(_flat_shards(holding, handle, index)), expected)
    fsdp_param = sharded.find(module, name)
    slot = holding.shards[0].slot
    param = fsdp_param.sharded_param if fsdp_param is not None else slot.tensor()
    return _dense(holding, param, expected)


def _dense(holding: LocalParam, param: torch.Tensor, expected: bool) -> GradientHolding:
    param = leaf_of(param)
    grad = param.grad
    if grad is None:
        return GradientHolding((), expected)
    _, spec = dtensor.split(param)
    commit = None
    if dtensor.is_dtensor(grad):
        grad, commit = _placed_like(grad, param)
    else:
        grad = wait_for_gradient(grad).detach()
        if spec is not None:
            grad._st_info = spec  # type: ignore[attr-defined]
    shards = plain.shards_of(holding.names, grad, TensorKind.PARAMETER, holding.shards[0].slot)
    return GradientHolding(tuple(shards), expected, commit)


def _placed_like(grad: Any, param: Any) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """The gradient under the parameter's placements, and how to write it back."""
    grad._local_tensor = wait_for_gradient(grad._local_tensor)
    if grad.placements == param.placements:
        return grad.detach(), None
    with torch.no_grad():
        placed = grad.redistribute(placements=param.placements)
        placed._local_tensor = wait_for_gradient(placed._local_tensor).clone()

    version = placed._local_tensor._version

    def commit() -> None:
        if _partial_only(grad, param) and placed._local_tensor._version == version:
            return
        with torch.no_grad():
            grad._local_tensor.copy_(_placed_back(placed, grad))

    return placed, commit


def _partial_only(grad: Any, param: Any) -> bool:
    """Whether writing it back needs no communication, so that a rank may skip it."""
    return all(
        one == other or one.is_partial()
        for one, other in zip(grad.placements, param.placements, strict=True)
    )


def _placed_back(placed: Any, grad: Any) -> torch.Tensor:
    """The local tensor of `placed` under the placements of `grad`."""
    from torch.distributed.tensor import Replicate

    whole = [Replicate() if p.is_partial() else p for p in grad.placements]
    local = wait_for_gradient(placed.redistribute(placements=whole)._local_tensor)
    coordinate = grad.device_mesh.get_coordinate()
    for axis, placement in enumerate(grad.placements):
        # A sum goes wholly to the first rank, zeros elsewhere; an average is equal on all.
        if placement.is_partial("sum") and coordinate[axis] != 0:
            local = torch.zeros_like(local)
    return local


def _flat_shards(holding: LocalParam, handle: Any, index: int) -> Iterator[LocalShard]:
    local = _flat_gradient(handle, index)
    if local is None:
        return
    for region, view in fsdp.regions_of(handle.flat_param, index, local):
        yield replace(
            holding.shards[0], dtype=dtype_name(view.dtype), region=region, tensor=view, holders=()
        )


def _flat_gradient(handle: Any, index: int) -> torch.Tensor | None:
    """This rank's elements of the gradient, 1-D in the parameter's memory order."""
    flat = handle.flat_param
    info = flat._shard_param_infos[index]
    if not info.in_shard:
        return None
    if handle._use_orig_params:
        original: nn.Parameter = flat._params[index]
        if original.grad is None:
            return None
        return original.grad.detach().as_strided((info.numel_in_shard,), (1,))
    if flat.grad is None:
        return None
    begin: int = info.offset_in_shard
    whole: torch.Tensor = flat.grad.detach().view(-1)
    return whole[begin : begin + info.numel_in_shard]
