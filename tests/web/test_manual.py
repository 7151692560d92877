"""The manual, as a control plane serves it, in a real browser."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from paramd_service.control.api.guard import MANUAL
from tests.needs import missing
from tests.web.door import Door, Tab

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(autouse=True)
def built() -> None:
    if not (MANUAL / "index.html").is_file():
        missing("the manual (make manual)")


def test_the_manual_is_read_and_searched_without_a_token_and_within_the_policy(
    browser: Browser, door: Door
) -> None:
    with Tab(browser, door) as tab:
        tab.page.goto(f"{door.url}/docs")
        assert tab.page.inner_text("h1").startswith("paramd")
        # The theme's own style is in force: its icons are a hidden sprite.
        assert (
            tab.page.evaluate("getComputedStyle(document.querySelector('svg')).display") == "none"
        )
        tab.page.click(".sidebar-tree >> text=How do I ...?")
        tab.page.wait_for_url("**/howto.html")
        tab.page.fill(".sidebar-search", "stall budget")
        tab.page.keyboard.press("Enter")
        tab.page.wait_for_url("**/search.html?q=stall*")
        tab.page.wait_for_selector("#search-results li a")
        tab.page.click("#search-results li a >> nth=0")
        tab.page.wait_for_selector("article h1")
        tab.check_quiet()


def test_every_picture_of_the_manual_is_shown(browser: Browser, door: Door) -> None:
    with Tab(browser, door) as tab:
        for page in ("index", "concepts"):
            tab.page.goto(f"{door.url}/docs/{page}.html")
            widths = "[...document.images].map(image => image.naturalWidth)"
            tab.page.wait_for_function(f"{widths}.every(width => width > 0)")
            assert tab.page.evaluate(f"{widths}.length") > 0
        tab.check_quiet()
