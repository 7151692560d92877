"""What a training leaves when it is over: its record, and a run that the next one compares with."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests.web.conftest import watched
from tests.web.door import Door, Tab, wait_for

if TYPE_CHECKING:
    from playwright.sync_api import Browser

BEFORE = "yesterday"


def train_and_end(folder: Path, state_dir: Path) -> tuple[int, str]:
    """A training that logs, writes a checkpoint and ends; the checkpoint's step and path."""
    with watched(folder, job=BEFORE, state_dir=state_dir) as door:
        made = door.post(f"/jobs/{BEFORE}/exports", {"destination": "local/step-{step}"})
        wait_for("the export", lambda: door.get(f"exports/{made['id']}")["state"] == "DONE")
        wait_for("a logged loss", lambda: _has_loss(door))
        step = int(door.get(f"exports/{made['id']}")["step"])
        (folder / "stop").touch()
        door.ranks.wait(timeout_s=60.0)
    return step, str(folder / "exports" / f"step-{step}")


def _has_loss(door: Door) -> bool:
    return any(one["metric"] == "log:loss" for one in door.get("history/series")["series"])


def test_an_ended_run_is_a_whole_record_and_compares_with_the_next_one(
    browser: Browser, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    step, path = train_and_end(tmp_path / "before", state)
    destinations = f'{{"local": "{tmp_path / "before" / "exports"}"}}'
    environment = {
        **{name: text for name, text in os.environ.items() if name != "DISPLAY"},
        "PARAMD_STATE_DIR": str(state),
        "PARAMD_DESTINATIONS": destinations,
    }
    with watched(tmp_path / "now", state_dir=state) as door, Tab(browser, door) as tab:
        tab.sign_in(door.token)
        wait_for("a loss of this run, too", lambda: _has_loss(door))
        tab.open("runs")
        others = tab.page.get_by_role("table", name="Runs of other jobs")
        others.get_by_role("button", name=f"Run 1 of {BEFORE} as A").click()
        tab.page.get_by_role("button", name="Run 1 as B", exact=True).click()
        both = tab.page.get_by_role("table", name="Both runs")
        wait_for("both runs", lambda: f"{BEFORE} 1" in both.inner_text())
        assert f"{door.job} 1" in both.inner_text()
        means = both.locator("tbody tr td:nth-child(3)").all_inner_texts()
        assert [text for text in means if re.search("[1-9]", text)] == means
        tab.check_quiet()
        admin = door.post("/tokens", {"role": "admin", "ttl_s": 600.0})["token"]
        assert door.as_holder(admin).get("/other-jobs") == {"jobs": []}
        assert [one["job"] for one in door.get("/other-jobs")["jobs"]] == [BEFORE]
        command = [sys.executable, "-m", "paramd.cli", "dashboard", "--job", BEFORE]
        shown = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            assert shown.stdout is not None
            look_at_record(tab, shown.stdout.readline().strip(), step, path)
        finally:
            shown.terminate()
            shown.communicate(timeout=60)


def look_at_record(tab: Tab, link: str, step: int, path: str) -> None:
    """From the link of `paramd dashboard --job`, whose address is another origin."""
    tab.page.goto(link)
    found = tab.page.get_by_role("list", name="Checkpoints")
    wait_for("where the checkpoint is", lambda: path in found.inner_text())
    assert f"step {step:,}" in found.inner_text()
    last = tab.page.get_by_role("table", name="Last values")
    wait_for("the last loss", lambda: last.get_by_text("loss", exact=True).count() == 1)
    assert re.search(r"loss\s+[0-9.e-]+\s+[0-9,]+", last.inner_text())
    for view in ("Mesh", "Parameters", "Gradients"):
        tab.page.get_by_label("Views").get_by_role("link", name=view).click()
        tab.page.get_by_role("heading", name="The training has ended").wait_for()
        assert tab.page.locator("main .trouble").count() == 0, view
        assert "step -1" not in tab.page.locator("main").inner_text()


def test_a_rank_that_raises_shows_its_traceback_and_a_dead_job_says_so(
    browser: Browser, tmp_path: Path
) -> None:
    with watched(tmp_path / "sick") as door, Tab(browser, door) as tab:
        tab.sign_in(door.token)
        (door.folder / "fail").touch()
        wait_for("no trainer alive", lambda: door.get("")["alive_count"] == 0)
        tab.open("overview")
        shown = tab.page.get_by_role("region", name="Traceback, rank 1")
        shown.wait_for()
        text = shown.inner_text()
        assert "RuntimeError: a failure that a test has planted" in text
        assert text.startswith("Traceback")
        header = tab.page.locator("main > .head").first
        wait_for("the header", lambda: "0 of 2 trainers alive" in header.inner_text())
        pause = tab.page.get_by_role("button", name="Pause", exact=True)
        assert pause.is_disabled()
        assert "0 of 2 trainers are alive" in (pause.get_attribute("title") or "")


def test_a_killed_training_that_starts_again_is_where_its_open_page_is(
    browser: Browser, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    with watched(tmp_path / "killed", state_dir=state) as first, Tab(browser, first) as tab:
        tab.sign_in(first.token)
        wait_for("some steps", lambda: first.get("")["step"] > 10)
        for rank in first.ranks:
            rank.process.kill()
        wait_for("no trainer alive", lambda: first.get("")["alive_count"] == 0)
        # A port that was named is taken or refused, never replaced.
        named = first.url.removeprefix("http://")
        with watched(tmp_path / "again", state_dir=state, listen=named) as again:
            assert (again.url, again.control_pid == first.control_pid) == (first.url, False)
            assert again.token != first.token
            # Nobody reloads it or signs in: the page that was open shows the new run.
            tab.page.get_by_text("run 2, 2 of 2 ranks").first.wait_for()
            step = again.get("")["step"]
            wait_for("later steps", lambda: again.get("")["step"] > step)
            verdict = tab.page.get_by_label("Health")
            wait_for("its verdict", lambda: "killed" not in verdict.inner_text())
            tab.open("params", filter="still.weight", name="still.weight")
            tab.see("1,920", within=".detail")
            assert tab.page.locator("input[name=token]").count() == 0
