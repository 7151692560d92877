"""Edits of one rank: what is staged is what is applied, told true, undone exactly."""

import asyncio
import math
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import xxhash

from paramd.errors import ConflictError, DataLossError, ExhaustedError, NotFoundError, UsageError
from paramd.layout.edits.kinds import EditKind
from paramd.layout.edits.ops import WHOLE_BOX
from paramd.layout.types import Box
from paramd.memory.control_page import Word
from paramd.memory.descriptors import reserved_bytes
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.edits.entry import WITHDRAWN_NS, Entry, Outcome, Phase, fate
from paramd_service.edits.memory import HEAD_BYTES
from paramd_service.edits.receive import is_finite
from paramd_service.sidecar.owner import Ownership
from paramd_service.sidecar.ranges import Ranges
from tests.edit_ops import edit_op
from tests.unit.layout.simulate import BOXES, Spec, World, build, fsdp1
from tests.unit.layout.test_plan import KINDS
from tests.unit.sidecar.edit_rank import Rank, bytes_of, fill_of, stage

SPECS = [
    Spec("w", "float32", (6, 5)),
    Spec("h", "bfloat16", (7,)),
    Spec("d", "float64", (3, 2, 4)),
    Spec("i", "int32", (5,)),
    Spec("s", "float32", ()),
]
WHOLE = [
    edit_op(fqn="w", kind=EditKind.LERP, weight=0.25, with_data=True),
    edit_op(fqn="h", kind=EditKind.ADD, weight=0.5, with_data=True),
    edit_op(fqn="d", box=Box((1, 0, 1), (3, 2, 4)), kind=EditKind.MUL, value=-2.0),
    edit_op(fqn="i", box=Box((1,), (4,)), kind=EditKind.SET, with_data=True),
    edit_op(fqn="s", kind=EditKind.FILL, value=0.5),
]


ALIKE = [Spec(name, "float32", (4, 6)) for name in "abcdef"] + [Spec("t", "float32", (8, 6))]
ONES = [edit_op(fqn="w", kind=EditKind.FILL, value=1.0)]
EXACT = [EditKind.SET, EditKind.MUL, EditKind.LERP, EditKind.FILL, EditKind.CLAMP]


def world_of(kind: str, size: int, specs: Sequence[Spec] = SPECS) -> World:
    held = fsdp1(specs, size) if kind == "fsdp1" else [BOXES[kind](s, size) for s in specs]
    world = build(specs, held)
    torch.manual_seed(0)
    for spec in specs:
        values = (torch.randn(spec.shape) * 8).to(getattr(torch, spec.dtype))
        world.full[spec.fqn] = bytes_of(values)
    world.arenas[:] = [world.laid(world.full, rank) for rank in range(size)]
    return world


@contextmanager
def rank_of(
    kind: str = "replicated", size: int = 1, number: int = 0, specs: Sequence[Spec] = SPECS
) -> Iterator[Rank]:
    world = world_of(kind, size, specs)
    rank = Rank(world.layout, world.arenas[number], number)
    try:
        yield rank
    finally:
        rank.close()


def operands() -> list[torch.Tensor | None]:
    torch.manual_seed(1)
    found: list[torch.Tensor | None] = []
    dtypes = {spec.fqn: getattr(torch, spec.dtype) for spec in SPECS}
    shapes = {spec.fqn: spec.shape for spec in SPECS}
    for op in WHOLE:
        box = Box(tuple(op.begin), tuple(op.end))
        sizes = box.sizes if box != WHOLE_BOX else shapes[op.fqn]
        value = (torch.randn(sizes) * 8).to(dtypes[op.fqn])
        found.append(value if op.with_data else None)
    return found


def expected(world: World) -> dict[str, bytes]:
    """The full tensors after WHOLE was done to them."""
    full = {}
    for spec in SPECS:
        data = bytearray(world.full[spec.fqn])
        full[spec.fqn] = torch.frombuffer(data, dtype=getattr(torch, spec.dtype)).view(spec.shape)
    for op, operand in zip(WHOLE, operands(), strict=True):
        part = full[op.fqn][tuple(map(slice, op.begin, op.end))]
        if op.kind == EditKind.MUL:
            part.mul_(op.value)
        elif operand is None:
            part.fill_(op.value)
        elif op.kind == EditKind.LERP:
            part.lerp_(operand, op.weight)
        elif op.kind == EditKind.ADD:
            part.add_(operand, alpha=op.weight)
        else:
            part.copy_(operand)
    return {fqn: bytes_of(tensor) for fqn, tensor in full.items()}


