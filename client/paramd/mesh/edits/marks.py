"""REST calls for marks, rollbacks and hyper-parameters, and what they return."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from paramd.errors import UsageError
from paramd.mesh.edits.calls import Edit, EditCalls, new_edit_id
from paramd.mesh.peers.control import read_document, readable
from paramd.mesh.results import Table

_GROUP = re.compile(r"(?:optimizer\s+(?P<optimizer>\d+)\s+)?group\s+(?P<group>\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A complete state that the sidecars keep in memory."""

    name: str
    """Empty: a standing snapshot, which the next ones replace."""
    step: int
    size_bytes: int
    """Of all ranks."""
    made_s: float | None
    """Seconds since the Unix epoch; None when unknown."""
    by: str
    """Name of the token that made it; empty of a standing snapshot."""
    whole: bool
    """Whether all ranks have it."""
    reason: str
    """Why not; empty if whole."""


class Marks(Table[Mark]):
    """States that training can be put back to, lowest step first."""

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
        """Keep the present state."""
        return self._mark(await self._edits.send("POST", "/marks", {"name": name}, deadline_s))

    async def all(self, deadline_s: float) -> Marks:
        """The states that there are."""
        found = await self._edits.send("GET", "/marks", None, deadline_s)
        return Marks([self._mark(one) for one in found["marks"]])

    async def drop(self, name: str, deadline_s: float) -> None:
        """Forget a mark."""
        await self._edits.send("DELETE", f"/marks/{quote(name, safe='')}", None, deadline_s)

    async def roll_back(self, to: str | int, note: str, deadline_s: float) -> Edit:
        """Create the edit that puts training back."""
        body = {"id": new_edit_id(), "mark" if isinstance(to, str) else "step": to, "note": note}
        return await self._edits.begin("/rollback", body, deadline_s)

    async def change(
        self, group: str, values: Mapping[str, Any], note: str, deadline_s: float
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
        with readable(self._edits.url):
            return read_document(Mark, found)


def parse_group(text: str) -> tuple[int, int]:
    """Optimizer and group of "group 1" or "optimizer 0 group 1". Raises UsageError."""
    found = _GROUP.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"group: {text[:64]!r}; expected 'group N' or 'optimizer M group N'")
    return int(found["optimizer"] or 0), int(found["group"])


def _plain(name: str, value: Any) -> Any:
    """A number, or a list of numbers. Raises UsageError."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(name, one) for one in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{name}: {value!r}; expected a number, or a tuple of numbers")
    return value
