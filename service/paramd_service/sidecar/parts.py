"""What a sidecar builds around the memory of one trainer: its pins and its edits."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor

from paramd_service.sidecar.blocks import BlockMaker
from paramd_service.sidecar.capture import Capture
from paramd_service.sidecar.config import SidecarConfig
from paramd_service.sidecar.copier import Copier
from paramd_service.sidecar.edit_limits import EditLimits
from paramd_service.sidecar.edit_memory import EditMemory
from paramd_service.sidecar.edits import Edits
from paramd_service.sidecar.faults import Faults
from paramd_service.sidecar.log import Log
from paramd_service.sidecar.owner import Possession
from paramd_service.sidecar.pins import Pins
from paramd_service.sidecar.snapshots import SnapshotStore

_PROGRAM_BYTES = 4 << 20


def make_pins(
    possession: Possession,
    *,
    blocks: BlockMaker,
    budget_bytes: int,
    idle_memory_s: float,
    executor: Executor,
    faults: Faults,
    log: Log,
) -> Pins:
    """Snapshots of a trainer's memory; the thread that copies them runs from now on."""
    store = SnapshotStore(
        budget_bytes=budget_bytes,
        blocks=blocks,
        clock_ns=time.monotonic_ns,
        idle_memory_s=idle_memory_s,
    )
    capture = Capture(possession.page, clock_ns=time.monotonic_ns, at_point=faults.at)
    copier = Copier(capture, possession.shared.wake, log)
    pins = Pins(
        possession, store=store, copier=copier, blocks=blocks, executor=executor, faults=faults
    )
    copier.start()
    return pins


def make_edits(
    possession: Possession,
    config: SidecarConfig,
    *,
    layout: Callable[[], bytes],
    executor: Executor,
    faults: Faults,
) -> Edits:
    """Edits of a trainer's memory, not started: `Edits.start` reserves what they need."""
    arena_bytes = possession.request.arena_bytes
    memory = EditMemory(
        possession.shared.edits,
        # Nobody needs more than the whole arena and a little for programs.
        pool_bytes=min(config.edit_pool_bytes, arena_bytes + _PROGRAM_BYTES),
        idle_s=config.idle_memory_s,
        executor=executor,
    )
    budget = config.edit_budget_bytes
    return Edits(
        memory,
        possession.page,
        rank=config.rank,
        arena_bytes=arena_bytes,
        limits=EditLimits(
            budget_bytes=budget if budget is not None else 2 * arena_bytes + (64 << 20),
            undo_budget_bytes=config.undo_budget_bytes,
            expiry_s=config.edit_expiry_s,
        ),
        layout=layout,
        faults=faults,
    )