@pytest.mark.parametrize("kind", KINDS)
async def test_an_edit_changes_what_its_operations_say_and_undo_puts_back_all_but_sums(
    kind: str,
) -> None:
    world, size = world_of(kind, 2), 2
    for number in range(size):
        with rank_of(kind, size, number) as rank:
            before = bytes(rank.arena)
            async with rank.edits() as edits:
                data = rank.data_of(WHOLE, operands())
                entry = await stage(edits, rank.manifest(1, WHOLE), data)
                assert entry.progress().phase == pb.EDIT_PHASE_STAGED
                assert bytes(rank.arena) == before
                rank.boundary(edits, entry)
                assert entry.progress().phase == pb.EDIT_PHASE_APPLIED
                assert (entry.edits, entry.stop_ns, entry.undo_refusal) == (1, 7, "")
                edited = bytes(rank.arena)
                assert edited == world.laid(expected(world), number)
                undo = await edits.begin(rank.manifest(2, WHOLE, undo_of=entry.edit_id))
                assert entry.undo_refusal.endswith("already staged")
                rank.boundary(edits, undo)
                assert_as_before(rank, before)
                assert entry.undo_refusal == "it is already undone"
                redo = await edits.begin(rank.manifest(3, WHOLE, undo_of=undo.edit_id))
                rank.boundary(edits, redo)
                assert_as_before(rank, edited)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(2))
async def test_undo_puts_ranges_of_equal_shape_back_each_in_its_own_place(
    kind: str, seed: int
) -> None:
    """Whatever would take one of them for another leaves bytes that are right somewhere else."""
    ops, data = alike(random.Random(seed))
    halves = [(ops[:4], data[:4]), (ops[4:], data[4:])]

    for number in range(2):
        with rank_of(kind, 2, number, ALIKE) as rank:
            async with rank.edits() as edits:
                done, states = [], [bytes(rank.arena)]
                for turn, (some, operands) in enumerate(halves):
                    staged = rank.data_of(some, operands)
                    entry = await stage(edits, rank.manifest(turn, some), staged, chunk=512)
                    rank.boundary(edits, entry)
                    done.append(entry)
                    states.append(bytes(rank.arena))
                # Either may be undone first: they have no element in common.
                for turn, (which, left) in enumerate([(0, [1]), (1, []), (0, [0])], start=2):
                    some = halves[which][0]
                    manifest = rank.manifest(turn, some, undo_of=done[which].edit_id)
                    done[which] = await edits.begin(manifest)
                    rank.boundary(edits, done[which])
                    assert bytes(rank.arena) == mixed(rank, states, left), f"turn {turn}"


def mixed(rank: Rank, states: Sequence[bytes], halves: Sequence[int]) -> bytes:
    """The arena with some of both edits, which change different bytes."""
    found = bytearray(states[0])
    for half in halves:
        before, after = states[half], states[half + 1]
        for at in (at for at in range(len(found)) if before[at] != after[at]):
            found[at] = after[at]
    return bytes(found)


def alike(chance: random.Random) -> tuple[list[pb.EditOp], list[torch.Tensor | None]]:
    """Operations on regions of equal shape, each with operands of its own, in any order."""
    boxes = {spec.fqn: [Box((0, 0), (4, 6))] for spec in ALIKE}
    boxes["t"] = [Box((0, 0), (4, 6)), Box((4, 0), (8, 6))]
    regions = [(fqn, box) for fqn, found in boxes.items() for box in found]
    chance.shuffle(regions)
    ops = []
    for number, (fqn, box) in enumerate(regions):
        kind = chance.choice(EXACT)
        with_data = kind in (EditKind.SET, EditKind.LERP)
        numbers = {"value": -1.5 - number, "weight": 0.25, "min": -1.0 - number, "max": 1.0}
        ops.append(edit_op(fqn, kind, box, with_data, **numbers))
    generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
    return ops, [torch.randn(4, 6, generator=generator) if op.with_data else None for op in ops]


