"""Pictures of the dashboard over a real training: `make screenshot` writes those of the README.

    python -m benchmarks.screenshot [--all FOLDER | --idle SECONDS]

Trains the demo's GPT on two ranks, edits and exports, and opens the page in Chromium.
`--all` writes every view in both themes and at the width of a phone, to be looked at; `--idle`
tells what views that nobody touches take of a core.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import struct
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import httpx2
import psutil

from benchmarks import site
from benchmarks.dashboard import cpu_of
from paramd.cli.demo import free_job_name, started
from paramd.places import Endpoint, read_endpoint

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

DOCS = Path(__file__).parent.parent / "docs"
WIDE, PHONE = (1440, 900), (390, 844)
OPEN_TIMEOUT_S = 120.0
WEIGHT = "layers.0.up.weight"
VIEWS = """[...document.querySelectorAll('[aria-label="Views"] a')]
    .map(one => one.firstChild.textContent).join(", ")"""
NAVIGATION, PNG_END_BYTES = "navigation", 12
SETTLE_MS = 12_000
"""Long enough for a few samples of what is collected while a page is open."""

README: tuple[tuple[str, str, dict[str, str]], ...] = (("dashboard", "params", {"name": WEIGHT}),)
ALL: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("overview", "overview", {}),
    ("runs", "runs", {}),
    ("mesh", "mesh", {"rank": "1"}),
    ("params", "params", {}),
    ("tree", "params", {"as": "tree"}),
    ("numbers", "params", {"name": WEIGHT}),
    ("overlay", "params", {"name": WEIGHT, "hist": "overlay", "smooth": "0.6"}),
    ("heat", "params", {"name": WEIGHT, "part": "heat", "zoom": "[0:64, 0:64]"}),
    ("where", "params", {"name": WEIGHT, "part": "where"}),
    ("values", "params", {"name": WEIGHT, "part": "values"}),
    ("compare", "params", {"name": WEIGHT, "part": "compare"}),
    ("grads", "grads", {"name": WEIGHT}),
    ("edits", "edits", {}),
    ("exports", "exports", {}),
    ("alerts", "alerts", {}),
    ("system", "system", {}),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", type=Path, metavar="FOLDER")
    parser.add_argument("--idle", type=float, metavar="SECONDS")
    arguments = parser.parse_args()
    folder: Path | None = arguments.all
    from playwright.sync_api import sync_playwright

    with training(busy=folder is not None) as endpoint, sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=["--no-sandbox", "--disable-gpu", "--no-first-run"],
        )
        if arguments.idle:
            idle(browser, endpoint, arguments.idle)
        elif folder is None:
            take(browser, endpoint, README, DOCS, theme="light", size=WIDE)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            for theme, size in product(("light", "dark"), (WIDE, PHONE)):
                take(browser, endpoint, ALL, folder, theme=theme, size=size)
        browser.close()


def idle(browser: Browser, endpoint: Endpoint, seconds: float) -> None:
    """Prints the CPU of a page that nobody touches, and of the control plane that watches."""
    page, control = _signed_in(browser.new_context(), endpoint), psutil.Process(endpoint.pid)
    for view in ("overview", "params", "grads"):
        page.goto(f"{endpoint.url}/#/{endpoint.job}/{view}")
        page.wait_for_timeout(SETTLE_MS)
        before_s = site.cpu_used_s(control)
        with cpu_of(page) as spent_s:
            page.wait_for_timeout(1e3 * seconds)
        used_s = site.cpu_used_s(control) - before_s
        shares = [f"{100 * one / seconds:.1f} %" for one in (spent_s[0], used_s)]
        print(f"{view}: page {shares[0]}, control plane {shares[1]}", flush=True)


@contextmanager
def training(*, busy: bool) -> Iterator[Endpoint]:
    """The demo's training, watched; `busy` with an edit and an export behind it."""
    with tempfile.TemporaryDirectory(prefix="paramd-shots-") as name:
        folder = Path(name)
        (folder / "exports").mkdir()
        os.environ |= {
            "PARAMD_STATE_DIR": str(folder / "state"),
            "PARAMD_LISTEN": "127.0.0.1:0",
            "PARAMD_ALERTS": json.dumps({"watch_share": 1, "stats_every_s": 5.0}),
            "PARAMD_DESTINATIONS": json.dumps({"checkpoints": str(folder / "exports")}),
        }
        (folder / "state").mkdir(mode=0o700)
        with started(free_job_name("my-run"), folder, keep=True) as run:
            run.wait_until_open()
            endpoint = read_endpoint(run.job)
            _await(lambda: _ask(endpoint, "GET", "")["step"] >= 50)
            edit = {"ops": [{"pattern": "head.*", "op": "mul", "value": 0.99}], "note": "try"}
            if busy:
                _ask(endpoint, "POST", "/edits", json=edit)
                _ask(endpoint, "POST", "/exports", json={"destination": "checkpoints/run/one"})
            yield endpoint


