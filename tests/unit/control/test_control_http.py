"""REST: nobody passes without the token, no foreign page passes at all, errors are problems."""

import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from unittest.mock import AsyncMock

import httpx2
import pytest
from fastapi import FastAPI

from paramd.errors import ConflictError
from paramd_service.control.access.join import FailureLimit
from paramd_service.control.api.app import build_app
from paramd_service.control.api.services import Services
from paramd_service.control.base import problems
from paramd_service.control.http_server import SECURITY_HEADERS
from tests.control_services import TOKEN, host, services

RIGHT = {"authorization": f"Bearer {TOKEN}"}


async def test_nothing_is_kept_of_an_evicted_job() -> None:
    of = host()
    mesh = of.jobs.get("run")
    parts = {part.name: part for part in of.parts}
    edits, watchers, exports = (
        vars(parts["edits"])["_edits"],
        vars(parts["alerts"])["_watchers"],
        vars(parts["exports"])["_exports"],
    )
    of.jobs._end(mesh, ConflictError("over"))
    of.jobs.on_evict.append(of.parts.evicted)
    edits.began(mesh)
    watchers._watchers["run"] = exports._queues["run"] = AsyncMock()
    of.jobs._evict_one([mesh])
    await exports.close()
    assert not any((watchers._watchers, exports._queues, edits._services, edits._paces))


@asynccontextmanager
async def client_of(app: FastAPI) -> AsyncIterator[httpx2.AsyncClient]:
    transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:8470") as client:
        yield client


@pytest.fixture
async def client() -> AsyncIterator[httpx2.AsyncClient]:
    async with client_of(build_app(services())) as found:
        yield found


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/api/v1/jobs", {"host": "LOCALHOST:9999"}, 200),
        ("/api/v1/jobs", {"origin": "http://127.0.0.1:8470"}, 200),
        ("/nowhere", {}, 404),
        ("/healthz", {"host": "evil.example:8470"}, 400),
        ("/api/v1/jobs", {"host": "evil.example"}, 400),
        ("/api/v1/jobs", {"origin": "https://evil.example"}, 403),
        (f"/api/v1/jobs?pattern={TOKEN}", {}, 400),
    ],
)
async def test_the_guard_is_in_front_of_the_app_and_its_headers_are_on_every_answer(
    client: httpx2.AsyncClient, path: str, headers: dict[str, str], status: int
) -> None:
    answer = await client.get(path, headers=RIGHT | headers)
    assert answer.status_code == status
    assert TOKEN not in answer.text
    assert all(answer.headers[name.decode()] == value.decode() for name, value in SECURITY_HEADERS)


async def test_wrong_tokens_are_limited_and_the_right_one_never_is() -> None:
    now_s = [0.0]
    limit = FailureLimit(burst=2.0, per_s=1.0, clock=lambda: now_s[0])
    parts = services()
    app = build_app(
        Services(**{n: getattr(parts, n) for n in Services.__slots__} | {"failures": limit})
    )
    async with client_of(app) as client:
        wrong = {"authorization": "Bearer wrong"}
        statuses = [(await client.get("/api/v1/jobs", headers=wrong)).status_code for _ in range(4)]
        assert statuses == [401, 401, 429, 429]
        assert (await client.get("/api/v1/jobs", headers=RIGHT)).status_code == 200
        now_s[0] = 1.0
        assert (await client.get("/api/v1/jobs", headers=wrong)).status_code == 401


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (OSError(errno.EMFILE, "Too many open files"), 429, "out of file descriptors"),
        (MemoryError(), 429, "out of memory"),
        (OSError(errno.EIO, "secret/path"), 500, "internal error"),
    ],
)
async def test_what_has_run_out_is_told_and_other_troubles_are_not(
    error: Exception, status: int, told: str
) -> None:
    app = FastAPI()
    problems.install(app)

    @app.get("/fails")
    async def fails() -> None:
        raise error

    async with client_of(app) as client:
        answer = await client.get("/fails")
    assert (answer.status_code, told in answer.json()["detail"]) == (status, True)
    assert "secret" not in answer.text
