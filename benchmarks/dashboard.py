"""The dashboard over 4,096 ranks and 50,000 parameters: its frames, its first paint, its cost.

Ranks are simulated, their streams are real; the page is the built one, in Debian's Chromium
without a GPU, on the same machine.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import psutil

from benchmarks import page_memory, site
from benchmarks.report import Goal, Report, Table
from paramd_service.control.api.guard import BUILT

if TYPE_CHECKING:
    from playwright.sync_api import Page

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
REPEATS = 40
FILTERS = ("model.layers.1*", "*.weight", "attention numel>100", "*.up.*", "")

SCROLL_PIXELS, JUMP_PIXELS = 120, 900
"""A fast wheel: some 250 rows a second; and the bar drawn at once."""

# Frames of the whole document while `act` runs; windows of a second, so that a stop shows.
RECORD = """async ([seconds, pixels]) => {
  const times = [];
  let on = true;
  const count = (now) => { times.push(now); if (on) requestAnimationFrame(count); };
  requestAnimationFrame(count);
  const box = document.querySelector('.rows');
  const until = performance.now() + seconds * 1000;
  while (performance.now() < until) {
    if (pixels) box.scrollTop = (box.scrollTop + pixels) % box.scrollHeight;
    await new Promise((resolve) => requestAnimationFrame(resolve));
  }
  on = false;
  return times;
}"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Frames:
    """Frames of one stretch."""

    mean_per_s: float
    least_per_s: float
    """In the worst second."""
    longest_ms: float
    cpu_ms: float
    """CPU time of the page's main thread for one frame: what a busy machine does not change."""
    browser_ms: float
    """The same of all of the browser's processes, which draw without a GPU here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """All that the page promises."""

    gzip_bytes: int
    first_paint_ms: float
    usable_ms: float
    """Until the first view is there, signed in, with a cold cache."""
    list_s: float
    """Until all parameters are listed."""
    scroll: Frames
    jump: Frames
    filtering: Frames
    mesh: Frames
    cpu_share: float
    """Of one core of the control plane, for the requests of the Mesh view that is open."""
    page_shares: list[float]
    """Of one core, in percent, while nobody touches the Mesh view: the page, all of the browser."""
    memory: page_memory.Memory


def run(*, quick: bool) -> Report:
    """One mesh, one page."""
    from playwright.sync_api import sync_playwright

    ranks, tensors, window_s = (256, 5000, 8.0) if quick else (4096, 50_000, 60.0)
    with ExitStack() as stack:
        process, url, token = stack.enter_context(_mesh(ranks, tensors))
        # Its memory still rises for a while after thousands have joined.
        before_share = site.cpu_share_of(process, window_s)
        driver = stack.enter_context(sync_playwright())
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        memory, (paint_ms, usable_ms), page = page_memory.measure(
            browser, process, lambda page: _opened(page, url, token), window_s / 3
        )
        with _watched(page) as asked, cpu_of(page) as page_s:
            time.sleep(window_s)
        share = _cost_s(process, asked, token, before_share) / window_s
        mesh = _frames(page, 5.0, pixels=0)
        list_s = _list(page, url, tensors)
        scroll = _frames(page, 8.0, pixels=SCROLL_PIXELS)
        jump = _frames(page, 8.0, pixels=JUMP_PIXELS)
        found = Measured(
            gzip_bytes=_size_bytes(),
            first_paint_ms=paint_ms,
            usable_ms=usable_ms,
            list_s=list_s,
            scroll=scroll,
            jump=jump,
            filtering=_filtering(page),
            mesh=mesh,
            cpu_share=share,
            page_shares=[100 * one / window_s for one in page_s],
            memory=memory,
        )
        browser.close()
    return _report(found, ranks, tensors, before_share, quick=quick)


@contextmanager
def _mesh(ranks: int, tensors: int) -> Iterator[tuple[psutil.Process, str, str]]:
    """A site's control plane whose one job has all of them."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paramd-bench-")))
        process, url = stack.enter_context(site.site(directory))
        token = (directory / "_site" / "token").read_text().strip()
        with httpx2.Client(
            base_url=url,
            headers={"authorization": f"Bearer {token}"},
            timeout=60.0,
            trust_env=False,
        ) as client:
            said = client.post("/api/v1/jobs", json={"job": "run", "world_size": ranks}).json()
            said |= stack.enter_context(_layouts(said, ranks, tensors))
            for begin in range(0, ranks, site.RANKS_OF_A_WORKER):
                stack.enter_context(site.simulated(said, ranks, begin))
            site.await_all(client, ranks)
            _await_layout(client)
        time.sleep(site.REPORT_S)
        yield process, url, token