def take(
    browser: Browser,
    endpoint: Endpoint,
    shots: tuple[tuple[str, str, dict[str, str]], ...],
    folder: Path,
    *,
    theme: str,
    size: tuple[int, int],
) -> None:
    """Signs in once and writes a PNG of each place."""
    scheme: Any = theme
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme=scheme
    )
    suffix = "" if folder == DOCS else f"-{theme}-{size[0]}"
    page = _signed_in(context, endpoint, folder / f"signin{suffix}.png" if shots is ALL else None)
    for name, view, query in shots:
        _shoot(page, endpoint, view, query, folder / f"{name}{suffix}.png")
    if shots is ALL:
        _shoot_edit(page, endpoint, folder, suffix)
    context.close()


def _signed_in(context: BrowserContext, endpoint: Endpoint, shot: Path | None = None) -> Page:
    """A page of its own; `shot`: where a picture of the sign-in goes."""
    page = context.new_page()
    page.on("console", lambda message: print(message.type, message.text, file=sys.stderr))
    page.goto(endpoint.url)
    page.wait_for_selector("input[name=token]")
    if shot is not None:
        page.screenshot(path=shot)
    page.fill("input[name=token]", endpoint.token)
    page.click("button[type=submit]")
    page.wait_for_selector("main h1")
    return page


def _shoot(page: Page, endpoint: Endpoint, view: str, query: dict[str, str], path: Path) -> None:
    shown = f"?{urlencode(query)}" if query else ""
    page.goto(f"{endpoint.url}/#/{endpoint.job}/{view}{shown}")
    page.wait_for_selector("main h1")
    page.wait_for_timeout(SETTLE_MS if "name" in query and "part" not in query else 4000)
    page.mouse.move(2, 2)
    page.screenshot(path=path, full_page=path.parent != DOCS)
    note(path, NAVIGATION, navigation(page))
    print(path)


def navigation(page: Page) -> str:
    """The page's views, as it calls them."""
    return str(page.evaluate(VIEWS))


def note(path: Path, key: str, text: str) -> None:
    """Adds a text to a PNG, before its end."""
    data, picture = f"{key}\0{text}".encode(), path.read_bytes()
    chunk = struct.pack(">I", len(data)) + b"tEXt" + data
    chunk += struct.pack(">I", zlib.crc32(b"tEXt" + data))
    path.write_bytes(picture[:-PNG_END_BYTES] + chunk + picture[-PNG_END_BYTES:])


def _shoot_edit(page: Page, endpoint: Endpoint, folder: Path, suffix: str) -> None:
    """An edit after its dry run, and the question before it: which is left at that."""
    page.goto(f"{endpoint.url}/#/{endpoint.job}/edits?{urlencode({'pattern': 'layers.0.*'})}")
    page.fill("input[name=value]", "0.5")
    page.get_by_role("button", name="Dry run").click()
    page.get_by_role("table", name="Before and after").wait_for()
    page.screenshot(path=folder / f"dry{suffix}.png", full_page=True)
    page.get_by_role("button", name="Apply").click()
    page.get_by_role("dialog").wait_for()
    page.screenshot(path=folder / f"confirm{suffix}.png")
    page.get_by_role("button", name="Cancel").click()


def _ask(endpoint: Endpoint, method: str, path: str, **more: Any) -> Any:
    answer = httpx2.request(
        method,
        f"{endpoint.url}/api/v1/jobs/{endpoint.job}{path}",
        headers={"authorization": f"Bearer {endpoint.token}"},
        trust_env=False,
        timeout=60.0,
        **more,
    )
    answer.raise_for_status()
    return answer.json()


def _await(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + OPEN_TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError("the training did not get going")
        time.sleep(0.2)


if __name__ == "__main__":
    main()
