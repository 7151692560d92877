"""REST calls for edits and holds, and the values they return."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import Any, Final
from urllib.parse import quote, urlencode

from paramd.errors import ConflictError, DeadlineError, ParamdError, UnreachableError, UsageError
from paramd.layout.edits.kinds import BY_WORD, KINDS
from paramd.layout.edits.ops import EDIT_ENDS, EditState, OpSpec
from paramd.mesh.peers.control import REST_TIMEOUT_S, RestClient, read_document, readable
from paramd.mesh.peers.discovery import SidecarFinder
from paramd.mesh.results import Table
from paramd.wire import LEASE_S, MAX_LEASE_S


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueRange:
    """Statistics of all elements that an edit selects."""

    min: float
    max: float
    mean: float
    norm: float
    nan_count: int
    inf_count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Edit:
    """One edit, as of the last response."""

    id: str
    job: str
    incarnation: int
    state: EditState
    reason: str
    """Why it was not applied; empty otherwise."""
    step: int
    """Step at whose boundary it was applied; -1 if it was not."""
    actor: str
    """Name of the token that created it."""
    committed_by: str
    """Name of the token that committed it; empty before that."""
    note: str
    dry_run: bool
    """It only computed `before` and `after`: it changes nothing and ends as ABORTED."""
    created_s: float
    """Seconds since the Unix epoch."""
    ops: tuple[Mapping[str, Any], ...]
    """The operations, with the names that matched."""
    size_bytes: int
    """Bytes of the changed elements; replicas count once."""
    stop_ms: float | None
    """Longest pause it caused on any rank."""
    before: ValueRange | None
    after: ValueRange | None
    undoable: bool
    undo_refusal: str
    """Why it cannot be undone; empty when it can."""
    undo_of: str
    undone_by: str
    rollback: Mapping[str, Any] | None
    """The state it puts back, `{"mark", "step"}`; of an undo, the one it leaves. Else None."""
    hyperparameters: Mapping[str, Any] | None
    """What it sets instead of parameters, `{"optimizer", "group", "values"}`; else None."""
    warning: str
    """What a trainer had to say about it; else empty."""

    @property
    def ended(self) -> bool:
        """Whether the state is terminal."""
        return self.state in EDIT_ENDS

    @property
    def names(self) -> tuple[str, ...]:
        """Names changed; the control plane lists up to 100 per operation."""
        return tuple(name for op in self.ops for name in op.get("names", ()))

    def __repr__(self) -> str:
        where = f" at step {self.step}" if self.state is EditState.APPLIED else ""
        why = f": {self.reason}" if self.reason else ""
        return f"<paramd.Edit {self.id[:8]} {self.state}{where}, {len(self.names)} names{why}>"


@dataclass(frozen=True, kw_only=True, slots=True)
class Hold:
    """State of a job's hold."""

    state: str
    """running, pausing, held or stepping."""
    step: int
    """Finished updates."""
    holder: str
    """Name of the holder's token; empty without a hold."""
    steps_left: int
    lease_left_s: float

    @property
    def held(self) -> bool:
        return self.state in ("held", "stepping")


def parse_edit(found: Mapping[str, Any]) -> Edit:
    """Parse an EditDocument. Raises KeyError, TypeError or ValueError."""
    return read_document(
        Edit,
        found,
        state=EditState(found["state"]),
        committed_by=str(found["committed_by"] or ""),
        ops=tuple(dict(op) for op in found["ops"]),
        before=_range(found["before"]),
        after=_range(found["after"]),
        undoable=bool(found["undo"]["possible"]),
        undo_refusal=str(found["undo"]["reason"] or ""),
        undo_of=str(found["undo_of"] or ""),
        undone_by=str(found["undone_by"] or ""),
        rollback=found["rollback"],
        hyperparameters=found["hyperparameters"],
    )


