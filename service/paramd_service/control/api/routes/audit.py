"""The audit, for admins: who changed what. Records come as they were hashed, too."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from paramd.chain import Link
from paramd.errors import UsageError
from paramd_service.control.api.routes.jobs import PROBLEMS
from paramd_service.control.api.services import Services

DEFAULT_LIMIT = 100
MAX_LIMIT = 1000

Limit = Annotated[int, Query(ge=1, le=MAX_LIMIT, description="Records on a page")]
Order = Annotated[Literal["newest", "oldest"], Query(description="Which come first")]
PageToken = Annotated[str, Query(max_length=64, description="From the page before")]


class AuditRecord(BaseModel):
    """One record. An intent comes before its effect, its outcome after it."""

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

    seq: int = Field(description="Position in the chain, 1 and up without gaps")
    kind: str = Field(description="intent, outcome, or event (no effect of ours)")
    time_ms: int = Field(description="Milliseconds since the Unix epoch")
    actor: str = Field(description="Name of the token, or of a part of the service; may be empty")
    role: str
    method: str = Field(description='What was called, e.g. "token.create"')
    incarnation: int = Field(description="0: not about one incarnation")
    step: int = Field(description="-1: not known, or of no matter")
    detail: dict[str, Any] = Field(description="Arguments; secrets as HMAC-SHA256 only")
    of: int | None = Field(description="An outcome's intent")
    result: str | None = Field(description='An outcome: "done", "failed: <why>" or a word')
    body: str = Field(description="The record as it was hashed: canonical JSON")
    hash: str = Field(description="sha256(hash of the record before || body), hexadecimal")


class AuditPage(BaseModel):
    """A page of one chain."""

    job: str = Field(description="Whose chain it is; empty: the site's own")
    anchor_seq: int = Field(description="The last record, as the file apart from the store has it")
    anchor_hash: str = Field(description="Its hash; compare with what the log told")
    records: list[AuditRecord]
    next_page_token: str = Field(description="Ask with it for the next page; empty at the end")


def router(services: Services) -> APIRouter:
    """/audit, /jobs/{job}/audit."""
    routes = APIRouter(tags=["audit"], responses=PROBLEMS)

    @routes.get("/audit")
    async def list_own_audit(
        limit: Limit = DEFAULT_LIMIT, order: Order = "newest", page_token: PageToken = ""
    ) -> AuditPage:
        """What was done with the control plane itself: tokens, starts, stops, refusals."""
        return await _page(services, services.records.chain, limit, order, page_token)

    @routes.get("/jobs/{job}/audit")
    async def list_audit(
        job: str,
        limit: Limit = DEFAULT_LIMIT,
        order: Order = "newest",
        page_token: PageToken = "",
    ) -> AuditPage:
        """What was done with a job; embedded, also with its control plane."""
        page = await _page(services, job, limit, order, page_token)
        if not page.records:
            # Nobody has recorded anything about jobs that never were.
            services.jobs.get(job)
        return page

    return routes


async def _page(services: Services, job: str, limit: int, order: str, page_token: str) -> AuditPage:
    audit = services.records.audit
    seq = _seq(page_token, order)
    # The head first: records that are added meanwhile lie behind it.
    anchor = await audit.anchor(job)
    if order == "oldest":
        links = await audit.oldest(job, after_seq=seq if seq is not None else 0, limit=limit)
    else:
        links = await audit.page(job, before_seq=seq, limit=limit)
    more = len(links) == limit and (order == "oldest" or links[-1].seq > 1)
    return AuditPage(
        job=job,
        anchor_seq=anchor.seq if anchor is not None else 0,
        anchor_hash=anchor.hash if anchor is not None else "",
        records=[_record(link) for link in links],
        next_page_token=f"{order}-{links[-1].seq}" if more else "",
    )


def _seq(page_token: str, order: str) -> int | None:
    """The record that a page ended with; None for the first page. Raises UsageError."""
    if not page_token:
        return None
    found = re.fullmatch(r"(newest|oldest)-([0-9]{1,15})", page_token)
    if found is None or found[1] != order:
        raise UsageError(f"page_token: not one of order={order}; leave it out to begin anew")
    return int(found[2])


def _record(link: Link) -> AuditRecord:
    """What can be read of a record, which somebody may have changed."""
    try:
        found = json.loads(link.body)
    except (ValueError, RecursionError):
        found = None
    body = found if isinstance(found, dict) else {}
    detail = body.get("detail")
    return AuditRecord(
        seq=link.seq,
        kind=_text(body, "kind") or "unreadable",
        time_ms=_number(body, "time_ms") or 0,
        actor=_text(body, "actor") or "",
        role=_text(body, "role") or "",
        method=_text(body, "method") or "",
        # Records are never rewritten: those of older versions say "epoch".
        incarnation=_number(body, "incarnation") or _number(body, "epoch") or 0,
        step=number if (number := _number(body, "step")) is not None else -1,
        detail=detail if isinstance(detail, dict) else {},
        of=_number(body, "of"),
        result=_text(body, "result"),
        body=link.body,
        hash=link.hash,
    )


def _text(body: dict[str, Any], key: str) -> str | None:
    value = body.get(key)
    return value if isinstance(value, str) else None


def _number(body: dict[str, Any], key: str) -> int | None:
    value = body.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
