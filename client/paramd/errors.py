"""Domain errors, request metadata, and the one table from errors to gRPC, HTTP and exit codes.

An error says what was wrong, what was expected and what to do next. Its text goes to the user;
anything secret or internal belongs in the log instead.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

METADATA_KEY = "x-request-id"
"""HTTP header and gRPC metadata key of the request id."""

RANK_KEY = "paramd-rank"
"""gRPC metadata key: the rank a call to a sidecar is meant for, in decimal digits."""

READS_KEY = "paramd-reads"
"""gRPC metadata key: the ticket and seed that the sidecar reads other ranks with, for exports and
for callers that have it gather."""

MAX_ID_CHARS = 64

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the request this task serves or makes; empty when there is none."""

ASKED_BY_KEY = "x-paramd-asked-by"
"""gRPC metadata key: on whose behalf a call is made. Honoured only with a ticket that is not
issued for a user's token: the control plane's, which calls on behalf of others."""

asked_by: ContextVar[str] = ContextVar("asked_by", default="")
"""Names the token the request came with; empty for the owner's, and for our own calls."""


def metadata() -> tuple[tuple[str, str], ...]:
    """The metadata of an outgoing gRPC call."""
    told = ((METADATA_KEY, request_id.get()), (ASKED_BY_KEY, asked_by.get()))
    return tuple((key, value) for key, value in told if value)


def asked_by_of(found: Iterable[Any]) -> str:
    """The client named in a call's metadata; empty when missing or malformed."""
    values = [value for key, value in found if key == ASKED_BY_KEY]
    value = values[0] if len(values) == 1 else ""
    return value if isinstance(value, str) and len(value) <= MAX_ID_CHARS else ""


class ParamdError(Exception):
    """Base of every error paramd raises on purpose."""


class UsageError(ParamdError, ValueError):
    """An argument is wrong; nothing was tried."""


class GoneError(UsageError, AttributeError):
    """A name of an earlier release; the text says what to use instead."""


class UnknownNameError(UsageError, AttributeError):
    """A name that never was; the text says which one does what it suggests."""


class UnreachableError(ParamdError, ConnectionError):
    """The service, or a part of it that is needed, does not respond."""


class NotFoundError(ParamdError, LookupError):
    """A job, name, snapshot or lease does not exist (any more)."""


class ConflictError(ParamdError):
    """The state does not allow it: stale run or layout, torn rank, attached twice."""


class ExistsError(ConflictError):
    """The id already names something else."""


class TornError(ConflictError):
    """A trainer ended inside an update; its parameters mix two steps."""


class PartialError(ParamdError):
    """Only some ranks answered."""


class DeniedError(ParamdError, PermissionError):
    """Missing, wrong or expired credentials, or a role that may not do this."""


class ExhaustedError(ParamdError):
    """A budget is used up: bytes, leases or concurrent calls. Try again later."""


class CapacityError(ExhaustedError):
    """This process would take more memory than its host or cgroup has left; it took none."""


class AbortedError(ParamdError):
    """The attempt lost a race with training; try again."""


class DataLossError(ParamdError):
    """Bytes did not match their checksum."""


class DeadlineError(ParamdError, TimeoutError):
    """The deadline passed without a result."""


@dataclass(frozen=True, kw_only=True)
class ErrorCodes:
    """An error's codes towards the outside."""

    grpc: str
    """Name of a `grpc.StatusCode`."""
    http: int
    """HTTP status."""
    exit: int
    """Exit code of the command line."""
    retry: bool = False
    """A reader may retry by itself."""


CODES: dict[type[ParamdError], ErrorCodes] = {
    UsageError: ErrorCodes(grpc="INVALID_ARGUMENT", http=422, exit=2),
    GoneError: ErrorCodes(grpc="INVALID_ARGUMENT", http=410, exit=2),
    UnreachableError: ErrorCodes(grpc="UNAVAILABLE", http=503, exit=3, retry=True),
    NotFoundError: ErrorCodes(grpc="NOT_FOUND", http=404, exit=4),
    ExistsError: ErrorCodes(grpc="ALREADY_EXISTS", http=409, exit=5),
    ConflictError: ErrorCodes(grpc="FAILED_PRECONDITION", http=409, exit=5),
    PartialError: ErrorCodes(grpc="UNAVAILABLE", http=503, exit=6),
    DeniedError: ErrorCodes(grpc="PERMISSION_DENIED", http=403, exit=7),
    DeadlineError: ErrorCodes(grpc="DEADLINE_EXCEEDED", http=504, exit=8),
    ExhaustedError: ErrorCodes(grpc="RESOURCE_EXHAUSTED", http=429, exit=1, retry=True),
    # Again would not help: it is the reader that has to ask for less.
    CapacityError: ErrorCodes(grpc="RESOURCE_EXHAUSTED", http=507, exit=1),
    AbortedError: ErrorCodes(grpc="ABORTED", http=409, exit=5, retry=True),
    DataLossError: ErrorCodes(grpc="DATA_LOSS", http=500, exit=1, retry=True),
    ParamdError: ErrorCodes(grpc="INTERNAL", http=500, exit=1),
}

# Of several errors with one status, a client raises the first; the last two it only receives.
_BY_GRPC = {codes.grpc: kind for kind, codes in reversed(CODES.items())} | {
    "OUT_OF_RANGE": UsageError,
    "UNAUTHENTICATED": DeniedError,
}


def codes_of(error: BaseException) -> ErrorCodes:
    """The codes of the nearest class of `error` in the table."""
    for kind in type(error).__mro__:
        if kind in CODES:
            return CODES[kind]
    return CODES[ParamdError]


def exhausted_of(error: BaseException) -> ExhaustedError | None:
    """The public, retryable error for running out of descriptors or memory; None for others."""
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.EMFILE, errno.ENFILE):
        return ExhaustedError("out of file descriptors; try again, or raise the limit (ulimit -n)")
    if number == errno.ENOMEM or isinstance(error, MemoryError):
        return ExhaustedError("out of memory; try again, or raise the memory limit")
    return None


def error_of_grpc(code_name: str) -> type[ParamdError]:
    """The domain error for a gRPC status, on the client's side."""
    return _BY_GRPC.get(code_name, ParamdError)


def reason_of(error: ParamdError) -> str:
    """The error's name in ErrorInfo and problem documents, e.g. "NOT_FOUND"."""
    name = type(error).__name__.removesuffix("Error")
    return "".join(f"_{c}" if c.isupper() and i else c for i, c in enumerate(name)).upper()
