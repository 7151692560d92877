"""Detect parameters that left the arena, and contents that changed when none should.

A look compares the module, the parameter and the address of its memory with those expected, so
replacing a module, a parameter, its `.data` or its local tensor all show. Sizes and strides are
compared too: `p.data = p.data[:n]` and `p.data = p.data.t()` keep the address. Additions to the
tree show through torch's registration hooks. Contents are compared by samples of the arena, and by
version counters, a few at a time.

A glance (glance.py) skips the look when no word of memory behind those answers has changed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from operator import attrgetter, getitem, is_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.hooks import RemovableHandle

from paramd.memory.control_page import MAX_SAMPLES, UNCHANGED, Changed, digest_of
from paramd.trainer.home.glance import INLINE_DIMS, Glance, glance_at
from paramd.trainer.model.dtensor import is_dtensor, split
from paramd.trainer.model.local_shard import Slot
from paramd.trainer.model.plain import has_plain_memory

SAMPLE_COUNT = 512
"""Most words sampled in the trainer; the sidecar knows the first `MAX_SAMPLES` of them."""

VERSION_COUNT = 32
"""Version counters compared per settled span, in rotation."""

SPARING = 16
"""The part of both, in rotation, that is compared while nobody reads: cold in the caches, each
sample costs some 0.2 us."""

SHAPE_COUNT = 8
"""Tensors whose sizes and strides are compared in one look, in rotation, where glances do not see
them: that costs some 0.3 us each."""

_address = torch.Tensor.data_ptr
_shape = attrgetter("shape")
_strides = torch.Tensor.stride
_local = attrgetter("_local_tensor")
_version = attrgetter("_version")

Columns = tuple[tuple[dict[str, Any], ...], tuple[str, ...], tuple[Any, ...]]
"""Tables, keys and expected values, as columns so that `map` runs at C speed."""

Slots = tuple[tuple[dict[str, Any], ...], tuple[str, ...]]
"""The first two of them."""

Form = tuple[tuple[int, ...], tuple[int, ...]]
"""A tensor's sizes and strides."""


@dataclass(frozen=True, slots=True)
class Watched:
    """A slot, the address its memory must have, and the name to report."""

    fqn: str
    slot: Slot
    address: int


class Watch:
    """Checks all watched slots and the modules that lead to them."""

    def __init__(
        self, items: Sequence[Watched], root: nn.Module | None = None, *, glances: bool = False
    ) -> None:
        """`glances`: tensors may be kept alive until the next look."""
        plain = [w for w in items if not is_dtensor(w.slot.tensor())]
        distributed = [w for w in items if is_dtensor(w.slot.tensor())]
        self._items = items
        self._forms = [_form_of(w) for w in items]
        self._plain = _columns(plain)
        self._distributed = _columns(distributed)
        self._modules = _module_columns(root)
        at_a_glance = _glanced(plain, root) if glances and root is not None else []
        self._glanced = _columns(at_a_glance)
        # By identity: searching a list of equal things takes the square of their number.
        known = {id(w) for w in at_a_glance}
        self._others = _columns([w for w in plain if id(w) not in known])
        formed = list(zip(items, self._forms, strict=True))
        self._few_forms = _few_at_a_time(formed)
        self._glanced_forms = [(w, form) for w, form in formed if id(w) in known]
        self._all_at_a_glance = len(at_a_glance) == len(items)
        self._glances = bool(at_a_glance)
        self._glance: Glance | None = None
        self.added = False
        """Whether a module or parameter was registered in the tree since this was made."""
        self._tree = {id(m) for m in root.modules()} if root is not None else set()
        self._remove = self._watch_registrations() if root is not None else []

    def close(self) -> None:
        """Remove the registration hooks."""
        for handle in self._remove:
            handle.remove()
        self._remove.clear()

    def look(self) -> list[str]:
        """Return names of all tensors out of place; usually none."""
        try:
            if self._in_place():
                return []
        except (KeyError, TypeError, AttributeError, RuntimeError):
            # A slot is gone or of another type: the slow path below finds which.
            pass
        # A glance keeps storages alive, also those the script has replaced.
        self._glance = None
        formed = zip(self._items, self._forms, strict=True)
        gone = [watched.fqn for watched, form in formed if not _stands(watched, form)]
        if not gone and not self.modules_in_place():
            self.added = True
        return gone

    def in_place(self) -> bool:
        """Whether everything watched is in place; changes nothing.

        For threads other than the training's, which keeps running. Goes tensor by tensor: a
        glance reads raw memory that only the training thread can be sure is still alive.
        """
        try:
            stand = _stand(self._plain) and _stand(self._distributed, _local)
            formed = zip(self._items, self._forms, strict=True)
            return stand and all(_has(*one) for one in formed) and self.modules_in_place()
        except (KeyError, TypeError, AttributeError, RuntimeError):
            return False

    @property
    def plain_slots(self) -> Slots:
        """Slots of tensors with plain memory, whose version counters mean something."""
        return self._plain[:2]

    @property
    def distributed_slots(self) -> Slots:
        """Slots of DTensors, of whose local tensors that is true."""
        return self._distributed[:2]

    def _in_place(self) -> bool:
        glance = self._glance
        if glance is not None and glance.same():
            return self._all_at_a_glance or (
                _stand(self._others) and _stand(self._distributed, _local) and self._few_have()
            )
        # Before the slow look, so that a change in between shows at the next glance.
        if self._glances and (glance is None or not glance.note_tables()):
            glance = self._glance_now()
        self._glance = None
        if not (_stand(self._plain) and _stand(self._distributed, _local) and self._few_have()):
            return False
        # A new glance tells of later changes only.
        if glance is not None and not all(_has(*one) for one in self._glanced_forms):
            return False
        if not self.modules_in_place():
            return False
        owners, keys, _ = self._glanced
        if glance is not None and all(map(is_, map(getitem, owners, keys), glance.tensors)):
            self._glance = glance
        return True

    def _few_have(self) -> bool:
        """Whether the next few tensors have their sizes and strides."""
        return all(_has(*one) for one in next(self._few_forms))

    def _glance_now(self) -> Glance | None:
        owners, keys, _ = self._glanced
        tables = {id(table): table for table in (*owners, *self._modules[0])}
        glance = glance_at(tuple(tables.values()), tuple(map(getitem, owners, keys)))
        self._glances = glance is not None
        return glance

    def modules_in_place(self) -> bool:
        """Whether the modules are those watched."""
        owners, keys, expected = self._modules
        try:
            # Tuples compare by identity first, which is also how modules compare.
            return tuple(map(getitem, owners, keys)) == expected
        except KeyError:
            return False

    def _watch_registrations(self) -> list[RemovableHandle]:
        """Have torch call when a module or parameter is registered, in any tree."""
        return [
            register_module_module_registration_hook(self._registered),
            register_module_parameter_registration_hook(self._registered),
        ]

    def _registered(self, module: nn.Module, _name: str, _what: object) -> None:
        if id(module) in self._tree:
            self.added = True


