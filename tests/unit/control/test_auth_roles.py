"""Who may do what over REST: every route, every role, from one table written out here."""

import dataclasses
import time
from collections.abc import AsyncIterator

import httpx2
import pytest
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts

from paramd.errors import DeniedError
from paramd.mesh.peers.control import error_of_http
from paramd.security.tickets import Role, Verifier, handed, new_token, shown_of
from paramd_service.control.access.authority import OWNER, Tokens
from paramd_service.control.access.doorway import OPEN_PATHS
from paramd_service.control.access.roles import OPERATIONS, UserRole
from paramd_service.control.api.app import build_app
from tests.control_services import BOOTSTRAP, TOKEN, services
from tests.memory_stores import MemoryTokens

V, R, E, X, T, A = UserRole
EVERYBODY = {V, R, E, X, T, A}
READERS = {R, E, X, A}

EXPECTED: dict[tuple[str, str], set[UserRole]] = {
    ("GET", "/metrics"): EVERYBODY,
    ("GET", "/api/v1/openapi.json"): EVERYBODY,
    ("GET", "/api/v1/session"): EVERYBODY,
    ("POST", "/api/v1/session"): EVERYBODY,
    ("POST", "/api/v1/session/codes"): EVERYBODY,
    ("DELETE", "/api/v1/session"): EVERYBODY,
    ("GET", "/api/v1/jobs/{job}/history"): EVERYBODY,
    ("GET", "/api/v1/jobs/{job}/history/series"): EVERYBODY,
    ("GET", "/api/v1/jobs/{job}/grads"): EVERYBODY,
    ("GET", "/api/v1/destinations"): EVERYBODY,
    ("POST", "/api/v1/destinations"): {A},
    ("GET", "/api/v1/jobs/{job}/exports"): EVERYBODY,
    ("POST", "/api/v1/jobs/{job}/exports"): {X, A},
    ("GET", "/api/v1/jobs/{job}/exports/{export}"): EVERYBODY,
    ("DELETE", "/api/v1/jobs/{job}/exports/{export}"): {X, A},
    ("POST", "/api/v1/jobs/{job}/exports/{export}/load"): {E, A},
    ("POST", "/api/v1/jobs/{job}/export-assets"): {X, A},
    ("GET", "/api/v1/jobs/{job}/export-file"): {E, A},
    ("GET", "/api/v1/jobs/{job}/export-schedules"): EVERYBODY,
    ("POST", "/api/v1/jobs/{job}/export-schedules"): {X, A},
    ("DELETE", "/api/v1/jobs/{job}/export-schedules/{schedule}"): {X, A},
    ("GET", "/api/v1/jobs"): EVERYBODY,
    ("POST", "/api/v1/jobs"): {T, A},
    ("GET", "/api/v1/jobs/{job}"): EVERYBODY,
    ("GET", "/api/v1/jobs/{job}/ranks"): EVERYBODY,
    ("GET", "/api/v1/jobs/{job}/tunnel"): READERS,
    ("GET", "/api/v1/jobs/{job}/ranks/{rank}/tunnel"): READERS,
    ("GET", "/api/v1/jobs/{job}/ranks/{rank}/metrics"): EVERYBODY,
    ("GET", "/api/v1/jobs/{job}/incarnations"): EVERYBODY,
    ("GET", "/api/v1/jobs/{job}/alerts"): EVERYBODY,
    ("GET", "/api/v1/jobs/{job}/why"): READERS,
    ("GET", "/api/v1/jobs/{job}/ranks/{rank}/log"): {E, A},
    ("GET", "/api/v1/jobs/{job}/updates"): READERS,
    ("GET", "/api/v1/jobs/{job}/diff"): READERS,
    ("GET", "/api/v1/jobs/{job}/params/spectrum"): READERS,
    ("GET", "/api/v1/jobs/{job}/events"): EVERYBODY,
    ("GET", "/api/v1/jobs/{job}/params"): EVERYBODY,
    ("GET", "/api/v1/jobs/{job}/params/detail"): EVERYBODY,
    ("GET", "/api/v1/jobs/{job}/params/stats"): EVERYBODY,
    ("GET", "/api/v1/jobs/{job}/params/histogram"): EVERYBODY,
    ("GET", "/api/v1/jobs/{job}/params/heatmap"): READERS,
    ("GET", "/api/v1/jobs/{job}/params/values"): READERS,
    ("GET", "/api/v1/jobs/{job}/snapshots"): READERS,
    ("POST", "/api/v1/jobs/{job}/snapshots"): READERS,
    ("GET", "/api/v1/jobs/{job}/snapshots/{snapshot}"): READERS,
    ("POST", "/api/v1/jobs/{job}/snapshots/{snapshot}/renew"): READERS,
    ("DELETE", "/api/v1/jobs/{job}/snapshots/{snapshot}"): READERS,
    ("GET", "/api/v1/jobs/{job}/edits"): EVERYBODY,
    ("GET", "/api/v1/jobs/{job}/edits/{edit}"): EVERYBODY,
    ("POST", "/api/v1/jobs/{job}/edits"): {E, A},
    ("POST", "/api/v1/jobs/{job}/edits/{edit}/commit"): {E, A},
    ("POST", "/api/v1/jobs/{job}/edits/{edit}/preview"): {E, A},
    ("POST", "/api/v1/jobs/{job}/edits/{edit}/undo"): {E, A},
    ("DELETE", "/api/v1/jobs/{job}/edits/{edit}"): {E, A},
    ("GET", "/api/v1/jobs/{job}/marks"): EVERYBODY,
    ("POST", "/api/v1/jobs/{job}/marks"): {E, A},
    ("DELETE", "/api/v1/jobs/{job}/marks/{mark}"): {E, A},
    ("POST", "/api/v1/jobs/{job}/rollback"): {E, A},
    ("GET", "/api/v1/jobs/{job}/hyperparameters"): READERS,
    ("POST", "/api/v1/jobs/{job}/hyperparameters"): {E, A},
    ("GET", "/api/v1/jobs/{job}/pause"): EVERYBODY,
    ("POST", "/api/v1/jobs/{job}/watch"): {E, A},
    ("POST", "/api/v1/jobs/{job}/pause"): {E, A},
    ("POST", "/api/v1/jobs/{job}/pause/renew"): {E, A},
    ("POST", "/api/v1/jobs/{job}/pause/step"): {E, A},
    ("DELETE", "/api/v1/jobs/{job}/pause"): {E, A},
    ("POST", "/api/v1/jobs/{job}/end"): {A},
    ("GET", "/api/v1/audit"): {A},
    ("GET", "/api/v1/jobs/{job}/audit"): {A},
    ("GET", "/api/v1/other-jobs"): {A},
    ("GET", "/api/v1/other-jobs/{job}/series"): {A},
    ("GET", "/api/v1/other-jobs/{job}/history"): {A},
    ("GET", "/api/v1/tokens"): {A},
    ("POST", "/api/v1/tokens"): {A},
    ("DELETE", "/api/v1/tokens/{name}"): {A},
}
"""Roles that a route lets through, whatever it then answers. Every route stands here."""


