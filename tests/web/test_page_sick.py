"""What the page shows of a training that is not well; none is shared with other tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.web.conftest import watched
from tests.web.door import Door, Tab, wait_for
from tests.web.training import JOB

if TYPE_CHECKING:
    from playwright.sync_api import Browser

WATCH = """verdict => {
    window.shown = [];
    new MutationObserver(() => window.shown.push([verdict.innerText, document.title]))
        .observe(verdict, {subtree: true, childList: true, characterData: true});
}"""
"""Keeps what the page's title is whenever the verdict changes."""


@pytest.fixture(scope="module")
def door(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    """A training of which no test needs that it is well, whatever ran before."""
    with watched(tmp_path_factory.mktemp("sick")) as found:
        yield found


def plant_nan(door: Door) -> None:
    """Has NaN in one parameter, from the next update on."""
    (door.folder / "nan").touch()


@pytest.fixture
def poisoned(door: Door) -> None:
    """A model that is not finite, and is known not to be."""
    plant_nan(door)
    wait_for(
        "the alert", lambda: any(a["rule"] == "non-finite" for a in door.get("alerts")["alerts"])
    )


def test_planted_nan_is_marked_wherever_it_shows(tab: Tab, door: Door) -> None:
    tab.open("grads", filter="layers.*")
    row = tab.page.locator("[role=row]", has=tab.page.get_by_text("layers.2.bias", exact=True))
    wait_for("a norm", lambda: float(row.locator(".num").first.inner_text()) > 0)
    if not (door.folder / "nan").exists():  # another test may have been first
        assert tab.page.get_by_text("non-finite").count() == 0
    plant_nan(door)
    row.get_by_text("non-finite").wait_for()
    first = tab.page.get_by_role("list", name="Not finite").locator("li", has_text="layers.2.bias")
    wait_for("its ranks", lambda: "on rank 0, 1" in first.inner_text())
    tab.open("alerts", state="firing")
    alert = tab.page.locator("li[data-rule='non-finite']").first
    alert.wait_for()
    firing = [a for a in door.get("alerts")["alerts"] if a["rule"] == "non-finite"]
    alert.get_by_role("button", name="All").click()
    wait_for("its members", lambda: firing[0]["name"] in alert.inner_text())
    assert "layers.1.weight" in alert.inner_text()
    assert tab.page.locator("li[data-rule='non-finite']").count() == 1
    bad = door.get("params/stats", filter="nan>0")["stats"]
    tab.open("params", filter="nan>0")
    for row in bad:
        tab.see_name(row["name"])
    assert "layers.1.weight" in {row["name"] for row in bad}
    marked = tab.page.locator("[role=row].bad")
    wait_for("their numbers", lambda: marked.count() == len(bad))


@pytest.mark.usefixtures("poisoned")
def test_the_overview_names_the_first_cause_and_who_changed_something(tab: Tab, door: Door) -> None:
    token = door.post("/tokens", {"role": "editor", "ttl_s": 600.0, "name": "mallory"})["token"]
    edit = {"ops": [{"pattern": "still.bias", "op": "mul", "value": 1.5}], "note": "late idea"}
    door.as_holder(token).post(f"/jobs/{JOB}/edits", edit)
    page = tab.page
    tab.open("overview")
    verdict = page.get_by_label("Health")
    wait_for("the verdict", lambda: "critical" in verdict.inner_text())
    assert "bad" in (verdict.get_attribute("class") or "")
    assert page.get_by_label("Views").get_by_text("critical").count() == 1
    assert page.title().startswith("(critical)")
    causes = page.get_by_role("list", name="Causes")
    causes.locator("li[data-rule='non-finite']").wait_for()
    edited = page.get_by_role("list", name="Timeline").locator("li", has_text="late idea")
    assert "by mallory" in edited.inner_text()
    assert "mul 1.5 still.bias" in edited.inner_text()


@pytest.mark.usefixtures("poisoned")
def test_a_control_plane_that_does_not_answer_is_not_taken_for_alive(tab: Tab, door: Door) -> None:
    tab.open("overview")
    verdict = tab.page.get_by_label("Health")
    wait_for("the verdict", lambda: "critical" in verdict.inner_text())
    verdict.evaluate(WATCH)
    pid = door.control_pid
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for("the doubt", lambda: "does not answer" in verdict.inner_text())
        doubts = [title for text, title in tab.page.evaluate("shown") if "does not answer" in text]
        assert doubts
        assert all(title.startswith("(unknown)") for title in doubts), doubts
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for("the answer", lambda: "critical" in verdict.inner_text())
    tab.messages.clear()  # requests that were given up