def check_applied(edit: Edit) -> Edit:
    """Return the edit if it was applied.

    Raises:
        ConflictError: it was aborted, on all ranks; or its incarnation ended.
        DeadlineError: it has not ended.
    """
    if edit.state is EditState.APPLIED:
        return edit
    if edit.state is EditState.ABORTED:
        raise ConflictError(f"edit {edit.id} was applied on no rank: {edit.reason}")
    if edit.state is EditState.LOST:
        raise ConflictError(f"edit {edit.id} was lost with its incarnation: {edit.reason}")
    raise DeadlineError(
        f"edit {edit.id} is still {edit.state}; it will be applied on all ranks or on none. See "
        f"mesh.get_edit({edit.id!r}), or allow more time (timeout=)"
    )


def what_text(edit: Edit) -> str:
    """The first operations, as text."""
    if edit.undo_of:
        return f"undo {edit.undo_of[:8]}"
    if edit.rollback is not None:
        mark, step = edit.rollback["mark"], edit.rollback["step"]
        return f"rollback to {mark} (step {step})" if mark else f"rollback to step {step}"
    if edit.hyperparameters is not None:
        change = edit.hyperparameters
        values = ", ".join(f"{name}={value}" for name, value in change["values"].items())
        return f"optimizer {change['optimizer']} group {change['group']}: {values}"
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


_RANGES = ("before", "after")


class Edits(Table[Edit]):
    """Edits, newest first."""

    columns = (
        ("id", lambda row: row.id[:8]),
        ("incarnation", lambda row: str(row.incarnation)),
        ("state", lambda row: str(row.state)),
        ("step", lambda row: str(row.step) if row.step >= 0 else ""),
        ("what", what_text),
        ("who", lambda row: row.actor),
        ("note", lambda row: row.note),
    )
    row_type = Edit

    @classmethod
    def _names(cls) -> Sequence[str]:
        """As `Table._names`, with the numbers of `before` and `after` as "before_min" and so on."""
        names = [name for name in super()._names() if name not in _RANGES]
        return [*names, *(f"{side}_{one.name}" for side in _RANGES for one in fields(ValueRange))]

    @classmethod
    def _record(cls, row: Any) -> dict[str, Any]:
        """As `Table._record`; None where an edit has no range."""
        record = {one.name: getattr(row, one.name) for one in fields(Edit)}
        ranges = {side: record.pop(side) for side in _RANGES}
        numbers = {
            f"{side}_{one.name}": getattr(found, one.name, None)
            for side, found in ranges.items()
            for one in fields(ValueRange)
        }
        return {**record, "state": str(row.state), **numbers}

    def summary(self) -> str:
        return f"{len(self)} edits"


def _range(found: Mapping[str, Any] | None) -> ValueRange | None:
    if found is None:
        return None
    # JSON has neither infinity nor NaN; both are sent as null.
    floats = ("min", "max", "mean", "norm")
    nans = {name: math.nan for name in floats if found[name] is None}
    return read_document(ValueRange, found, **nans)


_WAIT_S: Final = 3.0
"""Longest server-side wait of one request; below the request's timeout."""

_AGAIN_S: Final = 0.2
_PAGE: Final = 200

_RENEW_TIMEOUT_S: Final = 5.0
_FIRST_LOOK_S: Final = 0.01
_LAST_LOOK_S: Final = 0.5


def new_edit_id() -> str:
    """An id chosen by the client, so that resending a request is idempotent."""
    return secrets.token_hex(16)


@dataclass(frozen=True, kw_only=True, slots=True)
class EditTerms:
    """Options of an edit; see `AsyncMesh.edit`."""

    if_step: int | None = None
    reset_moments: bool = False
    allow_nonfinite: bool = False
    dry_run: bool = False
    note: str = ""


