"""Notes which of our functions a process enters while it is told to.

PARAMD_WALKS names a folder. `number` there holds one byte, the walk that is under way (0: none);
each process appends "walk file function" lines to a file of its own pid.
"""

import inspect
import mmap
import os
import sys
import threading
from pathlib import Path
from types import FrameType

ROOMS = ("/client/paramd/", "/service/paramd_service/")


def watch(folder: Path) -> None:
    """From now on, on this thread and all that begin after it."""
    with (folder / "number").open("rb") as file:
        number = mmap.mmap(file.fileno(), 1, prot=mmap.PROT_READ)
    seen: set[tuple[int, str, str]] = set()

    def entered(frame: FrameType, event: str, _: object) -> None:
        walk, code = number[0], frame.f_code
        if not walk or event != "call":
            return
        step = (walk, code.co_filename, code.co_qualname)
        if step in seen:
            return
        if not code.co_flags & inspect.CO_OPTIMIZED:
            return  # a module or class that is being defined is no step of the walk
        seen.add(step)
        name = code.co_filename.replace(os.sep, "/")
        room = next((room for room in ROOMS if room in name), None)
        if room is not None and "/v1/" not in name:  # generated stubs are nobody's reading
            file = name[name.index(room) :].split("/", 2)[2]
            line = f"{walk} {file} {code.co_qualname}\n"
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            descriptor = os.open(folder / str(os.getpid()), flags, 0o600)
            os.write(descriptor, line.encode())
            os.close(descriptor)

    threading.setprofile(entered)
    sys.setprofile(entered)


if named := os.environ.get("PARAMD_WALKS", ""):
    watch(Path(named))
