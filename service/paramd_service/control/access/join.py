"""gRPC access: tickets, checked by role, job and rank; methods not listed are denied. Also maps
errors to statuses and rate-limits addresses that keep failing."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, Never

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from paramd.errors import ConflictError, DeniedError, ParamdError, codes_of, exhausted_of, reason_of
from paramd.security.tickets import Claims, Role, Verifier, claimed
from paramd_service.admission import OPEN_METHODS
from paramd_service.control.access.authority import Denied

DOMAIN = "paramd"
MAX_DETAIL_CHARS = 2048

log = logging.getLogger("paramd.control")

ANY_ROLE: Final = frozenset(Role) - {Role.CONTROL, Role.GATHERER}
"""All that are shown to control planes; its own tickets are for sidecars."""
_CONTROL = "/paramd.v1.ControlService/"
_REFLECTION = ".ServerReflection/ServerReflectionInfo"

METHOD_ROLES: Final[dict[str, frozenset[Role]]] = {
    _CONTROL + "Join": frozenset({Role.SIDECAR}),
    _CONTROL + "ScheduleBoundary": frozenset({Role.READER, Role.EDITOR}),
    "/grpc.reflection.v1alpha" + _REFLECTION: ANY_ROLE,
    "/grpc.reflection.v1" + _REFLECTION: ANY_ROLE,
}
"""Roles that may call each method; a method that is not listed is denied."""

MAX_SOURCES: Final = 1024
"""Senders of bad tokens that are tracked separately."""

_caller: ContextVar[Claims] = ContextVar("paramd_caller")


async def abort(context: Any, error: ParamdError, code: grpc.StatusCode | None = None) -> Never:
    """End a call with a domain error's status; `code` overrides the table's."""
    code = code if code is not None else grpc.StatusCode[codes_of(error).grpc]
    text = str(error)[:MAX_DETAIL_CHARS]
    info = any_pb2.Any()
    info.Pack(error_details_pb2.ErrorInfo(reason=reason_of(error), domain=DOMAIN))
    status = status_pb2.Status(code=code.value[0], message=text, details=[info])
    trailers = (("grpc-status-details-bin", status.SerializeToString()),)
    await context.abort(code, text, trailing_metadata=trailers)
    raise AssertionError("abort always raises")


@asynccontextmanager
async def errors_as_statuses(context: Any, method: str) -> AsyncIterator[None]:
    """Map a handler's errors to statuses; unexpected ones are logged and hidden from the caller."""
    try:
        yield
    except ParamdError as error:
        await abort(context, error)
    except grpc.aio.AbortError:
        raise
    except Exception as error:
        log.exception("%s failed", method)
        hidden = exhausted_of(error) or ParamdError("internal error; see the control plane's log")
        await abort(context, hidden)


@dataclass(eq=False)
class TicketInterceptor(grpc.aio.ServerInterceptor):
    """First in the chain: admits a call if its ticket's role may make it."""

    verifier_of: Callable[[str, int], Verifier]
    """Raises DeniedError for a job and incarnation that this control plane does not serve."""
    check_revoked: Callable[[Claims], None]
    """Raises DeniedError for a ticket whose token has ended."""
    denied: Denied

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        method = handler_call_details.method
        if method in OPEN_METHODS:
            return await continuation(handler_call_details)
        try:
            # The handler runs in this task, so it sees the context variable.
            _caller.set(self._check(method, handler_call_details.invocation_metadata))
        except DeniedError as error:
            self.denied("", "", str(method), str(error))
            return _denial(error)
        return await continuation(handler_call_details)

    def _check(self, method: str, metadata: Any) -> Claims:
        found = [value for key, value in metadata or () if key == "authorization"]
        if len(found) != 1 or not isinstance(found[0], str) or not found[0].startswith("Bearer "):
            raise DeniedError("expected metadata 'authorization: Bearer <ticket>', once")
        ticket = found[0].removeprefix("Bearer ")
        job, incarnation = claimed(ticket)
        claims = self.verifier_of(job, incarnation).verify(ticket, job=job, incarnation=incarnation)
        self.check_revoked(claims)
        if claims.role not in METHOD_ROLES.get(method, frozenset()):
            raise RoleError(f"a ticket of role {claims.role.value!r} may not call {method[:200]}")
        return claims


def caller_token() -> str | None:
    """Token id of the current call's ticket; None when the ticket names no token."""
    return _caller.get().token_id


def caller_rank() -> tuple[str, int, int | None]:
    """Job, incarnation and rank of the current call's ticket."""
    claims = _caller.get()
    return claims.job, claims.incarnation, claims.rank


def check_incarnation(job: str, incarnation: int) -> None:
    """Raise ConflictError unless the current call's ticket is for this job and incarnation."""
    claims = _caller.get()
    if (claims.job, claims.incarnation) != (job, incarnation):
        raise ConflictError(
            f"the ticket is for job {claims.job!r}, run {claims.incarnation}; it is not "
            f"valid for job {job[:64]!r}, run {incarnation}"
        )


def check_rank(rank: int) -> None:
    """Raise RoleError unless the current call's ticket is bound to `rank`."""
    claims = _caller.get()
    if claims.rank != rank:
        raise RoleError(f"the ticket is for rank {claims.rank}; it is not valid for rank {rank}")


class RoleError(DeniedError):
    """The ticket is valid, but its role is not sufficient."""


@dataclass(kw_only=True, eq=False)
class FailureLimit:
    """Token bucket of failures by sender: `burst` at once, then `per_s` a second. Good tokens never
    count, so guessing cannot lock the owner out."""

    burst: float = 20.0
    per_s: float = 1.0
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._left: dict[str, tuple[float, float]] = {}

    def allows(self, source: str = "") -> bool:
        """Count one failure of a source (an address); False when it has had too many."""
        now_s = self.clock()
        left, seen_s = self._left.pop(source, (self.burst, now_s))
        left = min(self.burst, left + (now_s - seen_s) * self.per_s)
        allowed = left >= 1.0
        # Reinserted at the end, so that the first source is the one quiet for longest.
        self._left[source] = (left - 1.0 if allowed else left, now_s)
        if len(self._left) > MAX_SOURCES:
            del self._left[next(iter(self._left))]
        return allowed


def _denial(error: DeniedError) -> Any:
    of_role = isinstance(error, RoleError)
    code = grpc.StatusCode.PERMISSION_DENIED if of_role else grpc.StatusCode.UNAUTHENTICATED

    async def deny(_requests: Any, context: Any) -> AsyncIterator[bytes]:
        await abort(context, error, code)
        yield b""

    # Streaming both ways, so that the answer does not wait for a request.
    return grpc.stream_stream_rpc_method_handler(deny)
