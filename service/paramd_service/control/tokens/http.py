"""The dependency that every REST route has: a token, and a role that permits the operation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import Request

from paramd.errors import DeniedError
from paramd_service.control.auth import FailureLimit
from paramd_service.control.problems import CredentialsError
from paramd_service.control.tokens.authority import Denied, Principal, Tokens
from paramd_service.control.tokens.roles import needed_action


def required(
    tokens: Tokens, failures: FailureLimit, denied: Denied
) -> Callable[[Request], Awaitable[None]]:
    """A dependency that lets a request through when its token's role permits the operation."""

    async def require_token(request: Request) -> None:
        operation = str(getattr(request.scope.get("route"), "name", ""))
        principal = await tokens.principal(_offered(request))
        if principal is None:
            denied("", "", operation, "no token, or none that is valid")
            raise _refusal(failures, request)
        action = needed_action(operation)
        if not principal.may(action):
            reason = f"the role {principal.role} does not permit to {action.value}"
            denied(principal.name, principal.role, operation, reason)
            raise DeniedError(
                f"{reason}; ask an admin for another token (paramd token create --role ...)"
            )
        request.state.principal = principal

    return require_token


def principal_of(request: Request) -> Principal:
    """Who makes this request. Raises DeniedError when nobody has been let through."""
    found = getattr(request.state, "principal", None)
    if not isinstance(found, Principal):
        raise DeniedError("the request has not been authenticated")
    return found


def _offered(request: Request) -> str:
    """The token of a request; empty when there is none, or more than one."""
    offered = request.headers.getlist("authorization")
    scheme, _, token = offered[0].partition(" ") if len(offered) == 1 else ("", "", "")
    return token.strip() if scheme.lower() == "bearer" else ""


def _refusal(failures: FailureLimit, request: Request) -> CredentialsError:
    source = request.client.host if request.client is not None else ""
    if not failures.allows(source):
        return CredentialsError("too many wrong tokens; wait a second", retry_after_s=1)
    return CredentialsError(
        "no token, or one that is not valid here and now; send 'Authorization: Bearer <token>' "
        "with the token of endpoint.json in the job's directory of the state dir, or one that "
        "an admin made (paramd token create)"
    )