class EditCalls:
    """Edit and hold requests of one job. Idempotent ones are retried while unreachable."""

    def __init__(self, rest: RestClient, reach: SidecarFinder) -> None:
        self._rest = rest
        self._reach = reach

    async def create(
        self, edit_id: str, ops: Sequence[OpSpec], terms: EditTerms, deadline_s: float
    ) -> Edit:
        """Create an edit. Without tensor operands it is committed, too."""
        body: dict[str, Any] = {
            "id": edit_id,
            "ops": [op.document() for op in ops],
            "wait_s": _wait_s(deadline_s),
        }
        plain = asdict(EditTerms())
        body |= {name: said for name, said in asdict(terms).items() if said != plain[name]}
        return self._edit(await self._idempotent("POST", "/edits", body, deadline_s))

    async def commit(self, edit_id: str, deadline_s: float) -> Edit:
        """Commit a staged edit."""
        body = {"wait_s": _wait_s(deadline_s)}
        return self._edit(
            await self._idempotent("POST", f"/edits/{_q(edit_id)}/commit", body, deadline_s)
        )

    async def preview(self, edit_id: str, deadline_s: float) -> Edit:
        """Compute statistics before and after a staged edit."""
        return self._edit(
            await self._idempotent("POST", f"/edits/{_q(edit_id)}/preview", {}, deadline_s)
        )

    async def undo(self, edit_id: str, *, force: bool, deadline_s: float) -> Edit:
        """Create the edit that undoes another."""
        body = {"id": new_edit_id(), "force": force, "wait_s": _wait_s(deadline_s)}
        return self._edit(
            await self._idempotent("POST", f"/edits/{_q(edit_id)}/undo", body, deadline_s)
        )

    async def abort(self, edit_id: str) -> Edit:
        """Abort an edit, unless the trainers may have agreed to it."""
        return self._edit(await self._rest.send("DELETE", f"{self._path}/edits/{_q(edit_id)}"))

    async def get(self, edit_id: str, wait_s: float = 0.0) -> Edit:
        """One edit; waits up to `wait_s` seconds for its end."""
        path = f"{self._path}/edits/{_q(edit_id)}?wait_s={wait_s:g}"
        return self._edit(await self._rest.send("GET", path))

    async def ended(self, edit: Edit, deadline_s: float) -> Edit:
        """Poll an edit until it has ended or the deadline has passed."""
        while not edit.ended and (left_s := deadline_s - time.monotonic()) > 0:
            try:
                edit = await self.get(edit.id, min(_WAIT_S, left_s))
            except UnreachableError:
                if time.monotonic() + _AGAIN_S >= deadline_s:
                    raise
                await asyncio.sleep(_AGAIN_S)
        return edit

    async def all(self, *, state: str | None, limit: int) -> Edits:
        """Edits of the job, newest first. Raises UsageError for a bad state or limit."""
        if state is not None and state not in EditState.__members__:
            raise UsageError(f"state: {state!r}; expected one of {', '.join(EditState)}")
        if limit < 1:
            raise UsageError(f"limit: {limit}; expected at least 1")
        rows: list[Edit] = []
        token = ""
        while len(rows) < limit:
            query = {"limit": str(min(_PAGE, limit - len(rows)))}
            query |= {"state": state} if state is not None else {}
            query |= {"page_token": token} if token else {}
            found = await self._rest.send("GET", f"{self._path}/edits?{urlencode(query)}")
            rows += [self._edit(document) for document in found["edits"]]
            token = found.get("next_page_token", "")
            if not token:
                break
        return Edits(rows)

    @property
    def url(self) -> str:
        """The control plane's."""
        return self._rest.url

    async def begin(self, path: str, body: Mapping[str, Any], deadline_s: float) -> Edit:
        """Create an edit of another kind; `body` has its id."""
        body = {**body, "wait_s": _wait_s(deadline_s)}
        return self._edit(await self._idempotent("POST", path, body, deadline_s))

    async def send(
        self, method: str, path: str, body: Mapping[str, Any] | None, deadline_s: float
    ) -> Mapping[str, Any]:
        """Send a request about the job that may take until the deadline."""
        timeout_s = max(1.0, deadline_s - time.monotonic())
        found = await self._rest.send(method, self._path + path, body, timeout_s=timeout_s)
        return dict(found) if found else {}

    async def hold(
        self, method: str, path: str, body: Mapping[str, Any] | None, deadline_s: float
    ) -> Hold:
        """Send a hold request; `path` is appended to "/hold"."""
        # Not the usual timeout: agreement can take as long as a training step.
        timeout_s = max(1.0, deadline_s - time.monotonic())
        found = await self._rest.send(method, f"{self._path}/hold{path}", body, timeout_s=timeout_s)
        with readable(self._rest.url):
            return read_document(Hold, found)

    @property
    def _path(self) -> str:
        return f"/jobs/{quote(self._reach.document.job, safe='')}"

    async def _idempotent(
        self, method: str, path: str, body: Mapping[str, Any], deadline_s: float
    ) -> Mapping[str, Any]:
        while True:
            try:
                found = await self._rest.send(
                    method, self._path + path, body, timeout_s=_WAIT_S + REST_TIMEOUT_S
                )
                return dict(found)
            except UnreachableError:
                # The request may have arrived; the id makes a second one a no-op.
                if time.monotonic() + _AGAIN_S >= deadline_s:
                    raise
                await asyncio.sleep(_AGAIN_S)

    def _edit(self, found: Mapping[str, Any]) -> Edit:
        with readable(self._rest.url):
            return parse_edit(found)


