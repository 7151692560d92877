"""The id of the request under way: it goes along to every process that works for it."""

from __future__ import annotations

from contextvars import ContextVar

METADATA_KEY = "x-request-id"
"""Header of HTTP, key of gRPC metadata."""

MAX_ID_CHARS = 64

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the request that this task serves or makes; empty when there is none."""


def metadata() -> tuple[tuple[str, str], ...]:
    """What a gRPC call takes along."""
    found = request_id.get()
    return ((METADATA_KEY, found),) if found else ()
