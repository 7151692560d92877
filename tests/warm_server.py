"""The warm process itself: imports everything once, then forks what it is asked for.

    python -m tests.warm_server DESCRIPTOR {service|ranks} ROOM

`tests/warm.py` starts it and says what for. One message on the socket is one request, with the
new process's stdin, stdout and stderr; the answer is its process id. Nothing but imports has
happened here and there is one thread, so a fork is as good as a new interpreter. /proc shows a
fork the command line and environment of the process it came from: `ROOM` is there to be
overwritten with its own, by which tests find processes and look for secrets.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import importlib.util
import json
import os
import resource
import signal
import socket
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from paramd.cli.commands import OWN
from paramd.parts import found
from paramd_service.parts import CONTROL, SIDECAR
from tests import leaks, warm
from tests.ending import end

SERVICE = (
    "paramd.cli.main",
    "paramd_service.sidecar.main",
    "paramd_service.control.main",
    *dict.fromkeys(name.partition(":")[0] for name in (*OWN, *SIDECAR, *CONTROL)),
    # What those import only once they serve.
    "paramd_service.control.control_plane",
    "paramd_service.exports.files",
    "anyio._backends._asyncio",
    "httpcore2",
    "jwt",
)
MODULES = {
    # Without torch: what a sidecar loads, and has in memory, is for tests to see.
    "service": SERVICE,
    "ranks": (
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        # What torchrun is made of.
        "torch.distributed.launcher.api",
        "torch.distributed.elastic.rendezvous.registry",
        # An optimizer's first step imports it.
        "torch._dynamo",
        "safetensors.torch",
        "psutil",
        "pytest",
        "paramd.trainer.attaching.attach",
        "paramd.trainer.attaching.discovering",
        "paramd.trainer.resume.exported",
        "paramd.mesh.connect",
        "paramd.mesh.reading.assemble",
        "rich.table",
        *SERVICE,
    ),
}
"""What each of the two warm processes imports."""

LARGEST_BYTES = 1 << 18
"""Of a request: a command line and an environment."""

READY = b"ready"

HELPER = "tests.warm_server of"
"""How the process that forks a rank's children calls itself."""

SPACES = 0x00020000 | 0x04000000 | 0x20000000 | 0x40000000
"""CLONE_NEWNS, _NEWUTS, _NEWPID, _NEWNET: those of a host."""

LIMITS = (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_AS, resource.RLIMIT_CORE)


class Request(NamedTuple):
    """A process to be."""

    told: Mapping[str, Any]
    descriptors: Sequence[int]
    """Its stdin, stdout and stderr."""


def main() -> None:
    """Serves until the other side closes; a fork leaves the loop to run its module."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    # As strict as pytest is with what its workers import.
    with warnings.catch_warnings(action="error"):
        for name in MODULES[sys.argv[2]]:
            importlib.import_module(name)
    take_routes = control_planes_routes()
    # torch's take all its operators out of its libraries, which writes to 30 MiB of shared pages.
    for one in weakref.finalize._registry:  # type: ignore[attr-defined]
        one.atexit = False
    tasks = len(os.listdir("/proc/self/task"))
    if tasks != 1:
        raise RuntimeError(f"{tasks} threads: what they hold would be held for ever in a fork")
    # Or a first collection, and attach(), which looks at all objects, write to all shared pages.
    # Whose parameters something holds in C++ alone has to unfreeze first.
    gc.collect()
    gc.freeze()
    with suppress(BrokenPipeError):  # closed meanwhile, as `serve` sees
        connection.send(READY)
    request = serve(connection)
    while request is not None:
        become(request)
        if warm.WORKER not in request.told["arguments"]:  # whose tests make several
            take_routes()
        child = serve_children() if request.told["starts_others"] else None
        if child is None:
            arguments = request.told["arguments"]
            if arguments[0] in ("-c", *warm.WARM):
                # Taking an interpreter apart writes to all pages that it shares with the warm
                # process: 0.4 CPU seconds, more than the start.
                end(partial(run, arguments))
            run(arguments)
        request = child


def control_planes_routes() -> Callable[[], None]:
    """Over services that a control plane fills in, one in a process: most of what its start takes.

    Returns:
        has this process' control plane take them.
    """
    from paramd_service.alerts.service import Watchers
    from paramd_service.control.api import app
    from paramd_service.control.api.services import Services
    from paramd_service.control.mesh.jobs import Jobs
    from paramd_service.control.parts import ControlHost, ControlPart, ControlParts
    from paramd_service.control.store.history import MetricHistory
    from paramd_service.edits.service import EditRegistry
    from paramd_service.exports.service import ExportService

    # What some routes take out of them at once.
    kinds = {"_edits": EditRegistry, "_watchers": Watchers, "_exports": ExportService}
    jobs, history, host = (object.__new__(one) for one in (Jobs, MetricHistory, ControlHost))
    vars(host).update(jobs=jobs, records=SimpleNamespace(history=history))
    services: Any = SimpleNamespace(host=host)
    parts = [object.__new__(one) for one in found(CONTROL, "control", ControlPart)]
    for part in parts:
        vars(part).update({name: object.__new__(kind) for name, kind in kinds.items()}, host=host)
    of_parts = [router for part in parts for router in part.routes()]

    def fill(given: ControlHost) -> None:
        jobs.__dict__, history.__dict__ = vars(given.jobs), vars(given.records.history)
        vars(host).update(vars(given))

    def filled(router: Any, given: Services) -> Any:
        fill(given.host)
        vars(services).update({one.name: getattr(given, one.name) for one in fields(given)})
        return router

    def filled_parts(given: ControlParts) -> list[Any]:
        for part, real in zip(parts, given, strict=True):
            assert type(part) is type(real)
            for name in kinds.keys() & vars(real).keys():
                vars(part)[name].__dict__ = vars(vars(real)[name])
        return of_parts

    metrics = partial(filled, app.metrics_router(services))
    routes = [partial(filled, make(services)) for make in app._ROUTES]

    def take() -> None:
        vars(app).update(metrics_router=metrics, _ROUTES=routes)
        ControlParts.routes = filled_parts  # type: ignore[assignment,method-assign]

    return take


def run(arguments: Sequence[str]) -> None:
    """As the interpreter would, in `__main__`."""
    if arguments[0] == "-c":
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102
        return
    # Not by runpy: torchrun's agent looks at its stack all the time, and looks through all modules
    # for the source of frames that have none.
    spec = importlib.util.find_spec(arguments[0])
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{arguments[0]}.__main__")
    assert spec is not None, arguments
    loader: Any = spec.loader
    module = sys.modules["__main__"] = importlib.util.module_from_spec(spec)
    sys.argv[0], module.__name__ = str(spec.origin), "__main__"
    exec(loader.get_code(spec.name), module.__dict__)  # noqa: S102


def serve(connection: socket.socket) -> Request | None:
    """Forks for each request. None when the other side has closed; the request, in a fork."""
    # Ctrl-C is for what it forks, which may have to end others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with connection:
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(connection, LARGEST_BYTES, 3)
            except ConnectionResetError:  # closed before it had read that we are ready
                return None
            if not data:
                return None
            read_end, write_end = os.pipe()
            child = os.fork()
            if child == 0:
                request = Request(json.loads(data), descriptors)
                if request.told["host"]:
                    enter(request.told["host"])
                process = os.fork()
                if process == 0:
                    os.close(read_end)
                    os.close(write_end)
                    return request
                os.write(write_end, str(process).encode())
                os._exit(0)
            os.close(write_end)
            os.waitpid(child, 0)
            for descriptor in descriptors:
                os.close(descriptor)
            # From here on the adopter is its parent.
            connection.send(os.read(read_end, 32))
            os.close(read_end)


def enter(host: int) -> None:
    """Moves this process into another's namespaces; of process ids, what it forks from then on."""
    descriptor = os.pidfd_open(host)
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, SPACES):
        raise OSError(ctypes.get_errno(), f"cannot enter the namespaces of process {host}")
    os.close(descriptor)


