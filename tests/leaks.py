"""What a process holds: children, threads, descriptors; and what a test left behind.

before = holdings()
...
left = wait_until_gone(before, timeout_s=5)     # [] when nothing is left
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

POLL_S = 0.02
THREAD_PREFIX = "paramd"
"""Threads of ours carry it in their name, and must end even when they are daemons."""

_PR_SET_CHILD_SUBREAPER = 36
_RESOURCE_TRACKER = "multiprocessing.resource_tracker"
_BROWSER_SERVICE = "chromium --type=utility"


@dataclass(frozen=True, kw_only=True)
class Holdings:
    """What a process held at one moment. Each entry says what it is in words."""

    children: dict[tuple[int, float], str]
    threads: dict[threading.Thread, str]
    descriptors: dict[tuple[int, str], str]


def adopt_orphans() -> None:
    """Makes this process the parent of its orphaned descendants.

    So a sidecar that outlives its trainer becomes our child and is seen as left behind,
    instead of vanishing below init.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def holdings() -> Holdings:
    """What this process holds now."""
    return Holdings(children=_children(), threads=_threads(), descriptors=_descriptors())


def left_behind(before: Holdings) -> list[str]:
    """What is held now and was not held before, in words. Reaps adopted dead children."""
    now = holdings()
    _reap_adopted(before)
    return sorted(
        [text for key, text in now.children.items() if key not in before.children]
        + [text for key, text in now.threads.items() if key not in before.threads]
        + [text for key, text in now.descriptors.items() if key not in before.descriptors]
    )


def wait_until_gone(before: Holdings, *, timeout_s: float) -> list[str]:
    """Waits until nothing new is held. Returns what is still there at the deadline."""
    deadline = time.monotonic() + timeout_s
    while left := left_behind(before):
        # Objects in reference cycles hold their descriptors until they are collected.
        gc.collect()
        if not (left := left_behind(before)) or time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    return left


def end_new_processes(before: Holdings) -> None:
    """Kills what was left behind, so that one leak does not spoil the tests after it."""
    for pid, created in _children().keys() - before.children.keys():
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.create_time() == created:
                process.kill()


def _descendants(pid: int) -> Iterator[psutil.Process]:
    """Children of a process and theirs; not by psutil, which reads all of /proc for each test."""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, path.read_text().split()):
                with suppress(psutil.Error):
                    yield psutil.Process(child)
                yield from _descendants(child)


def _children() -> dict[tuple[int, float], str]:
    found = {}
    for process in _descendants(os.getpid()):
        with suppress(psutil.Error):
            command = " ".join(process.cmdline()).rstrip()
            # The standard library keeps this one helper until the interpreter ends.
            # Nor are a browser's services the test's: it starts them, and they end with it.
            is_own = _RESOURCE_TRACKER not in command and _BROWSER_SERVICE not in command
            if is_own and process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid, process.create_time()] = f"process {process.pid}: {command}"
    return found


def _threads() -> dict[threading.Thread, str]:
    return {
        thread: f"thread {thread.name!r}"
        for thread in threading.enumerate()
        if not thread.daemon or thread.name.startswith(THREAD_PREFIX)
    }


def open_files(pid: int) -> dict[Path, str]:
    """The links of a process' descriptors and where each leads, less what it closes meanwhile."""
    found = {}
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            found[link] = os.readlink(link)
    return found


def _descriptors() -> dict[tuple[int, str], str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        # The listing's own descriptor is gone by now.
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            found[int(name), target] = f"descriptor {name}: {target}"
    return found


def _reap_adopted(before: Holdings) -> None:
    """Collects dead children that we adopted; those that we started have a waiter."""
    for process in _descendants(os.getpid()):
        with suppress(psutil.Error, ChildProcessError):
            is_new = (process.pid, process.create_time()) not in before.children
            if is_new and process.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(process.pid, os.WNOHANG)


@contextmanager
def first_grpc_use() -> Iterator[None]:
    """gRPC's own descriptors live as long as a channel does; they are not a test's leak."""
    import grpc.aio

    async def serve_once() -> None:
        server = grpc.aio.server()
        server.add_insecure_port("127.0.0.1:0")
        await server.start()
        await server.stop(None)

    with grpc.insecure_channel("127.0.0.1:1"):
        asyncio.run(serve_once())
        yield