def _await_layout(client: httpx2.Client) -> None:
    deadline_s = time.monotonic() + 60.0
    while True:
        answer = client.get("/api/v1/jobs/run/params", params={"limit": 1})
        if answer.is_success:
            return
        if time.monotonic() > deadline_s:
            raise TimeoutError(answer.text)
        time.sleep(0.5)


@contextmanager
def _layouts(said: dict[str, Any], ranks: int, tensors: int) -> Iterator[dict[str, str]]:
    command = [sys.executable, "-m", "benchmarks.workers.layouts"]
    command += [said["job"], str(said["incarnation"]), str(ranks), str(tensors)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            told = json.loads(process.stdout.readline())
            yield {"layout_address": told["address"], "layout_digest": told["digest"]}
        finally:
            process.kill()


def _first_paint(page: Page, url: str, token: str) -> tuple[float, float]:
    page.goto(url)
    page.wait_for_selector("input[name=token]")
    paint_ms = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    page.fill("input[name=token]", token)
    begin_s = time.perf_counter()
    page.click("button[type=submit]")
    page.wait_for_selector("main h1")
    return float(paint_ms), 1e3 * (time.perf_counter() - begin_s)


def _opened(page: Page, url: str, token: str) -> tuple[float, float]:
    times = _first_paint(page, url, token)
    page.goto(f"{url}/#/run/mesh")
    page.wait_for_selector("canvas.field-map")
    return times


@contextmanager
def _watched(page: Page) -> Iterator[Counter[str]]:
    """Counts what a page asks for, by URL."""
    asked: Counter[str] = Counter()

    def note(request: Any) -> None:
        asked[request.url] += 1

    page.on("request", note)
    yield asked
    # What happened in the meantime is told with the next turn of its loop.
    page.wait_for_timeout(100)
    page.remove_listener("request", note)


def _cost_s(process: psutil.Process, asked: Counter[str], token: str, idle_share: float) -> float:
    """CPU seconds of the control plane for all these requests: each is asked many times.

    One open page is lost in what thousands of reports take, so it is not just looked at.
    """
    total_s = 0.0
    headers = {"authorization": f"Bearer {token}"}
    with httpx2.Client(headers=headers, timeout=60.0, trust_env=False) as client:
        for url, count in asked.items():
            before_s, begin_s = site.cpu_used_s(process), time.perf_counter()
            for _ in range(REPEATS):
                client.get(url).raise_for_status()
            took_s = time.perf_counter() - begin_s
            cpu_s = site.cpu_used_s(process) - before_s - idle_share * took_s
            total_s += count * max(0.0, cpu_s) / REPEATS
    return total_s


def _list(page: Page, url: str, tensors: int) -> float:
    begin_s = time.perf_counter()
    page.goto(f"{url}/#/run/params")
    page.get_by_test_id("total").get_by_text(f"{tensors:,}", exact=True).wait_for(timeout=120_000)
    return time.perf_counter() - begin_s


def _filtering(page: Page) -> Frames:
    """Frames while filters are typed, a character at a time, as the answers come."""
    page.evaluate("window.frames_ = []; window.on_ = true")
    page.evaluate(
        "(function count(now) { if (now) window.frames_.push(now);"
        " if (window.on_) requestAnimationFrame(count); })()"
    )
    field = page.locator("input[data-filter]")
    with cpu_of(page) as cpu:
        for text in FILTERS:
            field.fill("")
            field.press_sequentially(text, delay=60)
            page.wait_for_timeout(1500)
        times = page.evaluate("window.on_ = false, window.frames_")
    return _summary(times, cpu)


@contextmanager
def cpu_of(page: Page) -> Iterator[list[float]]:
    """CPU seconds within the block, of the page's main thread and of the whole browser."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def spent_s() -> float:
        found = session.send("Performance.getMetrics")["metrics"]
        return float(next(one["value"] for one in found if one["name"] == "TaskDuration"))

    result = [spent_s(), _browser_s()]
    yield result
    result[:] = [spent_s() - result[0], _browser_s() - result[1]]
    session.detach()


def _browser_s() -> float:
    used_s = 0.0
    for one in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            used_s += site.cpu_used_s(one) if "chrom" in one.name() else 0.0
    return used_s


def _frames(page: Page, seconds: float, *, pixels: int) -> Frames:
    with cpu_of(page) as cpu:
        times = page.evaluate(RECORD, [seconds, pixels])
    return _summary(times, cpu)


def _summary(times_ms: list[float], cpu_s: list[float]) -> Frames:
    gaps = [after - before for before, after in pairwise(times_ms)]
    begin, end = times_ms[0], times_ms[-1]
    windows = [
        sum(1 for t in times_ms if at <= t < at + 1000)
        for at in range(int(begin), int(end - 1000), 250)
    ]
    return Frames(
        mean_per_s=1000 * len(gaps) / (end - begin),
        least_per_s=min(windows),
        longest_ms=max(gaps),
        cpu_ms=1e3 * cpu_s[0] / len(gaps),
        browser_ms=1e3 * cpu_s[1] / len(gaps),
    )


def _size_bytes() -> int:
    """What a browser loads in all: packed where a packed copy lies beside, else as it is."""
    files = [path for path in BUILT.rglob("*") if path.is_file() and path.suffix != ".gz"]
    packed = [path.with_name(f"{path.name}.gz") for path in files]
    return sum(
        (gz if gz.is_file() else path).stat().st_size
        for path, gz in zip(files, packed, strict=True)
    )


def _report(found: Measured, ranks: int, tensors: int, idle_share: float, *, quick: bool) -> Report:
    goals = [
        Goal(what="dashboard, gzip in all", measured=found.gzip_bytes / 1e3, limit=350, unit="kB"),
        Goal(what="dashboard, first paint", measured=found.first_paint_ms, limit=1000, unit="ms"),
        Goal(what=f"frames a second, worst second, scrolling {tensors:,} parameters",
             measured=found.scroll.least_per_s, limit=30, at_least=True),
        Goal(what="frames a second, worst second, filtering them",
             measured=found.filtering.least_per_s, limit=30, at_least=True),
        Goal(what=f"control plane's CPU for one open page, {ranks:,} ranks",
             measured=100 * found.cpu_share, limit=1, unit="%"),
        Goal(what="CPU of a page that nobody touches", measured=found.page_shares[0], limit=4,
             unit="%"),
        Goal(what="control plane's memory for one more open page",
             measured=found.memory.page_bytes / 2**20, limit=2, unit="MiB"),
    ]  # fmt: skip
    rows = [
        [
            name,
            f"{one.mean_per_s:.0f}",
            f"{one.least_per_s:.0f}",
            f"{one.longest_ms:.0f}",
            f"{one.cpu_ms:.1f}",
            f"{one.browser_ms:.1f}",
        ]
        for name, one in (
            (f"scrolling {tensors:,} parameters, {SCROLL_PIXELS} pixels a frame", found.scroll),
            (f"the same, {JUMP_PIXELS}: every row is new in every frame", found.jump),
            ("filtering them", found.filtering),
            (f"Mesh view of {ranks:,} ranks", found.mesh),
        )
    ]
    return Report(
        name="dashboard",
        tables=[
            Table(
                title="Frames a second",
                header=[
                    "what",
                    "mean",
                    "worst second",
                    "longest ms",
                    "CPU of the page, ms a frame",
                    "of all the browser",
                ],
                rows=rows,
            )
        ],
        goals=[] if quick else goals,
        notes=[
            f"First paint {found.first_paint_ms:.0f} ms, a view {found.usable_ms:.0f} ms after "
            f"sign-in, all {tensors:,} names after {found.list_s:.1f} s. Without a page the "
            f"control plane takes {100 * idle_share:.1f} % of a core. While nobody touches it the "
            f"page takes {found.page_shares[0]:.1f} %, all of the browser "
            f"{found.page_shares[1]:.1f} %.",
            page_memory.note(found.memory),
            "Simulated ranks, control plane and browser share this machine; the ranks know the "
            "layout and no values, so the table's statistics stay empty.",
        ],
        numbers={"measured": asdict(found)},
    )
