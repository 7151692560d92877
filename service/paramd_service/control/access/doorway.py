"""REST access: connection limits, authentication, and the role each operation needs.

A stranger is a connection that has not shown a good token. Strangers have separate slots; when
those are full, the oldest of the address with the most is evicted. A client that sends its request
at once therefore gets through however many others stall, and no stranger ever displaces a
connection with a good token. When few descriptors are left and there is no stranger, an idle
connection of the token with the most makes room, the owner's last. A request is authenticated
before any of its body is read.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paramd.errors import (
    ConflictError,
    DeniedError,
    ExhaustedError,
    NotFoundError,
    UnreachableError,
)
from paramd.security.loopback import PROOF_PATH
from paramd.security.tls import CA_PATH
from paramd_service.admission import CALLER, ENDED, Shares
from paramd_service.control.access.authority import (
    KEY_HEADER,
    Denied,
    Principal,
    Sessions,
    Tokens,
    cookie_name,
    cookie_value,
)
from paramd_service.control.access.join import FailureLimit
from paramd_service.control.access.revocations import Revocations
from paramd_service.control.access.roles import (
    OF_NO_JOB,
    OF_RECORDS,
    Action,
    allowed,
    needed_action,
    why_refused,
)
from paramd_service.control.base.problems import problem

if TYPE_CHECKING:
    from paramd_service.control.http_server import Connection

MAX_STRANGERS: Final = 512

LEFT_FREE: Final = 64
"""Descriptors for what is no connection of REST's: gRPC, the store, logs, listeners."""

MAX_REQUESTS = 256
"""Most concurrent requests, streams included."""

OPEN_PATHS = frozenset({"/healthz", "/readyz", CA_PATH, PROOF_PATH})
"""Paths that need no token: probes have none, nor have clients that know only a fingerprint, or not
yet who listens. They reveal only whether the process works, who signed its certificate, and that it
knows a token of which the caller knows the id."""

SIGN_IN = ("POST", "/api/v1/session")
"""The only request that a sign-in code is valid for."""
CODE_SCHEME = "paramd-code"
"""Scheme of an Authorization header that holds a sign-in code."""
DOOR: Final = "door"
"""Name of a request's connection in its state."""
GONE: Final[Message] = {"type": "http.disconnect"}

_STATE = "principal"
_DIGEST = "sign_in_digest"
_COOKIE = "session_cookie"
GRACE_S = 1.0
"""Seconds that a request has to end by itself once its token or session has ended."""


