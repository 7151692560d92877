"""First of all interceptors: who may call what. What is not in the table is denied."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import grpc
import grpc.aio

from paramd.errors import DeniedError, ParamdError, UnreachableError
from paramd.tickets import Claims, Role

SERVICE = "paramd.v1.SidecarService"

_READERS = frozenset({Role.READER, Role.CONTROL, Role.SIDECAR})
_CONTROL = frozenset({Role.CONTROL})

# Health says SERVING or not, and nothing else: probes of an operator have no ticket.
OPEN_METHODS = frozenset(
    {
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/List",
        "/grpc.health.v1.Health/Watch",
    }
)
ROLES: dict[str, frozenset[Role]] = {
    f"/{SERVICE}/GetState": _READERS,
    f"/{SERVICE}/GetMesh": _READERS,
    f"/{SERVICE}/GetLayout": _READERS,
    f"/{SERVICE}/PinSnapshot": _READERS,
    f"/{SERVICE}/CaptureBoundary": _CONTROL,
    f"/{SERVICE}/ReadSnapshot": _READERS,
    f"/{SERVICE}/RenewSnapshot": _READERS,
    f"/{SERVICE}/ReleaseSnapshot": _READERS,
    f"/{SERVICE}/ComputeStats": _READERS,
    f"/{SERVICE}/PoolSnapshot": _READERS,
    f"/{SERVICE}/ListSnapshots": _READERS,
    f"/{SERVICE}/DigestSnapshot": _READERS,
    f"/{SERVICE}/GetMetrics": _READERS,
    f"/{SERVICE}/Summon": _READERS,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _READERS,
}

Verify = Callable[[str], Claims]
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Refuses a call before its request is read."""

    def __init__(self, verify: Verify) -> None:
        self._verify = verify

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        details = handler_call_details
        try:
            authorize(str(details.method), details.invocation_metadata or (), self._verify)
        except UnreachableError as error:
            return _refusing(grpc.StatusCode.UNAVAILABLE, error)
        except _UnknownCallerError as error:
            return _refusing(grpc.StatusCode.UNAUTHENTICATED, error)
        except DeniedError as error:
            return _refusing(grpc.StatusCode.PERMISSION_DENIED, error)
        return await continuation(details)


class _UnknownCallerError(DeniedError):
    """No ticket, or one that is not good here and now."""


def authorize(method: str, metadata: Iterable[Any], verify: Verify) -> None:
    """Returns when the caller may call `method`.

    Raises:
        DeniedError: it may not.
        UnreachableError: no trainer has attached, so nobody can be known yet.
    """
    if method in OPEN_METHODS:
        return
    allowed = ROLES.get(method)
    if allowed is None:
        raise DeniedError(f"{method[:128]!r} is not a method that anybody may call here")
    values = [value for key, value in metadata if key == "authorization"]
    scheme, _, ticket = values[0].partition(" ") if len(values) == 1 else ("", "", "")
    if not isinstance(scheme, str) or scheme.lower() != "bearer":
        raise _UnknownCallerError(
            "the call has no ticket; send metadata 'authorization: Bearer <ticket>' once "
            "(the control plane gives tickets out)"
        )
    try:
        claims = verify(ticket)
    except DeniedError as error:
        raise _UnknownCallerError(str(error)) from None
    if claims.role not in allowed:
        roles = ", ".join(sorted(role.value for role in allowed))
        raise DeniedError(f"a ticket of role {claims.role.value} may not call it; needed: {roles}")


def _refusing(code: grpc.StatusCode, error: ParamdError) -> Any:
    async def refuse(_requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(code, str(error))

    # Streams on both sides: nothing of the request is waited for.
    return grpc.stream_stream_rpc_method_handler(refuse)
