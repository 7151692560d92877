"""One training and one browser for all tests of the page; a fresh, signed-in tab for each."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.launch import start_ranks
from tests.needs import missing
from tests.web.door import JOB, Door, Tab

playwright_api = pytest.importorskip("playwright.sync_api")

WORKER = "tests.web.training"
FLAGS = (
    # The tests' own pages are all that it opens; it may run as root, and without a GPU.
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-breakpad",
    "--disable-dev-shm-usage",
)


@pytest.fixture(scope="package")
def browser() -> Iterator[playwright_api.Browser]:
    """Debian's Chromium. Without it, or without a built page, tests are skipped, but in CI."""
    # Here, as the process that only tells workers what to run imports this file, too.
    from paramd_service.control.api.guard import BUILT

    path = shutil.which("chromium")
    if path is None:
        missing("chromium (make system)")
    if not (BUILT / "index.html").is_file():
        missing("the page (make web)")
    with playwright_api.sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=path, args=list(FLAGS))
        # What a first page starts belongs to the browser, not to the first test.
        launched.new_page().close()
        yield launched
        launched.close()


@contextmanager
def watched(
    folder: Path, *, job: str = JOB, state_dir: Path | None = None, listen: str = "127.0.0.1:0"
) -> Iterator[Door]:
    """A training of two ranks that is watched, may export, and can be told to break."""
    exports = folder / "exports"
    exports.mkdir(parents=True)
    # What a busy machine does to the times of two ranks is no trouble that a test has planted.
    late = ["straggler", "slow-rank", "stuck"]
    watch = {
        "watch_share": 1, "stats_every_s": 1.0, "gradients_every_s": 1.0, "disabled": late,
    }  # fmt: skip
    env = {
        "PARAMD_ALERTS": json.dumps(watch),
        "PARAMD_LISTEN": listen,
        "PARAMD_DESTINATIONS": json.dumps({"local": str(exports)}),
    }
    stop = folder / "stop"
    told = ["--stop", str(stop), "--job", job]
    with start_ranks(WORKER, 2, args=told, env=env, state_dir=state_dir) as ranks:
        ranks.wait_for_text("attached", rank=0)
        found = Door(ranks, folder, job)
        found.wait_until_well()
        yield found
        stop.touch()


@pytest.fixture(scope="package")
def door(
    browser: playwright_api.Browser, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Door]:
    """The training of all tests that leave it whole."""
    with watched(tmp_path_factory.mktemp("web")) as found:
        yield found


@pytest.fixture
def tab(browser: playwright_api.Browser, door: Door) -> Iterator[Tab]:
    """A tab of its own, signed in as the owner. A message in its console fails the test."""
    with Tab(browser, door) as found:
        found.sign_in(door.token)
        yield found
        found.check_quiet()


@pytest.fixture
def exports(door: Door) -> Path:
    """Where the destination `local` leads."""
    return door.folder / "exports"