class Doorway:
    """All connections of one server that could make room for others. Event loop only."""

    def __init__(self, *, places: int = MAX_STRANGERS) -> None:
        # A quarter of all descriptors: those with a token need some, and so do store and sidecars.
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._places = min(places, descriptors // 4)
        # It must not come to a failed accept of gRPC's server, which tries again after a second.
        self._most = max(descriptors - LEFT_FREE, descriptors // 2)
        self._strangers: dict[str, dict[Connection, None]] = {}
        """By address; an address without any is absent."""
        self._count = 0
        self._tokens: dict[Connection, str] = {}
        """Id of the token that a connection has shown; empty for the owner's."""
        self._idle: dict[str, dict[Connection, None]] = {}
        """Those of a token that wait for a request, the longest first; none is absent."""
        self.tunnels: set[Connection] = set()
        """Connections upgraded from HTTP. Each has two more: to gRPC, and gRPC's own end."""

    def opened(self, door: Connection) -> None:
        """Add a new connection, as a stranger."""
        self._strangers.setdefault(door.host, {})[door] = None
        self._count += 1
        if self._count > self._places:
            self.make_room()

    def is_full(self) -> bool:
        """Whether the next connection would take a descriptor that others need."""
        beyond = 2 * len(self.tunnels)
        return self._count + len(self._tokens) + beyond >= self._most

    def make_room(self) -> bool:
        """Shut the oldest stranger, or else an idle connection; return whether there was one."""
        # From the address or token with the most, so that one cannot push out the rest.
        if self._strangers:
            crowd: dict[Connection, None] = max(self._strangers.values(), key=len)
        elif self._idle:
            most = max(self._idle, key=lambda who: (bool(who), len(self._idle[who])))
            crowd = self._idle[most]
        else:
            return False
        next(iter(crowd)).shut()
        return True

    def shown(self, door: Connection, token_id: str | None = None) -> None:
        """Record that the connection has shown a good token: no stranger takes its place now."""
        # It may have ended while its token was looked up.
        if door in self._tokens or door in self._strangers.get(door.host, {}):
            self._tokens[door] = token_id if token_id is not None else ""
        self._forget(door)

    def waits(self, door: Connection) -> None:
        """Record that the connection has no request now."""
        if door in self._tokens:
            self._idle.setdefault(self._tokens[door], {})[door] = None

    def works(self, door: Connection) -> None:
        """Record that the connection has a request."""
        who = self._tokens.get(door, "")
        idle = self._idle.get(who, {})
        idle.pop(door, None)
        if not idle:
            self._idle.pop(who, None)

    def closed(self, door: Connection) -> None:
        """Forget a connection that has ended. Idempotent."""
        self._forget(door)
        self.works(door)
        self._tokens.pop(door, None)
        self.tunnels.discard(door)

    def _forget(self, door: Connection) -> None:
        strangers = self._strangers.get(door.host, {})
        if door in strangers:
            del strangers[door]
            self._count -= 1
            if not strangers:
                del self._strangers[door.host]


_HAS_ENDED: Final = "the token or session of this request has ended meanwhile; sign in again"


async def run_until(
    ended: asyncio.Future[None], app: ASGIApp, scope: Scope, receive: Receive, send: Send
) -> None:
    """Run `app` for a request that only reads. Once `ended` is done, the app sees its client
    disconnect, an open response is closed cleanly, and a request that has no answer after `GRACE_S`
    is cancelled and refused."""
    open_answer = has_begun = False

    async def send_noting(message: Message) -> None:
        nonlocal open_answer, has_begun
        has_begun = True
        await send(message)
        open_answer = message["type"] == "http.response.start" or message.get("more_body", False)

    async def receive_or_end() -> Message:
        coming = asyncio.ensure_future(receive())
        try:
            either: set[asyncio.Future[Any]] = {coming, ended}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            return coming.result() if coming.done() else GONE
        finally:
            coming.cancel()

    running = asyncio.ensure_future(app(scope, receive_or_end, send_noting))
    try:
        await asyncio.wait({running, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            await asyncio.wait({running}, timeout=GRACE_S)
        if not running.done() and not has_begun:
            running.cancel()
            await asyncio.wait({running})
            await problem(401, "denied", _HAS_ENDED)(scope, receive, send)
            return
        await running
    finally:
        running.cancel()
    if open_answer and ended.done():
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@dataclass(eq=False)
class TokenGate:
    """ASGI middleware: every path but the open ones needs a valid token, even if it is a 404."""

    app: ASGIApp
    _: KW_ONLY
    tokens: Tokens
    sessions: Sessions
    revocations: Revocations
    doorway: Doorway
    failures: FailureLimit
    denied: Denied

    def __post_init__(self) -> None:
        # With few descriptors, streams and tunnels (two each) leave some for the rest.
        places = min(MAX_REQUESTS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._requests = Shares(places, "concurrent requests")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self.app(scope, receive, send)
            return
        try:
            principal = await self._principal(scope)
        except UnreachableError as error:
            await problem(503, "unreachable", str(error))(scope, receive, send)
            return
        if principal is None:
            self.denied("", "", f"{scope['method']} {scope['path']}", "no valid token")
            await self._refusal(scope)(scope, receive, send)
            return
        scope.setdefault("state", {})[_STATE] = principal
        if door := scope["state"].get(DOOR):
            self.doorway.shown(door, principal.token_id)
        try:
            self._requests.take(principal.token_id)
        except ExhaustedError as error:
            await problem(429, "exhausted", str(error), {"retry-after": "1"})(scope, receive, send)
            return
        token = CALLER.set(principal.token_id)
        try:
            await self._serve(principal, scope, receive, send)
        finally:
            CALLER.reset(token)
            self._requests.give_back(principal.token_id)

    # A change is finished even if its token ends meanwhile; what waits for its outcome looks at
    # `ENDED`.
    async def _serve(
        self, principal: Principal, scope: Scope, receive: Receive, send: Send
    ) -> None:
        cookie = scope["state"].get(_COOKIE)
        if principal.token_id is None and cookie is None:
            await self.app(scope, receive, send)
            return
        with ExitStack() as stack:
            ended = stack.enter_context(self.revocations.following(principal.token_id))
            if cookie is not None:
                stack.enter_context(self.sessions.following(cookie, ended))
            token = ENDED.set(ended)
            try:
                if scope["method"] == "GET":
                    await run_until(ended, self.app, scope, receive, send)
                else:
                    await self.app(scope, receive, send)
            finally:
                ENDED.reset(token)

    async def _principal(self, scope: Scope) -> Principal | None:
        """The caller. A token takes precedence over a session, even if it is bad."""
        if code := _credential(scope, CODE_SCHEME):
            if (scope["method"], scope["path"]) != SIGN_IN:
                return None
            digest = self.sessions.redeem(code)
            scope.setdefault("state", {})[_DIGEST] = digest
            return await self.tokens.principal_of_digest(digest) if digest else None
        if _values(scope, b"authorization"):
            return await self.tokens.principal(bearer_of(scope))
        keys = _values(scope, KEY_HEADER.encode())
        key = keys[0] if len(keys) == 1 else ""
        cookie = cookie_of(scope)
        digest = self.sessions.token_digest(cookie, key)
        if digest:
            scope.setdefault("state", {})[_COOKIE] = cookie
        return await self.tokens.principal_of_digest(digest) if digest else None

    def _refusal(self, scope: Scope) -> ASGIApp:
        client = scope.get("client")
        if not self.failures.allows(client[0] if client else ""):
            return problem(
                429, "denied", "too many invalid tokens; wait a second", {"retry-after": "1"}
            )
        return problem(
            401,
            "denied",
            "the token is missing, unknown, expired or revoked; send 'Authorization: Bearer "
            "<token>'. On the job's host the owner has one in endpoint.json; an admin "
            "creates others (paramd token create)",
            {"www-authenticate": 'Bearer realm="paramd"'},
        )


def permitted(denied: Denied, *, readonly: bool = False) -> Callable[[Request], Awaitable[None]]:
    """FastAPI dependency of every route: the caller's role must permit the operation. With
    `readonly`, callers may change only their own things: edits, exports, anything that touches
    training, and administrative requests other than GET are refused."""

    async def check_role(request: Request) -> None:
        operation = str(getattr(request.scope.get("route"), "name", ""))
        query = unquote(request.scope["query_string"].decode("latin-1"))
        action = needed_action(operation, query)
        principal = principal_of(request)
        check_job(principal, request.path_params.get("job"), operation)
        keeps = not readonly or action is not Action.ADMINISTER or request.method == "GET"
        if keeps and action in allowed(principal.role, readonly=readonly):
            return
        if principal.may(action):
            reason = "this control plane runs with --readonly, so nothing can be changed"
        else:
            reason = why_refused(principal.role, action)
        denied(principal.name, principal.role, operation, reason)
        raise DeniedError(reason)

    return check_role


def recorded(refusal: str) -> Callable[[Request], Awaitable[None]]:
    """FastAPI dependency of every route: with a refusal, only operations on records are served."""

    async def check_recorded(request: Request) -> None:
        operation = str(getattr(request.scope.get("route"), "name", ""))
        if refusal and operation not in OF_RECORDS:
            raise ConflictError(refusal)

    return check_recorded


def check_job(principal: Principal, job: str | None, operation: str = "") -> None:
    """Check that the caller's token is for `job`, or for `operation` if that has no job (None).

    Raises:
        NotFoundError: It is not, whether or not the job exists.
        DeniedError: The operation is about all jobs.
    """
    if job is not None and not principal.sees(job):
        raise NotFoundError(f"your token is for jobs {principal.jobs}, not for job {job[:64]!r}")
    if job is None and principal.jobs is not None and operation not in OF_NO_JOB:
        raise DeniedError(f"your token is for jobs {principal.jobs} only; this concerns all jobs")


def principal_of(request: Request) -> Principal:
    """The request's caller.

    Raises:
        DeniedError: If it has not been authenticated.
    """
    found = getattr(request.state, _STATE, None)
    if not isinstance(found, Principal):
        raise DeniedError("the request has not been authenticated")
    return found


def may_read(request: Request) -> bool:
    """Whether the caller may see values."""
    return principal_of(request).may(Action.READ)


def may_see_logs(request: Request) -> bool:
    """Whether the caller may see what the training prints."""
    return principal_of(request).may(Action.LOGS)


def bearer_of(scope: Scope) -> str:
    """The request's bearer token; empty when there is none or more than one."""
    return _credential(scope, "bearer")


def sign_in_digest(request: Request) -> str:
    """Digest of the token whose sign-in code the request carried; empty without a code."""
    return str(getattr(request.state, _DIGEST, ""))


def sign_in_code(request: Request) -> str:
    """The sign-in code that the request carried; empty without one."""
    return _credential(request.scope, CODE_SCHEME)


def cookie_of(scope: Scope) -> str:
    """The request's session cookie; empty when there is none."""
    hosts = _values(scope, b"host")
    name = cookie_name(hosts[0] if hosts else "", is_tls=scope["scheme"] == "https")
    return cookie_value("; ".join(_values(scope, b"cookie")), name)


def _credential(scope: Scope, wanted: str) -> str:
    """The Authorization header's text after this scheme; empty unless it is the only header."""
    found = _values(scope, b"authorization")
    scheme, _, text = (found[0] if len(found) == 1 else "").partition(" ")
    return text.strip() if scheme.lower() == wanted else ""


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name]
