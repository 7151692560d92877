"""Sessions of browsers: both halves, this origin only, no longer than the token; --readonly."""

import dataclasses
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest

from paramd_service.control.access.authority import (
    CODE_S,
    IDLE_S,
    MAX_CODES,
    MAX_OF_TOKEN,
    MAX_SESSIONS,
    OWNER,
    Sessions,
    Tokens,
    cookie_value,
)
from paramd_service.control.api.app import build_app
from paramd_service.control.api.guard import CSP, Page, PageFile, page_files
from paramd_service.control.base.config import ControlConfig
from tests.control_services import TOKEN, host, services
from tests.memory_stores import MemoryTokens
from tests.unit.control.test_control_http import RIGHT, client_of

SESSION = "/api/v1/session"


async def signed_in(client: httpx2.AsyncClient, by: str = f"Bearer {TOKEN}") -> dict[str, str]:
    """Signs in; gives the headers of what the page sends from then on."""
    answer = await client.post(SESSION, headers={"authorization": by})
    assert answer.status_code == 201, answer.text
    kept = answer.headers["set-cookie"]
    assert "HttpOnly" in kept
    assert "SameSite=strict" in kept
    client.cookies.clear()
    return {"cookie": kept.partition(";")[0], "x-paramd-session": answer.json()["key"]}


async def test_a_session_is_its_token_and_ends_at_sign_out() -> None:
    async with client_of(build_app(services())) as client:
        both = await signed_in(client)
        told = (await client.get(SESSION, headers=both)).json()
        assert (told["name"], told["role"]) == ("owner", "admin")
        assert (await client.delete(SESSION, headers=both)).status_code == 204
        assert (await client.get(SESSION, headers=both)).status_code == 401


async def test_neither_half_of_a_session_suffices() -> None:
    async with client_of(build_app(services())) as client:
        one, other = await signed_in(client), await signed_in(client)
        for wrong in (
            {"cookie": one["cookie"]},
            {"x-paramd-session": one["x-paramd-session"]},
            {**one, "x-paramd-session": other["x-paramd-session"]},
            {**one, "authorization": "Bearer wrong"},
            # What is no bearer's token is a wrong one, too, and not as if none had been sent.
            {**one, "authorization": ""},
            {**one, "authorization": "Basic wrong"},
            {**one, "authorization": "Bearer"},
        ):
            assert (await client.get(SESSION, headers=wrong)).status_code == 401


async def test_a_code_signs_in_once_and_is_good_for_nothing_else() -> None:
    owner = {"authorization": f"Bearer {TOKEN}"}
    async with client_of(build_app(services())) as client:
        made = await client.post(f"{SESSION}/codes", headers=owner)
        assert (made.status_code, made.json()["ttl_s"]) == (201, CODE_S)
        code = {"authorization": f"Paramd-Code {made.json()['code']}"}
        for method, path in (("GET", SESSION), ("GET", "/api/v1/jobs"), ("POST", "/api/v1/tokens")):
            assert (await client.request(method, path, headers=code)).status_code == 401
        # As a bearer's token it is nothing, and stays unused.
        wrong = {"authorization": f"Bearer {made.json()['code']}"}
        assert (await client.post(SESSION, headers=wrong)).status_code == 401
        both = await signed_in(client, code["authorization"])
        told = (await client.get(SESSION, headers=both)).json()
        assert told["name"] == "owner"
        assert (await client.post(SESSION, headers=code)).status_code == 401
        # A session may not make more of itself.
        assert (await client.post(f"{SESSION}/codes", headers=both)).status_code == 422
        assert (await client.post(f"{SESSION}/codes")).status_code == 401


