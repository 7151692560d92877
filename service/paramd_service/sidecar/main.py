"""The sidecar process: parse, build, run, close."""

import argparse
import asyncio
import ctypes
import json
import os
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import BinaryIO

from paramd import clock, gone, parts
from paramd.errors import ParamdError, UsageError, codes_of
from paramd.helpers import be_first_victim
from paramd.memory import descriptors, handover
from paramd.security.tls import Pems
from paramd_service import core_dumps
from paramd_service.admission import few_heaps, give_back_memory, raise_descriptor_limit
from paramd_service.aio import stopped
from paramd_service.parts import SIDECAR
from paramd_service.sidecar.config import SidecarConfig
from paramd_service.sidecar.faults import Faults, from_environment
from paramd_service.sidecar.log import Log
from paramd_service.sidecar.parts import SidecarPart, log_failed
from paramd_service.sidecar.rank import RankSidecar
from paramd_service.sidecar.rpc.control_link import Joining
from paramd_service.sidecar.rpc.grpc_server import GrpcServer
from paramd_service.sidecar.rpc.unix_server import UnixServer
from paramd_service.sidecar.shortage import Shortage
from paramd_service.sidecar.snapshots.store import BlockMaker
from paramd_service.tls import JobPems

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

# glibc's maximum: smaller blocks come from the heap, where pages stay warm.
_MMAP_THRESHOLD_BYTES = 32 << 20
_TRIM_THRESHOLD_BYTES = 256 << 20


_TLS_OPTIONS = {
    "advertise": "host under which others find it",
    "tls_cert": "file of the server's certificate [env: PARAMD_TLS_CERT]",
    "tls_key": "file of its private key [env: PARAMD_TLS_KEY]",
    "tls_client_ca": "CA whose certificates clients must have [env: PARAMD_TLS_CLIENT_CA]",
}

MAX_PEMS_BYTES = 64 << 10

# Bounds the copying thread's wait for the GIL while messages are being built.
_SWITCH_INTERVAL_S = 0.0005


def keep_memory() -> None:
    """Raise malloc's mmap and trim thresholds where libc has mallopt (musl does not)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sidecar until it should leave; return the exit code."""
    be_first_victim()
    core_dumps.forbid()
    try:
        config = parse(argv)
        pems = read_pems(sys.stdin.buffer) if config.job_tls else None
        faults = from_environment(config.socket_path)
        keep_memory()
        few_heaps()
        raise_descriptor_limit()
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        with clock.kept(config.socket_path.with_suffix(".clock")):
            asyncio.run(run(config, faults, pems))
    except ParamdError as error:
        print(f"paramd sidecar: {error}", file=sys.stderr)
        return codes_of(error).exit
    return 0


def parse(argv: Sequence[str] | None) -> SidecarConfig:
    """Parse the command line. Secrets arrive over the socket, never in argv.

    Raises:
        UsageError: If a value is out of range.
    """
    defaults = SidecarConfig(job="job", rank=0, socket_path=Path("socket"))
    parser = argparse.ArgumentParser(
        prog="paramd sidecar serve", description="Serves the parameters of one training rank."
    )
    parser.add_argument("--job", required=True, help="name of the job")
    parser.add_argument("--rank", required=True, type=int, help="rank whose parameters it owns")
    parser.add_argument("--socket", required=True, type=Path, help="Unix socket for the handover")
    parser.add_argument(
        "--listen", default=defaults.listen, help="gRPC address; beyond loopback with TLS"
    )
    parser.add_argument(
        "--stream-port", type=int, default=0, help="TCP port of bulk streams; 0 picks a free one"
    )
    parser.add_argument(
        "--trainer-pid",
        type=int,
        default=0,
        metavar="PID",
        help="leave if this process ends before a trainer has attached; 0 waits --linger-s",
    )
    for name, text in _TLS_OPTIONS.items():
        parser.add_argument("--" + name.replace("_", "-"), default="", help=text)
    parser.add_argument(
        "--job-tls",
        action="store_true",
        help="serve mutual TLS within the job; reads {ca, cert, key} as one JSON line from stdin",
    )
    # The control plane sets the interval of reports.
    for name in (one.name for one in fields(defaults) if one.name != "report_s"):
        option, default = "--" + name.replace("_", "-"), getattr(defaults, name)
        if name.endswith("_s"):
            parser.add_argument(option, type=float, default=default, metavar="SECONDS")
        elif name.endswith("_bytes"):
            parser.add_argument(option, type=int, default=default, metavar="BYTES")
    parser.add_argument(
        "--host-reserve",
        type=int,
        default=defaults.host_reserve,
        metavar="BYTES",
        help="memory of the host that stays free for the training; by default 5 %% of it, or what "
        "a step takes",
    )
    parser.add_argument("--max-calls", type=int, default=defaults.max_calls, metavar="COUNT")
    gone.check_options(argv if argv is not None else sys.argv[1:])
    values = vars(parser.parse_args(argv))
    return SidecarConfig(socket_path=values.pop("socket"), **values)


