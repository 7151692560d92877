"""REST calls for edits, pauses, restore points, rollbacks, hyper-parameters; their results."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from paramd import gone
from paramd.documents import Document, Finite, Record, Text, read_document
from paramd.errors import ConflictError, DeadlineError, ParamdError, UnreachableError, UsageError
from paramd.inside import ELSEWHERE
from paramd.layout.edits.kinds import BY_WORD, KINDS
from paramd.layout.edits.ops import EDIT_ENDS, EditState, EditTerms, OpSpec
from paramd.mesh.peers.control import REST_TIMEOUT_S
from paramd.mesh.peers.discovery import AGAIN_S, JobRest, segment
from paramd.mesh.peers.grpc import MORE_TIME, TELL_S, cancelled
from paramd.mesh.results import Table
from paramd.wire import LEASE_S, MAX_AGREE_S, MAX_LEASE_S

_WAIT_S: Final = 3.0
"""Longest server-side wait of one request; below the request's timeout."""

log = logging.getLogger("paramd")

_ANSWER_S: Final = 5.0
"""Extra seconds for an answer that takes as long as its caller allowed."""

_RENEW_TIMEOUT_S: Final = 5.0
_FIRST_LOOK_S: Final = 0.01
_LAST_LOOK_S: Final = 0.5

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        return gone.attribute(__name__, sys.modules[__name__], name)


TRIED: Final = "DRY RUN:"
"""How the reason of a dry run begins that came to its end."""

_RANGES = ("before", "after")

Row = TypeVar("Row", bound=Any)
"""An `Edit`, or the control plane's own row of one."""

