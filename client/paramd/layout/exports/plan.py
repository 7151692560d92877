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
            one.fqn: [
                {"name": part.name, "begin": part.box.begin, "end": part.box.end}
                for part in one.hub
            ]
            for one in self.layout.tensors
            if one.hub and not _is_renamed(one) and one.fqn in self.names
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
        found = hashlib.sha256(repr((self.settings, beside)).encode())
        for file in self.files:
            facts = (file.name, file.rank, file.size_bytes, file.header, file.entries)
            found.update(repr(facts).encode())
        for key, source in self.sources.items():
            found.update(repr((key, dict(source.spans), source.tensors)).encode())
        return found.digest()


def plan_export(
    layout: Layout,
    settings: ExportSettings,
    optimizer: OptimizerTable | None = None,
    extra: ExtraState | None = None,
) -> ExportPlan:
    """Plan an export of everything that `settings` includes; `optimizer` None omits its state, and
    `extra` None what modules have beside their tensors.

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
    chosen = _chosen(layout, settings)
    included = {TensorKind.PARAMETER: settings.parameters, TensorKind.BUFFER: settings.buffers}
    view = _view(layout, settings)
    tensors = [
        one
        for one in (layout.tensors if view is None else view.tensors)
        if included[one.kind] and one.fqn in chosen
    ]
    if not tensors:
        raise NotFoundError("the export would be empty: the job has no tensor of these kinds")
    kept = None
    if optimizer is not None and settings.weights_from and view is None:
        kept = averages(layout, tensors, optimizer, settings.weights_from)
        optimizer = kept.table
    if optimizer is not None and settings.patterns:
        optimizer = optimizer.of(chosen)
    own_names = {one.fqn for one in tensors}
    beside = view.beside(layout, own_names) if view is not None else ()
    beside = tuple(one for one in beside if one.fqn not in own_names)
    if laid_out.keeps_tied or settings.names.rules:
        # torch and the caller's names expect the model in memory.
        tensors = [replace(one, hub=()) for one in tensors]
    renamed = {one.fqn: one.hub[0].name for one in tensors if _is_renamed(one)}
    if extra is not None:
        extra = extra.of(settings.patterns)
        own = extra.table.keys() & {n for t in layout.tensors for n in (t.fqn, *t.aliases)}
        if own:
            raise UsageError(f"extra state {min(own)!r} has the name of a parameter or buffer")
    constants = extra.constants if extra is not None else {}
    extras = sorted(extra.kept) if extra is not None else []
    written = [n for t in tensors for n in (t.fqn, *(t.aliases if settings.keep_tied else ()))]
    # Rules are for the names that a view has; those of an adapter have none.
    told = view.names if view is not None and not view.config else {}
    mapped = settings.names.apply([*(told.get(name, name) for name in written), *extras])
    names = {name: mapped[told.get(name, name)] for name in (*written, *extras)}
    names |= {name: renamed[name] for name in names if name in renamed}
    whole = [*tensors, *(replace(one, hub=(), aliases=()) for one in beside)]
    reads = _blended(
        replace(
            _reads(layout, whole, settings.replica, optimizer),
            constants=constants,
            unwritten=frozenset(one.fqn for one in beside),
            averages=kept,
        ),
        layout,
        whole,
        view,
        optimizer,
    )
    config, note = "", layout.hub_note
    if view is not None:
        config, note = view.config, view.note
    return ExportPlan(
        settings=settings,
        layout=layout,
        files=tuple(laid_out.plan(whole, names, settings, reads, optimizer)),
        sources=_sources(whole, reads, optimizer),
        names=_all_names(tensors, names) | {name: names[name] for name in extras},
        optimizer=optimizer,
        extra=extra,
        config=config,
        note=note,
    )


def _view(layout: Layout, settings: ExportSettings) -> View | None:
    """What is written instead of the model in memory; None if that is."""
    if settings.format == PEFT.name:
        return adapter_view(layout, settings.adapter)
    if settings.merge:
        return merged_view(layout, settings.adapter)
    return model_view(layout, settings.weights_from) if settings.weights_from else None


def _blended(
    reads: Reads,
    layout: Layout,
    tensors: Sequence[TensorLayout],
    view: View | None,
    optimizer: OptimizerTable | None,
) -> Reads:
    names = {name: one.fqn for one in layout.tensors for name in (one.fqn, *one.aliases)}
    numbers = {one.fqn: number for number, one in enumerate(tensors)}
    positions = {name: numbers[fqn] for name, fqn in names.items() if fqn in numbers}
    states = state_positions(tensors, optimizer) if optimizer is not None else {}
    addends = {} if view is None else {f: a for f, a in view.addends.items() if f in numbers}
    lerps = reads.averages.lerps if reads.averages is not None else {}
    lerps = {fqn: weight for fqn, weight in lerps.items() if fqn in numbers}
    return replace(reads, blends=blends(positions, addends, lerps, states))


def _chosen(layout: Layout, settings: ExportSettings) -> Collection[str]:
    """The names that the settings' patterns select; tied tensors by their first."""
    if not settings.patterns:
        return {tensor.fqn for tensor in layout.tensors}
    found = select(NameIndex(layout), settings.patterns, with_buffers=True)
    parts = [one.name for one in found if tuple(one.box.sizes) != tuple(one.tensor.shape)]
    if parts:
        raise UsageError(f"names: {parts[0]!r} is asked for in part; an export has whole tensors")
    return {one.tensor.fqn for one in found}


def _is_renamed(tensor: TensorLayout) -> bool:
    """Whether transformers only has another name for it."""
    return [one.shape for one in tensor.hub] == [tensor.shape]


def _all_names(tensors: Iterable[TensorLayout], names: Mapping[str, str]) -> dict[str, str]:
    return {
        name: names.get(name, names[tensor.fqn])
        for tensor in tensors
        for name in (tensor.fqn, *tensor.aliases)
    }


def _reads(
    layout: Layout, tensors: Sequence[TensorLayout], replica: int, optimizer: OptimizerTable | None
) -> Reads:
    others = optimizer.replicas if optimizer is not None else {}
    replicas = {rank: Replica(layout, rank) for rank in {replica, *others.values()}}
    model = {one.fqn: replicas[replica].pieces(one) for one in tensors}
    states = {
        one.fqn: replicas[others[one.fqn]].pieces(one) for one in tensors if one.fqn in others
    }
    return Reads(layout.world_size, model, {**model, **states})


def _sources(
    tensors: Sequence[TensorLayout], reads: Reads, optimizer: OptimizerTable | None
) -> dict[str, Source]:
    found = {"": make_source("", ((t, t.dtype, reads.model[t.fqn]) for t in tensors))}
    if optimizer is None:
        return found
    by_name = {tensor.fqn: tensor for tensor in tensors}
    for key in optimizer.keys:
        items = [
            (by_name[fqn], dtype, reads.states[fqn])
            for fqn, dtype in optimizer.tensors(key)
            if fqn in by_name
        ]
        found[key] = make_source(key, items)
    return found
