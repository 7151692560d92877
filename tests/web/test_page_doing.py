"""What is done through the page happens to the training, and what happens shows on the page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.screenshot import navigation
from tests.web.door import Door, Tab, wait_for

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAME = "still.bias"
"""Does not learn, so that its numbers are those of the edits alone."""
PICTURE = Path(__file__).parents[2] / "docs/dashboard.png"
CUT_OFF = """[...document.querySelectorAll('main table, main .rows, main button')].filter(one => {
    for (let up = one; up; up = up.parentElement) {
        const how = getComputedStyle(up).overflowX;
        if (how === 'auto' || how === 'scroll') return false;
    }
    return one.getBoundingClientRect().right > innerWidth + 1;
}).map(one => one.outerHTML.slice(0, 120))"""
"""What is wider than the window, and cannot be scrolled to."""
SMALL = """[...document.querySelectorAll('button, select, summary, nav a, input')].filter(one => {
    const {width, height} = (one.closest('label') ?? one).getBoundingClientRect();
    return one.checkVisibility() && width > 1 && (width < 24 || height < 24);
}).map(one => one.outerHTML.slice(0, 120))"""
"""What a finger misses: controls of less than 24 pixels."""
SHIFTED = """new Promise(done => { let sum = 0; new PerformanceObserver(list => {
    for (const one of list.getEntries()) sum += one.hadRecentInput ? 0 : one.value;
}).observe({type: 'layout-shift', buffered: true}); setTimeout(() => done(sum), 3000); })"""
"""How much of what was in sight moves until the page has been there for seconds."""
VIEWS = ("overview", "runs", "mesh", "params", "grads", "edits", "exports", "alerts", "system")


def norm(door: Door, name: str = NAME) -> float:
    return float(door.get("params/stats", filter=name)["stats"][0]["norm"])


def test_an_edit_is_tried_confirmed_applied_and_undone(tab: Tab, door: Door) -> None:
    page = tab.page
    before = norm(door)
    tab.open("edits", pattern=NAME)
    page.select_option("select[name=op]", "fill")
    page.fill("input[name=value]", "0.25")
    page.fill("input[name=note]", "<b>why</b>")
    assert page.get_by_role("button", name="Apply").is_disabled()
    page.click("text=Dry run")
    changes = page.get_by_role("list", name="What changes").first
    changes.wait_for()
    assert f"fill 0.25 {NAME}: 1 tensor, 40 elements" in changes.inner_text().replace("\n", " ")
    measured = page.get_by_role("table", name="Before and after").first
    assert "0.25" in measured.inner_text()
    assert norm(door) == before
    page.get_by_role("button", name="Apply").click()
    page.wait_for_selector("dialog[open]")
    page.get_by_role("button", name="Cancel").click()
    assert norm(door) == before
    page.get_by_role("button", name="Apply").click()
    page.click("text=Change 40 elements of 1 tensor")
    page.get_by_role("status").get_by_text("APPLIED").wait_for()
    wait_for("the edit", lambda: abs(norm(door) - 0.25 * 40**0.5) < 1e-6)
    told = next(edit for edit in door.get("edits")["edits"] if edit["state"] == "APPLIED")
    row = page.locator(f"tr[data-edit='{told['id']}']")
    row.wait_for()
    assert told["actor"] in row.inner_text()
    assert "<b>why</b>" in row.inner_text()
    assert f"{told['step']:,}" in row.inner_text()
    dry = next(edit for edit in door.get("edits")["edits"] if edit["dry_run"])
    assert "DRY RUN" in page.locator(f"tr[data-edit='{dry['id']}']").inner_text()
    row.get_by_role("button", name="Undo").click()
    question = page.get_by_role("dialog")
    assert "What they have learned since is lost" in question.inner_text()
    question.get_by_role("button", name="Cancel").click()
    assert abs(norm(door) - 0.25 * 40**0.5) < 1e-6
    row.get_by_role("button", name="Show").click()
    page.get_by_role("dialog").get_by_role("button", name="Undo").click()
    page.click("text=Undo: restore 40 elements")
    wait_for("the undo", lambda: norm(door) == before)
    undo = wait_for("the log", lambda: door.get(f"edits/{told['id']}")["undone_by"])
    page.locator(f"tr[data-edit='{undo}']").get_by_text(f"undoes {told['id'][:8]}").wait_for()


def test_training_is_marked_and_put_back_after_a_question(tab: Tab, door: Door) -> None:
    tab.open("params")  # as in the header of every view
    tab.page.get_by_text("Actions", exact=True).click()
    tab.page.get_by_role("button", name="Restore point …").click()
    tab.page.get_by_role("dialog").get_by_label("Name").fill("safe")
    tab.page.get_by_role("button", name="Create it").click()
    tab.see("Restore point safe is kept", within="dialog")
    tab.page.get_by_role("link", name="All restore points").click()
    panel = tab.page.locator(
        "section.panel", has=tab.page.get_by_role("heading", name="Restore points")
    )
    row = panel.locator('tr[data-mark="safe"]')
    row.get_by_role("button", name="Roll back …").wait_for()
    mark = next(one for one in door.get("marks")["marks"] if one["name"] == "safe")
    wait_for("some steps", lambda: door.get("")["step"] > mark["step"] + 20)
    row.get_by_role("button", name="Roll back …").click()
    tab.page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    assert not any(one["rollback"] for one in door.get("edits")["edits"])
    row.get_by_role("button", name="Roll back …").click()
    dialog = tab.page.get_by_role("dialog")
    dialog.get_by_text("updates since").wait_for()
    dialog.get_by_label("Note").fill("loss jumped")
    dialog.get_by_role("button", name="Roll back to step").click()
    dialog.wait_for(state="detached")
    edit = next(one for one in door.get("edits")["edits"] if one["rollback"])
    assert (edit["state"], edit["note"]) == ("APPLIED", "loss jumped")
    assert edit["rollback"] == {"mark": "safe", "step": mark["step"]}
    tab.page.get_by_role("table", name="Edits").get_by_text(
        "rolls back to restore point safe"
    ).wait_for()
    tab.open("overview")
    tab.page.locator('li[data-kind="mark"]').get_by_text("safe").wait_for()
    tab.open("edits")
    row.get_by_role("button", name="Delete …").click()
    tab.page.get_by_role("dialog").get_by_role("button", name="Delete it").click()
    wait_for("the mark is gone", lambda: not any(m["name"] for m in door.get("marks")["marks"]))


def test_where_watching_is_off_the_verdict_has_a_button_for_it(tab: Tab, door: Door) -> None:
    door.post(f"/jobs/{door.job}/watch", {"on": False})
    tab.open("overview")
    verdict = tab.page.get_by_label("Health")
    verdict.get_by_text("values are not watched").wait_for()
    assert "paramd watch on" in verdict.inner_text()
    assert "ok" not in (verdict.get_attribute("class") or "").split()
    verdict.get_by_role("button", name="Turn on", exact=True).click()
    wait_for("values are watched", lambda: all(not one["turn_on"] for one in watches(door)))
    verdict.get_by_role("button", name="Turn").wait_for(state="detached")
    tab.open("alerts")
    tab.see("values checked every")
    assert tab.page.get_by_text("paramd watch on").count() == 0


def watches(door: Door) -> list[dict[str, Any]]:
    return list(door.get("")["verdict"]["watches"])


def test_exports_are_scheduled_and_a_schedule_removed(tab: Tab, door: Door) -> None:
    page = tab.page
    tab.open("exports")
    page.select_option("select[name=when]", "steps")
    page.fill("input[name=key]", "run/more")
    page.fill("input[name=every]", "1000000")
    page.get_by_role("button", name="Schedule", exact=True).click()
    page.get_by_text("every 1,000,000 steps, the last 3 are kept").wait_for()
    page.get_by_role("button", name="Remove", exact=True).click()
    wait_for("the schedule's end", lambda: door.get("export-schedules")["schedules"] == [])


@pytest.mark.parametrize(("theme", "width"), [("light", 1400), ("dark", 390)])
def test_every_view_fits_says_where_it_is_from_and_stays_quiet(
    browser: Browser, door: Door, theme: str, width: int
) -> None:
    with Tab(browser, door, theme=theme) as tab:
        tab.page.set_viewport_size({"width": width, "height": 844})
        tab.sign_in(door.token)
        assert tab.page.get_attribute("html", "data-theme") == theme
        for view in VIEWS:
            tab.open(view)
            tab.page.wait_for_selector(".source")
            tab.page.wait_for_timeout(300)  # what comes late must not widen the page either
            over = "document.documentElement.scrollWidth - window.innerWidth"
            assert tab.page.evaluate(over) <= 0, view
            assert tab.page.locator("main .trouble").all_inner_texts() == [], view
            assert tab.violations() == [], view
            if width < 400:
                assert tab.page.evaluate(CUT_OFF) == [], view
                assert tab.page.evaluate(SMALL) == [], view
        tab.open("overview")
        tab.page.reload()
        tab.page.wait_for_selector(".source")
        assert tab.page.evaluate(SHIFTED) < 0.1
        assert navigation(tab.page).encode() in PICTURE.read_bytes(), "make screenshot"
        for part in ("", "heat", "where", "compare"):
            tab.open("params", name="still.weight", part=part)
            tab.see("1,920", within=".detail")
            assert tab.page.evaluate(over) <= 0, part
        tab.check_quiet()
