"""Plan the files of an export from layout and settings. Pure: equal inputs, equal plans.

    plan = plan_export(layout, ExportSettings(max_shard_bytes=parse_size("2GiB")))
    plan.sources[""].spans         # spans to pin on each rank
    for file in plan.files:        # file.rank should write it

Every side computes the plan itself; equal `digest`s prove that they agree.
Source: huggingface/huggingface_hub: serialization/_base.py (how shards are cut and named).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from paramd.errors import NotFoundError, UsageError
from paramd.layout.exports.extra import NOT_ASKED, ExtraState, matching
from paramd.layout.exports.files import (
    Blend,
    ExportFile,
    Reads,
    Source,
    TorchFiles,
    make_source,
    state_positions,
)
from paramd.layout.exports.optimizer import OptimizerTable
from paramd.layout.exports.peft import PEFT
from paramd.layout.exports.settings import FORMATS, ExportSettings
from paramd.layout.exports.views import (
    Averages,
    View,
    adapter_view,
    averages,
    blends,
    merged_view,
    model_view,
)
from paramd.layout.plan import Replica
from paramd.layout.select import NameIndex, select
from paramd.layout.types import Layout, TensorKind, TensorLayout


@dataclass(frozen=True)
class ExportPlan:
    """All files of an export, and what to pin for them."""

    settings: ExportSettings
    layout: Layout
    files: tuple[ExportFile, ...]
    """Files that sidecars write from snapshots; index, manifest and the like are added later."""
    sources: Mapping[str, Source]
    """By state key; "" for parameters and buffers."""
    names: Mapping[str, str]
    """Names in the files by name in the model, aliases included. A tied name that is not
    written maps to the one that is."""
    optimizer: OptimizerTable | None
    extra: ExtraState | None = None
    """None if it is not read, or not yet."""
    config: str = ""
    """Text of adapter_config.json, if an adapter is written."""
    note: str = ""
    """Why names and parts are those in memory, not as transformers writes them."""

    @property
    def with_optimizer(self) -> bool:
        """Whether it has the optimizer's state, beside the weights."""
        return self.optimizer is not None and not self.settings.weights_from

    @property
    def needs_optimizer(self) -> bool:
        """Whether its weights are in the optimizer's state."""
        return bool(self.settings.weights_from) and not self.is_view

    @property
    def is_view(self) -> bool:
        """Whether it has other tensors, or other names, than the model in memory."""
        return _view(self.layout, self.settings) is not None

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def exported(self) -> tuple[TensorLayout, ...]:
        """The parameters and buffers that are in it."""
        names = {tensor.fqn for tensor in self.sources[""].tensors} if "" in self.sources else ()
        return tuple(tensor for tensor in self.layout.tensors if tensor.fqn in names)

    @property
    def with_buffers(self) -> bool:
        """Whether it has a buffer, which only an agreed boundary can copy."""
        return any(tensor.kind is TensorKind.BUFFER for tensor in self.exported)

    @property
    def at_boundary(self) -> bool:
        """Whether only an agreed boundary can copy it: it has buffers or extra state, or arenas
        are mirrored."""
        return self.with_buffers or self.layout.mirrored or self.with_extra

    @property
    def with_extra(self) -> bool:
        """Whether the model has extra state that belongs into it."""
        return self.settings.buffers and bool(self._extra_names)

    @property
    def _extra_names(self) -> tuple[str, ...]:
        if self.is_view:
            # Its names are the job's, not those of an adapter or of one model.
            return ()
        return matching(self.layout.missing, self.settings.patterns)

    @property
    def missing(self) -> dict[str, str]:
        """What the model's state dict has and this has not, with the reason."""
        table = self.extra.table if self.extra is not None else {}
        kept = self.extra.kept if self.extra is not None else ()
        names = dict.fromkeys((*self._extra_names, *table))
        return {n: str(table.get(n, {}).get("why", NOT_ASKED)) for n in names if n not in kept}

    @property
    def parts(self) -> dict[str, list[dict[str, Any]]]:
        """By fqn, the parts of a tensor written as several, or in another shape."""
        if self.settings.names.rules or FORMATS[self.settings.format].keeps_tied or self.is_view:
            return {}
        return {
            tensor.fqn: [
                {"name": part.name, "begin": part.box.begin, "end": part.box.end}
                for part in tensor.hub
            ]
            for tensor in self.layout.tensors
            if tensor.hub and not _is_renamed(tensor) and tensor.fqn in self.names
        }

    @property
    def tied(self) -> dict[str, str]:
        """Aliases of included tensors, and the fqn of each; both as in the model."""
        return {
            alias: tensor.fqn
            for tensor in self.exported
            for alias in tensor.aliases
            if alias in self.names
        }

    def finish(self, torch_files: TorchFiles) -> dict[str, bytes]:
        """The format's small files, once the sidecars have written theirs; blocks for seconds.

        Raises:
            ParamdError: If torch could not write its metadata.
        """
        return FORMATS[self.settings.format].finish(self, torch_files)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of all that it has, as far as the layout does not tell it."""
        optimizer = self.optimizer.to_plain() if self.optimizer is not None else None
        beside = json.dumps([optimizer, self.extra.table if self.extra is not None else None])
        digest = hashlib.sha256(repr((self.settings, beside)).encode())
        for file in self.files:
            facts = (file.name, file.rank, file.size_bytes, file.header, file.entries)
            digest.update(repr(facts).encode())
        for key, source in self.sources.items():
            digest.update(repr((key, dict(source.spans), source.tensors)).encode())
        return digest.digest()


def plan_export(
    layout: Layout,
    settings: ExportSettings,
    optimizer: OptimizerTable | None = None,
    extra: ExtraState | None = None,
) -> ExportPlan:
    """Plan an export of everything that the settings include.

    Args:
        layout: The job's layout.
        settings: What is included, in which format and under which names.
        optimizer: The optimizers' table; None omits their state.
        extra: What modules have beside their tensors; None omits it.

    Raises:
        UsageError: A dtype that the format lacks, a pattern that is malformed or of a part of a
            tensor, a name rule that matches nothing, or extra state that is malformed.
        ConflictError: Two tensors would have the same name.
        NotFoundError: Nothing is included, a pattern matches nothing, or there is no such
            adapter or state.
    """
    laid_out = FORMATS[settings.format]
    if laid_out.keeps_tied:
        # Names share the bytes, and loaders expect all of them.
        settings = replace(settings, keep_tied=True)
    contents = _contents(layout, settings, optimizer)
    if extra is not None:
        extra = _extra_of(layout, settings, extra)
    constants = extra.constants if extra is not None else {}
    extras = sorted(extra.kept) if extra is not None else []
    names = _file_names(contents, extras, settings)
    reads = replace(_reads(layout, contents, settings.replica), constants=constants)
    whole, view = contents.read, contents.view
    return ExportPlan(
        settings=settings,
        layout=layout,
        files=tuple(laid_out.plan(whole, names, settings, reads, contents.optimizer)),
        sources=_sources(whole, reads, contents.optimizer),
        names=_all_names(contents.tensors, names) | {name: names[name] for name in extras},
        optimizer=contents.optimizer,
        extra=extra,
        config=view.config if view is not None else "",
        note=view.note if view is not None else layout.hub_note,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Contents:
    """The tensors of an export, and where their elements are."""

    tensors: Sequence[TensorLayout]
    """Those that are written."""
    beside: Sequence[TensorLayout]
    """Those that are only read, for the others."""
    view: View | None
    """What is written instead of the model in memory; None if that is."""
    optimizer: OptimizerTable | None
    """The part of the optimizers' table that is read; None: nothing of it."""
    averages: Averages | None
    """Where the weights are, if they are not the parameters."""

    @property
    def read(self) -> list[TensorLayout]:
        """All that is read: what is written comes first."""
        return [*self.tensors, *(replace(one, hub=(), aliases=()) for one in self.beside)]


