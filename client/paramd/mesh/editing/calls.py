"""Edits and holds over the control plane's REST side."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote, urlencode

from paramd.errors import UnreachableError
from paramd.mesh.editing.results import (
    Edit,
    Edits,
    Hold,
    parse_edit,
    parse_hold,
    unreadable,
)
from paramd.mesh.rest import REST_TIMEOUT_S, RestClient

_WAIT_S: Final = 3.0
"""How long one request lets the control plane wait; below the deadline of a request."""

_AGAIN_S: Final = 0.2
_PAGE: Final = 200


def new_edit_id() -> str:
    """A name for an edit, made before it is sent: sending it twice does it once."""
    return secrets.token_hex(16)


class EditCalls:
    """Requests about one job. What is idempotent is asked again when nobody answered."""

    def __init__(self, rest: RestClient, job: str) -> None:
        self._rest = rest
        self._path = f"/jobs/{quote(job, safe='')}"

    async def create(self, body: Mapping[str, Any], deadline_s: float) -> Edit:
        """Creates the edit that `body["id"]` names; without operands it is committed too."""
        body = {**body, "wait_s": _wait_s(deadline_s)}
        return self._edit(await self._idempotent("POST", "/edits", body, deadline_s))

    async def commit(self, edit_id: str, deadline_s: float) -> Edit:
        """Has a staged edit applied."""
        body = {"wait_s": _wait_s(deadline_s)}
        return self._edit(
            await self._idempotent("POST", f"/edits/{edit_id}/commit", body, deadline_s)
        )

    async def preview(self, edit_id: str, deadline_s: float) -> Edit:
        """Statistics before and after a staged edit."""
        return self._edit(
            await self._idempotent("POST", f"/edits/{edit_id}/preview", {}, deadline_s)
        )

    async def undo(self, edit_id: str, undo_id: str, *, force: bool, deadline_s: float) -> Edit:
        """Creates the edit `undo_id` that undoes another."""
        body = {"id": undo_id, "force": force, "wait_s": _wait_s(deadline_s)}
        return self._edit(
            await self._idempotent("POST", f"/edits/{edit_id}/undo", body, deadline_s)
        )

    async def abort(self, edit_id: str) -> Edit:
        """Calls an edit off, unless the trainers may have agreed on it."""
        return self._edit(await self._rest.send("DELETE", f"{self._path}/edits/{edit_id}"))

    async def get(self, edit_id: str, wait_s: float = 0.0) -> Edit:
        """One edit. Waits up to `wait_s` seconds for its end."""
        path = f"{self._path}/edits/{quote(edit_id, safe='')}?wait_s={wait_s:g}"
        return self._edit(await self._rest.send("GET", path))

    async def ended(self, edit: Edit, deadline_s: float) -> Edit:
        """The edit when it has ended, or as it is at the deadline."""
        while not edit.ended and (left_s := deadline_s - time.monotonic()) > 0:
            try:
                edit = await self.get(edit.id, min(_WAIT_S, left_s))
            except UnreachableError:
                if time.monotonic() + _AGAIN_S >= deadline_s:
                    raise
                await asyncio.sleep(_AGAIN_S)
        return edit

    async def all(self, *, state: str | None, limit: int) -> Edits:
        """Edits of the job, newest first."""
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

    async def hold(
        self, method: str, path: str, body: Mapping[str, Any] | None, deadline_s: float
    ) -> Hold:
        """A request about the job's hold; `path` begins behind "/hold"."""
        # Agreeing takes as long as a step of the training takes.
        found = await self._rest.send(
            method, f"{self._path}/hold{path}", body, timeout_s=_left_s(deadline_s)
        )
        try:
            return parse_hold(found)
        except (KeyError, TypeError, ValueError) as error:
            raise unreadable(self._rest.url, error) from error

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
                # The id names it: whether it arrived or not, asking again does it once.
                if time.monotonic() + _AGAIN_S >= deadline_s:
                    raise
                await asyncio.sleep(_AGAIN_S)

    def _edit(self, found: Mapping[str, Any]) -> Edit:
        try:
            return parse_edit(found)
        except (KeyError, TypeError, ValueError) as error:
            raise unreadable(self._rest.url, error) from error


def edit_body(
    edit_id: str,
    ops: Sequence[Mapping[str, Any]],
    *,
    if_step: int | None,
    allow_nonfinite: bool,
    reset_moments: bool,
    note: str,
    dry_run: bool,
) -> dict[str, Any]:
    """The request of create_edit."""
    body: dict[str, Any] = {"id": edit_id, "ops": list(ops)}
    if if_step is not None:
        body["if_step"] = if_step
    flags = {"allow_nonfinite": allow_nonfinite, "reset_moments": reset_moments, "dry_run": dry_run}
    body.update({name: True for name, wanted in flags.items() if wanted})
    if note:
        body["note"] = note
    return body


def _wait_s(deadline_s: float) -> float:
    return round(min(_WAIT_S, max(deadline_s - time.monotonic(), 0.0)), 3)


def _left_s(deadline_s: float) -> float:
    return max(1.0, deadline_s - time.monotonic())
