"""What open pages of the dashboard take of the control plane's memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import psutil

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

T = TypeVar("T")

MORE_PAGES = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """By how much the control plane's resident memory grew, window by window of one length."""

    idle_bytes: list[float]
    """With no page open yet, and again with all of them open: what its reports take anyway."""
    first_bytes: float
    """With the first page, with all that its first requests load."""
    more_bytes: list[float]
    """With each further page."""

    @property
    def page_bytes(self) -> float:
        """What one more page takes: the median, less what a window takes anyway."""
        return statistics.median(self.more_bytes) - statistics.median(self.idle_bytes)


def measure(
    browser: Browser, process: psutil.Process, opened: Callable[[Page], T], window_s: float
) -> tuple[Memory, T, Page]:
    """Opens pages one by one, closes all but the first, and gives what `opened` said of that.

    Each sits in a browser's context of its own, so with connections and a session of its own.
    """

    def grown(*, opens: bool) -> float:
        begin_s = time.monotonic()
        if opens:
            page = browser.new_context(viewport={"width": 1440, "height": 900}).new_page()
            pages.append((page, opened(page)))
        time.sleep(max(0.0, begin_s + window_s / 2 - time.monotonic()))
        levels.append(_rss_bytes(process, window_s / 2))
        return levels[-1] - levels[-2]

    pages: list[tuple[Page, T]] = []
    levels = [_rss_bytes(process, window_s / 2)]
    idle = [grown(opens=False)]
    first = grown(opens=True)
    more = [grown(opens=True) for _ in range(MORE_PAGES)]
    idle.append(grown(opens=False))
    for page, _ in pages[1:]:
        page.context.close()
    page, said = pages[0]
    return Memory(idle_bytes=idle, first_bytes=first, more_bytes=more), said, page


def note(memory: Memory) -> str:
    """How it was measured, and all the numbers."""
    first, idle, more = (
        ", ".join(f"{size / 2**20:.1f}" for size in sizes)
        for sizes in ([memory.first_bytes], memory.idle_bytes, memory.more_bytes)
    )
    return (
        "Memory is the control plane's resident set, the median of half a window, from window to "
        f"window, in MiB: it grew by {first} with the first page, with all that this loads, by "
        f"{more} with each further one (Mesh view, a browser's context each), and by {idle} in "
        "windows before and after in which no page was opened. One more page: the median of the "
        "further ones less that of windows without."
    )


def _rss_bytes(process: psutil.Process, window_s: float) -> float:
    """Median over a while: reports of thousands of ranks come and go."""
    found = []
    end_s = time.monotonic() + window_s
    while time.monotonic() < end_s:
        found.append(process.memory_info().rss)
        time.sleep(0.5)
    return statistics.median(found)