class Site:
    """An app with a token of every role."""

    def __init__(self) -> None:
        self.tokens = Tokens(TOKEN, MemoryTokens())
        self.denials: list[tuple[str, ...]] = []
        parts = dataclasses.replace(
            services(), tokens=self.tokens, denied=lambda *told: self.denials.append(told)
        )
        self.app: FastAPI = build_app(parts)
        transport = httpx2.ASGITransport(self.app, raise_app_exceptions=False)
        self.client = httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:8470")
        self.of: dict[UserRole, str] = {}

    async def start(self) -> None:
        for role in UserRole:
            _, self.of[role] = await self.tokens.create(OWNER, role=role, ttl_s=60.0)

    async def ask(self, method: str, path: str, token: str | None) -> httpx2.Response:
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        return await self.client.request(method, path, headers=headers)


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    found = Site()
    await found.start()
    async with found.client:
        yield found


def routes(app: FastAPI) -> set[tuple[str, str]]:
    return {
        (method, route.path or "")
        for route in iter_route_contexts(app.routes)
        for method in route.methods or ()
        if method != "HEAD"
    }


def test_every_route_stands_in_the_table(site: Site) -> None:
    found = {(method, path) for method, path in routes(site.app) if path not in OPEN_PATHS}
    assert found == set(EXPECTED)


def test_every_operation_names_its_action_and_none_is_named_twice(site: Site) -> None:
    names = [
        route.name for route in iter_route_contexts(site.app.routes) if route.path not in OPEN_PATHS
    ]
    assert len(names) == len(set(names)), "two operations of one name would share their rights"
    assert set(names) == set(OPERATIONS)


def concrete(path: str) -> str:
    """A path of this shape that answers at once: no such job, token or snapshot."""
    for name, value in (("job", "none"), ("rank", "0"), ("snapshot", "0" * 32), ("name", "none")):
        path = path.replace("{" + name + "}", value)
    return path


@pytest.mark.parametrize("role", UserRole)
async def test_a_role_passes_where_the_table_says_and_nowhere_else(
    site: Site, role: UserRole
) -> None:
    for (method, path), roles in EXPECTED.items():
        answer = await site.ask(method, concrete(path), site.of[role])
        assert answer.status_code != 401, (method, path)
        assert (answer.status_code == 403) == (role not in roles), (method, path, answer.text)


