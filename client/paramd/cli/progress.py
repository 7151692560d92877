"""A bar of bytes with the time left, on stderr, when somebody looks at it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Moved = Callable[[str, int, int], None]
"""(what is done, bytes done, bytes in all)"""


@contextmanager
def bar(what: str) -> Iterator[Moved]:
    """Shows what it is told; nothing where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda _what, _done_bytes, _size_bytes: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(what, total=None)

        def moved(now: str, done_bytes: int, size_bytes: int) -> None:
            shown.update(
                task,
                description=now,
                completed=done_bytes,
                total=size_bytes if size_bytes else None,
            )

        yield moved
