"""What is done through the page happens to the training, and what happens shows on the page."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from tests.web.door import Door, Tab, wait_for
from tests.web.training import JOB

if TYPE_CHECKING:
    from playwright.sync_api import Route

NAME = "still.bias"
"""Does not learn, so that its numbers are those of the edits alone."""

WATCH = """verdict => {
    window.shown = [];
    new MutationObserver(() => window.shown.push([verdict.innerText, document.title]))
        .observe(verdict, {subtree: true, childList: true, characterData: true});
}"""
"""Keeps what the page's title is whenever the verdict changes."""


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
    page.click("text=Change 40 elements of 1 tensors")
    page.get_by_role("status").get_by_text("APPLIED").wait_for()
    wait_for("the edit", lambda: abs(norm(door) - 0.25 * 40**0.5) < 1e-6)
    told = next(edit for edit in door.get("edits")["edits"] if edit["state"] == "APPLIED")
    row = page.locator(f"tr[data-edit='{told['id']}']")
    row.wait_for()
    assert told["actor"] in row.inner_text()
    assert "<b>why</b>" in row.inner_text()
    assert f"{told['step']:,}" in row.inner_text()
    dry = next(edit for edit in door.get("edits")["edits"] if edit["dry_run"])
    assert "dry run" in page.locator(f"tr[data-edit='{dry['id']}']").inner_text()
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
    tab.open("edits")
    panel = tab.page.locator(
        "section.panel", has=tab.page.get_by_role("heading", name="States to go back to")
    )
    panel.get_by_label("Name of the mark").fill("safe")
    panel.get_by_role("button", name="Mark the present state").click()
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
    tab.page.get_by_role("table", name="Edits").get_by_text("rolls back to mark safe").wait_for()
    tab.open("overview")
    tab.page.locator('li[data-kind="mark"]').get_by_text("safe").wait_for()
    tab.open("edits")
    row.get_by_role("button", name="Forget …").click()
    tab.page.get_by_role("dialog").get_by_role("button", name="Forget it").click()
    wait_for("the mark is gone", lambda: not any(m["name"] for m in door.get("marks")["marks"]))


def test_training_is_paused_stepped_and_resumed_with_the_lease_in_sight(
    tab: Tab, door: Door
) -> None:
    page = tab.page
    tab.open("edits", lease="60")
    page.get_by_role("button", name="Pause").click()
    lease = page.get_by_test_id("lease")
    lease.wait_for()
    wait_for("the hold", lambda: door.get("hold")["state"] == "held")
    held = door.get("hold")
    left = int(lease.inner_text().split()[0])
    assert 0 < left <= 60
    wait_for("the countdown", lambda: int(lease.inner_text().split()[0]) < left)
    page.get_by_label("Steps").fill("2")
    page.get_by_role("button", name="Step", exact=True).click()
    wait_for("two steps", lambda: door.get("hold")["step"] == held["step"] + 2)
    page.get_by_role("button", name="Resume").click()
    page.get_by_role("button", name="Pause").wait_for()
    assert door.get("hold")["state"] == "running"


def test_an_export_is_started_followed_and_verified(tab: Tab, door: Door, exports: Path) -> None:
    page = tab.page
    tab.open("exports")
    page.fill("input[name=key]", "run/one")
    page.get_by_role("button", name="Export", exact=True).click()
    shown = page.locator("li[data-export]").first
    shown.get_by_text("DONE").wait_for()
    (told,) = door.get("exports")["exports"]
    assert told["state"] == "DONE"
    assert f"step {told['step']:,}" in shown.inner_text()
    assert "local/run/one" in shown.inner_text()
    shown.get_by_role("button", name="Files").click()
    files = page.get_by_role("table", name="Files")
    files.wait_for()
    written = {path.name for path in (exports / "run" / "one").iterdir()}
    for file in door.get(f"exports/{told['id']}")["files"]:
        files.get_by_text(file["name"], exact=True).wait_for()
        assert file["name"] in written
    page.select_option("select[name=when]", "steps")
    page.fill("input[name=key]", "run/more")
    page.fill("input[name=every]", "1000000")
    page.get_by_role("button", name="Schedule", exact=True).click()
    page.get_by_text("every 1,000,000 steps, the last 3 are kept").wait_for()
    page.get_by_role("button", name="Remove", exact=True).click()
    wait_for("the schedule's end", lambda: door.get("export-schedules")["schedules"] == [])


def test_planted_nan_is_marked_wherever_it_shows(tab: Tab, door: Door) -> None:
    tab.open("grads", filter="layers.*")
    row = tab.page.locator("[role=row]", has=tab.page.get_by_text("layers.2.bias", exact=True))
    wait_for("a norm", lambda: float(row.locator(".num").first.inner_text()) > 0)
    assert tab.page.get_by_text("non-finite").count() == 0
    (door.folder / "nan").touch()
    row.get_by_text("non-finite").wait_for()
    first = tab.page.get_by_role("list", name="Not finite").locator("li", has_text="layers.2.bias")
    wait_for("its ranks", lambda: "on rank 0, 1" in first.inner_text())
    tab.open("alerts", state="firing")
    alert = tab.page.locator("li[data-rule='non-finite']").first
    alert.wait_for()
    firing = [a for a in door.get("alerts")["alerts"] if a["rule"] == "non-finite"]
    alert.get_by_role("button", name="All").click()
    wait_for("its members", lambda: firing[0]["subject"] in alert.inner_text())
    assert "layers.1.weight" in alert.inner_text()
    assert tab.page.locator("li[data-rule='non-finite']").count() == 1
    bad = door.get("params/stats", filter="nan>0")["stats"]
    tab.open("params", filter="nan>0")
    for row in bad:
        tab.see_name(row["name"])
    assert "layers.1.weight" in {row["name"] for row in bad}
    marked = tab.page.locator("[role=row].bad")
    wait_for("their numbers", lambda: marked.count() == len(bad))


