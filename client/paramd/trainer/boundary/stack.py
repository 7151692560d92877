"""The Python stack, which tells what a hook was called within."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import FrameType


def frames(thread: int | None = None) -> Iterator[FrameType]:
    """The Python stack of a thread, innermost first; None: of this one."""
    frame: FrameType | None
    if thread is None or thread == threading.get_ident():
        frame = sys._getframe(1)
    else:
        frame = sys._current_frames().get(thread)
    while frame is not None:
        yield frame
        frame = frame.f_back
