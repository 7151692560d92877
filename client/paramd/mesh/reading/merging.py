"""An adapter merged into its base by the reader, tensor by tensor, as the tensors come.

The training is only read: the base, and the adapter's matrices beside it, of one state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from paramd.errors import NotFoundError, UsageError
from paramd.layout.exports.files import BlendKind
from paramd.layout.exports.views import merged_view
from paramd.layout.select import NameIndex, Pattern, select

if TYPE_CHECKING:
    import torch


class Merger:
    """How one adapter of a layout is merged."""

    def __init__(self, index: NameIndex, adapter: str) -> None:
        """`adapter`: its name; empty: the only one.

        Raises:
            NotFoundError: If there is none.
            UsageError: If it cannot be merged.
        """
        self._index = index
        self._view = merged_view(index.layout, adapter)
        self._fqns = {
            name: one.fqn for one in index.layout.tensors for name in (one.fqn, *one.aliases)
        }

    def with_inputs(self, patterns: Sequence[Pattern], *, buffers: bool) -> list[Pattern]:
        """The patterns, and the names of what is read for the tensors that they select.

        Raises as `select`; NotFoundError if they select nothing of the merged model, UsageError
        for a part of a tensor.
        """
        found = select(self._index, patterns, with_buffers=buffers)
        part = [one.name for one in found if tuple(one.box.sizes) != tuple(one.tensor.shape)]
        if part:
            raise UsageError(f"{part[0]!r}: merged weights are read whole, not in part")
        chosen = {one.tensor.fqn for one in found}
        if not any(fqn in self._view.names for fqn in chosen):
            raise NotFoundError("the patterns select no tensor of the merged model")
        beside = self._view.beside(self._index.layout, chosen)
        return [*patterns, *(one.fqn for one in beside)]

    def name(self, fqn: str) -> str | None:
        """A tensor's name in the merged model; None if it is not in it."""
        return self._view.names.get(fqn)

    def names(self, fqn: str, names: Sequence[str]) -> tuple[str, ...]:
        """The names in the merged model of a tensor that `names` in memory have selected."""
        found = [self._view.names[one] for one in names if one in self._view.names]
        first = self._view.names.get(fqn)
        return tuple(dict.fromkeys(found or ([first] if first is not None else [])))

    def inputs(self, fqn: str) -> tuple[str, ...]:
        """The tensors that are read beside one."""
        addend = self._view.addends.get(fqn)
        return tuple(self._fqns[one] for one in addend.inputs) if addend is not None else ()

    def merge_(self, fqn: str, base: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        """Merge into `base`, in place; `tensors` has its inputs by fqn."""
        from paramd.tensors.blend import blend_

        addend = self._view.addends.get(fqn)
        if addend is not None:
            kind = BlendKind.LOW_RANK if addend.a else BlendKind.ADD
            inputs = [tensors[name] for name in self.inputs(fqn)]
            blend_(base, kind, inputs, addend.scale, transposed=addend.transposed)
