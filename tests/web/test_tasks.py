"""What operators come for, each as a script that counts its clicks and fails at a dead end.

All share one training, which is well but for what a task plants. The table of tasks, clicks and
seconds is printed at the end (pytest -s).
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from tests.longer import busy
from tests.web.conftest import watched
from tests.web.door import Door, Tab, wait_for
from tests.web.training import JOB

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator

DEAD_END_S = 15.0
DONE: list[tuple[str, int, float]] = []


class Task:
    """An operator at work: from the view where they are to the answer, by clicks alone."""

    def __init__(self, tab: Tab) -> None:
        tab.page.set_default_timeout(DEAD_END_S * 1000 * busy())
        self.tab, self.page, self.clicks = tab, tab.page, 0

    def click(self, target: Locator) -> None:
        """One click, on what is in sight and can be clicked."""
        target.click()
        self.clicks += 1

    def press(self, name: str, *, exact: bool = False) -> None:
        self.click(self.page.get_by_role("button", name=name, exact=exact).last)

    def go(self, view: str) -> None:
        self.click(self.page.get_by_label("Views").get_by_role("link", name=view))

    def row(self, name: str) -> Locator:
        shown = self.page.get_by_text(name, exact=True)
        return self.page.locator("[role=row]", has=shown)


@pytest.fixture(scope="module", autouse=True)
def table() -> Iterator[None]:
    yield
    for name, clicks, took_s in DONE:
        print(f"\n{name:<32} {clicks:>2} clicks {took_s:5.1f} s", end="")


@contextmanager
def begun(tab: Tab, name: str, *, most: int) -> Iterator[Task]:
    """From the first view that a sign-in leads to; `most` clicks are enough."""
    tab.open("overview")
    tab.page.get_by_label("Health").get_by_text(re.compile("ok|running")).first.wait_for()
    task, began_s = Task(tab), time.monotonic()
    yield task
    DONE.append((name, task.clicks, time.monotonic() - began_s))
    assert task.clicks <= most, f"{name}: {task.clicks} clicks"


@contextmanager
def planted(door: Door, name: str) -> Iterator[None]:
    (door.folder / name).touch()
    yield
    (door.folder / name).unlink()


def test_the_largest_update_and_gradient(tab: Tab) -> None:
    with begun(tab, "largest update; gradient", most=5) as task:
        task.go("Parameters")
        task.press("Changes")
        task.press("Compare")
        changes = task.page.get_by_role("table", name="Changes")
        ratios = changes.locator("tbody tr td:nth-child(3)")
        ratios.first.wait_for()
        found = [float(text) for text in ratios.all_inner_texts() if text[0].isdigit()]
        assert found == sorted(found, reverse=True)
        task.go("Gradients")
        task.row("layers.0.weight").wait_for()
        task.press("norm", exact=True)
        norms = task.page.get_by_role("table", name="Gradients").locator(".all .row")
        wait_for("an order", lambda: "none" not in norms.first.inner_text())


def test_who_changed_it_and_back(tab: Tab, door: Door) -> None:
    token = door.post("/tokens", {"role": "editor", "ttl_s": 600.0, "name": "night-shift"})
    edit = {"ops": [{"pattern": "still.bias", "op": "mul", "value": 3.0}], "note": "an idea"}
    made = door.as_holder(token["token"]).post(f"/jobs/{JOB}/edits", edit)
    with begun(tab, "who changed it, when; undo", most=3) as task:
        line = task.page.get_by_role("list", name="Timeline").locator("li", has_text="an idea")
        line.first.wait_for()
        assert "by night-shift" in line.first.inner_text()
        task.click(line.first.get_by_role("link", name="edit"))
        task.click(task.page.get_by_role("dialog").get_by_role("button", name="Undo"))
        task.press("Undo: restore")
        wait_for("the undo", lambda: door.get(f"edits/{made['id']}")["undone_by"])


def test_why_is_it_slow(tab: Tab, door: Door) -> None:
    with planted(door, "slow"), begun(tab, "why slow", most=2) as task:
        task.go("Mesh")
        task.press("Ask every rank")
        found = task.page.get_by_text(re.compile("rank 1 was .* it slows the others"))
        found.wait_for(timeout=DEAD_END_S * 1000 * busy())


def test_a_checkpoint_now_where_it_is_and_loaded(
    tab: Tab, door: Door, exports: Path, tmp_path: Path
) -> None:
    """Named after the step that it holds, from the header and from the form; its lines load all
    files of it, or nothing."""
    with begun(tab, "checkpoint now, where is it", most=3) as task:
        task.click(task.page.get_by_text("Actions", exact=True))
        task.press("Checkpoint …")
        assert task.page.get_by_label("Folder name").input_value() == "step-{step}"
        task.press("Write it")
        shown = task.page.locator("li[data-export]").first
        shown.get_by_text("DONE").wait_for()
        made = door.get("exports")["exports"][0]
        assert made["destination"] == f"local/step-{made['step']}"
        assert shown.locator("code").first.inner_text() == str(exports / f"step-{made['step']}")
        assert "strict=True" in shown.get_by_role("region", name="Lines that load").inner_text()
        shown.get_by_role("button", name="Download").first.wait_for()
    with begun(tab, "export in several files", most=3) as task:
        task.go("Exports")
        form = task.page.get_by_role("form", name="Export", exact=True)
        assert form.get_by_label("Folder name").input_value() == "step-{step}"
        form.get_by_label("Largest file").fill("8KB")
        task.click(form.get_by_role("button", name="Export", exact=True))
        made = wait_for("the export", lambda: _newest(door, made["id"]))
        shown = task.page.locator(f"li[data-export='{made['id']}']")
        task.click(shown.get_by_role("button", name="Files and code"))
        lines = shown.get_by_role("region", name="Lines that load").inner_text()
    (tmp_path / "lines.py").write_text(lines)
    place = exports / f"step-{made['step']}"
    files = sorted(place.glob("*.safetensors"))
    written = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert len(files) > 1
    out = tmp_path / "loaded.pt"
    command = [sys.executable, "-m", "tests.web.loads", str(tmp_path / "lines.py"), str(out)]
    subprocess.run([*command, str(files[0])], check=True, timeout=120 * busy())
    for kind, state in torch.load(out).items():
        assert state.keys() == written.keys(), kind
        assert all(torch.equal(state[name], value) for name, value in written.items()), kind


def _newest(door: Door, before: str) -> dict[str, Any] | None:
    """The export after that one, once it is done."""
    last: dict[str, Any] = door.get("exports")["exports"][0]
    return last if last["id"] != before and last["state"] == "DONE" else None


def test_a_checkpoint_is_loaded_back(tab: Tab, door: Door, exports: Path) -> None:
    """A dry run, then all ranks at one step; a damaged one is refused."""

    def bias() -> float:
        return float(door.get("params/stats", filter="still.bias")["stats"][0]["max"])

    before = bias()
    made = door.post(f"/jobs/{JOB}/exports", {"destination": "local/back-{step}"})
    wait_for("the export", lambda: door.get(f"exports/{made['id']}")["state"] == "DONE")
    edit = {"ops": [{"pattern": "still.bias", "op": "fill", "value": 7.0}]}
    door.post(f"/jobs/{JOB}/edits", edit)
    wait_for("the edit", lambda: bias() == 7.0)
    with begun(tab, "checkpoint loaded back", most=5) as task:
        task.go("Exports")
        shown = task.page.locator(f"li[data-export='{made['id']}']")
        task.click(shown.get_by_role("button", name="Load …"))
        dialog = task.page.get_by_role("dialog")
        task.click(dialog.get_by_role("button", name="Dry run"))
        patience_ms = 60_000 * busy()
        dialog.get_by_text("DRY RUN: nothing has changed yet").wait_for(timeout=patience_ms)
        assert bias() == 7.0
        task.click(dialog.get_by_role("button", name="Load it"))
        dialog.get_by_text("Loaded on all ranks at step").wait_for(timeout=patience_ms)
        assert bias() == before
        task.press("Close", exact=True)
    (done,) = (one for one in door.get("edits")["edits"] if one["note"].startswith("loaded local/"))
    assert (done["state"], done["undo"]["possible"]) == ("APPLIED", True)
    # A checkpoint that was damaged since is refused, and nothing waits for its values.
    (file,) = (exports / door.get(f"exports/{made['id']}")["destination"].split("/")[1]).glob(
        "*.safetensors"
    )
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    shown.get_by_role("button", name="Load …").click()
    dialog.get_by_role("button", name="Dry run").click()
    dialog.get_by_text("its checksum differs").wait_for(timeout=patience_ms)
    assert door.get("edits")["edits"][0]["state"] == "ABORTED"
    # The browser itself tells the console of the refusal.
    assert all("409" in message for message in tab.messages), tab.messages
    tab.messages.clear()


def test_pause_three_steps_and_resume(tab: Tab, door: Door) -> None:
    with begun(tab, "pause, step 3, resume", most=3) as task:
        task.press("Pause", exact=True)
        lease = task.page.get_by_test_id("lease")
        lease.wait_for()
        held = wait_for("the pause", lambda: (h := door.get("pause"))["state"] == "paused" and h)
        left = int(lease.inner_text().split()[0])
        assert 0 < left <= 30
        wait_for("the countdown", lambda: int(lease.inner_text().split()[0]) < left)
        task.page.get_by_label("Steps").fill("3")
        header = task.page.get_by_label("Training", exact=True)
        task.click(header.get_by_role("button", name="Step", exact=True))
        wait_for("three steps", lambda: door.get("pause")["step"] == held["step"] + 3)
        task.press("Resume")
        task.page.get_by_role("button", name="Pause", exact=True).wait_for()
        assert door.get("pause")["state"] == "running"


def test_compared_with_an_earlier_step(tab: Tab, door: Door) -> None:
    """A step that is kept by itself; training is held, as each of these steps is a short one."""
    with begun(tab, "compare with earlier", most=3) as task:
        door.post(f"/jobs/{JOB}/pause", {"lease_s": 120.0})
        kept = wait_for("a standing snapshot", lambda: [
            f"mark:{one['step']}" for one in door.get("marks")["marks"]
            if one["whole"] and not one["name"] and one["step"] < door.get("pause")["step"]
        ])  # fmt: skip
        task.go("Parameters")
        task.press("Two states")
        task.page.locator(f"select[name=from] option[value='{kept[0]}']").wait_for(state="attached")
        task.page.select_option("select[name=from]", kept[0])
        task.page.select_option("select[name=to]", "now")
        task.press("Compare")
        found = task.page.locator("main").get_by_text(re.compile(r"[1-9]\d* tensors? differ")).first
        found.wait_for(timeout=45_000)
        door.delete("pause")


def test_heat_map_slice_and_value(tab: Tab, door: Door) -> None:
    with begun(tab, "heat map, slice, value", most=4) as task:
        task.go("Parameters")
        task.click(task.row("still.weight").first)
        task.press("Heat map")
        heat = task.page.locator(".heat canvas")
        heat.wait_for()
        box = heat.bounding_box()
        assert box is not None
        # Cells are elements here: from the middle of one to that of another.
        across, down = box["width"] / 48, box["height"] / 40
        task.page.mouse.move(box["x"] + 8.5 * across, box["y"] + 4.5 * down)
        task.page.mouse.down()
        task.page.mouse.move(box["x"] + 15.5 * across, box["y"] + 11.5 * down)
        task.page.mouse.up()
        task.clicks += 1
        tab.see("shown 8 \u00d7 8, [4:12, 8:16]")
        part = door.get("params/heatmap", name="still.weight[4:12, 8:16]")["values"]
        box = heat.bounding_box()
        assert box is not None
        task.page.mouse.move(box["x"] + box["width"] / 16, box["y"] + box["height"] / 16)
        tab.see(f"row 4, column 8: {part[0]:.5g}")


def test_a_learning_rate_and_back(tab: Tab, door: Door) -> None:
    def rate() -> float:
        return float(door.get("hyperparameters")["groups"][0]["values"]["lr"])

    before = rate()
    with begun(tab, "learning rate seen, set", most=3) as task:
        task.go("Edits")
        groups = task.page.get_by_role("table", name="Parameter groups")
        groups.get_by_text(f"{before:g}", exact=True).wait_for()
        task.click(groups.get_by_role("button", name="Set"))
        task.page.fill("input[name=rate]", "2e-4")
        task.press("Set lr")
        groups.get_by_text("0.0002", exact=True).wait_for()
        assert rate() == 2e-4
    tab.page.get_by_role("row", name="sets lr").get_by_role("button", name="Undo").click()
    tab.page.click("text=Undo: restore the values")
    wait_for("the undo", lambda: rate() == before)


def test_a_colleague_may_look(browser: Browser, tab: Tab, door: Door) -> None:
    with begun(tab, "read-only colleague", most=3) as task:
        task.go("System")
        task.page.fill("input[name=token-name]", "colleague")
        task.page.select_option("select[name=role]", "reader")
        task.press("Make a token")
        task.press("Make an invitation link")
        link = task.page.locator(".line code", has_text="/sign-in/").inner_text()
    with Tab(browser, door) as guest:
        guest.page.goto(link)
        guest.see("colleague", within=".side")
        assert guest.page.get_by_role("button", name="Pause", exact=True).count() == 0


def test_shared_back_and_reloaded(browser: Browser, tab: Tab, door: Door) -> None:
    with begun(tab, "share, back, reload", most=3) as task:
        task.go("Parameters")
        task.click(task.row("still.weight").first)
        task.press("Placement", exact=True)
        pieces = task.page.get_by_role("table", name="Pieces")
        pieces.wait_for()
        link = task.page.url
        task.page.reload()
        pieces.wait_for()
        task.page.go_back()
        wait_for("the step back", lambda: pieces.count() == 0)
    with Tab(browser, door) as other:
        other.sign_in(door.token)
        other.page.goto(link)
        other.page.get_by_role("table", name="Pieces").wait_for()


def test_a_sidecar_and_a_rank_die(browser: Browser, tmp_path: Path) -> None:
    """In a training of its own, which does not go on."""
    with watched(tmp_path) as door, Tab(browser, door) as tab:
        tab.sign_in(door.token)
        with begun(tab, "a sidecar, a rank died", most=1) as task:
            pid = door.get("ranks")["ranks"][1]["sidecar_pid"]
            os.kill(pid, signal.SIGKILL)
            wait_for(
                "its heir", lambda: door.get("ranks")["ranks"][1]["sidecar_pid"] not in (0, pid)
            )
            door.wait_until_well()
            health = task.page.get_by_label("Health")
            health.get_by_text(re.compile("ok|running")).first.wait_for()
            os.kill(door.get("ranks")["ranks"][1]["trainer_pid"], signal.SIGKILL)
            health.get_by_text(re.compile("rank 1: .*SIGKILL")).wait_for(timeout=30_000)
            told = door.get("ranks")["ranks"][1]
            task.go("Mesh")
            tile = task.page.locator(".tile").nth(1)
            wait_for("the tile", lambda: told["state"] in tile.inner_text())
            assert told["state"] != "ok"
            assert told["reason"] in tile.inner_text()
            assert task.page.locator(".tile.ok", has_text="rank 1").count() == 0
