"""The first interceptor: who may call what. Methods that are not in the table are denied."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextvars import ContextVar
from typing import Any

import grpc
import grpc.aio

from paramd import errors
from paramd.errors import DeniedError, ParamdError, UnreachableError
from paramd.security.tickets import Claims, Role
from paramd_service import shares
from paramd_service.shares import Who

SERVICE = "paramd.v1.SidecarService"

_EDITORS = frozenset({Role.EDITOR, Role.CONTROL})
_READERS = _EDITORS | {Role.READER}
_VIEWERS = _READERS | {Role.VIEWER}
_CONTROL = frozenset({Role.CONTROL})

# Health says SERVING or not, and nothing else: an operator's probes have no ticket.
OPEN_METHODS = frozenset(
    {
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/List",
        "/grpc.health.v1.Health/Watch",
    }
)
ROLES: dict[str, frozenset[Role]] = {
    f"/{SERVICE}/GetState": _VIEWERS,
    f"/{SERVICE}/GetMesh": _VIEWERS,
    f"/{SERVICE}/GetLayout": _VIEWERS,
    f"/{SERVICE}/PinSnapshot": _READERS,
    f"/{SERVICE}/ReachBoundary": _CONTROL,
    f"/{SERVICE}/WithdrawBoundary": _CONTROL,
    f"/{SERVICE}/RenewHold": _CONTROL,
    f"/{SERVICE}/StageEdit": _EDITORS,
    f"/{SERVICE}/GetEdit": _EDITORS,
    f"/{SERVICE}/PreviewEdit": _EDITORS,
    f"/{SERVICE}/DropEdit": _CONTROL,
    f"/{SERVICE}/ReadSnapshot": _READERS,
    f"/{SERVICE}/RenewSnapshot": _READERS,
    f"/{SERVICE}/ReleaseSnapshot": _READERS,
    f"/{SERVICE}/ComputeStats": _READERS,
    f"/{SERVICE}/PoolSnapshot": _READERS,
    f"/{SERVICE}/ListSnapshots": _READERS,
    f"/{SERVICE}/DigestSnapshot": _READERS,
    f"/{SERVICE}/GetMetrics": _VIEWERS,
    f"/{SERVICE}/Summon": _READERS,
    f"/{SERVICE}/StreamGradients": _READERS,
    f"/{SERVICE}/BeginExport": _CONTROL,
    f"/{SERVICE}/WriteExportFile": _CONTROL,
    f"/{SERVICE}/StoreExportFile": _CONTROL,
    f"/{SERVICE}/VerifyExportFile": _CONTROL,
    f"/{SERVICE}/ReadExportFile": _CONTROL,
    f"/{SERVICE}/StreamExportFile": _CONTROL,
    f"/{SERVICE}/FinishExport": _CONTROL,
    f"/{SERVICE}/DropExport": _CONTROL,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _VIEWERS,
}

CALLER_TICKET: ContextVar[str] = ContextVar("paramd_caller_ticket")
"""Ticket of the call that the current task serves, for forwarding."""

CALLER: ContextVar[Claims] = ContextVar("paramd_caller")
"""The claims of that ticket."""


def _who(claims: Claims, metadata: Iterable[Any]) -> Who:
    """Whose token a call is for; the control plane names the token that it calls on behalf of."""
    return claims.token_id or errors.asked_by_of(metadata) or None


Verify = Callable[[str], Claims]
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Refuses a call before its request is read."""

    def __init__(
        self, verify: Verify, refused: Callable[[str, str], None] = lambda method, reason: None
    ) -> None:
        """`refused` is called with the method and the reason of every denied call."""
        self._verify = verify
        self._refused = refused

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        details = handler_call_details
        try:
            found = authorize(str(details.method), details.invocation_metadata or (), self._verify)
        except UnreachableError as error:
            return _refusing(grpc.StatusCode.UNAVAILABLE, error)
        except _UnknownCallerError as error:
            self._refused(str(details.method), str(error))
            return _refusing(grpc.StatusCode.UNAUTHENTICATED, error)
        except DeniedError as error:
            self._refused(str(details.method), str(error))
            return _refusing(grpc.StatusCode.PERMISSION_DENIED, error)
        if found is not None:
            # The handler runs in this task, so it sees these variables.
            CALLER_TICKET.set(found[0])
            CALLER.set(found[1])
            who = _who(found[1], details.invocation_metadata or ())
            shares.CALLER.set(who)
            errors.asked_by.set(who or "")
        return await continuation(details)


class _UnknownCallerError(DeniedError):
    """No ticket, or one that is not valid here."""


def authorize(method: str, metadata: Iterable[Any], verify: Verify) -> tuple[str, Claims] | None:
    """The caller's ticket and claims if it may call `method`; None for a method open to all.

    Raises:
        DeniedError: it may not.
        UnreachableError: no trainer has attached, so no ticket can be verified yet.
    """
    if method in OPEN_METHODS:
        return None
    allowed = ROLES.get(method)
    if allowed is None:
        raise DeniedError(f"{method[:128]!r} is not a method that anybody may call here")
    values = [value for key, value in metadata if key == "authorization"]
    value = values[0] if len(values) == 1 and isinstance(values[0], str) else ""
    scheme, _, ticket = value.partition(" ")
    if scheme.lower() != "bearer":
        raise _UnknownCallerError(
            "the call has no ticket; send metadata 'authorization: Bearer <ticket>' once "
            "(the control plane gives tickets out)"
        )
    try:
        claims = verify(ticket)
    except DeniedError as error:
        raise _UnknownCallerError(str(error)) from None
    if claims.role not in allowed:
        raise DeniedError(_wrong_role(claims.role, allowed))
    return ticket, claims


def check_reader(claims: Claims) -> None:
    """Raise DeniedError unless the ticket permits reading values."""
    if claims.role not in _READERS:
        raise DeniedError(_wrong_role(claims.role, _READERS))


def check_editor(claims: Claims) -> None:
    """Raise DeniedError unless the ticket permits staging edits."""
    if claims.role not in _EDITORS:
        raise DeniedError(_wrong_role(claims.role, _EDITORS))


def _wrong_role(found: Role, allowed: frozenset[Role]) -> str:
    roles = ", ".join(sorted(role.value for role in allowed))
    return f"a ticket of role {found.value} may not do that; needed: {roles}"


def _refusing(code: grpc.StatusCode, error: ParamdError) -> Any:
    async def refuse(_requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(code, str(error))

    # Stream-stream: the refusal does not wait for the request.
    return grpc.stream_stream_rpc_method_handler(refuse)