def _contents(
    layout: Layout, settings: ExportSettings, optimizer: OptimizerTable | None
) -> _Contents:
    """What the settings include. Raises as `plan_export`."""
    chosen = _chosen(layout, settings)
    view = _view(layout, settings)
    tensors = _included(layout, settings, view, chosen)
    kept = None
    if optimizer is not None and settings.weights_from and view is None:
        kept = averages(layout, tensors, optimizer, settings.weights_from)
        optimizer = kept.table
    if optimizer is not None and settings.patterns:
        optimizer = optimizer.of(chosen)
    beside = _beside(layout, view, tensors)
    if FORMATS[settings.format].keeps_tied or settings.names.rules:
        # torch and the caller's names expect the model in memory.
        tensors = [replace(tensor, hub=()) for tensor in tensors]
    return _Contents(tensors=tensors, beside=beside, view=view, optimizer=optimizer, averages=kept)


def _included(
    layout: Layout, settings: ExportSettings, view: View | None, chosen: Collection[str]
) -> list[TensorLayout]:
    """The chosen tensors of the kinds that are exported; NotFoundError if there is none."""
    kinds = {TensorKind.PARAMETER: settings.parameters, TensorKind.BUFFER: settings.buffers}
    tensors = [
        tensor
        for tensor in (layout.tensors if view is None else view.tensors)
        if kinds[tensor.kind] and tensor.fqn in chosen
    ]
    if not tensors:
        raise NotFoundError("the export would be empty: the job has no tensor of these kinds")
    return tensors


def _beside(
    layout: Layout, view: View | None, tensors: Iterable[TensorLayout]
) -> tuple[TensorLayout, ...]:
    """The tensors that are only read, for those that are written."""
    if view is None:
        return ()
    written = {tensor.fqn for tensor in tensors}
    return tuple(tensor for tensor in view.beside(layout, written) if tensor.fqn not in written)


