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
from paramd_service.control.tokens.roles import Action, needed_action

OPEN_PATHS = frozenset({"/healthz", "/readyz"})
"""Say only whether the process works: probes have no token."""

_STATE = "principal"


class TokenGate:
    """ASGI middleware: what is no open path needs a valid token, whether it exists or not."""

    def __init__(
        self, app: ASGIApp, *, tokens: Tokens, failures: FailureLimit, denied: Denied
    ) -> None:
        self._app = app
        self._tokens = tokens
        self._failures = failures
        self._denied = denied

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        try:
            principal = await self._tokens.principal(_offered(scope))
        except UnreachableError as error:
            await problem(503, "unreachable", str(error))(scope, receive, send)
            return
        if principal is None:
            self._denied("", "", f"{scope['method']} {scope['path']}", "no valid token")
            await self._refusal(scope)(scope, receive, send)
            return
        scope.setdefault("state", {})[_STATE] = principal
        await self._app(scope, receive, send)

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


def permitted(denied: Denied) -> Callable[[Request], Awaitable[None]]:
    """The dependency of every route: the caller's role permits the operation."""

    async def check_role(request: Request) -> None:
        operation = str(getattr(request.scope.get("route"), "name", ""))
        query = unquote(request.scope["query_string"].decode("latin-1"))
        action = needed_action(operation, query)
        principal = principal_of(request)
        if principal.may(action):
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


def _reason(principal: Principal, action: Action) -> str:
    return f"the role {principal.role} does not permit to {action.value}"


def _offered(scope: Scope) -> str:
    """The token of a request; empty when there is none, or more than one."""
    found = [value for name, value in scope["headers"] if name == b"authorization"]
    scheme, _, token = (found[0] if len(found) == 1 else b"").decode("latin-1").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""
