"""Ids by their first characters, as lists and messages print them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from sqlalchemy import Connection, Table, select

from paramd.errors import NotFoundError, UsageError
from paramd_service.control.store.store import Store

ID_CHARS = 32
_HEX = re.compile("[0-9a-f]+")
_NAMED = 4
"""Candidates that an error names."""


async def whole_id(store: Store, table: Table, job: str, given: str, *, see: str) -> str:
    """The id of the job's one row that `given` begins; whole ids are returned unseen.

    Raises: as `only`; StoreError.
    """
    if len(given) == ID_CHARS:
        return given
    found: list[str] = []
    # Digits below letters in every collation, so a range does; the id's index serves it.
    if _HEX.fullmatch(given):
        key = table.c.id
        chosen = select(key).where(table.c.job == job, key >= given, key < given + "g")

        def work(connection: Connection) -> list[str]:
            rows = connection.execute(chosen.order_by(key).limit(_NAMED + 1)).all()
            return [str(row[0]) for row in rows]

        found = await store.read(work)
    return only(found, given, see=see)


def only(found: Sequence[str], given: str, *, see: str) -> str:
    """The one id of `found`, which are those that `given` begins.

    Args:
        see: the command that lists such ids.

    Raises:
        NotFoundError: there is none.
        UsageError: there are several; it names them.
    """
    if not found:
        raise NotFoundError(f"no id begins with {given[:ID_CHARS]!r}; see: {see}")
    if len(found) > 1:
        named = ", ".join(found[:_NAMED]) + (", ..." if len(found) > _NAMED else "")
        raise UsageError(f"several ids begin with {given!r}: {named}; give more characters")
    return found[0]
