"""The audit of a control plane and of its jobs, for admins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter
from sqlalchemy import Connection

from paramd_service.audit.rest import record_of, router
from paramd_service.control.parts import ControlPart, ReadStored, StoredRequest
from paramd_service.control.records.audit import links


class Audit(ControlPart):
    """Shows the chains of records."""

    name = "audit"

    @classmethod
    def stored(cls) -> Mapping[str, ReadStored]:
        return {"audit": _stored}

    def routes(self) -> Sequence[APIRouter]:
        return [router(self.host)]


def _stored(connection: Connection, given: StoredRequest) -> dict[str, Any]:
    order = "oldest" if given.oldest else "newest"
    found = links(connection, given.job, order=order, beyond_seq=None, limit=given.limit)
    return {
        "job": given.job,
        "records": [record_of(link).model_dump(mode="json") for link in found],
        "next_page_token": "",
    }
