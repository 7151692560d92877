"""The page in a real browser: sign-in, numbers, names like attacks, roles, other sites."""

from __future__ import annotations

import http.server
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import httpx2

from tests.web.door import Door, Tab, wait_for
from tests.web.training import HOSTILE, JOB

if TYPE_CHECKING:
    from playwright.sync_api import Browser


def test_a_token_is_sent_once_and_kept_nowhere_in_the_page(browser: Browser, door: Door) -> None:
    with Tab(browser, door) as tab:
        tab.page.goto(door.url)
        tab.page.fill("input[name=token]", "wrong-token-of-nobody")
        tab.page.click("button[type=submit]")
        tab.see("This token is not valid here", within="form")
        tab.messages.clear()  # the refusal
        tab.sign_in(door.token)
        (cookie,) = tab.cookies()
        assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
        kept = "JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])"
        assert door.token not in tab.page.evaluate(kept)
        assert cookie["value"] not in tab.page.evaluate(kept)
        tab.page.reload()
        tab.page.wait_for_selector("main h1")
        tab.page.click("text=Sign out")
        tab.page.wait_for_selector("input[name=token]")
        assert tab.cookies() == []
        tab.check_quiet()


def test_a_link_signs_in_once_and_leaves_no_code_in_the_address(
    browser: Browser, door: Door
) -> None:
    code = door.post("/session/codes", None)["code"]
    link = f"{door.url}/#/sign-in/{code}/{JOB}"
    with Tab(browser, door) as tab:
        tab.page.goto(link)
        tab.page.wait_for_selector("main h1")
        assert code not in tab.page.evaluate("JSON.stringify([localStorage, location.href])")
        assert tab.page.evaluate("location.hash").startswith(f"#/{JOB}")
        tab.check_quiet()
        tab.page.goto(link)  # again, in the open tab of who is signed in
        wait_for("the code gone", lambda: code not in tab.page.evaluate("location.href"))
        tab.page.wait_for_selector("main h1")
    with Tab(browser, door) as tab:
        tab.page.goto(link)
        tab.see("This link has been used", within="form")
        fresh = door.post("/session/codes", None)["code"]
        tab.page.goto(f"{door.url}/#/sign-in/{fresh}/{JOB}")
        tab.page.wait_for_selector("main h1")
        tab.messages.clear()  # the refusal


def test_a_link_of_another_token_asks_before_it_replaces_who_is_signed_in(
    browser: Browser, door: Door
) -> None:
    made = door.post("/tokens", {"role": "editor", "name": "link-of-another"})
    signed = {"authorization": f"Bearer {made['token']}"}
    with Tab(browser, door) as tab:
        tab.page.goto(f"{door.url}/#/sign-in/{door.post('/session/codes', None)['code']}/{JOB}")
        tab.page.wait_for_selector("main h1")
        where = f"{door.url}/api/v1/session/codes"
        code = httpx2.post(where, headers=signed, trust_env=False).json()["code"]
        tab.page.goto(f"{door.url}/#/sign-in/{code}/{JOB}")
        tab.see("signed in as owner (admin)", within="[role=alertdialog]")
        tab.page.get_by_role("button", name="Stay signed in").click()
        tab.page.wait_for_selector("main h1")
        assert tab.page.locator(".name", has_text="owner").count() == 1
        tab.page.goto("about:blank")
        tab.page.goto(f"{door.url}/#/sign-in/{code}/{JOB}")
        tab.page.get_by_role("button", name="Use the link").click()
        wait_for("the other", lambda: tab.page.locator(".name", has_text="link-of").count() == 1)
        tab.messages.clear()  # the refusals


def test_numbers_and_values_are_those_of_the_api(tab: Tab, door: Door) -> None:
    stats = door.get("params/stats", filter="still.weight")["stats"][0]
    tab.open("params", filter="still.weight", name="still.weight")
    tab.see(f"{stats['norm']:.6g}", within=".detail")
    tab.page.click("text=Values")
    tab.page.get_by_role("button", name="Exact").click()
    wait_for("the values", lambda: tab.page.locator(".values td").count() == 16 * 8)
    told = door.get("params/values", name="still.weight[0:16, 0:8]")["values"]
    assert [cell.inner_text() for cell in tab.page.locator(".values td").all()] == told
    tab.page.get_by_role("button", name="Placement", exact=True).click()
    pieces = tab.page.get_by_role("table", name="Pieces")
    wait_for("the pieces", lambda: "20:40, 0:48" in pieces.inner_text())


