"""Adapters of a model, as a trainer finds them when it attaches: how PEFT would write each, and how
it is merged into its base. Pure.

    W + scale * B A           a weight of the base, and two matrices of low rank (LoRA)
    bias + scale * b          a bias of the base, and the one that LoRA adds to it

Nothing is computed in the training: whoever reads the weights merges them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from paramd.errors import NotFoundError, UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Addend:
    """What an adapter adds to one tensor of its base."""

    a: str
    """Name of the matrix of shape (r, in); empty if a bias is added."""
    b: str
    """Name of the matrix of shape (out, r), or of the bias."""
    scale: float
    transposed: bool = False
    """Whether the base's weight has shape (in, out)."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the tensors that are read beside the base's."""
        return (self.a, self.b) if self.a else (self.b,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One adapter of one model. Names of tensors are those of the job's layout."""

    name: str
    """As in PEFT, such as "default"."""
    model: str
    """Prefix of the model's tensors; empty if it is all of the job's."""
    config: str = ""
    """Text of its adapter_config.json."""
    written: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By tensor, its names in adapter_model.safetensors."""
    why_not_written: str = ""
    """Why PEFT's files cannot be written; empty if they can."""
    merged: Mapping[str, str] = field(default_factory=dict)
    """By tensor, its name in the base model, for all tensors of the merged model."""
    merged_note: str = ""
    """Why the names are those in memory, not as transformers writes them; empty if they are."""
    addends: Mapping[str, Addend] = field(default_factory=dict)
    """By tensor of the base, what is added to it."""
    why_not_merged: str = ""
    """Why it cannot be merged; empty if it can."""

    @property
    def title(self) -> str:
        """The name, with the model's where there is one."""
        return f"{self.model}{self.name}"

    def check_written(self) -> None:
        """Raise UsageError if PEFT's files cannot be written."""
        if self.why_not_written:
            raise UsageError(
                f"adapter {self.title!r} cannot be written as PEFT does: {self.why_not_written}"
            )

    def check_merged(self) -> None:
        """Raise UsageError if it cannot be merged."""
        if self.why_not_merged:
            raise UsageError(
                f"adapter {self.title!r} cannot be merged: {self.why_not_merged}; export it as it "
                "is, with format='peft' or without merge"
            )


def encode_adapters(adapters: Iterable[Adapter]) -> str:
    """The adapters as JSON; empty without any."""
    found = [asdict(one) for one in adapters]
    return json.dumps(found, separators=(",", ":"), ensure_ascii=False) if found else ""


def decode_adapters(text: str) -> tuple[Adapter, ...]:
    """The inverse of `encode_adapters`; UsageError if malformed."""
    if not text:
        return ()
    try:
        return tuple(map(_decoded, json.loads(text)))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UsageError(f"the layout's adapters cannot be read: {error!r}") from None


def _addend(one: Mapping[str, Any]) -> Addend:
    return Addend(
        a=str(one["a"]),
        b=str(one["b"]),
        scale=float(one["scale"]),
        transposed=bool(one["transposed"]),
    )


def _decoded(one: Mapping[str, Any]) -> Adapter:
    written = {str(fqn): tuple(map(str, names)) for fqn, names in one["written"].items()}
    return Adapter(
        name=str(one["name"]),
        model=str(one["model"]),
        config=str(one["config"]),
        why_not_written=str(one["why_not_written"]),
        why_not_merged=str(one["why_not_merged"]),
        merged_note=str(one["merged_note"]),
        written=written,
        merged={str(fqn): str(name) for fqn, name in one["merged"].items()},
        addends={str(fqn): _addend(of) for fqn, of in one["addends"].items()},
    )


def merge_adapters(ranks: Iterable[Sequence[Adapter]]) -> tuple[Adapter, ...]:
    """The adapters of a job, of which each rank may have a part: stages of a pipeline."""
    found: dict[tuple[str, str], Adapter] = {}
    for one in (one for adapters in ranks for one in adapters):
        first = found.setdefault((one.model, one.name), one)
        found[one.model, one.name] = Adapter(
            name=one.name,
            model=one.model,
            config=first.config,
            written={**one.written, **first.written},
            why_not_written=first.why_not_written or one.why_not_written,
            merged={**one.merged, **first.merged},
            merged_note=first.merged_note or one.merged_note,
            addends={**one.addends, **first.addends},
            why_not_merged=first.why_not_merged or one.why_not_merged,
        )
    return tuple(found.values())


def find_adapter(adapters: Sequence[Adapter], name: str) -> Adapter:
    """The adapter of that name, or with an empty one the only one.

    Raises:
        NotFoundError: If there is none.
        UsageError: If several may be meant.
    """
    found = [one for one in adapters if name in ("", one.name, one.title)]
    exact = [one for one in found if name == one.title]
    if len(exact or found) == 1:
        return (exact or found)[0]
    known = ", ".join(repr(one.title) for one in adapters)
    if found:
        raise UsageError(f"adapter: there are several, {known}; name one")
    if not adapters:
        raise NotFoundError(
            "adapter: the model had no adapter of PEFT when the training attached it"
        )
    raise NotFoundError(f"adapter: there is no {name!r}; this training has {known}")
