"""HTTP: a token before anything of a request is read, then a role that permits the operation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from urllib.parse import unquote

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from paramd.errors import DeniedError, UnreachableError
from paramd_service.control.auth import FailureLimit
from paramd_service.control.problems import problem
from paramd_service.control.tokens.authority import Denied, Principal, Tokens
from paramd_service.control.tokens.ending import run_until
from paramd_service.control.tokens.revocations import Revocations
from paramd_service.control.tokens.roles import Action, allowed, needed_action
from paramd_service.control.tokens.sessions import KEY_HEADER, Sessions, cookie_name, cookie_value

OPEN_PATHS = frozenset({"/healthz", "/readyz"})
"""Say only whether the process works: probes have no token."""

_STATE = "principal"


class TokenGate:
    """ASGI middleware: what is no open path needs a valid token, whether it exists or not."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        tokens: Tokens,
        sessions: Sessions,
        revocations: Revocations,
        failures: FailureLimit,
        denied: Denied,
    ) -> None:
        self._app = app
        self._revocations = revocations
        self._tokens = tokens
        self._sessions = sessions
        self._failures = failures
        self._denied = denied

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        try:
            principal = await self._principal(scope)
        except UnreachableError as error:
            await problem(503, "unreachable", str(error))(scope, receive, send)
            return
        if principal is None:
            self._denied("", "", f"{scope['method']} {scope['path']}", "no valid token")
            await self._refusal(scope)(scope, receive, send)
            return
        scope.setdefault("state", {})[_STATE] = principal
        if principal.token_id is None or scope["method"] != "GET":
            await self._app(scope, receive, send)
            return
        with self._revocations.following(principal) as ended:
            await run_until(ended, self._app, scope, receive, send)

    async def _principal(self, scope: Scope) -> Principal | None:
        """A token counts before a session, and a wrong one is not mended by a session."""
        if _values(scope, b"authorization"):
            return await self._tokens.principal(bearer_of(scope))
        keys = _values(scope, KEY_HEADER.encode())
        key = keys[0] if len(keys) == 1 else ""
        digest = self._sessions.token_digest(cookie_of(scope), key)
        return await self._tokens.principal_of_digest(digest) if digest else None

    def _refusal(self, scope: Scope) -> ASGIApp:
        client = scope.get("client")
        if not self._failures.allows(client[0] if client else ""):
            return problem(429, "denied", "too many wrong tokens; wait", {"retry-after": "1"})
        return problem(
            401,
            "denied",
            "no token, or one that is not valid here and now; send 'Authorization: Bearer "
            "<token>' with the token of endpoint.json in the job's directory of the state dir, "
            "or one that an admin made (paramd token create)",
            {"www-authenticate": 'Bearer realm="paramd"'},
        )


def permitted(denied: Denied, *, readonly: bool = False) -> Callable[[Request], Awaitable[None]]:
    """The dependency of every route: the caller's role permits the operation.

    With `readonly` nobody changes anything that is not their own: whatever changes
    parameters or training, exports, or is not asked with GET by an admin, is refused.
    """

    async def check_role(request: Request) -> None:
        operation = str(getattr(request.scope.get("route"), "name", ""))
        query = unquote(request.scope["query_string"].decode("latin-1"))
        action = needed_action(operation, query)
        principal = principal_of(request)
        keeps = not readonly or action is not Action.ADMINISTER or request.method == "GET"
        if keeps and action in allowed(principal.role, readonly=readonly):
            return
        reason = _reason(principal, action)
        denied(principal.name, principal.role, operation, reason)
        raise DeniedError(
            f"{reason}; ask an admin for another token (paramd token create --role ...)"
        )

    return check_role


def principal_of(request: Request) -> Principal:
    """Who makes this request. Raises DeniedError when nobody has been let through."""
    found = getattr(request.state, _STATE, None)
    if not isinstance(found, Principal):
        raise DeniedError("the request has not been authenticated")
    return found


def bearer_of(scope: Scope) -> str:
    """The token of a request; empty when there is none, or more than one."""
    found = _values(scope, b"authorization")
    scheme, _, token = (found[0] if len(found) == 1 else "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def cookie_of(scope: Scope) -> str:
    """The session's cookie of a request; empty when there is none."""
    hosts = _values(scope, b"host")
    name = cookie_name(hosts[0] if hosts else "", is_tls=scope["scheme"] == "https")
    return cookie_value("; ".join(_values(scope, b"cookie")), name)


def _reason(principal: Principal, action: Action) -> str:
    if principal.may(action):
        return "this control plane runs with --readonly, which lets nobody change anything"
    return f"the role {principal.role} does not permit to {action.value}"


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name]