def _q(edit_id: str) -> str:
    # Whatever a caller gives as an id stays one segment of the path.
    return quote(edit_id, safe="")


def _wait_s(deadline_s: float) -> float:
    return round(min(_WAIT_S, max(deadline_s - time.monotonic(), 0.0)), 3)


class Holder:
    """This mesh's hold. Use on one event loop."""

    def __init__(self, calls: EditCalls) -> None:
        self._calls = calls
        self._lease_s = LEASE_S
        self._renewing: asyncio.Task[None] | None = None

    async def pause(self, lease_s: float, *, renew: bool, deadline_s: float) -> Hold:
        """Begin a hold; with `renew`, renew its lease until `resume` or `stop_renewing`."""
        if not 0 < lease_s <= MAX_LEASE_S:
            raise UsageError(f"lease_s: {lease_s}; expected above 0 and at most {MAX_LEASE_S:g}")
        found = await self._calls.hold("POST", "", {"lease_s": lease_s}, deadline_s)
        # After the request: if it fails, a hold we already have must keep its renewals.
        await self.stop_renewing()
        if renew:
            self._lease_s = lease_s
            self._renewing = asyncio.create_task(self._renew(), name="paramd-hold")
        return found

    async def step(self, steps: int, *, wait: bool, deadline_s: float) -> Hold:
        """Run `steps` updates; with `wait`, return once all ranks hold again."""
        if steps < 1:
            raise UsageError(f"steps: {steps}; expected at least 1")
        found = await self._calls.hold("POST", "/step", {"steps": steps}, deadline_s)
        pause_s = _FIRST_LOOK_S
        while wait and found.state == "stepping":
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise DeadlineError(
                    f"{found.steps_left} of {steps} updates are left; training finishes them, "
                    "then holds again. Allow more time (timeout=), or do not wait (wait=False)"
                )
            await asyncio.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LAST_LOOK_S)
            found = await self._calls.hold("GET", "", None, deadline_s)
        if wait and not found.held:
            raise ConflictError(
                f"the hold ended before its {steps} updates did, at step {found.step}; training "
                "continues. Use a longer lease, or renew it"
            )
        return found

    async def resume(self, *, deadline_s: float) -> Hold:
        """End the hold. Idempotent."""
        await self.stop_renewing()
        return await self._calls.hold("DELETE", "", None, deadline_s)

    async def stop_renewing(self) -> None:
        """Stop renewing, so that the lease runs out. Idempotent."""
        task, self._renewing = self._renewing, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            # If renewing fails, the hold ends with its lease.
            with suppress(ParamdError):
                await self._calls.hold(
                    "POST",
                    "/renew",
                    {"lease_s": self._lease_s},
                    time.monotonic() + _RENEW_TIMEOUT_S,
                )