def _extra_of(layout: Layout, settings: ExportSettings, extra: ExtraState) -> ExtraState:
    """The extra state that is exported; UsageError if it has the name of a tensor."""
    extra = extra.of(settings.patterns)
    own = extra.table.keys() & {name for one in layout.tensors for name in (one.fqn, *one.aliases)}
    if own:
        raise UsageError(f"extra state {min(own)!r} has the name of a parameter or buffer")
    return extra


def _file_names(
    contents: _Contents, extras: Sequence[str], settings: ExportSettings
) -> dict[str, str]:
    """Names in the files, by name in the model, of what is written. Raises as `apply`."""
    view = contents.view
    written = [
        name
        for tensor in contents.tensors
        for name in (tensor.fqn, *(tensor.aliases if settings.keep_tied else ()))
    ]
    # Rules are for the names that a view has; those of an adapter have none.
    own = view.names if view is not None and not view.config else {}
    mapped = settings.names.apply([*(own.get(name, name) for name in written), *extras])
    names = {name: mapped[own.get(name, name)] for name in (*written, *extras)}
    renamed = {one.fqn: one.hub[0].name for one in contents.tensors if _is_renamed(one)}
    return names | {name: renamed[name] for name in names if name in renamed}


def _view(layout: Layout, settings: ExportSettings) -> View | None:
    """What is written instead of the model in memory; None if that is."""
    if settings.format == PEFT.name:
        return adapter_view(layout, settings.adapter)
    if settings.merge:
        return merged_view(layout, settings.adapter)
    return model_view(layout, settings.weights_from) if settings.weights_from else None


def _blends(layout: Layout, contents: _Contents) -> dict[str, Blend]:
    """By fqn, what is computed of a tensor that is read and of others beside it."""
    optimizer, tensors = contents.optimizer, contents.read
    names = {name: one.fqn for one in layout.tensors for name in (one.fqn, *one.aliases)}
    numbers = {tensor.fqn: number for number, tensor in enumerate(tensors)}
    positions = {name: numbers[fqn] for name, fqn in names.items() if fqn in numbers}
    states = state_positions(tensors, optimizer) if optimizer is not None else {}
    addends = contents.view.addends if contents.view is not None else {}
    lerps = contents.averages.lerps if contents.averages is not None else {}
    return blends(
        positions,
        {fqn: addend for fqn, addend in addends.items() if fqn in numbers},
        {fqn: weight for fqn, weight in lerps.items() if fqn in numbers},
        states,
    )


def _chosen(layout: Layout, settings: ExportSettings) -> Collection[str]:
    """The names that the settings' patterns select; tied tensors by their first."""
    if not settings.patterns:
        return {tensor.fqn for tensor in layout.tensors}
    selected = select(NameIndex(layout), settings.patterns, with_buffers=True)
    parts = [item.name for item in selected if tuple(item.box.sizes) != tuple(item.tensor.shape)]
    if parts:
        raise UsageError(f"names: {parts[0]!r} is asked for in part; an export has whole tensors")
    return {item.tensor.fqn for item in selected}


def _is_renamed(tensor: TensorLayout) -> bool:
    """Whether transformers only has another name for it."""
    return [one.shape for one in tensor.hub] == [tensor.shape]


def _all_names(tensors: Iterable[TensorLayout], names: Mapping[str, str]) -> dict[str, str]:
    return {
        name: names.get(name, names[tensor.fqn])
        for tensor in tensors
        for name in (tensor.fqn, *tensor.aliases)
    }


def _reads(layout: Layout, contents: _Contents, replica: int) -> Reads:
    """The pieces that are read, of that replica, and what is computed of them."""
    optimizer, tensors = contents.optimizer, contents.read
    others = optimizer.replicas if optimizer is not None else {}
    replicas = {rank: Replica(layout, rank) for rank in {replica, *others.values()}}
    model = {tensor.fqn: replicas[replica].pieces(tensor) for tensor in tensors}
    states = {
        tensor.fqn: replicas[others[tensor.fqn]].pieces(tensor)
        for tensor in tensors
        if tensor.fqn in others
    }
    return Reads(
        layout.world_size,
        model,
        {**model, **states},
        unwritten=frozenset(tensor.fqn for tensor in contents.beside),
        averages=contents.averages,
        blends=_blends(layout, contents),
    )


def _sources(
    tensors: Sequence[TensorLayout], reads: Reads, optimizer: OptimizerTable | None
) -> dict[str, Source]:
    sources = {"": make_source("", ((t, t.dtype, reads.model[t.fqn]) for t in tensors))}
    if optimizer is None:
        return sources
    by_name = {tensor.fqn: tensor for tensor in tensors}
    for key in optimizer.keys:
        items = [
            (by_name[fqn], dtype, reads.states[fqn])
            for fqn, dtype in optimizer.tensors(key)
            if fqn in by_name
        ]
        sources[key] = make_source(key, items)
    return sources
