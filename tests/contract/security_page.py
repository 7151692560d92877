"""The tables of docs/reference/roles.md that say who may do what, from the code.

make surface            # after a wanted change; writes them anew
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from paramd.security.tickets import Role
from paramd_service.admission import OPEN_METHODS
from paramd_service.control.access.join import METHOD_ROLES
from paramd_service.control.access.roles import OPERATIONS, PERMITTED, Action, UserRole, ticket_role
from paramd_service.control.api.app import build_app
from paramd_service.sidecar.calls import ROLES
from tests.control_services import services

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "roles.md"
BEGIN, END = "<!-- roles: begin -->", "<!-- roles: end -->"
_TABLES = re.compile(f"{BEGIN}\n.*{END}\n", re.DOTALL)


def page() -> str:
    """The whole page, its tables those of the code as it is now."""
    tables = "\n".join([*_actions(), "", *_operations(), "", *_methods()])
    return _TABLES.sub(lambda _: f"{BEGIN}\n{tables}\n{END}\n", PAGE.read_text())


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _head(names: list[str]) -> list[str]:
    return [_row(names), "|" + "---|" * len(names)]


def _actions() -> Iterator[str]:
    yield from _head(
        ["token role", *(action.value for action in Action), "its tickets are of role"]
    )
    for role in UserRole:
        marks = ["yes" if action in PERMITTED[role] else "" for action in Action]
        yield _row([role.value, *marks, ticket_role(role).value])


def _operations() -> Iterator[str]:
    by_action: dict[str, list[str]] = defaultdict(list)
    for path, methods in build_app(services()).openapi()["paths"].items():
        for method, operation in methods.items():
            action = OPERATIONS.get(operation["operationId"], Action.ADMINISTER)
            by_action[action.value].append(f"`{method.upper()} {path}`")
    yield from _head(["REST operation", "needs the action"])
    for action in Action:
        for operation in sorted(by_action[action.value]):
            yield _row([operation, action.value])


def _methods() -> Iterator[str]:
    yield from _head(["gRPC method", *(role.value for role in Role)])
    for method in sorted(OPEN_METHODS):
        yield _row([f"`{method}`", *("open" for _ in Role)])
    for server, roles in (("sidecar", ROLES), ("control plane", METHOD_ROLES)):
        yield from _rows_of(server, roles)


def _rows_of(server: str, roles: Mapping[str, frozenset[Role]]) -> Iterator[str]:
    for method, allowed in roles.items():
        marks = ["yes" if role in allowed else "" for role in Role]
        yield _row([f"`{method}` ({server})", *marks])


if __name__ == "__main__":
    PAGE.write_text(page())