async def test_a_sign_in_of_another_token_over_an_open_session_asks() -> None:
    tokens = Tokens(TOKEN, MemoryTokens())
    _, theirs = await tokens.create(OWNER, role="editor", ttl_s=60.0, name="somebody")
    app = build_app(dataclasses.replace(services(), tokens=tokens))
    async with client_of(app) as client:
        mine = await signed_in(client)
        made = await client.post(f"{SESSION}/codes", headers={"authorization": f"Bearer {theirs}"})
        link = {"authorization": f"Paramd-Code {made.json()['code']}", **mine}
        for by in (link, link, {"authorization": f"Bearer {theirs}", **mine}):
            answer = await client.post(SESSION, headers=by)
            assert answer.status_code == 409
            assert "set-cookie" not in answer.headers
            assert "signed in as owner (admin)" in answer.json()["detail"]
            assert "as somebody (editor)" in answer.json()["detail"]
        assert (await client.get(SESSION, headers=mine)).json()["name"] == "owner"
        answer = await client.post(f"{SESSION}?replace=true", headers=link)
        assert (answer.status_code, answer.json()["name"]) == (201, "somebody")
        # The same token again asks nothing, nor does one whose session's token has ended.
        again = {"authorization": f"Bearer {TOKEN}", **mine}
        assert (await client.post(SESSION, headers=again)).status_code == 201
        client.cookies.clear()
        other = await signed_in(client, f"Bearer {theirs}")
        await tokens.revoke(OWNER, "somebody")
        over = {"authorization": f"Bearer {TOKEN}", **other}
        assert (await client.post(SESSION, headers=over)).status_code == 201


def test_a_code_dies_by_use_by_age_and_in_a_crowd() -> None:
    now_s = [0.0]
    sessions = Sessions(clock=lambda: now_s[0])
    code = sessions.invite("digest")
    assert (sessions.redeem(code), sessions.redeem(code)) == ("digest", "")
    code = sessions.invite("digest")
    now_s[0] = CODE_S
    assert sessions.redeem(code) == ""
    codes = [sessions.invite("digest") for _ in range(MAX_CODES + 1)]
    assert [sessions.redeem(one) for one in codes[:2]] == ["", "digest"]
    owners = sessions.invite("owner")
    codes = [sessions.invite("viewer") for _ in range(2 * MAX_CODES)]
    assert sessions.redeem(owners) == "owner", "a crowd displaces its own"


async def test_a_session_ends_with_its_token() -> None:
    tokens = Tokens(TOKEN, MemoryTokens())
    _, token = await tokens.create(OWNER, role="viewer", ttl_s=60.0, name="someone")
    app = build_app(dataclasses.replace(services(), tokens=tokens))
    async with client_of(app) as client:
        both = await signed_in(client, f"Bearer {token}")
        assert (await client.get(SESSION, headers=both)).json()["actions"] == ["view"]
        await tokens.revoke(OWNER, "someone")
        assert (await client.get(SESSION, headers=both)).status_code == 401


def test_an_idle_session_ends_and_the_oldest_makes_place() -> None:
    now_s = [0.0]
    sessions = Sessions(clock=lambda: now_s[0])
    first = sessions.open("digest")
    now_s[0] = IDLE_S - 1
    assert sessions.token_digest(first.cookie, first.key) == "digest"
    now_s[0] += IDLE_S
    assert sessions.token_digest(first.cookie, first.key) == ""
    opened = [sessions.open("one") for _ in range(MAX_OF_TOKEN + 1)]
    assert sessions.token_digest(opened[0].cookie, opened[0].key) == ""
    assert sessions.token_digest(opened[1].cookie, opened[1].key) == "one"


def test_a_kept_session_of_the_owner_goes_on_with_the_next_runs_own_token(tmp_path: Path) -> None:
    path = tmp_path / "sessions.json"
    first = Sessions()
    first.keep(path, "run 1's", port=8470)
    mine, theirs = first.open("run 1's"), first.open("a viewer's")
    later = Sessions()
    later.keep(path, "run 2's", port=8470)
    assert later.token_digest(mine.cookie, mine.key) == "run 2's"
    assert later.token_digest(theirs.cookie, theirs.key) == "a viewer's"
    assert later.token_digest(mine.cookie, theirs.key) == ""


