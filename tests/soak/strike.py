"""Does the faults of a plan to a stage, and undoes them."""

from __future__ import annotations

import os
import resource
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from paramd.errors import ParamdError
from tests.multiprocess.striking import LIMIT_S, is_down
from tests.soak.links import Mode
from tests.soak.plan import Fault
from tests.soak.stage import Stage, full, is_root, patience_s

REACH_S = 15.0
"""How long a point may take to be reached while everybody is at work."""

CLOCK_S = 3600.0
CGROUPS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))
MEMORY_BYTES = 4 << 20
VERSIONS = {"newer": "999.0.0", "older": "0.0.1"}


class NotPossibleError(Exception):
    """This machine, or this user, cannot do it; the table says so."""


class NotReachedError(AssertionError):
    """A named point that the plan holds was not passed by anybody in time."""


@contextmanager
def struck(stage: Stage, fault: Fault) -> Iterator[None]:
    """The fault has happened when the block begins, and is undone after it."""
    who, where, _ = fault.words
    do = _KINDS.get((who, where)) or _KINDS.get(("*", where)) or _KINDS.get((who, "*")) or _point
    with do(stage, fault):
        yield


@contextmanager
def _random(stage: Stage, fault: Fault) -> Iterator[None]:
    who, _, how = fault.words
    process = stage.process(who, fault.rank)
    process.send_signal(signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    try:
        yield
    finally:
        if how == "stop":
            _go_on(process)


@contextmanager
def _all_sidecars(stage: Stage, fault: Fault) -> Iterator[None]:
    for process in [stage.process("sidecar", r) for r in range(stage.main.world_size)]:
        process.kill()
    yield


@contextmanager
def _point(stage: Stage, fault: Fault) -> Iterator[None]:
    who, point, how = fault.words
    # Which rank writes, verifies or finishes an export, and which replica a heatmap is of, is
    # not for the plan to choose.
    anybody = point.startswith("export-") or point == "pool"
    ranks = range(stage.main.world_size) if anybody else (fault.rank,)
    processes = [stage.process(who, rank) for rank in ranks]
    for rank in ranks:
        _arm(stage, who, rank, f"{point}:{how}")
    over = threading.Event()
    helper = threading.Thread(target=_provoke, args=(stage, point, over), name=f"provoke {point}")
    helper.start()
    try:
        deadline_s = time.monotonic() + patience_s(REACH_S)
        while not any(is_down(process) for process in processes):
            if time.monotonic() > deadline_s:
                raise NotReachedError(f"{fault.kind} of rank {fault.rank}")
            time.sleep(0.01)
        yield
    finally:
        over.set()
        for rank in ranks:
            _arm(stage, who, rank, "")
        for process in processes:
            _go_on(process)
        helper.join()


def _arm(stage: Stage, who: str, rank: int, rule: str) -> None:
    """The rule that a rank has from now on; the empty one calls the last one off."""
    faults = stage.main.faults
    path = faults / (f"rank-{rank}.sock" if who == "sidecar" else f"rank-{rank}")
    part = path.with_name(f"{path.name}.part")
    part.write_text(rule)
    part.replace(path)


def _provoke(stage: Stage, point: str, over: threading.Event) -> None:
    """Exports, and calls exports off, for points that actors pass only now and then."""
    number = 0
    while point.startswith("export-") and not over.is_set():
        number += 1
        key = f"exports/{point}-{time.monotonic_ns()}"
        try:
            with stage.connect() as mesh:
                export = mesh.export(
                    key, include=("parameters",), max_shard_size=1 << 13, assets=stage.assets
                )
                if point == "export-dropped":
                    mesh.cancel_export(export.info.id)
                export.wait(REACH_S)
        except ParamdError:
            over.wait(0.1)


@contextmanager
def _clock(stage: Stage, fault: Fault) -> Iterator[None]:
    who, _, way = fault.words
    name = "clock-control" if who == "control" else f"clock-{who}-{fault.rank}"
    path = stage.folder / "inject" / name
    if not path.exists():
        raise NotPossibleError(f"{who} has no clock to move")
    _write_in_place(path, CLOCK_S if way == "+" else -CLOCK_S)
    try:
        yield
    finally:
        _write_in_place(path, 0.0)


def _write_in_place(path: Path, seconds: float) -> None:
    """The processes have the file mapped, so it must stay the same one."""
    with path.open("r+b") as file:
        file.write(struct.pack("<d", seconds))


@contextmanager
def _version(stage: Stage, fault: Fault) -> Iterator[None]:
    """Its sidecar comes back as that of another version, which the trainer must not take."""
    path = stage.folder / "inject" / f"version-sidecar-{fault.rank}"
    path.write_text(VERSIONS[fault.words[2]])
    try:
        stage.process("sidecar", fault.rank).kill()
        yield
    finally:
        path.unlink()


@contextmanager
def _descriptors(stage: Stage, fault: Fault) -> Iterator[None]:
    process = stage.process(fault.words[0], fault.rank)
    with _limited(process, resource.RLIMIT_NOFILE, process.num_fds()):
        yield


@contextmanager
def _memory(stage: Stage, fault: Fault) -> Iterator[None]:
    who, _, how = fault.words
    process = stage.process(who, fault.rank)
    if how == "address-space":
        with _limited(process, resource.RLIMIT_AS, process.memory_info().vms + MEMORY_BYTES):
            yield
    elif how == "shared":
        # What /dev/shm being full is for files there: a memfd cannot grow over this size.
        with _limited(process, resource.RLIMIT_FSIZE, 4096):
            yield
    else:
        with _cgroup(process):
            yield


@contextmanager
def _limited(process: psutil.Process, what: int, most: int) -> Iterator[None]:
    soft, hard = process.rlimit(what)
    process.rlimit(what, (most, hard))
    try:
        yield
    finally:
        with suppress(psutil.Error):
            process.rlimit(what, (soft, hard))


@contextmanager
def _cgroup(process: psutil.Process) -> Iterator[None]:
    """It may take little more memory from now on; the kernel may end it for that."""
    root = next((r for r in CGROUPS if os.access(r / "cgroup.procs", os.W_OK)), None)
    if root is None or not is_root():
        raise NotPossibleError("no memory control group can be made")
    limit = "memory.limit_in_bytes" if root.name == "memory" else "memory.max"
    group = root / f"paramd-soak-{process.pid}"
    group.mkdir()
    try:
        if not (group / limit).exists():
            raise NotPossibleError("this control group has no memory controller")
        (group / limit).write_text(str(MEMORY_BYTES))
        (group / "cgroup.procs").write_text(str(process.pid))
        yield
    finally:
        with suppress(OSError):
            (root / "cgroup.procs").write_text(str(process.pid))
        _remove(group)


def _remove(group: Path) -> None:
    deadline_s = time.monotonic() + patience_s(LIMIT_S)
    while True:
        with suppress(OSError):
            for pid in (group / "cgroup.procs").read_text().split():
                (group.parent / "cgroup.procs").write_text(pid)
            group.rmdir()
            return
        assert time.monotonic() < deadline_s, f"{group} cannot be removed"
        time.sleep(0.02)


@contextmanager
def _disk(stage: Stage, fault: Fault) -> Iterator[None]:
    if not is_root():
        raise NotPossibleError("small disks need root")
    with full(stage.folder / fault.words[1]):
        yield


@contextmanager
def _link(stage: Stage, fault: Fault) -> Iterator[None]:
    _, who, how = fault.words
    assert stage.links is not None
    first = 2 * fault.rank
    ports = stage.control_ports if who == "control" else stage.main.ports[first : first + 2]
    for port in ports:
        stage.links.set(port, Mode(how))
    try:
        yield
    finally:
        for port in ports:
            stage.links.set(port, Mode.OPEN)


@contextmanager
def _postgres(stage: Stage, fault: Fault) -> Iterator[None]:
    stop = signal.SIGINT if fault.words[2] == "restart" else signal.SIGKILL
    stage.restart_postgres(stop, fault.seconds)
    yield


def _go_on(process: psutil.Process) -> None:
    with suppress(psutil.Error):
        process.send_signal(signal.SIGCONT)


_KINDS: dict[tuple[str, str], Callable[..., object]] = {
    ("sidecars", "*"): _all_sidecars, ("*", "random"): _random, ("postgres", "random"): _postgres,
    ("*", "clock"): _clock, ("*", "version"): _version, ("*", "descriptors"): _descriptors,
    ("*", "memory"): _memory, ("disk", "*"): _disk, ("link", "*"): _link,
}  # fmt: skip
