"""Permission to call methods, and checks of every request before it is served.

The interceptor runs first; methods that are not in its table are denied. Each subject's module
has `calls(rank)`, a table of its methods by name; the servicer merges the tables and treats all
methods alike.
"""

from __future__ import annotations

from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import Message

from paramd import errors
from paramd.errors import DeniedError, ParamdError, UnreachableError, UsageError
from paramd.security.tickets import OF_RANKS, Claims, Role, Told
from paramd.v1 import sidecar_pb2 as pb
from paramd_service import admission
from paramd_service.admission import OPEN_METHODS, Who
from paramd_service.sidecar.orders import ReplayedError

MAX_SPANS = 100_000
MAX_SNAPSHOT_IDS = 1_024

# Reserved from a caller's deadline, so that an error arrives in time.
_MARGIN_S = 0.25
_MARGIN_PART = 0.1


def check_deadline(remaining_s: float | None, max_deadline_s: float) -> float:
    """Seconds that a call may take.

    Raises:
        UsageError: If the call has none, or one too far away.
    """
    if remaining_s is None or remaining_s > max_deadline_s + 1:
        given = "no deadline" if remaining_s is None else f"a deadline in {remaining_s:.0f} s"
        raise UsageError(
            f"the call has {given}; set one of at most {max_deadline_s:.0f} s (timeout=)"
        )
    return max(remaining_s - min(_MARGIN_S, _MARGIN_PART * remaining_s), 0.0)


def check_spans(spans: Sequence[pb.Span], arena_bytes: int) -> tuple[tuple[int, int], ...]:
    """The spans as pairs.

    Raises:
        UsageError: If they are too many, empty, not sorted, overlapping, or outside of the
            arena.
    """
    if len(spans) > MAX_SPANS:
        raise UsageError(f"spans: {len(spans):,}; expected at most {MAX_SPANS:,}")
    checked: list[tuple[int, int]] = []
    last_end = 0
    for span in spans:
        begin, end = span.begin, span.end
        if not last_end <= begin < end <= arena_bytes:
            raise UsageError(
                f"spans: [{begin}, {end}) after byte {last_end}; expected non-empty, sorted, "
                f"non-overlapping spans within [0, {arena_bytes})"
            )
        checked.append((begin, end))
        last_end = end
    return tuple(checked)


def check_range(offset_bytes: int, size_bytes: int, total_bytes: int) -> tuple[int, int]:
    """[begin, end) of a read; size 0: up to the end.

    Raises:
        UsageError: It leaves the total.
    """
    if not 0 <= offset_bytes <= total_bytes or not 0 <= size_bytes <= total_bytes - offset_bytes:
        raise UsageError(
            f"offset_bytes, size_bytes: {offset_bytes}, {size_bytes}; expected a range within "
            f"{total_bytes} bytes"
        )
    return offset_bytes, offset_bytes + size_bytes if size_bytes else total_bytes


def granted_lease_s(lease_ms: int, default_s: float, max_s: float) -> float:
    """Lease granted to a request, in seconds: 0 means the default, `max_s` is the cap.

    Raises:
        UsageError: If it is negative.
    """
    if lease_ms < 0:
        raise UsageError(f"lease_ms: {lease_ms}; expected 0 (the default) or more")
    return min(lease_ms / 1000, max_s) if lease_ms else default_s


Unary: TypeAlias = Callable[[Any, float], Awaitable[Message]]
"""(request, seconds left) -> answer"""
Answers: TypeAlias = Callable[[Any, float], AsyncGenerator[bytes, None]]
"""(request, seconds left) -> serialized answers"""
Requests: TypeAlias = Callable[[AsyncIterator[Any], float], Awaitable[Message]]
"""(requests, seconds left) -> answer"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One method; exactly one of `unary`, `answers` and `requests` is set."""

    unary: Unary | None = None
    answers: Answers | None = None
    """Returns a stream; always heavy."""
    requests: Requests | None = None
    """Takes a stream; always heavy."""
    part: Callable[[bytes], Any] | None = None
    """Parses one message of that stream, where a protobuf object would cost a copy."""
    heavy: bool | Callable[[Any], bool] = False
    """Whether it takes one of the slots that bound concurrent work; may depend on the request."""


CallTable: TypeAlias = Mapping[str, Call]
"""Methods by their name in SidecarService."""


SERVICE = "paramd.v1.SidecarService"

EDITORS = frozenset({Role.EDITOR, Role.CONTROL})
READERS = EDITORS | {Role.READER}
GATHERERS = READERS | {Role.GATHERER}
_VIEWERS = READERS | {Role.VIEWER}
_CONTROL = frozenset({Role.CONTROL})
_OF_USERS = (Role.VIEWER, Role.READER, Role.EDITOR)
"""Roles of users' tickets, the least one first."""

_METHODS: dict[frozenset[Role], str] = {
    _VIEWERS: "GetState GetMesh GetLayout ListKeptStates GetMetrics ReachPeers",
    READERS: (
        "PinSnapshot GrantStream RenewSnapshot ReleaseSnapshot ListSnapshots "
        "ComputeStats PoolSnapshot ProfileSnapshot MultiplySnapshot DigestSnapshot DeltaSnapshot "
        "ReplayUpdate InspectTrainer GetLogged Summon StreamGradients"
    ),
    GATHERERS: "ReadSnapshot",
    EDITORS: "StageEdit GetEdit PreviewEdit",
    frozenset({Role.COPIER}): "PutCopy",
    _CONTROL: (
        "ReachBoundary WithdrawBoundary RenewHold DropEdit MakeMark DropMark GetLog BeginExport "
        "WriteExportFile StoreExportFile VerifyExportFile ReadExportFile FinishExport DropExport"
    ),
}

