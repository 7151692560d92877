"""How a domain error reaches a gRPC client: one status, one public text, one reason."""

from __future__ import annotations

import secrets
from typing import Any

import grpc
import grpc.aio

from paramd.errors import MAX_ID_CHARS, METADATA_KEY, ParamdError, codes_of, exhausted_of, reason_of
from paramd_service.sidecar.log import Log

DOMAIN = "paramd"
RETRY_AFTER_S = 0.1
_DETAILS_KEY = "grpc-status-details-bin"


async def abort_with(
    context: grpc.aio.ServicerContext[Any, Any],
    error: ParamdError,
    code: grpc.StatusCode | None = None,
) -> None:
    """End the call with the error's status and ErrorInfo. Always raises.

    `code` overrides the table's status for the error.
    """
    codes = codes_of(error)
    code = code if code is not None else grpc.StatusCode[codes.grpc]
    details = _details(code, error, retry=codes.retry)
    await context.abort(code, str(error), trailing_metadata=((_DETAILS_KEY, details),))


async def abort_internal(
    context: grpc.aio.ServicerContext[Any, Any], error: Exception, log: Log
) -> None:
    """End the call without revealing what went wrong, unless something has run out; the log has
    the details, under an id."""
    error_id = secrets.token_hex(4)
    log(
        "internal-error",
        id=error_id,
        error=repr(error),
        at=_where(error),
        request_id=_request_id(context),
    )
    if (told := exhausted_of(error)) is not None:
        await abort_with(context, told)
    await context.abort(
        grpc.StatusCode.INTERNAL, f"internal error, see the sidecar's log (id {error_id})"
    )


def _request_id(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """The caller's request id, truncated: anyone may send anything."""
    for key, value in context.invocation_metadata() or ():
        if key == METADATA_KEY and isinstance(value, str):
            return value[:MAX_ID_CHARS]
    return ""


def _where(error: Exception) -> str:
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return ""
    return f"{traceback.tb_frame.f_code.co_filename}:{traceback.tb_lineno}"


def _details(code: grpc.StatusCode, error: ParamdError, *, retry: bool) -> bytes:
    # Imported on first use: a sidecar without errors does not pay for them.
    from google.protobuf import any_pb2, duration_pb2
    from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

    status = status_pb2.Status(code=code.value[0], message=str(error))
    details: list[Any] = [error_details_pb2.ErrorInfo(reason=reason_of(error), domain=DOMAIN)]
    if retry:
        delay = duration_pb2.Duration(nanos=int(RETRY_AFTER_S * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return bytes(status.SerializeToString())
