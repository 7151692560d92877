"""What this rank's sidecar has for a successor of its trainer.

The live state is offered when the trainer ended between two updates, with nothing standing in
for its weights and with its samples as they were; standing snapshots always. The successor
compares the ranks' offers and decides (paramd/trainer/resume).
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from paramd.memory.control_page import (
    Word,
    label_of,
    sample_digest,
)
from paramd.memory.gate import resting_state, state_of
from paramd_service.sidecar.owner import AttachedMemory, Ownership
from paramd_service.sidecar.snapshots.standing import Standing


def offer_of(
    attached: AttachedMemory, ownership: Ownership, layout_digest: str, standing: Standing
) -> tuple[dict[str, Any], list[int]]:
    """The offer, and the descriptors it goes with: new ones, which the caller closes.

    They are arena, optimizer memory, continuation memory and the state's allocations on a device if
    the live state is offered, then one for each snapshot, read-only.
    """
    page, request = attached.page, attached.request
    resting = resting_state(page)
    state = resting if resting is not None else state_of(page)
    why_not = _why_not_live(attached, ownership)
    descriptors: list[int] = []
    if not why_not:
        shared = attached.shared
        descriptors += map(os.dup, (shared.arena, shared.optimizer, shared.continuation))
        descriptors += [os.dup(one.descriptor) for one in shared.state]
    snapshots = _snapshots(standing, descriptors)
    offer = {
        "op": "offered",
        "ownership": ownership.name,
        "pid": request.pid,
        "incarnation": request.incarnation,
        "world_size": request.world_size,
        "arena_bytes": request.arena_bytes,
        "device": request.device.uuid.hex() if request.device is not None else "",
        "layout_digest": layout_digest,
        "lineage": page[Word.LINEAGE],
        "step": state.step,
        "edits": page[Word.EDITS] + page[Word.EDITS_BEFORE],
        "why_not_live": why_not,
        "optimizer_bytes": page[Word.OPTIMIZER_BYTES],
        "allocations": [one.size_bytes for one in attached.shared.state],
        "digests": standing.left_digests(attached),
        "reached": standing.reached,
        "snapshots": snapshots,
    }
    return offer, descriptors


def offer_of_snapshots(
    ownership: Ownership, standing: Standing
) -> tuple[dict[str, Any], list[int]]:
    """As `offer_of`, when a trainer that was to take the memory over died meanwhile."""
    descriptors: list[int] = []
    snapshots = _snapshots(standing, descriptors)
    newest = snapshots[0] if snapshots else {}
    offer = {
        "op": "offered",
        "ownership": ownership.name,
        "incarnation": 0,
        "world_size": newest.get("world_size", 0),
        "layout_digest": newest.get("layout_digest", ""),
        "step": -1,
        "reached": standing.reached,
        "why_not_live": "a trainer that was to go on in it died while it attached",
        "snapshots": snapshots,
    }
    return offer, descriptors


def _snapshots(standing: Standing, descriptors: list[int]) -> list[dict[str, Any]]:
    """The labels of whole snapshots; adds their descriptors."""
    found = []
    for label, block in standing.labels():
        found.append(dataclasses.asdict(label))
        descriptors.append(os.open(f"/proc/self/fd/{block.descriptor}", os.O_RDONLY | os.O_CLOEXEC))
    return found


def _why_not_live(attached: AttachedMemory, ownership: Ownership) -> str:
    page = attached.page
    if ownership is not Ownership.ORPHANED:
        return str(ownership.value)
    if not page[Word.LINEAGE]:
        return "its trainer did not keep what a successor needs (attach with resume='auto')"
    if label := label_of(page):
        return f"the trainer ended while other weights ({label!r}) stood in for the training's"
    digest = sample_digest(page, attached.host_bytes)
    if page[Word.REST]:
        changed = digest != page[Word.REST_DIGEST]
    else:
        settled = page[Word.SETTLED_SEQ] == page[Word.SEQ]
        changed = settled and digest != page[Word.SETTLED_DIGEST]
    return "parameters were changed after the last update" if changed else ""
