"""From domain errors to gRPC statuses, with google.rpc.ErrorInfo beside the text."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Never

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from paramd.errors import ParamdError, codes_of

DOMAIN = "paramd"
MAX_DETAIL_CHARS = 2048

log = logging.getLogger("paramd.control")


async def abort(context: Any, error: ParamdError, code: grpc.StatusCode | None = None) -> Never:
    """Ends a call with the status of a domain error; `code` replaces the table's."""
    code = code if code is not None else grpc.StatusCode[codes_of(error).grpc]
    text = str(error)[:MAX_DETAIL_CHARS]
    info = any_pb2.Any()
    info.Pack(error_details_pb2.ErrorInfo(reason=reason_of(error), domain=DOMAIN))
    status = status_pb2.Status(code=code.value[0], message=text, details=[info])
    trailers = (("grpc-status-details-bin", status.SerializeToString()),)
    await context.abort(code, text, trailing_metadata=trailers)
    raise AssertionError("abort always raises")


def reason_of(error: ParamdError) -> str:
    """The error's class as ErrorInfo and problem documents name it, e.g. "NOT_FOUND"."""
    name = type(error).__name__.removesuffix("Error")
    return "".join(f"_{c}" if c.isupper() and i else c for i, c in enumerate(name)).upper()


@asynccontextmanager
async def errors_as_statuses(context: Any, method: str) -> AsyncIterator[None]:
    """Maps what a handler raises; what we did not expect is logged, not told."""
    try:
        yield
    except ParamdError as error:
        await abort(context, error)
    except grpc.aio.AbortError:
        raise
    except Exception:
        log.exception("%s failed", method)
        hidden = ParamdError("internal error; the control plane's log has the details")
        await abort(context, hidden)
