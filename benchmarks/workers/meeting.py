"""Ranks that meet as those of a training do: light processes, forked from one that has torch.

    python -m benchmarks.workers.meeting WORLD_SIZE

Each is a real rank of `attach`: its gloo group, all stages until the sidecars may serve; rank 0
starts a real control plane. Left out is what a rank does alone: its sidecar's process and its
memory. Simulated sidecars join the control plane after that, from one process. Says what was
measured as one JSON line.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
import tempfile
import time
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist

from benchmarks.site import REPORT_S, told_worker
from paramd.trainer.attaching import stages
from paramd.trainer.attaching.exchange import Exchange
from paramd.trainer.helpers.sidecar_link import SidecarLink
from paramd.trainer.settings import AttachSettings

TIMEOUT_S = 300.0
LAYERS = 12
_LAZY = "TORCH_GLOO_LAZY_INIT"


class SimulatedSidecar(SidecarLink):
    """No process: the rank makes its memory itself."""

    def open(self) -> None:
        self.address = f"127.0.0.1:{40_000 + self._identity.rank}"

    def own_descriptors(self) -> Any:
        """None: nothing is moved."""


def main() -> None:
    world_size = int(sys.argv[1])
    torch.set_num_threads(1)
    stages.SidecarLink = SimulatedSidecar  # type: ignore[misc]
    # Loads what the first optimizer of a process loads; the ranks share it, and scan none of it.
    _model()
    gc.collect()
    gc.freeze()
    gc.disable()
    with tempfile.TemporaryDirectory(prefix="paramd-bench-") as folder:
        os.environ |= {"PARAMD_STATE_DIR": folder, "PARAMD_LISTEN": "127.0.0.1:0"}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        ranks = [_forked(rank, world_size, port) for rank in range(world_size)]
        failed = [rank for rank, pid in enumerate(ranks) if os.waitpid(pid, 0)[1]]
    if failed:
        raise SystemExit(f"ranks {failed[:8]} failed")


def _forked(rank: int, world_size: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        _rank(rank, world_size, port)
        code = 0
    finally:
        sys.stdout.flush()
        # The exit handlers are the parent's.
        os._exit(code)


def _rank(rank: int, world_size: int, port: int) -> None:
    timeout = timedelta(seconds=TIMEOUT_S)
    store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0, timeout, wait_for_workers=False)
    # The training's own group is there before it attaches; what it costs is none of ours.
    os.environ[_LAZY] = "1"
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    del os.environ[_LAZY]
    model, optimizer = _model()
    _meet(store, "begin", rank, world_size)
    before, begin_s = _connections(), time.perf_counter()
    settings = AttachSettings.from_environment()
    exchange = Exchange(timeout_s=TIMEOUT_S)
    met = stages.Stages(exchange, settings, "meeting", {})
    found = met.look_back(met.discover(model, optimizer, None, None))
    identity = met.identify()
    mesh = met.open(identity, found)
    # As `move_in` does: moved, begun, and what `attach` tells of its outcome.
    for _ in range(3):
        exchange.gather({})
    mine = {"attached_s": time.perf_counter() - begin_s, "connections": _connections() - before}
    told = exchange.gather(mine | {"ticket": identity.rank_ticket})
    if rank == 0:
        begin_s = time.perf_counter()
        registered = {
            "address": mesh["control_address"],
            "job": identity.job,
            "incarnation": identity.incarnation,
            "world_size": world_size,
            "report_s": REPORT_S,
            "layout_digest": mesh["layout_digest"],
            "layout_address": mesh["peers"][0]["address"],
            "tickets": [one["ticket"] for one in told],
        }
        with told_worker("joins", "0", str(world_size), said=registered, answer="joined"):
            joined_s = time.perf_counter() - begin_s
        print(json.dumps(_found(told) | {"joined_s": joined_s}), flush=True)
    _meet(store, "end", rank, world_size)
    met.close()


def _found(told: list[dict[str, Any]]) -> dict[str, float]:
    connections = [one["connections"] for one in told]
    return {
        "attached_s": max(one["attached_s"] for one in told),
        "connections_of_rank_0": connections[0],
        "connections_of_others": max(connections[1:]),
    }


def _model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(LAYERS)])
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _connections() -> int:
    return len(psutil.Process().net_connections("tcp"))


def _meet(store: dist.Store, name: str, rank: int, world_size: int) -> None:
    """Wait until all are here, without a connection of their own."""
    if store.add(name, 1) == world_size:
        store.set(f"{name} all", "1")
    store.wait([f"{name} all"], timedelta(seconds=TIMEOUT_S))


if __name__ == "__main__":
    main()
