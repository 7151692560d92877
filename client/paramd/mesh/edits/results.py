"""What the control plane says of edits and of a hold, as values that print well."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from paramd.errors import ConflictError, DeadlineError, ParamdError
from paramd.layout.edits.kinds import BY_WORD, KINDS
from paramd.mesh.results import Table


class EditState(StrEnum):
    """Where an edit stands. The last three are terminal."""

    STAGING = "STAGING"
    STAGED = "STAGED"
    COMMITTED = "COMMITTED"
    APPLIED = "APPLIED"
    """On all ranks, at one step."""
    ABORTED = "ABORTED"
    """On none."""
    LOST = "LOST"
    """The epoch ended before every rank had said so; its parameters went with it."""


TERMINAL = frozenset({EditState.APPLIED, EditState.ABORTED, EditState.LOST})


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueRange:
    """Statistics of all elements that an edit names."""

    min: float
    max: float
    mean: float
    norm: float
    nan_count: int
    inf_count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Edit:
    """One edit, as last heard."""

    id: str
    job: str
    epoch: int
    state: EditState
    reason: str
    """Why it was not applied; empty otherwise."""
    step: int
    """Step at whose boundary it was applied; -1 while it was not."""
    actor: str
    """Name of the token of who asked for it."""
    committed_by: str
    """And of who had it applied; empty: nobody yet."""
    note: str
    dry_run: bool
    """It was only to tell `before` and `after`: nothing was changed, and it ends as ABORTED."""
    created_s: float
    """Seconds since the Unix epoch."""
    ops: tuple[Mapping[str, Any], ...]
    """What was asked for, with the names that matched."""
    size_bytes: int
    """Bytes of the elements changed, replicas counted once."""
    stop_ms: float | None
    """Longest time that a trainer stood for it."""
    before: ValueRange | None
    after: ValueRange | None
    undoable: bool
    undo_refusal: str
    """Why it cannot be undone; empty when it can."""
    undo_of: str
    undone_by: str

    @property
    def ended(self) -> bool:
        """Whether the state will not change any more."""
        return self.state in TERMINAL

    @property
    def names(self) -> tuple[str, ...]:
        """Names changed, as far as the control plane lists them (100 an operation)."""
        return tuple(name for op in self.ops for name in op.get("names", ()))

    def __repr__(self) -> str:
        where = f" at step {self.step}" if self.state is EditState.APPLIED else ""
        why = f": {self.reason}" if self.reason else ""
        return f"<paramd.Edit {self.id[:8]} {self.state}{where}, {len(self.names)} names{why}>"


@dataclass(frozen=True, kw_only=True, slots=True)
class Hold:
    """Whether training waits at a boundary on request."""

    state: str
    """running, pausing, held or stepping."""
    step: int
    """Finished updates."""
    holder: str
    """Who holds it; empty when nobody does."""
    steps_left: int
    lease_left_s: float

    @property
    def held(self) -> bool:
        return self.state in ("held", "stepping")


def parse_edit(found: Mapping[str, Any]) -> Edit:
    """An EditDocument of the REST side."""
    undo = found.get("undo") or {}
    return Edit(
        id=str(found["id"]),
        job=str(found["job"]),
        epoch=int(found["epoch"]),
        state=EditState(found["state"]),
        reason=str(found.get("reason") or ""),
        step=_number(found.get("step"), -1),
        actor=str(found.get("actor") or ""),
        committed_by=str(found.get("committed_by") or ""),
        note=str(found.get("note") or ""),
        dry_run=bool(found.get("dry_run", False)),
        created_s=float(found.get("created_s") or 0.0),
        ops=tuple(dict(op) for op in found.get("ops", ())),
        size_bytes=_number(found.get("size_bytes"), 0),
        stop_ms=_float(found.get("stop_ms")),
        before=_range(found.get("before")),
        after=_range(found.get("after")),
        undoable=bool(undo.get("possible", False)),
        undo_refusal=str(undo.get("reason") or ""),
        undo_of=str(found.get("undo_of") or ""),
        undone_by=str(found.get("undone_by") or ""),
    )


def parse_hold(found: Mapping[str, Any]) -> Hold:
    """A hold's document of the REST side."""
    return Hold(
        state=str(found["state"]),
        step=_number(found.get("step"), -1),
        holder=str(found.get("holder") or ""),
        steps_left=_number(found.get("steps_left"), 0),
        lease_left_s=float(found.get("lease_left_s") or 0.0),
    )


def check_applied(edit: Edit) -> Edit:
    """The edit, when it was applied.

    Raises:
        ConflictError: it was refused, so no rank has it; or its epoch ended.
        DeadlineError: it is still under way.
    """
    if edit.state is EditState.APPLIED:
        return edit
    if edit.state is EditState.ABORTED:
        raise ConflictError(f"edit {edit.id}: not applied, on no rank: {edit.reason}")
    if edit.state is EditState.LOST:
        raise ConflictError(f"edit {edit.id}: lost with its epoch: {edit.reason}")
    raise DeadlineError(
        f"edit {edit.id} is still {edit.state}; no rank has it, or all will. Ask again with "
        f"mesh.get_edit({edit.id!r}), or allow more time (timeout=)"
    )


def what_text(edit: Edit) -> str:
    """The operations in a few words."""
    if edit.undo_of:
        return f"undo {edit.undo_of[:8]}"
    texts = [op_text(op) for op in edit.ops[:3]]
    return ", ".join(texts) + (" ..." if len(edit.ops) > 3 else "")


def op_text(op: Mapping[str, Any]) -> str:
    """One operation, such as "mul 0.5 layers.*"."""
    word = str(op.get("op"))
    # A newer control plane may know more kinds.
    names = KINDS[BY_WORD[word]].shown if word in BY_WORD else ("value",)
    numbers = [op.get(name) for name in names]
    shown = " ".join("-" if n is None else f"{n:g}" for n in numbers) if not op.get("data") else ""
    return " ".join(part for part in (word, shown, str(op.get("pattern"))) if part)


class Edits(Table[Edit]):
    """Edits, newest first."""

    columns = (
        ("id", lambda row: row.id[:8]),
        ("state", lambda row: str(row.state)),
        ("step", lambda row: str(row.step) if row.step >= 0 else ""),
        ("what", what_text),
        ("who", lambda row: row.actor),
        ("note", lambda row: row.note),
    )

    def summary(self) -> str:
        return f"{len(self)} edits"


def unreadable(url: str, error: Exception) -> ParamdError:
    """What to raise when an answer is not what the contract says."""
    return ParamdError(
        f"{url} gave an answer that this client cannot read ({error!r}); client and job may run "
        "different versions of paramd"
    )


def _range(found: Mapping[str, Any] | None) -> ValueRange | None:
    if found is None:
        return None
    # JSON has no infinity and no NaN; null stands for what is none.
    floats = {name: _float(found.get(name)) for name in ("min", "max", "mean", "norm")}
    return ValueRange(
        **{name: value if value is not None else float("nan") for name, value in floats.items()},
        nan_count=_number(found.get("nan_count"), 0),
        inf_count=_number(found.get("inf_count"), 0),
    )


def _float(value: Any) -> float | None:
    return float(value) if value is not None else None


def _number(value: Any, default: int) -> int:
    return int(value) if value is not None else default