def read_pems(stdin: BinaryIO) -> Pems:
    """The certificate of `--job-tls`. Raises UsageError, whose text never quotes it."""
    try:
        return Pems.of_json(json.loads(stdin.readline(MAX_PEMS_BYTES)))
    except (ValueError, RecursionError):
        raise UsageError("stdin: expected one JSON line with ca, cert and key") from None


async def run(config: SidecarConfig, faults: Faults, pems: Pems | None = None) -> None:
    """Start the servers, wait until the sidecar should leave, then drain.

    Raises:
        UsageError: If it cannot listen on the socket or the address.
    """
    log = Log(fields={"job": config.job, "rank": config.rank, "pid": os.getpid()})
    memory_thread = ThreadPoolExecutor(1, thread_name_prefix="paramd-memory")
    stats_thread = ThreadPoolExecutor(1, thread_name_prefix="paramd-stats")
    rank = RankSidecar(
        config,
        blocks=BlockMaker(memory_thread),
        executor=memory_thread,
        stats_executor=stats_thread,
        faults=faults,
        log=log,
        parts=parts.found(SIDECAR, "sidecar", SidecarPart, partial(log_failed, log)),
    )
    if pems is not None:
        rank.own_pems = JobPems(pems, mutual=True)
    listener = handover.listen(config.socket_path)
    server = GrpcServer(rank)
    unix = UnixServer(rank, listener, lambda: server.address)
    try:
        await server.start()
        unix.start()
        joining = Joining(rank, address=server.address)
        joining.start()
        rank.room.open()
        rank.parts.started()
        giving_back = [
            asyncio.get_running_loop().create_task(work)
            for work in (give_back_memory(), Shortage(rank).run())
        ]
        rank.wait_for_trainer()
        log("started", address=server.address, socket_path=str(config.socket_path))
        _leave_on_signals(rank)
        if config.trainer_pid:
            _leave_with(config.trainer_pid, rank)
        await rank.leaving.wait()
        for task in giving_back:
            await stopped(task)
        # Only now: whoever is ended instead leaves its figures, which its successor reads.
        rank.room.close()
        await _drain(rank, server, unix, joining)
    finally:
        unix.stop_listening()
        memory_thread.shutdown()
        stats_thread.shutdown(cancel_futures=True)


async def _drain(rank: RankSidecar, server: GrpcServer, unix: UnixServer, joining: Joining) -> None:
    """Drain in numbered steps. A second signal ends the process at once."""
    log = rank.log
    log("drain", step=1, doing="health says NOT_SERVING")
    await server.say_not_serving()
    log("drain", step=2, doing="no new trainers or clients on the socket")
    unix.stop_listening()
    await joining.stop()
    await rank.parts.stopping()
    log("drain", step=3, doing=f"running calls may end within {rank.config.grace_s} s")
    await server.stop(rank.config.grace_s)
    log("drain", step=4, doing="snapshots are released")
    await unix.close()
    await rank.close()
    log("drain", step=5, doing="closed")


def _leave_with(pid: int, rank: RankSidecar) -> None:
    """Tell the rank when the process that started this one has ended."""
    loop = asyncio.get_running_loop()
    try:
        pidfd = descriptors.pidfd(pid)
    except ProcessLookupError:
        rank.starter_ended()
        return

    def ended() -> None:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        rank.starter_ended()

    loop.add_reader(pidfd, ended)


def _leave_on_signals(rank: RankSidecar) -> None:
    loop = asyncio.get_running_loop()

    def leave(number: signal.Signals) -> None:
        if rank.leaving.is_set():
            rank.log("forced", signal=number.name)
            # Not sys.exit, which would hang on whatever the drain hangs on.
            os._exit(128 + number)
        rank.log("leaving", reason=number.name)
        rank.leaving.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, leave, number)