ROLES: dict[str, frozenset[Role]] = {
    f"/{SERVICE}/{method}": roles for roles, of in _METHODS.items() for method in of.split()
} | {"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _VIEWERS - _CONTROL}

CALLER: ContextVar[Claims] = ContextVar("paramd_caller")
"""The claims of the call's own ticket."""
_READS: ContextVar[str] = ContextVar("paramd_reads")
_ORDER: ContextVar[Told | None] = ContextVar("paramd_order", default=None)
"""What is told of the current task's order, so far; None for all other calls."""


def handed_over() -> str:
    """What the current task's call reads other ranks with; DeniedError: the caller sent nothing."""
    reads = _READS.get()
    if not reads:
        raise DeniedError(
            "the call reads other ranks, and its ticket is good at this one alone; send the field "
            f"`reads` of GET /api/v1/jobs/{{job}}?rank=R&gather=true as metadata {errors.READS_KEY}"
        )
    return reads


def as_ordered(request: bytes, *, last: bool = True) -> bytes:
    """The current task's request, if nobody has changed it: a message, or of a stream the next one.

    Raises DeniedError, at the `last` message, if an order of the control plane said another thing.
    """
    order = _ORDER.get()
    if order is not None:
        order.add(request)
        if last:
            check_ordered()
    return request


async def whole_if_ordered(rest: AsyncIterator[Any]) -> None:
    """What acts on the first message of a stream awaits this before, with the rest of it.

    An order is known to be one at its end, so it must end there. Raises DeniedError otherwise.
    """
    if _ORDER.get() is not None:
        async for _ in rest:
            raise DeniedError("the control plane ordered another thing: this message comes alone")


def check_ordered() -> None:
    """Raise DeniedError unless all messages of the current task's order are those it was for."""
    order = _ORDER.get()
    if order is not None and order.digest != CALLER.get().told:
        raise DeniedError("the control plane ordered another thing than this request says")


def _who(claims: Claims, metadata: Iterable[Any]) -> Who:
    """The token a call acts for; the control plane names it in metadata, and ranks act for none."""
    own = claims.token_id if claims.role not in OF_RANKS else ""
    return own or errors.asked_by_of(metadata) or None


Verify = Callable[[str], Claims]
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Refuses a call before its request is read."""

    def __init__(
        self,
        verify: Verify,
        check_meant: Callable[[object], None],
        refused: Callable[[str, str], None] = lambda method, reason: None,
        allowed: Callable[[str], None] = lambda method: None,
    ) -> None:
        """`check_meant` raises UnreachableError for calls that name another rank; `refused` is
        called with method and reason of every denied call, `allowed` with the method of every
        other call that needs a ticket."""
        self._verify = verify
        self._check_meant = check_meant
        self._refused = refused
        self._allowed = allowed

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        details = handler_call_details
        metadata = dict(details.invocation_metadata or ())
        reads = str(metadata.get(errors.READS_KEY, ""))
        try:
            # First: what is shown to another rank is no good here, which is no denial.
            self._check_meant(metadata.get(errors.RANK_KEY) or None)
            found = authorize(str(details.method), details.invocation_metadata or (), self._verify)
        except ReplayedError as error:
            self._refused(str(details.method), str(error))
            return _refusing(grpc.StatusCode.UNAVAILABLE, error)
        except UnreachableError as error:
            return _refusing(grpc.StatusCode.UNAVAILABLE, error)
        except _UnknownCallerError as error:
            self._refused(str(details.method), str(error))
            return _refusing(grpc.StatusCode.UNAUTHENTICATED, error)
        except DeniedError as error:
            self._refused(str(details.method), str(error))
            return _refusing(grpc.StatusCode.PERMISSION_DENIED, error)
        if found is not None:
            self._allowed(str(details.method))
            # The handler runs in this task, and so sees these variables.
            _READS.set(reads)
            CALLER.set(found)
            who = _who(found, details.invocation_metadata or ())
            if found.role is Role.CONTROL:
                _ORDER.set(Told(str(details.method), who or "", reads))
            admission.CALLER.set(who)
            errors.asked_by.set(who or "")
        return await continuation(details)


class _UnknownCallerError(DeniedError):
    """No ticket, or one that is not valid here."""


def authorize(method: str, metadata: Iterable[Any], verify: Verify) -> Claims | None:
    """The claims of the caller's ticket if it may call `method`; None for a method open to all.

    Raises:
        DeniedError: It may not.
        UnreachableError: No trainer has attached, so no ticket can be verified yet; or an order
            is played again.
    """
    if method in OPEN_METHODS:
        return None
    allowed = ROLES.get(method)
    if allowed is None:
        raise DeniedError(f"{method[:128]!r} is not a method of this server")
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
    check_role(claims, allowed)
    return claims


def check_role(claims: Claims, allowed: frozenset[Role]) -> None:
    """Raise DeniedError unless the ticket is of one of these roles."""
    if claims.role not in allowed:
        least = next((role for role in _OF_USERS if role in allowed), None)
        if claims.role not in _OF_USERS or least is None:
            raise DeniedError(f"a ticket of role {claims.role.value} may not call this")
        raise DeniedError(
            f"this token's role is {claims.role.value}; this call needs {least.value}. Ask an "
            f"admin for such a token: paramd token create --role {least.value}"
        )


def _refusing(code: grpc.StatusCode, error: ParamdError) -> Any:
    async def refuse(_requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(code, str(error))

    # Stream-stream, so that the refusal does not wait for the request.
    return grpc.stream_stream_rpc_method_handler(refuse)