def assert_as_before(rank: Rank, before: bytes) -> None:
    """All bytes but those of the sum, which may be off in its last digits."""
    now, sums = bytearray(rank.arena), bytearray(before)
    for tensor in rank.layout.tensors:
        for piece in tensor.pieces:
            if tensor.fqn == "h" and piece.rank == rank.rank:
                end = piece.arena_begin + 2 * piece.region.numel
                one, other = (
                    torch.frombuffer(data, dtype=torch.bfloat16)[piece.arena_begin // 2 : end // 2]
                    for data in (now[: len(now) // 2 * 2], sums[: len(sums) // 2 * 2])
                )
                torch.testing.assert_close(one, other, rtol=0.05, atol=0.1)
                now[piece.arena_begin : end] = sums[piece.arena_begin : end]
    assert now == sums


async def test_data_comes_in_order_whole_and_finite_or_not_at_all() -> None:
    with rank_of() as rank:
        async with rank.edits() as edits:
            ops = [edit_op(fqn="h", kind=EditKind.SET, with_data=True), *WHOLE[:1]]
            values: list[torch.Tensor | None] = [torch.ones(7).bfloat16(), torch.ones(6, 5)]
            data = rank.data_of(ops, values)
            entry = await edits.begin(rank.manifest(1, ops))
            assert rank.page[Word.EXPECTED_NS] > time.monotonic_ns()
            part = data[:50]
            with pytest.raises(DataLossError, match="checksum"):
                await edits.take(entry, [(0, 50, fill_of(part, 0, checked_at=50))])
            fill = fill_of(part, 0)
            with pytest.raises(UsageError, match="0 of 192 are staged"):
                await edits.take(entry, [(50, 50, fill)])
            await edits.take(entry, [(0, 50, fill)])
            await edits.take(entry, [(0, 50, fill)])
            with pytest.raises(UsageError, match="50 of 192 are staged"):
                await edits.take(entry, [(40, 50, fill)])
            with pytest.raises(UsageError, match="50 of 192"):
                await edits.take(entry, [(50, 1000, fill)])
            with pytest.raises(ConflictError, match="50 of 192 bytes"):
                edits.make_ready(entry.edit_id, boundary=1, token=1)
            rest = data[50:]
            await edits.take(entry, [(50, len(rest), fill_of(rest, 50))])
            assert entry.phase is Phase.STAGED
            assert [d.hex() for d in entry.data_digests] == [
                xxhash.xxh3_128(bytes_of(value)).hexdigest()
                for value in values
                if value is not None
            ]
            for number, bad in enumerate((float("nan"), float("inf"), float("-inf"))):
                one = torch.ones(7).bfloat16()
                one[6] = bad
                data = rank.data_of(ops, [one, values[1]])
                with pytest.raises(UsageError, match=r"'h' holds NaN.*element 6 "):
                    await stage(edits, rank.manifest(9, ops), data)
                with pytest.raises(NotFoundError):
                    edits.get(f"{9:032x}")
                wanted = rank.manifest(10 + number, ops, allow_nonfinite=True)
                assert (await stage(edits, wanted, data)).phase is Phase.STAGED


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_what_is_not_finite_is_found_among_numbers_of_any_sign(dtype: str) -> None:
    limits = torch.finfo(getattr(torch, dtype))
    numbers = [0.0, -0.0, 1.0, limits.max, limits.min, limits.tiny, -limits.tiny]
    for other in (0.0, 1.0, -1.0, limits.max, limits.min):
        for number in [*numbers, math.nan, -math.nan, math.inf, -math.inf]:
            values = torch.full((70,), other, dtype=getattr(torch, dtype))
            values[33] = number
            assert is_finite(memoryview(bytes_of(values)), dtype) is math.isfinite(number)


class _AgreesMeanwhile(dict[int, int]):
    """A control page whose trainer agrees on request 1 while word `at` is being read."""

    at = -1

    def __getitem__(self, word: int) -> int:
        if word == self.at:
            # In the trainer's order: PROMISED is cleared last.
            self |= {Word.EDIT_AGREED: 1, Word.AGREED: 1, Word.AGREED_TOKEN: 5, Word.PROMISED: 0}
        return self.get(word, 0)


@pytest.mark.parametrize("at", list(Word))
async def test_an_edit_that_is_agreed_while_its_fate_is_read_is_never_called_off(at: Word) -> None:
    words: Any = _AgreesMeanwhile({Word.PROMISED: 1})
    words.at = at
    opened: asyncio.Future[None] = asyncio.Future()
    entry = Entry(manifest=pb.EditManifest(), digest=b"", opened=opened)
    entry.boundary, entry.token, entry.unready_ns = 1, 5, 1
    assert fate(entry, words, ended=None, now_ns=2 * WITHDRAWN_NS) is Outcome.OPEN


async def test_a_ready_edit_is_let_go_of_only_when_nobody_can_apply_it() -> None:
    with rank_of() as rank:
        page = rank.page
        async with rank.edits() as edits:
            entry = await edits.begin(rank.manifest(1, ONES))
            rank.ready(edits, entry)
            for words in ({}, {Word.READY: 0, Word.PROMISED: 1}):
                for word, value in words.items():
                    page[word] = value
                await asyncio.sleep(1.5 * WITHDRAWN_NS / 1e9)
                with pytest.raises(ConflictError, match="may have agreed"):
                    await edits.drop(entry.edit_id)
            with pytest.raises(ConflictError, match="in doubt for boundary 1"):
                edits.make_ready(entry.edit_id, boundary=2, token=5)
            page[Word.PROMISED] = 0
            edits.request_ended(1)
            await asyncio.sleep(1.5 * WITHDRAWN_NS / 1e9)
            edits.settle()
            assert entry.phase is Phase.STAGED
            rank.ready(edits, entry)
            assert entry.boundary == 2
            # Agreed by all, and not applied yet: the trainer may be reading it right now.
            rank.agree()
            page[Word.READY] = 0
            await asyncio.sleep(1.5 * WITHDRAWN_NS / 1e9)
            with pytest.raises(ConflictError, match="may have agreed"):
                await edits.drop(entry.edit_id)
            rank.apply()
            assert edits.get(entry.edit_id).phase is Phase.APPLIED
            with pytest.raises(ConflictError, match="already applied, at boundary 2"):
                edits.make_ready(entry.edit_id, boundary=3, token=9)


async def test_a_request_that_is_not_in_the_page_yet_is_not_one_that_was_withdrawn() -> None:
    """The copying thread writes it, and on a busy machine that may take a while."""

    with rank_of() as rank:
        async with rank.edits() as edits:
            entry = await edits.begin(rank.manifest(1, ONES))
            argument = edits.make_ready(entry.edit_id, boundary=1, token=5)
            for _ in range(2):
                await asyncio.sleep(1.5 * WITHDRAWN_NS / 1e9)
                edits.settle()
            assert entry.phase is Phase.READY
            rank.page[Word.TOKEN], rank.page[Word.ARGUMENT] = 5, argument
            rank.page[Word.READY] = 1
            rank.agree()
            rank.apply()
            assert edits.get(entry.edit_id).phase is Phase.APPLIED


async def test_what_a_withdrawn_request_leaves_is_free_at_once() -> None:
    with rank_of() as rank:
        async with rank.edits() as edits:
            entry = await edits.begin(rank.manifest(1, ONES))
            rank.ready(edits, entry)
            rank.page[Word.READY] = 0
            edits.withdrawn(1)
            assert entry.phase is Phase.STAGED
            rank.ready(edits, entry)
            # Another control plane's request of the same number was agreed instead.
            rank.page[Word.TOKEN] = 77
            rank.agree()
            edits.settle()
            assert entry.phase is Phase.STAGED
            await edits.drop(entry.edit_id)
            await edits.drop(entry.edit_id)
            assert edits.staged_bytes == 0


async def test_the_trainers_end_decides_what_became_of_a_ready_edit() -> None:
    for steps, phase in ((1, Phase.STAGED), (2, Phase.STAGED), (3, Phase.APPLIED)):
        with rank_of() as rank:
            async with rank.edits() as edits:
                entry = await edits.begin(rank.manifest(1, ONES))
                rank.ready(edits, entry)
                for step in (rank.agree, rank.apply)[: steps - 1]:
                    step()
                edits.trainer_ended(Ownership.ORPHANED)
                assert entry.phase is phase
                with pytest.raises(ConflictError, match="no further edits"):
                    await edits.begin(rank.manifest(2, WHOLE))
    with rank_of() as rank:
        async with rank.edits() as edits:
            entry = await edits.begin(rank.manifest(1, ONES))
            rank.ready(edits, entry)
            rank.agree()
            rank.page[Word.EDIT_AGREED] = 1
            edits.trainer_ended(Ownership.TORN)
            assert entry.phase is Phase.READY


async def test_budgets_bound_what_is_staged_and_what_is_kept() -> None:
    with rank_of() as rank:
        small = [edit_op(fqn="s", kind=EditKind.FILL, value=1.0)]
        async with rank.edits(undo_budget_bytes=2 * 4096, budget_bytes=3 * 4096) as edits:
            applied = []
            for number in range(4):
                entry = await edits.begin(rank.manifest(number, small))
                rank.boundary(edits, entry)
                applied.append(entry)
            assert [bool(one.undo_refusal) for one in applied] == [True, True, False, False]
            assert "later edits" in applied[0].undo_refusal
            assert edits.undo_bytes == 2 * 4096
            with pytest.raises(ConflictError, match="later edits"):
                await edits.begin(rank.manifest(10, small, undo_of=applied[0].edit_id))
            # What a staged undo needs is not dropped for anybody.
            undo = await edits.begin(rank.manifest(11, small, undo_of=applied[2].edit_id))
            for number in range(20, 23):
                entry = await edits.begin(rank.manifest(number, small))
                rank.boundary(edits, entry)
            assert applied[2].body is undo.body is not None
            with pytest.raises(ConflictError, match="drop that one first"):
                await edits.drop(applied[2].edit_id)
            for number in range(30, 33):
                await edits.begin(rank.manifest(number, small))
            with pytest.raises(ExhaustedError, match="bytes of staged edits are taken"):
                await edits.begin(rank.manifest(33, small))
        async with rank.edits(undo_budget_bytes=100) as edits:
            entry = await edits.begin(rank.manifest(40, small))
            rank.boundary(edits, entry)
            assert "whole undo budget" in entry.undo_refusal
            bare = await edits.begin(rank.manifest(41, small, undoable=False))
            rank.boundary(edits, bare)
            assert "without undo data" in bare.undo_refusal


async def test_an_undo_persisted_before_its_original_leaves_no_claim_to_its_memory() -> None:
    """The sidecar dies between the two; what a successor then frees, the next one must not find."""

    with rank_of("fsdp1", 2, 1) as rank:
        data = rank.data_of(WHOLE, operands())
        async with rank.edits() as edits:
            first = await stage(edits, rank.manifest(1, WHOLE), data)
            rank.boundary(edits, first)
            undo = await edits.begin(rank.manifest(2, WHOLE, undo_of=first.edit_id))
            rank.ready(edits, undo)
            rank.agree()
            rank.apply()
            with patch.object(edits._book.undo, "_persist", lambda one: None):
                edits.settle()
            assert undo.phase is Phase.APPLIED
        async with rank.edits() as edits:
            await edits.drop(undo.edit_id)
            third = await stage(edits, rank.manifest(3, WHOLE), data)
            taken = edits.staged_bytes
        async with rank.edits() as edits:
            assert edits.get(first.edit_id).undo_refusal == "it is already undone"
            assert edits.undo_bytes == 0
            assert edits.staged_bytes == taken
            rank.boundary(edits, edits.get(third.edit_id))


async def test_all_memory_comes_back() -> None:
    with rank_of() as rank:
        async with rank.edits(idle_s=0.0) as edits:
            whole = edits.memory.free_bytes
            assert whole == edits.memory.sparse.size_bytes - HEAD_BYTES
            begin, end = await edits.memory.reserve(8 << 20)
            assert reserved_bytes(edits.memory.sparse.descriptor) >= 8 << 20
            holes = rank.page[Word.EDIT_HOLES]
            edits.memory.free(begin, end)
            entries = [await edits.begin(rank.manifest(n, WHOLE)) for n in range(5)]
            for entry in entries:
                await edits.drop(entry.edit_id)
            async with asyncio.timeout(60):
                while edits.memory.free_bytes < whole or edits.memory.idle_bytes:
                    await asyncio.sleep(0.001)
            assert reserved_bytes(edits.memory.sparse.descriptor) <= HEAD_BYTES + (1 << 20)
            # The trainer's page tables of them are gone, and it is told.
            assert rank.page[Word.EDIT_HOLES] > holes


def test_ranges_add_remove_and_find_as_sets_do() -> None:
    ranges = Ranges()
    numbers: set[int] = set()
    for step in range(300):
        begin, size = step * 37 % 101, step * 13 % 17
        change = (ranges.add, numbers.update) if step % 3 else (
            ranges.remove, numbers.difference_update)  # fmt: skip
        change[0](begin, begin + size)
        change[1](range(begin, begin + size))
        assert [n for low, high in ranges for n in range(low, high)] == sorted(numbers)
        assert ranges.size == len(numbers)
        inside = [n for low, high in ranges.within(20, 60) for n in range(low, high)]
        outside = [n for low, high in ranges.missing(20, 60) for n in range(low, high)]
        assert inside == sorted(numbers & set(range(20, 60)))
        assert outside == sorted(set(range(20, 60)) - numbers)
        fit = ranges.first_fit(5)
        assert fit is None or set(range(fit, fit + 5)) <= numbers
