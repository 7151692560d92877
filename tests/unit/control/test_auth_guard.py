"""What browsers can be made to do, and what must not stand in a URL; refused before anything."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from paramd.security.tickets import holds_token, new_token
from paramd_service.control.access.join import MAX_SOURCES, FailureLimit
from paramd_service.control.api.guard import MAX_BODY_BYTES, SECURITY_HEADERS, Guard

HOST = "127.0.0.1:8470"
reached: list[str] = []


async def app(scope: Any, receive: Any, send: Any) -> None:
    request = Request(scope, receive)
    await request.body()
    reached.append(request.method)
    await PlainTextResponse("ok", headers={"x-frame-options": "SAMEORIGIN"})(scope, receive, send)


@pytest.fixture
async def client() -> AsyncIterator[httpx2.AsyncClient]:
    reached.clear()
    guarded = Guard(
        app,
        listen_host="10.0.0.7",
        is_token=holds_token,
        names=lambda: frozenset({"train.example", "*.mesh.example", "fd00::7"}),
    )
    transport = httpx2.ASGITransport(guarded)
    async with httpx2.AsyncClient(transport=transport, base_url=f"http://{HOST}") as found:
        yield found


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost:1", "[::1]:8470", "10.0.0.7:8470", "train.example", "TRAIN.example:1",
     "a.mesh.example", "[fd00::7]:8470"],
)  # fmt: skip
async def test_names_of_this_server_pass(client: httpx2.AsyncClient, host: str) -> None:
    assert (await client.get("/", headers={"host": host})).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "a.b.mesh.example",
     "mesh.example", "xtrain.example", "0.0.0.0", "[::]", "2130706433", "", "train.example@evil"],
)  # fmt: skip
async def test_a_rebound_name_is_refused_whatever_else_is_right(
    client: httpx2.AsyncClient, host: str
) -> None:
    headers = {"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"}
    assert (await client.get("/", headers=headers)).status_code == 400
    assert reached == []


@pytest.mark.parametrize(
    "origin",
    ["null", "http://evil.example", f"https://{HOST}", "http://127.0.0.1:8471", "file://", ""],
)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
async def test_a_foreign_origin_is_refused(
    client: httpx2.AsyncClient, origin: str, method: str
) -> None:
    answer = await client.request(method, "/", headers={"origin": origin})
    assert answer.status_code == 403
    assert reached == []


@pytest.mark.parametrize(
    ("site", "mode", "method", "status"),
    [
        ("same-origin", "cors", "GET", 200),
        ("none", "navigate", "GET", 200),
        ("cross-site", "navigate", "GET", 200),
        ("cross-site", "navigate", "POST", 403),
        ("cross-site", "no-cors", "GET", 403),
        ("same-site", "cors", "GET", 403),
        ("cross-site", "websocket", "GET", 403),
    ],
)
async def test_only_a_link_may_come_from_another_site(
    client: httpx2.AsyncClient, site: str, mode: str, method: str, status: int
) -> None:
    headers = {"sec-fetch-site": site, "sec-fetch-mode": mode}
    assert (await client.request(method, "/", headers=headers)).status_code == status


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None]
)
async def test_a_form_of_another_site_changes_nothing(
    client: httpx2.AsyncClient, kind: str | None
) -> None:
    headers = {} if kind is None else {"content-type": kind}
    answer = await client.post("/", content=b'{"role":"admin"}', headers=headers)
    assert answer.status_code == 415
    assert reached == []
    assert (await client.post("/", json={"role": "admin"})).status_code == 200


async def test_bodies_have_a_length_and_a_limit(client: httpx2.AsyncClient) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b"{}"

    headers = {"content-type": "application/json"}
    long = b" " * (MAX_BODY_BYTES + 1)
    assert (await client.post("/", content=chunks(), headers=headers)).status_code == 411
    assert (await client.post("/", content=long, headers=headers)).status_code == 413
    assert reached == []


@pytest.mark.parametrize(
    "url",
    ["/?token=x", "/?Access_Token=", "/?a=1&ticket=2", "/?a={}", "/?{}=1", "/x/{}", "/{}/x",
     "/?a=x{}y"],
)  # fmt: skip
async def test_a_token_in_a_url_is_refused_and_not_logged(
    client: httpx2.AsyncClient, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    token = new_token()
    with caplog.at_level(logging.DEBUG, logger="paramd.control.access"):
        answer = await client.get(url.format(token))
    assert answer.status_code == 400
    assert token not in answer.text
    assert "GET" in caplog.text
    assert token not in caplog.text
    assert reached == []


async def test_every_answer_has_the_headers_and_a_route_may_set_its_own(
    client: httpx2.AsyncClient,
) -> None:
    answer = await client.get("/")
    for name, value in SECURITY_HEADERS:
        expected = "SAMEORIGIN" if name == b"x-frame-options" else value.decode()
        assert answer.headers.get_list(name.decode()) == [expected]
    refused = await client.get("/?token=x")
    assert all(refused.headers[name.decode()] == value.decode() for name, value in SECURITY_HEADERS)
    assert "default-src 'none'" in refused.headers["content-security-policy"]


async def test_browsers_are_told_to_keep_to_tls_but_not_for_loopback(
    client: httpx2.AsyncClient,
) -> None:
    for url, told in (
        ("https://train.example/", True),
        ("https://127.0.0.1:8470/", False),
        ("http://train.example/", False),
    ):
        answer = await client.get(url)
        assert ("strict-transport-security" in answer.headers) == told, url


async def test_websockets_do_not_exist() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    guarded = Guard(app, listen_host="127.0.0.1", is_token=holds_token)
    reached.clear()
    await guarded({"type": "websocket"}, None, send)  # type: ignore[arg-type]
    assert (sent, reached) == ([], [])


def test_who_sends_wrong_tokens_is_limited_and_nobody_else() -> None:
    now_s = [0.0]
    limit = FailureLimit(burst=2.0, per_s=1.0, clock=lambda: now_s[0])
    assert [limit.allows("a") for _ in range(3)] == [True, True, False]
    assert limit.allows("b")
    now_s[0] = 1.0
    assert [limit.allows("a") for _ in range(2)] == [True, False]
    # However long it has been quiet: no more than the burst at once.
    now_s[0] = 1e6
    assert [limit.allows("a") for _ in range(4)] == [True, True, False, False]
    for number in range(2 * MAX_SOURCES):
        limit.allows(str(number))
    assert len(limit._left) == MAX_SOURCES