@pytest.mark.parametrize(
    "kind",
    ["none", "unknown", "expired", "revoked", "digest", "empty", "bare", "scheme", "short", "long"],
)
async def test_every_route_refuses_whoever_has_no_valid_token(
    site: Site, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, made = await site.tokens.create(OWNER, role="admin", ttl_s=60.0, name="doomed")
    offered = {
        "none": None, "unknown": f"Bearer {new_token()}", "digest": f"Bearer {row.digest}",
        "empty": "", "bare": made, "scheme": f"Basic {made}", "short": f"Bearer {made[:-1]}",
        "long": "Bearer " + "x" * 4000,
    }.get(kind, f"Bearer {made}")  # fmt: skip
    headers = {} if offered is None else {"authorization": offered}
    if kind == "revoked":
        await site.tokens.revoke(OWNER, "doomed")
    if kind == "expired":
        later_s = time.time() + 61.0
        monkeypatch.setattr(site.tokens, "_clock", lambda: later_s)
    for method, path in [*EXPECTED, ("GET", "/no/such/path"), ("PUT", "/api/v1/jobs")]:
        answer = await site.client.request(method, concrete(path), headers=headers)
        assert answer.status_code == 401, (method, path)
        assert answer.headers["www-authenticate"].startswith("Bearer")
    for path in ("/healthz", "/readyz"):
        assert (await site.client.get(path, headers=headers)).status_code == 200
    # Never the token itself; a burst of refusals is told to the audit one by one.
    assert len(site.denials) == len(EXPECTED) + 2
    assert made not in repr(site.denials)


async def test_an_operation_that_nobody_named_is_for_admins_alone(site: Site) -> None:
    @site.app.get("/careless")
    async def careless() -> str:
        return "secret"

    for role in UserRole:
        answer = await site.ask("GET", "/careless", site.of[role])
        assert answer.status_code == (200 if role is A else 403), role


@pytest.mark.parametrize(
    ("role", "method", "path", "needs"),
    [
        (UserRole.VIEWER, "GET", "why", "reading values needs reader"),
        (UserRole.VIEWER, "POST", "edits", "changing a training needs editor"),
        (UserRole.READER, "GET", "ranks/0/log", "reading logs needs editor"),
        (UserRole.EDITOR, "POST", "exports", "exporting needs exporter"),
        (UserRole.EXPORTER, "POST", "end", "administration needs admin"),
    ],
)
async def test_who_is_refused_by_role_is_told_the_least_role_and_of_no_other_token(
    site: Site, role: UserRole, method: str, path: str, needs: str
) -> None:
    answer = await site.ask(method, f"/api/v1/jobs/none/{path}", site.of[role])
    said = answer.json()["detail"]
    least = needs.split()[-1]
    advice = f"Ask an admin for such a token: paramd token create --role {least}"
    assert said == f"this token's role is {role}; {needs}. {advice}"
    # A client adds nothing to it, least of all where the owner's token is.
    assert str(error_of_http("http://x", 403, said, answer.json()["type"])) == said


@pytest.mark.parametrize("query", ["pattern=w[0:1]", "pattern=w%5B0%5D", "q=%255B&pattern=w[0]"])
async def test_slices_are_values_so_a_viewer_gets_no_statistics_of_them(
    site: Site, query: str
) -> None:
    for path in ("stats", "histogram"):
        url = f"/api/v1/jobs/none/params/{path}"
        assert (await site.ask("GET", f"{url}?pattern=w", site.of[V])).status_code != 403
        assert (await site.ask("GET", f"{url}?{query}", site.of[V])).status_code == 403
        assert (await site.ask("GET", f"{url}?{query}", site.of[R])).status_code != 403


@pytest.mark.parametrize("role", UserRole)
async def test_the_ticket_of_a_job_is_no_stronger_than_the_token(
    site: Site, role: UserRole
) -> None:
    query, size = "rank=1&gather=true", BOOTSTRAP.world_size
    found = (await site.ask("GET", f"/api/v1/jobs/run?{query}", site.of[role])).json()
    both = (await site.ask("GET", "/api/v1/jobs/run", site.of[role])).json()
    whole, reads = handed(both["ticket"], both["ticket_seed"]), found["reads"]
    wanted = Role.EDITOR if role in (E, A) else Role.READER if role in READERS else Role.VIEWER
    reading = Role.VIEWER if wanted is Role.VIEWER else Role.READER
    for rank, shown, of in (
        (1, found["ticket"], wanted),
        (None, shown_of(whole, None, size), wanted),
        (0, shown_of(reads, 0, size), reading),
    ):
        place = 0 if rank is None else rank + 1
        verifier = Verifier(BOOTSTRAP.signer.public_key, place)
        claims = verifier.verify(shown, job="run", incarnation=3)
        assert (claims.role, claims.rank) == (of, None)
    # A rank that is handed what it reads with learns no key of the other ticket.
    assert found["ticket_seed"] == ""
    forged = handed(both["ticket"], reads.partition("~")[2])
    with pytest.raises(DeniedError):
        Verifier(BOOTSTRAP.signer.public_key, 1).verify(
            shown_of(forged, 0, size), job="run", incarnation=3
        )