def test_the_overview_names_the_first_cause_and_who_changed_something(tab: Tab, door: Door) -> None:
    token = door.post("/tokens", {"role": "editor", "ttl_s": 600.0, "name": "mallory"})["token"]
    edit = {"ops": [{"pattern": "still.bias", "op": "mul", "value": 1.5}], "note": "late idea"}
    door.as_holder(token).post(f"/jobs/{JOB}/edits", edit)
    page = tab.page
    tab.open("overview")
    verdict = page.get_by_label("Health")
    wait_for("the verdict", lambda: "not finite" in verdict.inner_text())
    assert "bad" in (verdict.get_attribute("class") or "")
    assert page.get_by_label("Views").get_by_text("not finite").count() == 1
    assert page.title().startswith("(not finite)")
    causes = page.get_by_role("list", name="Causes")
    causes.locator("li[data-rule='non-finite']").wait_for()
    edited = page.get_by_role("list", name="Timeline").locator("li", has_text="late idea")
    assert "by mallory" in edited.inner_text()
    assert "mul 1.5 still.bias" in edited.inner_text()


def test_values_that_could_not_be_checked_are_checked_again_soon(tab: Tab, door: Door) -> None:
    refused = []

    def refuse_once(route: Route) -> None:
        if refused:
            route.continue_()
        else:
            refused.append(route.request.url)
            route.fulfill(status=503, body="{}")

    tab.page.route("**/params/stats?*", refuse_once)
    tab.page.reload()
    tab.open("overview")
    verdict = tab.page.get_by_label("Health")
    wait_for("a check that failed", lambda: verdict.inner_text() and refused)
    # Otherwise only a minute later.
    wait_for("the verdict", lambda: "not finite" in verdict.inner_text())
    tab.messages.clear()  # the refusal


def test_alerts_are_acknowledged_and_silenced_and_stay_red(tab: Tab, door: Door) -> None:
    page = tab.page
    tab.open("alerts", state="firing")
    item = page.locator("li[data-rule='non-finite']")
    item.get_by_role("button", name="Acknowledge").click()
    question = page.get_by_role("dialog")
    question.get_by_label("Note").fill("looking at it")
    question.get_by_role("combobox").select_option("3600")
    question.get_by_role("button", name="Acknowledge", exact=True).click()
    item.get_by_text("seen by owner").wait_for()
    item.get_by_text("looking at it").wait_for()
    seen = [a for a in door.get("alerts")["alerts"] if a["rule"] == "non-finite"]
    assert {a["acknowledged_by"] for a in seen} == {"owner"}
    assert all(a["silenced"] for a in seen)
    (job,) = door.get("/jobs")["jobs"]
    assert job["critical_count"] >= len(seen)
    assert job["open_count"] <= job["critical_count"] + job["warning_count"] - len(seen)
    methods = [record["method"] for record in door.get("audit")["records"]]
    assert {"alerts.acknowledge", "alerts.silence"} <= set(methods)
    tab.open("overview")
    verdict = page.get_by_label("Health")
    wait_for("the verdict", lambda: "not finite" in verdict.inner_text())
    tab.open("alerts")
    page.get_by_role("button", name="End", exact=True).first.click()
    wait_for("the silence's end", lambda: door.get("alert-silences")["silences"] == [])


def test_a_tensor_without_a_finite_element_says_so(tab: Tab, door: Door) -> None:
    tab.open("params", name="layers.1.weight")
    tab.see("no element is finite", within=".detail")
    assert tab.page.locator(".detail .trouble").count() == 0
    tab.open("grads", filter="layers.*", name="layers.2.weight")
    tab.see("No element is finite, so there are no magnitudes to draw.")


def test_a_control_plane_that_does_not_answer_is_not_taken_for_alive(tab: Tab, door: Door) -> None:
    tab.open("overview")
    verdict = tab.page.get_by_label("Health")
    wait_for("the verdict", lambda: "not finite" in verdict.inner_text())
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
    wait_for("the answer", lambda: "not finite" in verdict.inner_text())
    tab.messages.clear()  # requests that were given up


def test_a_killed_rank_shows_with_the_reason(tab: Tab, door: Door) -> None:
    tab.open("mesh")
    # A tile may show an alert: on a busy machine updates wait longer than their budget.
    tab.page.locator(".tile", has_text="computing").nth(1).wait_for()
    os.kill(door.get("ranks")["ranks"][1]["trainer_pid"], signal.SIGKILL)

    def lost() -> bool:
        return "trainer" in door.get("ranks")["ranks"][1]["reason"]

    wait_for("the loss", lost)
    tile = tab.page.locator(".tile").nth(1)
    wait_for("the tile", lambda: "trainer" in tile.inner_text())
    told = door.get("ranks")["ranks"][1]
    assert told["state"] != "ok"
    assert told["state"] in tile.inner_text()
    assert told["reason"] in tile.inner_text()
    assert tab.page.locator(".tile.ok", has_text="rank 1").count() == 0
