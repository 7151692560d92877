"""PreviewEdit: statistics of what an edit would change, before and after, from a copy."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from paramd.errors import ConflictError
from paramd.memory.edit_program import Record, parse_program
from paramd.memory.mirror import is_mirror
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.sidecar.edits.entry import Entry, Phase
from paramd_service.sidecar.edits.memory import Range, Ranges
from paramd_service.sidecar.rank import RankSidecar
from paramd_service.sidecar.rpc.statistics import on_stats_thread, stats_message
from paramd_service.sidecar.snapshots.blocks import Key


@dataclass(frozen=True, slots=True)
class Preview:
    """One answer per operation, in order, all of one step."""

    step: int
    before: list[pb.Stats]
    after: list[pb.Stats]


async def preview(rank: RankSidecar, entry: Entry, timeout_s: float) -> Preview:
    """Statistics of this rank's elements, per operation.

    Holds a snapshot of them meanwhile.

    Raises:
        ConflictError: the edit is not STAGED, or was applied meanwhile; the arena is a mirror.
        ExhaustedError, AbortedError, TornError: from pinning.
        UsageError: a dtype has no statistics.
    """
    async with entry.lock:
        _check_staged(entry)
        await rank.edits.planned(entry)
        attached, edit = rank.attached, entry.edit
        assert attached is not None
        if is_mirror(attached.page.words):
            raise ConflictError(
                "previews need what the parameters are now, and these stay in the trainer's own "
                "memory; summon them to compute what an edit would do, or apply and undo it"
            )
        assert edit is not None
        arena_bytes, memory = attached.request.arena_bytes, rank.edits.memory.buffer
        records = parse_program(memory, entry.program_begin, arena_bytes=arena_bytes)
        spans = tuple(Ranges(*((item.arena_begin, item.arena_end) for item in edit.items)))
        if not spans:
            nothing = [pb.Stats(min=float("inf"), max=float("-inf"))] * entry.op_count
            return Preview(rank.step, nothing, nothing)
        key = Key(rank.epoch, spans)
        lease = await rank.pins.pin(key, lease_s=timeout_s, timeout_s=timeout_s)
        store = rank.pins.store
        snapshot = store.hold(lease.snapshot)
        try:
            # Our own hold replaces the lease, which could end in the middle.
            store.release(lease.snapshot_id)
            ops = [(item.op, item.dtype) for item in edit.items]
            view, count = snapshot.view(), entry.op_count
            before, after = await on_stats_thread(
                rank, lambda stop: _reduce(view, spans, memory, records, ops, count, stop)
            )
            step = snapshot.step
        finally:
            store.drop(snapshot)
        # Applied meanwhile, the edit may be in the snapshot already.
        rank.edits.settle()
        _check_staged(entry)
    return Preview(step, before, after)


def _reduce(
    snapshot: memoryview,
    spans: Sequence[Range],
    memory: memoryview,
    records: Sequence[Record],
    ops: Sequence[tuple[int, str]],
    op_count: int,
    stop: Sequence[bool],
) -> tuple[list[pb.Stats], list[pb.Stats]]:
    from paramd_service.sidecar.statistics import reduce, trial

    reduce.set_up()
    before, after = ([reduce.Reduced() for _ in range(op_count)] for _ in range(2))
    offsets: dict[int, int] = {}
    begin_bytes = 0
    for begin, end in spans:
        offsets[begin] = begin_bytes - begin
        begin_bytes += end - begin
    begins = sorted(offsets)
    for record, (op, dtype) in zip(records, ops, strict=True):
        if stop:
            return [], []  # cancelled: nobody waits for the result
        shift = offsets[begins[_at(begins, record.arena_begin)]]
        trial.try_record(
            snapshot, record.arena_begin + shift, memory, record, dtype, before[op], after[op]
        )
    return (
        [stats_message(one) for one in before],
        [stats_message(one) for one in after],
    )


def _at(begins: Sequence[int], position: int) -> int:
    return bisect_right(begins, position) - 1


def _check_staged(entry: Entry) -> None:
    if entry.phase is not Phase.STAGED:
        raise ConflictError(
            f"edit {entry.edit_id} is {entry.phase.name}; only a STAGED one can be previewed"
        )