def test_tokens_are_made_shown_once_and_revoked(tab: Tab, door: Door) -> None:
    page = tab.page
    tab.open("system")
    page.fill("input[name=token-name]", "on-call")
    page.select_option("select[name=role]", "reader")
    page.get_by_role("button", name="Make a token").click()
    secret = page.get_by_test_id("secret").inner_text().strip()

    def status() -> int:
        offered = {"authorization": f"Bearer {secret}"}
        return httpx2.get(f"{door.url}/api/v1/jobs", headers=offered, trust_env=False).status_code

    assert status() == 200
    page.get_by_role("button", name="Done").click()
    assert secret not in page.content()
    row = page.get_by_role("row", name="on-call")
    row.get_by_role("button", name="Revoke").click()
    page.get_by_role("button", name="Cancel").click()
    assert status() == 200
    row.get_by_role("button", name="Revoke").click()
    page.get_by_role("dialog").get_by_role("button", name="Revoke", exact=True).click()
    row.get_by_text("revoked").wait_for()
    assert status() == 401


def test_names_like_attacks_stay_text(tab: Tab) -> None:
    tab.page.on("dialog", lambda dialog: tab.messages.append(f"dialog: {dialog.message}"))
    for shown in ("list", "tree"):
        tab.open("params", filter="odd.*", **{"as": shown})
        for name in HOSTILE:
            label = name if shown == "tree" else f"odd.{name}"
            tab.see_name(label)
    assert tab.page.locator("main img").count() == 0
    widths = tab.page.locator("[role=table] .row").evaluate_all(
        "rows => [...new Set(rows.map(row => row.getBoundingClientRect().width))]"
    )
    assert len(widths) == 1
    for name in HOSTILE:
        tab.open("params", filter="odd.*", name=f"odd.{name}")
        tab.see("4.89898", within=".detail")  # the norm of 24 ones


def test_what_a_role_may_not_is_not_offered_and_refused(browser: Browser, door: Door) -> None:
    token = door.post("/tokens", {"role": "viewer", "ttl_s": 600.0})["token"]
    with Tab(browser, door) as tab:
        tab.sign_in(token)
        tab.open("params", name="still.weight")
        tab.see("1,920", within=".detail")
        tab.open("params", name="still.weight", part="heat")
        tab.see("Values are for readers; this token has the role viewer", within=".detail")
        offered = tab.page.get_by_role("group", name="Part").inner_text()
        assert "Heat map" not in offered
        assert "Values" not in offered
        for view, form in (("edits", "Edit"), ("exports", "Export")):
            tab.open(view)
            tab.page.wait_for_selector(".source")
            assert tab.page.get_by_role("form", name=form).count() == 0
        tab.open("mesh", rank="0")
        tab.see("Needs an editor's token")
        assert tab.page.get_by_role("button", name="Read the log").is_disabled()
        tab.check_quiet()
        asked = f"""fetch('/api/v1/jobs/{JOB}/params/values?name=still.weight', {{
            headers: {{'x-paramd-session': localStorage.getItem('paramd.session')}}
        }}).then(answer => answer.status)"""
        assert tab.page.evaluate(asked) == 403


def test_other_sites_get_nothing(browser: Browser, door: Door, tmp_path: Path) -> None:
    host = {"host": "evil.example"}
    assert httpx2.get(door.url, headers=host, trust_env=False).status_code == 400
    (tmp_path / "evil.html").write_text("<title>another site</title>")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: object, **named: object) -> None:
            super().__init__(*arguments, directory=str(tmp_path), **named)  # type: ignore[arg-type]

        def log_message(self, *_: object) -> None:
            pass

    with Tab(browser, door) as tab, http.server.HTTPServer(("127.0.0.1", 0), Quiet) as server:
        serving = threading.Thread(target=server.serve_forever, name="another-site")
        serving.start()
        try:
            tab.sign_in(door.token)
            # The same host, so the browser sends the cookie; another port, so another origin.
            tab.page.goto(f"http://127.0.0.1:{server.server_port}/evil.html")
            asked = f"""fetch('{door.url}/api/v1/session', {{credentials: 'include'}})
                .then(answer => answer.text(), error => 'nothing: ' + error)"""
            assert tab.page.evaluate(asked).startswith("nothing: ")
            frame = f"""new Promise(resolve => {{
                const frame = document.createElement('iframe');
                frame.onload = () => resolve(frame.contentDocument === null ? 'refused' : 'shown');
                frame.src = '{door.url}/';
                document.body.append(frame);
            }})"""
            assert tab.page.evaluate(frame) == "refused"
        finally:
            server.shutdown()
            serving.join()
