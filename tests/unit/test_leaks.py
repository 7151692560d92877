"""The leak check sees what it is there to see."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

import pytest

from tests.leaks import holdings, left_behind, wait_until_gone

SLEEP_FOR_EVER = "import time\nwhile True: time.sleep(60)"
ORPHAN = f"""
import subprocess, sys
command = [sys.executable, "-c", {SLEEP_FOR_EVER!r}]
child = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
print(child.pid)
"""


@contextmanager
def _child() -> Iterator[str]:
    process = subprocess.Popen([sys.executable, "-c", SLEEP_FOR_EVER])
    yield f"process {process.pid}:"
    process.kill()
    process.wait()


@contextmanager
def _orphan() -> Iterator[str]:
    """A grandchild in a session of its own whose parent has ended."""
    parent = subprocess.run([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, check=True)
    pid = int(parent.stdout)
    yield f"process {pid}:"
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@contextmanager
def _thread(*, daemon: bool, name: str) -> Iterator[str]:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, daemon=daemon, name=name)
    thread.start()
    yield f"thread {name!r}"
    stop.set()
    thread.join()


@contextmanager
def _descriptor() -> Iterator[str]:
    descriptor = os.memfd_create("left")
    yield f"descriptor {descriptor}: /memfd:left"
    os.close(descriptor)


@pytest.mark.parametrize(
    "leak",
    [
        _child,
        _orphan,
        lambda: _thread(daemon=False, name="worker"),
        lambda: _thread(daemon=True, name="paramd-copy"),
        _descriptor,
    ],
    ids=["child", "orphan", "thread", "daemon-thread-of-ours", "descriptor"],
)
def test_a_leak_is_named_while_it_lasts_and_forgotten_after(
    leak: Callable[[], AbstractContextManager[str]],
) -> None:
    before = holdings()
    with leak() as name:
        left = left_behind(before)
        assert len(left) == 1
        assert left[0].startswith(name)
    assert wait_until_gone(before, timeout_s=5) == []
