"""The chain's rows, appended one at a time, each after checking the last one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import Connection, insert, select, text

from paramd.chain import START, Head, Link, canonical, link_hash
from paramd_service.control.store.schema import audit

LOCK_KEY = 0x70617261_6D640002
"""PostgreSQL advisory lock held while appending."""


class ChainBrokenError(Exception):
    """The store has lost or altered an earlier record; appending would hide that."""


def append(
    connection: Connection, job: str, known: Head, record: Callable[[int], Mapping[str, Any]]
) -> Link:
    """Append `record(seq)` to a job's chain; the caller commits.

    Args:
        known: The newest head kept apart from the store; the chain must still contain it.

    Raises:
        ChainBrokenError: it does not.
    """
    if connection.dialect.name == "postgresql":
        # Several control planes may share one chain. SQLite has a single writer anyway.
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": LOCK_KEY})
    last = head(connection, job)
    if known.seq and (last if last.seq == known.seq else _at(connection, job, known.seq)) != known:
        raise ChainBrokenError(
            f"record {known.seq} of the audit was removed or replaced; run: paramd audit verify"
        )
    seq = last.seq + 1
    body = canonical({**record(seq), "job": job, "prev": last.hash, "seq": seq})
    link = Link(seq, body, link_hash(last.hash, body))
    connection.execute(insert(audit).values(job=job, seq=seq, body=body, hash=link.hash))
    return link


def head(connection: Connection, job: str) -> Head:
    """The chain's head according to the store."""
    chosen = (
        select(audit.c.seq, audit.c.hash)
        .where(audit.c.job == job)
        .order_by(audit.c.seq.desc())
        .limit(1)
    )
    row = connection.execute(chosen).first()
    return Head(row.seq, row.hash) if row is not None else START


def links(connection: Connection, job: str, *, after_seq: int, limit: int) -> list[Link]:
    """Records after `after_seq`, oldest first."""
    chosen = (
        select(audit).where(audit.c.job == job, audit.c.seq > after_seq).order_by(audit.c.seq)
    ).limit(limit)
    return [Link(row.seq, row.body, row.hash) for row in connection.execute(chosen)]


def newest(connection: Connection, job: str, *, before_seq: int | None, limit: int) -> list[Link]:
    """Records before `before_seq` (None: all), newest first."""
    chosen = select(audit).where(audit.c.job == job).order_by(audit.c.seq.desc()).limit(limit)
    if before_seq is not None:
        chosen = chosen.where(audit.c.seq < before_seq)
    return [Link(row.seq, row.body, row.hash) for row in connection.execute(chosen)]


def _at(connection: Connection, job: str, seq: int) -> Head | None:
    chosen = select(audit.c.hash).where(audit.c.job == job, audit.c.seq == seq)
    found = connection.execute(chosen).scalar()
    return Head(seq, found) if found is not None else None