_GROUP = re.compile(r"(?:(?:optimizer\s+(?P<optimizer>\d+)\s+)?group\s+)?(?P<group>\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class EditOp(Record):
    """One operation and the parameters it matched. Operands are None when absent, or when the
    token's role may not see them."""

    pattern: str
    op: str
    value: float | str | None
    """In JSON, which has no NaN and no infinities, these are text: "nan", "inf", "-inf"."""
    weight: float | None
    min: float | None
    max: float | None
    data: bool
    names: tuple[str, ...]
    """The first 100 matched parameters."""
    name_count: int
    numel: int
    """Elements, replicas counted once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hyperparameters(Record):
    """Hyper-parameters of a parameter group: those that an edit sets, or all."""

    optimizer: int
    group: int
    values: Mapping[str, Any]

    @property
    def name(self) -> str:
        """As `set_hyperparameters` takes it: "optimizer 0 group 1"."""
        return f"optimizer {self.optimizer} group {self.group}"

    def __getitem__(self, name: str) -> Any:
        """A field, or a value: `one["lr"]` is `one.values["lr"]`."""
        return self.values[name] if name in self.values else Record.__getitem__(self, name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollback(Record):
    """The state that an edit puts back."""

    mark: str
    """Empty: a standing snapshot."""
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueRange(Document):
    """Statistics of all elements that an edit names. NaN: no finite element."""

    min: Finite
    max: Finite
    mean: Finite
    norm: Finite
    nan_count: int
    inf_count: int


_NO_RANGE: dict[str, float | None] = dict.fromkeys(one.name for one in fields(ValueRange))


@dataclass(frozen=True, kw_only=True, slots=True)
class Undo(Document):
    """Whether an edit can be undone."""

    possible: bool
    reason: str
    """Why not; empty if possible."""

    def __call__(self) -> NoReturn:
        """Raises UsageError: an answer has no connection to undo anything with."""
        raise UsageError("edit.undo says whether it can be undone; write mesh.undo(edit)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Edit(Document):
    """An edit and its state, as of the last response."""

    id: str
    job: str
    incarnation: int
    state: EditState
    """APPLIED, ABORTED and LOST are final."""
    reason: str
    """Reason for ABORTED or LOST; else empty."""
    step: int
    """Step at whose boundary it was applied; -1 if it was not."""
    boundary: int
    """Number of its boundary request; 0: none yet."""
    actor: str
    """Name of the token that created it."""
    committed_by: Text
    """Name of the token that committed it; empty before that."""
    note: str
    dry_run: bool
    """Whether it only computes `before` and `after`: it changes nothing and ends as ABORTED."""
    created_s: float
    """Seconds since the Unix epoch."""
    ended_s: float | None
    """None until it ends."""
    ops: tuple[EditOp, ...]
    """The operations, with the names that matched."""
    size_bytes: int
    """Size of the elements it names; replicas count once."""
    stop_ms: float | None
    """Longest time it stopped a trainer."""
    before: ValueRange | None
    """None: unknown, or the token's role may not see it."""
    after: ValueRange | None
    undo: Undo
    undo_of: Text
    """Edit that this one undoes; else empty."""
    undone_by: Text
    """Edit that undid this one; else empty."""
    rollback: Rollback | None
    """The state it puts back; of an undo, the one it leaves. Else None."""
    hyperparameters: Hyperparameters | None
    """The hyper-parameters that it sets instead of parameters; else None."""
    warning: str
    """A trainer's warning about it, or that replicas were not equal; else empty."""

    @property
    def undoable(self) -> bool:
        return self.undo.possible

    @property
    def undo_refusal(self) -> str:
        """Why it cannot be undone; empty when it can."""
        return self.undo.reason

    @property
    def ended(self) -> bool:
        """Whether the state is terminal."""
        return self.state in EDIT_ENDS

    @property
    def shown_state(self) -> str:
        """The state in tables: a dry run ends as ABORTED, but without any failure."""
        return "DRY RUN" if self.was_tried else str(self.state)

    @property
    def was_tried(self) -> bool:
        """Whether it is a dry run that came to its end."""
        return self.dry_run and (self.before is not None or self.reason.startswith(TRIED))

    @property
    def names(self) -> tuple[str, ...]:
        """Names changed; the control plane lists up to 100 per operation."""
        return tuple(name for op in self.ops for name in op.names)

    def __repr__(self) -> str:
        where = f" at step {self.step}" if self.state is EditState.APPLIED else ""
        why = f": {self.reason}" if self.reason else ""
        if self.before is not None and self.after is not None:
            before, after = self.before, self.after
            why += (
                f"; norm {before.norm:.4g} -> {after.norm:.4g}"
                f", min {before.min:.4g} -> {after.min:.4g}"
                f", max {before.max:.4g} -> {after.max:.4g}"
            )
        return f"<paramd.Edit {self.id[:8]} {self.shown_state}{where}, {what_text(self)}{why}>"


class PauseWord(StrEnum):
    """State of a pause."""

    RUNNING = "running"
    PAUSING = "pausing"
    """Requested, not agreed yet."""
    PAUSED = "paused"
    STEPPING = "stepping"
    """A number of boundaries pass before training waits again."""


@gone.tells
@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class PauseState(Document):
    """Whether training is paused at a boundary."""

    state: PauseWord
    step: int = -1
    """Finished updates; -1 when no rank reports it."""
    holder: str = ""
    """Name of the token that paused training, and a unique suffix; empty without a pause."""
    steps_left: int = 0
    """Boundaries it may still pass before it pauses again."""
    lease_left_s: float = 0.0
    waits_for: str = ""
    """While pausing: the rank whose boundary is waited for, and since when."""
    since_s: float | None = None
    """Seconds since the Unix epoch; None when unknown."""

    def __repr__(self) -> str:
        by = f" by {self.holder}, for {self.lease_left_s:.1f} s more" if self.holder else ""
        return f"<paramd.{type(self).__name__} {self.state} at step {self.step}{by}>"

    @property
    def paused(self) -> bool:
        return self.state in ("paused", "stepping")


class Pause(PauseState):
    """The result of `pause`: a `PauseState`, and a block at whose end training resumes."""

    __slots__ = ("_resume",)
    _resume: Callable[[], object]

    @classmethod
    def of(cls, state: PauseState, resume: Callable[[], object]) -> Pause:
        """`resume` ends the pause."""
        self = cls(
            state=state.state,
            step=state.step,
            holder=state.holder,
            steps_left=state.steps_left,
            lease_left_s=state.lease_left_s,
            waits_for=state.waits_for,
            since_s=state.since_s,
        )
        object.__setattr__(self, "_resume", resume)
        return self

    def __enter__(self) -> Pause:
        return self

    def __exit__(self, *_: object) -> None:
        # Not an error if the lease has run out: then training continues already.
        with suppress(ConflictError):
            self._resume()


def check_applied(edit: Edit) -> Edit:
    """Return the edit; ConflictError unless it was applied, DeadlineError if it has not ended."""
    if edit.state is EditState.APPLIED:
        return edit
    if edit.state is EditState.ABORTED:
        raise ConflictError(f"edit {edit.id[:8]} was applied on no rank: {edit.reason}")
    if edit.state is EditState.LOST:
        raise ConflictError(f"edit {edit.id[:8]} was lost with its run: {edit.reason}")
    why = f" ({edit.reason})" if edit.reason else ""
    raise DeadlineError(
        f"edit {edit.id[:8]} is still {edit.state}{why}; it will be applied on all ranks or none. "
        f"See mesh.get_edit({edit.id!r}), or {MORE_TIME}"
    )


def what_text(edit: Edit) -> str:
    """The first operations, as text."""
    if edit.undo_of:
        return f"undo {edit.undo_of[:8]}"
    if edit.rollback is not None:
        mark, step = edit.rollback.mark, edit.rollback.step
        return f"rollback to {mark} (step {step})" if mark else f"rollback to step {step}"
    if edit.hyperparameters is not None:
        change = edit.hyperparameters
        values = ", ".join(f"{name}={value}" for name, value in change.values.items())
        return f"optimizer {change.optimizer} group {change.group}: {values}"
    return ", ".join([op_text(op) for op in edit.ops[:3]]) + (" ..." if len(edit.ops) > 3 else "")


def op_text(op: EditOp | Mapping[str, Any]) -> str:
    """One operation as text, such as "mul 0.5 layers.*"."""
    word = str(op.get("op"))
    # A newer control plane may know more kinds.
    names = KINDS[BY_WORD[word]].shown if word in BY_WORD else ("value",)
    numbers = [_operand(op.get(name)) for name in names]
    shown = " ".join(numbers) if not op.get("data") else ""
    return " ".join(part for part in (word, shown, str(op.get("pattern"))) if part)


def _operand(value: Any) -> str:
    try:
        # Records have NaN and infinities as text.
        return "-" if value is None else f"{float(value):g}"
    except (TypeError, ValueError, OverflowError):
        return str(value)


class Edits(Table[Edit]):
    """Edits, newest first."""

    columns = (
        ("id", lambda row: row.id[:8]),
        ("run", lambda row: str(row.incarnation)),
        ("state", lambda row: row.shown_state),
        ("step", lambda row: str(row.step) if row.step >= 0 else ""),
        ("what", what_text),
        ("who", lambda row: row.actor),
        ("note", lambda row: row.note),
    )
    row_type = Edit
    key = "id"

    @classmethod
    def _names(cls) -> Sequence[str]:
        """As `Table._names`, with the numbers of `before` and `after` as "before_min" and so on."""
        return [
            *[name for name in super()._names() if name not in (*_RANGES, "undo")],
            "undoable",
            "undo_refusal",
            *(f"{side}_{one.name}" for side in _RANGES for one in fields(ValueRange)),
        ]

    @classmethod
    def _record(cls, row: Any) -> dict[str, Any]:
        """As `Table._record`; None where an edit has no range."""
        numbers = {
            f"{side}_{name}": number
            for side, found in (("before", row.before), ("after", row.after))
            for name, number in (asdict(found) if found is not None else _NO_RANGE).items()
        }
        plain = {name: getattr(row, name) for name in cls._names() if name not in numbers}
        return {**plain, "state": str(row.state), **numbers}

    def summary(self) -> str:
        return f"{len(self)} edits"


def in_effect(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """The edits still in effect, newest first. Beside each is the last undo or redo that followed
    it, or the edit itself. An even number of undos leaves the edit in effect; an odd number
    leaves nothing of it or of them.
    """
    known = {row.id: row for row in rows}
    found = []
    for first in rows:
        if first.undo_of in known:
            continue  # counted with the edit that it undid
        last, undos = first, 0
        while last.undone_by in known:
            last, undos = known[last.undone_by], undos + 1
        if undos % 2 == 0:
            found.append((first, last))
    return sorted(found, key=lambda pair: (-pair[1].incarnation, -pair[1].boundary))


def new_edit_id() -> str:
    """An id chosen by the client, so that resending a request is idempotent."""
    return secrets.token_hex(16)


EDIT_INSTEAD: Final = (
    "Change parameters here within attachment.update(); or edit with wait=False, which is applied "
    "at a later boundary, or from another thread or process"
)
GOES_ON: Final = "It is applied as training goes on; look for it then, or wait in another thread"


class EditCalls:
    """Edit and pause requests of one job. Idempotent ones are retried while unreachable."""

    def __init__(self, rest: JobRest) -> None:
        self.rest = rest

    async def create(
        self, edit_id: str, ops: Sequence[OpSpec], terms: EditTerms, deadline_s: float
    ) -> Edit:
        """Create an edit. Without tensor operands it is committed, too."""
        body: dict[str, Any] = {"id": edit_id, "ops": [op.document() for op in ops]}
        plain = asdict(EditTerms())
        body |= {name: said for name, said in asdict(terms).items() if said != plain[name]}
        return await self.begin("/edits", body, deadline_s)

    async def commit(self, edit_id: str, deadline_s: float) -> Edit:
        return await self.begin(f"/edits/{segment(edit_id)}/commit", {}, deadline_s)

    async def preview(self, edit_id: str, deadline_s: float) -> Edit:
        return await self._again(f"/edits/{segment(edit_id)}/preview", {}, deadline_s)

    async def undo(
        self, edit_id: str, *, force: bool, deadline_s: float, dry_run: bool = False
    ) -> Edit:
        body: dict[str, Any] = {"id": new_edit_id(), "force": force}
        # A control plane of an earlier version refuses what it does not know.
        body |= {"dry_run": True} if dry_run else {}
        return await self.begin(f"/edits/{segment(edit_id)}/undo", body, deadline_s)

    async def last_of(self, name: str) -> str:
        """Id of the token's newest edit in effect, or of its last redo. Raises ConflictError."""
        found = in_effect(await self.all(state="APPLIED", limit=1000))
        left = [(row, last) for row, last in found if not row.undo_of]
        for row, last in left:
            if row.actor == name:
                return last.id
        others = [f"{row.id[:8]} by {row.actor}, {what_text(row)}" for row, _ in left[:5]]
        those = f"; those of others: {'; '.join(others)}" if others else ""
        raise ConflictError(f"no applied edit of {name!r} is left to undo{those}")

    async def begin(self, path: str, body: Mapping[str, Any], deadline_s: float) -> Edit:
        """Create, or commit, an edit and wait a little for its end; `body` has a new one's id."""
        wait_s = round(min(_WAIT_S, max(deadline_s - time.monotonic(), 0.0)), 3)
        # The thread that trains need not wait for what its next boundary does.
        wait_s = 0.0 if self.rest.waits_for_itself() else wait_s
        return await self._again(path, {**body, "wait_s": wait_s}, deadline_s)

    async def abort(self, edit_id: str) -> Edit:
        """Abort an edit, unless the trainers may have agreed to it."""
        return self._edit(await self.rest.send("DELETE", f"/edits/{segment(edit_id)}"))

    async def get(self, edit_id: str, wait_s: float = 0.0) -> Edit:
        """One edit; waits up to `wait_s` seconds for its end."""
        return self._edit(
            await self.rest.send("GET", f"/edits/{segment(edit_id)}?wait_s={wait_s:g}")
        )

    def check_outside(self, what: str, instead: str = EDIT_INSTEAD) -> None:
        """Raise ConflictError if the caller is the thread that trains, for which `what` waits."""
        self.rest.check_outside(what, instead)

    async def ended(self, edit: Edit, deadline_s: float) -> Edit:
        """Poll an edit until it has ended or the deadline has passed.

        Raises:
            ConflictError: If it waits for the thread that trains and that thread is the caller.
        """
        if not edit.ended:
            self.check_outside(f"edit {edit.id[:8]}", GOES_ON)
        while not edit.ended and (left_s := deadline_s - time.monotonic()) > 0:
            try:
                edit = await self.get(edit.id, min(_WAIT_S, left_s))
            except UnreachableError:
                if time.monotonic() + AGAIN_S >= deadline_s:
                    raise
                await asyncio.sleep(AGAIN_S)
        return edit

    async def all(self, *, state: str | None, limit: int) -> Edits:
        """Edits of the job, newest first.

        Raises:
            UsageError: For a bad state or limit.
        """
        state = state.upper() if state is not None else None
        if state is not None and state not in EditState.__members__:
            raise UsageError(f"state: {state!r}; expected one of {', '.join(EditState)}")
        if limit < 1:
            raise UsageError(f"limit: {limit}; expected at least 1")
        return Edits(map(self._edit, await self.rest.rows("edits", limit, state=state)))

    async def pause(
        self, method: str, path: str, body: Mapping[str, Any] | None, deadline_s: float
    ) -> PauseState:
        """Send a pause request; `path` is appended to "/pause"."""
        found = await self.send(method, f"/pause{path}", body, deadline_s)
        return self.rest.read(lambda: read_document(PauseState, found))

    async def send(
        self, method: str, path: str, body: Mapping[str, Any] | None, deadline_s: float
    ) -> Any:
        """Send a request that is answered once the ranks have agreed."""
        # Not the usual timeout: agreement can take as long as a training step.
        timeout_s = max(1.0, deadline_s - time.monotonic()) + _ANSWER_S
        return await self.rest.send(method, path, body, timeout_s=timeout_s)

    async def _again(self, path: str, body: Mapping[str, Any], deadline_s: float) -> Edit:
        timeout_s = _WAIT_S + REST_TIMEOUT_S
        return self._edit(
            await self.rest.again("POST", path, body, deadline_s, timeout_s=timeout_s)
        )

    def _edit(self, found: Mapping[str, Any]) -> Edit:
        return self.rest.read(lambda: read_document(Edit, found))


class Holder:
    """This mesh's pause. Use on one event loop."""

    def __init__(self, calls: EditCalls) -> None:
        self._calls = calls
        self._lease_s = LEASE_S
        self._renewing: asyncio.Task[None] | None = None
        self._is_ours = False
        """Whether a pause was begun here and not ended."""

    async def pause(self, lease_s: float, *, renew: bool, deadline_s: float) -> PauseState:
        """Begin a pause; with `renew`, renew its lease until `resume` or `close`."""
        self._calls.check_outside("pause", ELSEWHERE)
        if not 0 < lease_s <= MAX_LEASE_S:
            raise UsageError(f"lease: {lease_s} s; expected above 0 and at most {MAX_LEASE_S:g}")
        left_s = min(max(1.0, deadline_s - time.monotonic()), MAX_AGREE_S)
        pause_id = secrets.token_hex(8)
        asked = {"lease_s": lease_s, "timeout_s": round(left_s, 3), "id": pause_id}
        telling = asyncio.create_task(self._tell(), name="paramd-pause-told")
        try:
            found = await self._calls.pause("POST", "", asked, deadline_s)
            self._is_ours = True
        except asyncio.CancelledError:
            # It may begin yet, and its lease would outlast this call. One begun earlier, by this
            # mesh or by others, is left alone.
            was_ours, self._is_ours = self._is_ours, True
            with suppress(ParamdError):
                await self._calls.pause("DELETE", f"?id={pause_id}", None, 0.0)
                self._is_ours = was_ours
            raise
        finally:
            await cancelled(telling)
        # After the request: if it fails, a pause we already have must keep its renewals.
        await self._stop_renewing()
        if renew:
            self._lease_s = lease_s
            self._renewing = asyncio.create_task(self._renew(), name="paramd-pause")
        return found

    async def step(self, steps: int, *, wait: bool, deadline_s: float) -> PauseState:
        """Run `steps` updates; with `wait`, return once all ranks are paused again."""
        self._calls.check_outside("step", ELSEWHERE)
        if steps < 1:
            raise UsageError(f"steps: {steps}; expected at least 1")
        found = await self._calls.pause("POST", "/step", {"steps": steps}, deadline_s)
        pause_s = _FIRST_LOOK_S
        while wait and found.state == "stepping":
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise DeadlineError(
                    f"{found.steps_left} of {steps} updates are left; training finishes them, "
                    "then pauses again. Allow more time (timeout=), or do not wait (wait=False)"
                )
            await asyncio.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LAST_LOOK_S)
            found = await self._calls.pause("GET", "", None, deadline_s)
        if wait and not found.paused:
            raise ConflictError(
                f"the pause ended before its {steps} updates did, at step {found.step}; training "
                "continues. Use a longer lease, or renew it"
            )
        return found

    async def resume(self, *, deadline_s: float) -> PauseState:
        """End the pause. Idempotent."""
        await self._stop_renewing()
        found = await self._calls.pause("DELETE", "", None, deadline_s)
        self._is_ours = False
        return found

    async def close(self) -> None:
        """Stop renewing, and log how long the pause still lasts, if it does. Idempotent."""
        await self._stop_renewing()
        is_ours, self._is_ours = self._is_ours, False
        with suppress(ParamdError):
            now = await self._calls.pause("GET", "", None, 0.0) if is_ours else None
            if now is not None and now.lease_left_s > 0:
                until = f"in {now.lease_left_s:.0f} s, or with: paramd resume"
                log.warning("paramd: training is paused; it resumes %s", until)

    async def _stop_renewing(self) -> None:
        task, self._renewing = self._renewing, None
        if task is not None:
            await cancelled(task)

    async def _tell(self) -> None:
        """Log, every few seconds, the ranks that a pause waits for."""
        while True:
            await asyncio.sleep(TELL_S)
            with suppress(ParamdError):
                now = await self._calls.pause("GET", "", None, time.monotonic() + _ANSWER_S)
                if now.waits_for:
                    log.warning("paramd: the pause is waiting for %s", now.waits_for)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            # If renewing fails, the pause ends with its lease.
            with suppress(ParamdError):
                deadline_s = time.monotonic() + _RENEW_TIMEOUT_S
                await self._calls.pause("POST", "/renew", {"lease_s": self._lease_s}, deadline_s)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Mark(Document):
    """A complete state that the sidecars keep in memory; with a name, a restore point."""

    name: str
    """Empty: a standing snapshot, which the next ones replace."""
    step: int
    size_bytes: int
    """Bytes on all ranks."""
    made_s: float | None
    """Seconds since the Unix epoch; None when unknown."""
    by: str
    """Name of the token that made it; empty of a standing snapshot."""
    whole: bool
    """Whether all ranks have it."""
    reason: str
    """Why not; empty if whole."""

    @property
    def state(self) -> str | int:
        """The argument of `rollback`: a restore point's name, or a standing snapshot's step."""
        return self.name or self.step


class HyperparameterGroups(Table[Hyperparameters]):
    """Parameter groups of all optimizers, at one step."""

    columns = (
        ("optimizer", lambda row: str(row.optimizer)),
        ("group", lambda row: str(row.group)),
        ("values", lambda row: ", ".join(f"{name}={one}" for name, one in row.values.items())),
    )
    row_type = Hyperparameters
    about = ("step",)
    step: int

    def summary(self) -> str:
        return f"{len(self)} groups at step {self.step}"


class Marks(Table[Mark]):
    """States that training can return to, lowest step first."""

    columns = (
        ("name", lambda row: row.name),
        ("step", lambda row: str(row.step)),
        ("bytes", lambda row: str(row.size_bytes)),
        ("by", lambda row: row.by),
        ("whole", lambda row: "yes" if row.whole else row.reason),
    )
    row_type = Mark

    def summary(self) -> str:
        return f"{len(self)} states"


class MarkCalls:
    """Requests about the kept states of one job."""

    def __init__(self, edits: EditCalls) -> None:
        self._edits = edits

    async def make(self, name: str, deadline_s: float) -> Mark:
        self._edits.check_outside("mark", ELSEWHERE)
        return self._mark(await self._edits.send("POST", "/marks", {"name": name}, deadline_s))

    async def all(self, deadline_s: float) -> Marks:
        found = await self._edits.send("GET", "/marks", None, deadline_s)
        return Marks(map(self._mark, found["marks"]))

    async def drop(self, name: str, deadline_s: float) -> None:
        await self._edits.send("DELETE", f"/marks/{segment(name)}", None, deadline_s)

    async def roll_back(self, to: str | int, note: str, deadline_s: float) -> Edit:
        """Create the edit that returns training to a state."""
        if isinstance(to, int) and (isinstance(to, bool) or to < 0):
            raise UsageError(
                f"to: {to}; expected a restore point, its name, or a step of mesh.marks()"
            )
        body = {"id": new_edit_id(), "mark" if isinstance(to, str) else "step": to, "note": note}
        return await self._edits.begin("/rollback", body, deadline_s)

    async def groups(self, deadline_s: float) -> HyperparameterGroups:
        found = await self._edits.send("GET", "/hyperparameters", None, deadline_s)

        def parse() -> HyperparameterGroups:
            rows = (read_document(Hyperparameters, one) for one in found["groups"])
            return HyperparameterGroups(rows, step=int(found["step"]))

        return self._edits.rest.read(parse)

    async def change(
        self, group: str | int, values: Mapping[str, Any], note: str, deadline_s: float
    ) -> Edit:
        """Create the edit that sets hyper-parameters."""
        optimizer, number = parse_group(group)
        body = {
            "id": new_edit_id(),
            "optimizer": optimizer,
            "group": number,
            "values": {name: _plain(name, value) for name, value in values.items()},
            "note": note,
        }
        return await self._edits.begin("/hyperparameters", body, deadline_s)

    def _mark(self, found: Mapping[str, Any]) -> Mark:
        return self._edits.rest.read(lambda: read_document(Mark, found))


def parse_group(text: str | int) -> tuple[int, int]:
    """Optimizer and group of "group 1", 1 or "optimizer 0 group 1". Raises UsageError."""
    found = _GROUP.fullmatch(str(text).strip())
    if found is None:
        raise UsageError(f"group: {str(text)[:64]!r}; expected 'group N' or 'optimizer M group N'")
    return int(found["optimizer"] or 0), int(found["group"])


def _plain(name: str, value: Any) -> Any:
    """The value as a number or a list of numbers; UsageError if it is neither."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(name, one) for one in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{name}: {value!r}; expected a number, or a tuple of numbers")
    return value
