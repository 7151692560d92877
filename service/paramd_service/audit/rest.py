"""The audit: who changed what, with the hashed form of each record. For admins."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from paramd.chain import Link
from paramd.errors import UsageError
from paramd_service.control.parts import ControlHost

DEFAULT_LIMIT = 100
MAX_LIMIT = 1000

Limit = Annotated[int, Query(ge=1, le=MAX_LIMIT, description="Records on a page")]
Order = Annotated[Literal["newest", "oldest"], Query(description="Which records come first")]
PageToken = Annotated[str, Query(max_length=64, description="From the previous page")]


class AuditRecord(BaseModel):
    """One record. An intent precedes its effect, an outcome follows it."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "seq": 7,
                    "kind": "intent",
                    "time_ms": 1767225600000,
                    "actor": "owner",
                    "role": "admin",
                    "method": "token.create",
                    "incarnation": 3,
                    "step": -1,
                    "detail": {"name": "notebook", "role": "reader", "ttl_s": 86400.0},
                    "of": None,
                    "result": None,
                    "body": '{"actor":"owner", ...}',
                    "hash": "9f" * 32,
                }
            ]
        }
    )

    seq: int = Field(description="Position in the chain, from 1, without gaps")
    kind: str = Field(description="intent, outcome, or event (not an action of the service)")
    time_ms: int = Field(description="Milliseconds since the Unix epoch")
    actor: str = Field(description="Name of the token, or of a part of the service; may be empty")
    role: str
    method: str = Field(description='What was called, e.g. "token.create"')
    incarnation: int = Field(description="0: not about one run")
    step: int = Field(description="-1: unknown or not applicable")
    detail: dict[str, Any] = Field(description="Arguments, without secrets")
    of: int | None = Field(description="Of an outcome: seq of its intent")
    result: str | None = Field(description='Of an outcome: "done", "failed: <why>" or a word')
    body: str = Field(description="The record as it was hashed: canonical JSON")
    hash: str = Field(description="sha256(previous record's hash || body), hexadecimal")


class AuditPage(BaseModel):
    """A page of one chain."""

    job: str = Field(description="Job of the chain; empty: the site's own chain")
    records: list[AuditRecord]
    next_page_token: str = Field(description="Pass it to get the next page; empty at the end")


def router(host: ControlHost) -> APIRouter:
    routes = APIRouter(tags=["audit"])

    @routes.get("/audit")
    async def list_own_audit(
        limit: Limit = DEFAULT_LIMIT, order: Order = "newest", page_token: PageToken = ""
    ) -> AuditPage:
        """Audit of the control plane itself: tokens, starts, stops, refusals."""
        return await _page(host, host.records.chain, limit, order, page_token)

    @routes.get("/jobs/{job}/audit")
    async def list_audit(
        job: str, limit: Limit = DEFAULT_LIMIT, order: Order = "newest", page_token: PageToken = ""
    ) -> AuditPage:
        """Audit of a job; of an embedded control plane, too."""
        page = await _page(host, job, limit, order, page_token)
        if not page.records:
            host.jobs.get(job)  # raises NotFoundError for a job that never existed
        return page

    return routes


async def _page(host: ControlHost, job: str, limit: int, order: str, page_token: str) -> AuditPage:
    links = await host.records.audit.page(
        job, order=order, beyond_seq=_seq(page_token, order), limit=limit
    )
    more = len(links) == limit and (order == "oldest" or links[-1].seq > 1)
    return AuditPage(
        job=job,
        records=[record_of(link) for link in links],
        next_page_token=f"{order}-{links[-1].seq}" if more else "",
    )


def _seq(page_token: str, order: str) -> int | None:
    """Last record of the previous page; None for the first page. Raises UsageError."""
    if not page_token:
        return None
    found = re.fullmatch(r"(newest|oldest)-([0-9]{1,15})", page_token)
    if found is None or found[1] != order:
        raise UsageError(f"page_token: not of order={order}; omit it to start over")
    return int(found[2])


def record_of(link: Link) -> AuditRecord:
    """Parse a record as far as possible: it may have been tampered with."""
    try:
        found = json.loads(link.body)
    except (ValueError, RecursionError):
        found = None
    body = found if isinstance(found, dict) else {}
    detail = body.get("detail")
    step = _number(body, "step")
    # Records are never rewritten; older versions wrote "epoch".
    incarnation = _count(body, "incarnation") or _count(body, "epoch")
    return AuditRecord(
        seq=link.seq,
        kind=_word(body, "kind") or "unreadable",
        time_ms=_count(body, "time_ms"),
        actor=_word(body, "actor"),
        role=_word(body, "role"),
        method=_word(body, "method"),
        incarnation=incarnation,
        step=step if step is not None else -1,
        detail=detail if isinstance(detail, dict) else {},
        of=_number(body, "of"),
        result=_text(body, "result"),
        body=link.body,
        hash=link.hash,
    )


def _text(body: dict[str, Any], key: str) -> str | None:
    value = body.get(key)
    return value if isinstance(value, str) else None


def _word(body: dict[str, Any], key: str) -> str:
    return _text(body, key) or ""


def _count(body: dict[str, Any], key: str) -> int:
    return _number(body, key) or 0


def _number(body: dict[str, Any], key: str) -> int | None:
    value = body.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
