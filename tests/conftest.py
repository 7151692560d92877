"""What holds for every test: nothing is left behind, and no user state is touched."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests import costs, launch, leaks, longer

LEAK_TIMEOUT_S = 20.0

# Time limits per example fail on busy machines. CI repeats itself; people search on.
settings.register_profile("paramd", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("paramd")


def pytest_configure(config: pytest.Config) -> None:
    leaks.adopt_orphans()
    # Samples of values and stacks would be among what tests count and time; those that are about
    # them turn them on.
    os.environ["PARAMD_ALERTS"] = '{"watch": false, "look": false}'
    config.pluginmanager.register(costs.Durations(config))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """What all workers and their ranks need is imported once, in what forks them."""
    launch.warm_children()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what runs in turns and has none now."""
    others = [
        item
        for item in items
        if item.get_closest_marker("in_turns") and not longer.has_turn(item.nodeid)
    ]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begins to import what the processes of tests need, when any test starts some."""
    folders = {item.path.parent.name for item in session.items}
    if session.config.option.collectonly:
        return
    # Or each look for what a test left behind goes through all that was imported: 0.3 CPU seconds.
    gc.collect()
    gc.freeze()
    if folders & {"gpu", "integration", "multiprocess", "scenes", "web"}:
        launch.warm_services()
        launch.warm_start()


def pytest_sessionfinish() -> None:
    launch.end_warm_start()


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Fails a test after which a child process, thread or descriptor remains.

    There is no way to opt out. What a wider fixture keeps was there before the test.
    """
    before = leaks.holdings()
    yield
    left = leaks.wait_until_gone(before, timeout_s=LEAK_TIMEOUT_S)
    if left:
        leaks.end_new_processes(before)
        pytest.fail("the test left behind:\n  " + "\n  ".join(left), pytrace=False)


@pytest.fixture(autouse=True)
def private_state_dir(
    nothing_is_left_behind: None,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """Keeps tests away from the jobs of whoever runs them."""
    state_dir = tmp_path_factory.mktemp("state")
    for name in ("PARAMD_TOKEN", "PARAMD_LISTEN", "PARAMD_URL", "PARAMD_JOB"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PARAMD_STATE_DIR", str(state_dir))
    return state_dir


@pytest.fixture(scope="module")
def grpc_is_up() -> Iterator[None]:
    """For modules whose tests are the first to use gRPC in this process."""
    with leaks.first_grpc_use():
        yield