def test_whoever_has_most_sessions_loses_one_when_there_are_too_many() -> None:
    sessions = Sessions(clock=lambda: 0.0)
    admin = sessions.open("admin")
    crowd = [
        [sessions.open(f"{n}") for _ in range(MAX_OF_TOKEN)]
        for n in range(MAX_SESSIONS // MAX_OF_TOKEN)
    ]
    assert sessions.token_digest(admin.cookie, admin.key) == "admin"
    assert sessions.token_digest(crowd[0][0].cookie, crowd[0][0].key) == ""
    assert sessions.token_digest(crowd[0][1].cookie, crowd[0][1].key) == "0"


@pytest.mark.parametrize("header", ["", "a", "=", "paramd-1", "x" * 5000, 'paramd-1="', "\x00"])
def test_a_cookie_that_cannot_be_read_is_none(header: str) -> None:
    assert cookie_value(header, "paramd-1") == ""


async def test_readonly_refuses_changes_and_admins_may_still_look() -> None:
    parts = services(host(config=ControlConfig(job="run", readonly=True)))
    async with client_of(build_app(parts)) as client:
        answer = await client.post("/api/v1/tokens", headers=RIGHT, json={"role": "viewer"})
        assert answer.status_code == 403
        assert "--readonly" in answer.json()["detail"]
        assert (await client.get("/api/v1/tokens", headers=RIGHT)).status_code != 403
        assert (await client.get(SESSION, headers=RIGHT)).json()["readonly"] is True


@asynccontextmanager
async def serving(files: Mapping[str, PageFile]) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of the page or of the manual, made of files."""
    transport = httpx2.ASGITransport(Page(build_app(services()), files=files))
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:8470") as client:
        yield client


async def test_a_built_page_is_kept_by_browsers_and_names_no_other_file(tmp_path: Path) -> None:
    (tmp_path / "assets").mkdir()
    (tmp_path / "index.html").write_text("<title>page</title>")
    (tmp_path / "assets" / "app-1.js").write_text("1")
    (tmp_path / "assets" / "app-1.js.gz").write_bytes(b"packed")
    (tmp_path / "secret.txt").write_text("no")
    async with serving(page_files(tmp_path)) as client:
        index = await client.get("/")
        assert index.headers["content-security-policy"] == CSP
        assert index.headers["cache-control"] == "no-cache"
        again = await client.get("/", headers={"if-none-match": index.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        script = await client.get("/assets/app-1.js", headers={"accept-encoding": "identity"})
        assert (script.content, script.headers["content-type"][:15]) == (b"1", "text/javascript")
        assert "immutable" in script.headers["cache-control"]
        for other in ("/secret.txt", "/assets/../secret.txt", "/index.html", "/assets/app-1.js.gz"):
            assert (await client.get(other)).status_code == 401


def test_sessions_outlive_a_process_and_what_was_left_stays_left(tmp_path: Path) -> None:
    path, now_s = tmp_path / "sessions.json", [1e9]

    def process(port: int = 8470) -> Sessions:
        sessions = Sessions(clock=lambda: now_s[0])
        sessions.keep(path, "", port=port)
        return sessions

    before = process()
    kept, left = before.open("digest"), before.open("digest")
    before.close(left.cookie)
    assert path.stat().st_mode & 0o777 == 0o600
    assert not any(secret in path.read_text() for secret in (kept.key, kept.cookie))
    after = process()
    assert after.token_digest(kept.cookie, kept.key) == "digest"
    assert after.token_digest(kept.cookie, left.key) == ""
    assert after.token_digest(left.cookie, left.key) == ""
    now_s[0] += IDLE_S
    assert process().token_digest(kept.cookie, kept.key) == ""
    path.write_text('{"not": "ours"}')
    assert process().token_digest(kept.cookie, kept.key) == ""


def test_sessions_end_for_good_when_their_process_is_back_at_another_port(tmp_path: Path) -> None:
    def process(port: int) -> Sessions:
        sessions = Sessions()
        sessions.keep(tmp_path / "sessions.json", "", port=port)
        return sessions

    before = process(8470).open("digest")
    assert process(8470).token_digest(before.cookie, before.key) == "digest"
    assert process(8471).token_digest(before.cookie, before.key) == ""
    assert process(8470).token_digest(before.cookie, before.key) == ""