def become(request: Request) -> None:
    """Makes a fork what a new process would be: descriptors, session, environment, limits."""
    told = request.told
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if told["new_session"]:
        os.setsid()
    # Above those that they are to replace: one may have the number of another.
    moved = [os.dup(descriptor) for descriptor in request.descriptors]
    for number, descriptor in enumerate(moved):
        os.dup2(descriptor, number)
    for descriptor in {*moved, *request.descriptors} - {0, 1, 2}:
        os.close(descriptor)
    for limit, pair in zip(LIMITS, told["limits"], strict=True):
        resource.setrlimit(limit, pair)
    os.umask(told["umask"])
    os.chdir(told["cwd"])
    os.environ.clear()
    os.environ.update(told["env"])
    atexit.register(end_lightly)
    sys.argv = list(told["arguments"])
    is_code = sys.argv[0] == "-c"
    if is_code:
        del sys.argv[1]
    if told["env"].get("PYTHONSAFEPATH"):
        del sys.path[0]
    else:
        sys.path[0] = told["cwd"]
    module = () if is_code else ("-m",)
    show([sys.executable, *module, *told["arguments"]], told["env"])


def end_lightly() -> None:
    """The last thing before the end, which would else look for cycles in all that was imported.

    That took a rank 1.4 CPU seconds, more than many run.
    """
    gc.collect(1)  # what is new
    gc.freeze()


def serve_children() -> Request | None:
    """Forks the process that will fork this one's children, while there is one thread.

    What it forks becomes this process's own child, to wait for and to signal, since this one
    adopts.

    Returns:
        None in this process; in a child, what it is to become.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if os.fork():
        theirs.close()
        leaks.adopt_orphans()
        forker = warm.inherited = warm.Forker(ours)
        warm.start_children_with(service=forker, ranks=forker)
        return None
    ours.close()
    # Whoever reads the parent's output is to see its end.
    with open(os.devnull, "r+b") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(nothing.fileno(), 1)
    show([HELPER, str(parent)], {})
    request = serve(theirs)
    if request is None:
        os._exit(0)
    return request


def show(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Has /proc show this command line and environment."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    # arg_start, arg_end, env_start, env_end: fields 48 to 51, of which two stand before the ")".
    arguments = int(fields[45]), int(fields[46])
    variables = int(fields[47]), int(fields[48])
    _overwrite(arguments, command)
    _overwrite(variables, [f"{name}={value}" for name, value in environment.items()])


def _overwrite(span: tuple[int, int], words: Sequence[str]) -> None:
    begin, end = span
    text = b"".join(os.fsencode(word) + b"\0" for word in words)
    if len(text) > end - begin:
        raise RuntimeError(f"{len(text)} bytes do not fit into {end - begin}")
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


if __name__ == "__main__":
    main()
