"""The API that tells the truth, and a browser's tab that shows it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlencode

import httpx2

from tests.launch import Ranks
from tests.longer import wait_until
from tests.needs import missing

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator

Found = TypeVar("Found")
JOB = "web"
AXE = Path(__file__).parents[2] / "client/web/node_modules/axe-core/axe.min.js"
LOOK = """axe.run(document, {resultTypes: ['violations']}).then(found =>
    found.violations.map(one => one.id + ': ' + one.nodes.map(node => node.html).join(' ')))"""
PATIENCE_S = 60.0


def wait_for(what: str, condition: Callable[[], Found], timeout_s: float = PATIENCE_S) -> Found:
    return wait_until(condition, what, timeout_s)


class Door:
    """The REST side of the training's control plane, asked without the page."""

    def __init__(self, ranks: Ranks, folder: Path, job: str = JOB) -> None:
        self.ranks = ranks
        self.folder = folder
        self.job = job
        endpoint = json.loads((ranks.state_dir / job / "endpoint.json").read_text())
        self.url: str = endpoint["url"]
        self.token: str = endpoint["token"]
        self.control_pid: int = endpoint["pid"]

    def get(self, path: str, **query: object) -> Any:
        """Of the job; a path that begins with / is taken as it is."""
        where = path if path.startswith("/") else f"/jobs/{self.job}/{path}".rstrip("/")
        return self._ask("GET", where, params=query)

    def post(self, path: str, body: object) -> Any:
        return self._ask("POST", path, json=body)

    def delete(self, path: str) -> Any:
        return self._ask("DELETE", f"/jobs/{self.job}/{path}")

    def as_holder(self, token: str) -> Door:
        """The same, asked with another token."""
        other = copy.copy(self)
        other.token = token
        return other

    def wait_until_well(self) -> None:
        def well() -> bool:
            ranks = self.get("ranks")["ranks"]
            return len(ranks) == 2 and all(r["state"] == "ok" and r["step"] > 2 for r in ranks)

        wait_for("both ranks well", well)

    def _ask(self, method: str, path: str, **more: Any) -> Any:
        # Without a pool, which would keep a connection beyond a test.
        answer = httpx2.request(
            method,
            f"{self.url}/api/v1{path}",
            headers={"authorization": f"Bearer {self.token}"},
            trust_env=False,
            timeout=30.0,
            **more,
        )
        assert answer.status_code < 300, answer.text
        return answer.json()


class Tab:
    """One tab of a browser with nothing of other tabs in it."""

    def __init__(self, browser: Browser, door: Door, *, theme: str = "light") -> None:
        self._door = door
        scheme: Any = theme
        self._context = browser.new_context(
            color_scheme=scheme, viewport={"width": 1400, "height": 900}
        )
        self.page = self._context.new_page()
        self.page.set_default_timeout(PATIENCE_S * 1000)
        self.messages: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda m: self.messages.append(f"{m.type}: {m.text}"))
        self.page.on("pageerror", lambda e: self.messages.append(f"pageerror: {e}"))
        self.page.on("request", lambda r: self.requests.append(r.url))

    def __enter__(self) -> Tab:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.close()

    def sign_in(self, token: str) -> None:
        self.page.goto(self._door.url)
        self.page.fill("input[name=token]", token)
        self.page.click("button[type=submit]")
        self.page.wait_for_selector("main h1")

    def open(self, view: str, **query: str) -> None:
        """Goes to a view as a link would."""
        shown = f"?{urlencode(query)}" if query else ""
        self.page.goto(f"{self._door.url}/#/{JOB}/{view}{shown}")
        self.page.wait_for_selector("main h1")

    def see(self, text: str, *, within: str = "main") -> Locator:
        """Waits until some text is in sight."""
        found = self.page.locator(within).get_by_text(text).first
        found.wait_for()
        return found

    def see_name(self, name: str) -> None:
        """Waits until a row of a table has a name, to the letter."""
        names = self.page.locator("[role=table] .all bdi.name")
        wait_for(name, lambda: name in names.all_text_contents())

    def cookies(self) -> list[Any]:
        return list(self._context.cookies())

    def violations(self) -> list[str]:
        """What axe-core finds in the page as it is: rule and elements."""
        if not AXE.is_file():
            missing("axe-core (make web)")
        # Through the debugger, which the page's policy does not bind.
        debugger = self._context.new_cdp_session(self.page)
        debugger.send("Runtime.evaluate", {"expression": AXE.read_text()})
        found = debugger.send(
            "Runtime.evaluate", {"expression": LOOK, "awaitPromise": True, "returnByValue": True}
        )
        debugger.detach()
        return list(found["result"]["value"])

    def check_quiet(self) -> None:
        """Nothing in the console, nothing asked of another host, no token in a URL."""
        assert not self.messages, self.messages
        for url in self.requests:
            assert url.startswith(self._door.url), url
            assert self._door.token not in url