class Left(NamedTuple):
    """What an update has left, to compare with later."""

    samples: bytes
    versions: tuple[int, ...]
    addresses: tuple[int, ...]
    """`p.data = other` counts as no write, and leaves the arena as it was."""


class Contents:
    """Samples of an arena's parameters, and version counters: they reveal stray writes.

    The places are drawn once, from the operating system's randomness, leaving the training's
    generators untouched.
    """

    def __init__(self, arena: memoryview, spans: Iterable[tuple[int, int]]) -> None:
        """`spans` are the half-open byte spans of parameters in the arena."""
        self._words = np.frombuffer(arena, dtype=np.int64, count=arena.nbytes // 8)
        self.indices = _places([(b // 8, -(-e // 8)) for b, e in spans], len(self._words))
        self._at = np.array(self.indices, dtype=np.intp)
        self._at_shared = self._at[:MAX_SAMPLES]
        self._at_seen = self._at
        # Strides: the places go from span to span, so each part has some of all tensors.
        self._parts = cycle([self._at[begin::SPARING] for begin in range(SPARING)])
        self._turns = self._few_turns = _turns(((), ()), VERSION_COUNT)
        self._seen: tuple[bytes, tuple[torch.Tensor, ...], tuple[int, ...]] = (b"", (), ())
        self._all: tuple[Slots, Slots] = ((), ()), ((), ())

    def watch(self, slots: Slots, distributed: Slots = ((), ())) -> None:
        """Set the tensors whose version counters are compared from now on; of DTensors only by
        `left` and `changed_since`."""
        self._all = slots, distributed
        self._turns = _turns(slots, VERSION_COUNT)
        self._few_turns = _turns(slots, VERSION_COUNT // SPARING)
        self._seen = (b"", (), ())

    def digest(self) -> int:
        """Digest of the samples that the sidecar also knows."""
        return digest_of(self._words.take(self._at_shared).tobytes())

    def remember(self, *, sparing: bool = False) -> None:
        """Record a settled, verified state; it must not change until the next update.

        `sparing`: a part of the samples and versions, in rotation. A change of all parameters
        shows all the same, one of a single tensor when its turn comes.
        """
        self._at_seen = next(self._parts) if sparing else self._at
        tensors = tuple(map(getitem, *next(self._few_turns if sparing else self._turns)))
        self._seen = (self._samples(), tensors, tuple(map(_version, tensors)))

    def forget(self) -> None:
        """Compare with nothing until the next `remember`: the parameters are elsewhere."""
        self._seen = (b"", (), ())

    def strayed(self) -> bool:
        """Whether anything changed since `remember`, as far as samples and versions show."""
        samples, tensors, versions = self._seen
        if not samples:
            return False
        return self._samples() != samples or tuple(map(_version, tensors)) != versions

    def left(self) -> Left:
        """All samples, versions and addresses as they are now."""
        plain, distributed = self._all
        tensors = *map(getitem, *plain), *map(_local, map(getitem, *distributed))
        return Left(
            self._words.take(self._at).tobytes(),
            tuple(map(_version, tensors)),
            tuple(map(_address, tensors)),
        )

    def changed_since(self, before: Left) -> Changed:
        """Whether what an update has left was changed since, and what shows it."""
        now = self.left()
        written = (now.versions, now.addresses) != (before.versions, before.addresses)
        how = Changed.WRITTEN if written else UNCHANGED
        return how if now.samples == before.samples else how | Changed.SAMPLES

    def close(self) -> None:
        """Release the arena."""
        self._words = np.empty(0, np.int64)
        self._at = self._at_shared = self._at_seen = np.empty(0, np.intp)
        self._parts = cycle([self._at])
        self._turns = self._few_turns = _turns(((), ()), VERSION_COUNT)
        self._seen = (b"", (), ())
        self._all = ((), ()), ((), ())

    def _samples(self) -> bytes:
        """The words to compare as they are now."""
        return self._words.take(self._at_seen).tobytes()


def _turns(slots: Slots, count: int) -> Iterator[Slots]:
    owners, keys = slots
    begins = range(0, max(len(keys), 1), count)
    return cycle([(owners[b : b + count], keys[b : b + count]) for b in begins])


def _places(spans: Sequence[tuple[int, int]], word_count: int) -> list[int]:
    """Words to sample, from each span in turn, so that small parameters get some too."""
    draw: Callable[[int, int], int] = random.SystemRandom().randrange
    usable = [(b, min(e, word_count)) for b, e in spans if b < min(e, word_count)]
    if not usable:
        return []
    order = random.SystemRandom().sample(usable, len(usable))
    return [
        draw(*order[place % len(order)]) for place in range(min(SAMPLE_COUNT, 4 * len(order) + 64))
    ]


def _columns(items: Sequence[Watched]) -> Columns:
    return (
        tuple(w.slot.owner for w in items),
        tuple(w.slot.key for w in items),
        tuple(w.address for w in items),
    )


def _few_at_a_time(
    formed: Sequence[tuple[Watched, Form]],
) -> Iterator[Sequence[tuple[Watched, Form]]]:
    """`SHAPE_COUNT` in each turn, over and over."""
    begins = range(0, max(len(formed), 1), SHAPE_COUNT)
    return cycle([formed[begin : begin + SHAPE_COUNT] for begin in begins])


def _glanced(items: Iterable[Watched], root: nn.Module) -> list[Watched]:
    """Those that a glance can tell of."""
    tables = {id(module._parameters) for module in root.modules()}
    return [watched for watched in items if _at_a_glance(watched, tables)]


def _at_a_glance(watched: Watched, tables: Collection[int]) -> bool:
    """Whether the tensor is in a module's own table, of a plain class and of few dims."""
    tensor = watched.slot.tensor()
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.dim() <= INLINE_DIMS
    return plain and id(watched.slot.owner) in tables


def _form_of(watched: Watched) -> Form:
    local, _ = split(watched.slot.tensor())
    return tuple(_shape(local)), _strides(local)


def _has(watched: Watched, form: Form) -> bool:
    return _form_of(watched) == form


def _stand(columns: Columns, local: Callable[[Any], Any] | None = None) -> bool:
    """Whether each tensor, or its local one, has its expected address."""
    owners, keys, expected = columns
    tensors = map(getitem, owners, keys)
    return tuple(map(_address, tensors if local is None else map(local, tensors))) == expected


def _module_columns(root: nn.Module | None) -> Columns:
    """The place of each module in the tree. Modules without parameters cost no more."""
    rows = [
        (module._modules, name, child)
        for module in (root.modules() if root is not None else ())
        for name, child in module._modules.items()
        if child is not None
    ]
    return tuple(zip(*rows, strict=True)) if rows else ((), (), ())  # type: ignore[return-value]


def _stands(watched: Watched, form: Form) -> bool:
    value = watched.slot.owner.get(watched.slot.key)
    if not isinstance(value, torch.Tensor):
        return False
    local, _ = split(value)
    here = has_plain_memory(local) and local.data_ptr() == watched.address
    return here and _has(watched, form)
