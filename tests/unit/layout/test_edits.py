"""Plans of edits change the right elements, on every replica, for every way of sharding."""

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paramd.errors import NotFoundError, UsageError
from paramd.layout.dtypes import item_bytes
from paramd.layout.edits.kinds import EditKind
from paramd.layout.edits.ops import WHOLE_BOX, OpSpec, edit_ops, ops_of
from paramd.layout.edits.plan import (
    DATA_ALIGNMENT_BYTES,
    EditPlan,
    check_ops,
    finder,
    overlap,
    plan_edit,
)
from paramd.layout.select import NameIndex
from paramd.layout.types import Box, Layout, Piece, TensorKind, TensorLayout, full_box
from paramd.v1 import sidecar_pb2 as pb
from tests.edit_ops import edit_op
from tests.unit.layout.simulate import BOXES, Spec, World, build, flat_indexes, fsdp1
from tests.unit.layout.test_plan import KINDS


def operand(planned_index: int, at: int, size: int) -> bytes:
    """The element `at` of an operation's operand, told apart from every other one."""
    return (planned_index << 20 | at).to_bytes(4, "little").rjust(size, b"\x7f")[-size:]


def check_plan(plan: EditPlan, world: World) -> None:
    """Applies a plan of SETs element by element and compares with the full tensors."""
    arenas = [bytearray(arena) for arena in world.arenas]
    expected = {fqn: bytearray(data) for fqn, data in world.full.items()}
    for number, planned in enumerate(plan.ops):
        size = item_bytes(planned.tensor.dtype)
        for at, flat in enumerate(flat_indexes(planned.box, planned.tensor.shape)):
            expected[planned.op.fqn][flat * size : (flat + 1) * size] = operand(number, at, size)
    for edit in plan.ranks:
        touched: Counter[int] = Counter()
        end_before = 0
        for item in edit.items:
            size = item_bytes(item.dtype)
            assert item.data_begin % DATA_ALIGNMENT_BYTES == 0
            assert end_before <= item.data_begin <= edit.data_bytes - item.size_bytes
            end_before = item.data_begin + item.size_bytes
            for index in itertools.product(*map(range, item.sizes)):
                to = item.arena_begin + size * dot(index, item.strides)
                source = item.source_begin + dot(index, item.source_strides)
                assert item.arena_begin <= to <= item.arena_end - size
                arenas[edit.rank][to : to + size] = operand(item.op, source, size)
                touched.update(range(to, to + size))
        assert set(touched.values()) <= {1}
    # Every replica of every region holds the expected bytes; nothing else has changed.
    full = {fqn: bytes(data) for fqn, data in expected.items()}
    assert arenas == [world.laid(full, rank) for rank in range(len(arenas))]


def dot(index: tuple[int, ...], strides: tuple[int, ...]) -> int:
    return sum(i * stride for i, stride in zip(index, strides, strict=True))


@st.composite
def edits_of_worlds(draw: st.DrawFn) -> tuple[World, list[pb.EditOp]]:
    shapes = st.lists(st.integers(0, 5), max_size=4)
    specs = [
        Spec(f"w{n}", draw(st.sampled_from(["float32", "bfloat16", "int64"])), tuple(draw(shapes)))
        for n in range(draw(st.integers(1, 4)))
    ]
    size = draw(st.sampled_from([1, 2, 3, 4]))
    kind = draw(st.sampled_from(KINDS))
    held = fsdp1(specs, size) if kind == "fsdp1" else [BOXES[kind](spec, size) for spec in specs]
    ops = []
    for spec in specs:
        ends = tuple(draw(st.integers(0, n)) for n in spec.shape)
        box = Box(tuple(draw(st.integers(0, n)) for n in ends), ends)
        boxes = [box]
        if draw(st.booleans()) and spec.shape:
            # The rest of the first dim too: several regions of one parameter.
            boxes.append(Box((box.end[0], *box.begin[1:]), (spec.shape[0], *box.end[1:])))
        ops += [edit_op(fqn=spec.fqn, box=b, kind=EditKind.SET, with_data=True) for b in boxes]
    return build(specs, held), draw(st.permutations(ops))


@settings(max_examples=120, deadline=None)
@given(edits_of_worlds())
def test_any_edit_of_any_layout_is_what_slicing_the_full_tensors_would_do(
    drawn: tuple[World, list[pb.EditOp]],
) -> None:
    world, ops = drawn
    check_plan(plan_edit(world.layout, ops), world)


def layout(*tensors: tuple[str, str, tuple[int, ...]], buffers: tuple[str, ...] = ()) -> Layout:
    made, begin = [], 0
    for fqn, dtype, shape in tensors:
        kind = TensorKind.BUFFER if fqn in buffers else TensorKind.PARAMETER
        piece = Piece(0, begin, full_box(shape))
        made.append(TensorLayout(fqn, dtype, shape, kind, (piece,), (f"tied.{fqn}",)))
        begin += 1024
    return Layout(1, (begin,), tuple(made))


PLAIN = layout(
    ("f", "float32", (4, 4)), ("h", "float16", (4,)), ("i", "int8", (4,)), ("b", "bool", (4,)),
    ("c", "complex64", (4,)), ("q", "float8_e4m3fn", (4,)), ("z", "complex128", (4,)),
    ("running", "float32", (4,)), buffers=("running",),
)  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"fqn": "nope", "kind": EditKind.FILL}, "no parameter 'nope'"),
        ({"fqn": "running", "kind": EditKind.FILL}, "is a buffer"),
        ({"fqn": "f", "kind": EditKind.FILL, "box": Box((0,), (4,))}, "the tensor's 2 dims"),
        ({"fqn": "f", "kind": EditKind.FILL, "box": Box((0, 0), (5, 4))}, "out of range"),
        ({"fqn": "f", "kind": EditKind.FILL, "box": Box((3, 0), (2, 4))}, "out of range"),
        ({"fqn": "f", "kind": EditKind.FILL, "box": Box((-1, 0), (2, 4))}, "out of range"),
        ({"fqn": "f", "kind": EditKind.SET}, "needs data"),
        ({"fqn": "f", "kind": EditKind.LERP}, "needs data"),
        ({"fqn": "f", "kind": EditKind.FILL, "with_data": True}, "not data"),
        ({"fqn": "f", "kind": EditKind.CLAMP, "max": 1.0, "with_data": True}, "not data"),
        ({"fqn": "f", "kind": EditKind.CLAMP}, "at least one bound"),
        ({"fqn": "f", "kind": EditKind.CLAMP, "min": 2.0, "max": 1.0}, "not above max"),
        ({"fqn": "f", "kind": EditKind.CLAMP, "min": math.nan}, "not above max"),
        ({"fqn": "f", "kind": EditKind.ADD, "weight": 0.0}, "changes nothing"),
        ({"fqn": "f", "kind": EditKind.ADD, "weight": math.inf}, "weight is inf"),
        ({"fqn": "f", "kind": EditKind.FILL, "value": math.nan}, "allow_nonfinite"),
        ({"fqn": "f", "kind": EditKind.MUL, "value": math.inf}, "allow_nonfinite"),
        ({"fqn": "h", "kind": EditKind.FILL, "value": 70000.0}, "not finite in float16"),
        ({"fqn": "q", "kind": EditKind.MUL, "value": 2.0}, "does not support arithmetic"),
        ({"fqn": "q", "kind": EditKind.FILL, "value": 5.0}, "use set"),
        ({"fqn": "z", "kind": EditKind.SET, "with_data": True}, "cannot be edited"),
        ({"fqn": "b", "kind": EditKind.ADD, "value": 1.0}, "does not support arithmetic"),
        ({"fqn": "b", "kind": EditKind.FILL, "value": 2.0}, "from 0 to 1"),
        ({"fqn": "i", "kind": EditKind.FILL, "value": 0.5}, "whole number"),
        ({"fqn": "i", "kind": EditKind.FILL, "value": 128.0}, "from -128 to 127"),
        ({"fqn": "i", "kind": EditKind.ADD, "value": 1.0}, "use set or fill"),
        ({"fqn": "c", "kind": EditKind.CLAMP, "max": 1.0}, "use set"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_reason(
    fields: dict[str, object], words: str
) -> None:
    with pytest.raises((UsageError, NotFoundError), match=words):
        plan_edit(PLAIN, [edit_op(**fields)])  # type: ignore[arg-type]


def test_overlapping_regions_and_names_of_one_tensor_are_refused() -> None:
    def fill(fqn: str, *box: tuple[int, ...]) -> pb.EditOp:
        return edit_op(fqn=fqn, box=Box(*box) if box else WHOLE_BOX, kind=EditKind.FILL)

    top, low = fill("f", (0, 0), (2, 4)), fill("f", (2, 0), (4, 4))
    assert plan_edit(PLAIN, [low, top]).numel == 16
    column, empty = fill("f", (0, 1), (4, 2)), fill("f", (1, 1), (1, 4))
    plan_edit(PLAIN, [top, empty])
    for ops in ([top, column], [column, low], [fill("f"), top], [fill("f"), fill("tied.f")]):
        with pytest.raises(UsageError, match="the same elements of 'f'"):
            plan_edit(PLAIN, ops)
    find = finder(PLAIN)
    assert overlap(check_ops(find, [top]), check_ops(find, [fill("tied.f")])) == "f"
    assert overlap(check_ops(find, [top, fill("h")]), check_ops(find, [low, fill("i")])) is None


def test_limits_of_operations_and_regions_hold() -> None:
    with pytest.raises(UsageError, match="expected 1 to"):
        plan_edit(PLAIN, [])
    wide = layout(("w", "float32", (2000,)))
    rows = [edit_op(fqn="w", box=Box((n,), (n + 1,)), kind=EditKind.FILL) for n in range(1001)]
    assert plan_edit(wide, rows[:1000]).numel == 1000
    with pytest.raises(UsageError, match="at most 1,000 regions"):
        plan_edit(wide, rows)


def test_tensors_that_share_memory_under_two_names_are_not_edited_together() -> None:
    pieces = (Piece(0, 0, Box((0,), (8,))),)
    half = (Piece(0, 16, Box((0,), (4,))),)
    tensors = tuple(
        TensorLayout(fqn, "float32", (n,), TensorKind.PARAMETER, held)
        for fqn, n, held in (("whole", 8, pieces), ("half", 4, half))
    )
    ops = [edit_op(fqn=fqn, kind=EditKind.FILL) for fqn in ("whole", "half")]
    with pytest.raises(UsageError, match="share memory"):
        plan_edit(Layout(1, (64,), tensors), ops)


def test_a_number_to_set_fills_and_bounds_may_be_a_list() -> None:
    filled = [OpSpec(pattern=name, op="fill", value=0.0) for name in ("f", "g")]
    assert ops_of([["f", "g"]], set=0) == filled
    assert ops_of(["f"], clamp=[None, 1])[0].max == 1.0
    with pytest.raises(UsageError, match="such as set="):
        ops_of([object()], mul=2)  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"pattern": "f", "op": "replace"}, "expected one of set, add"),
        ({"pattern": "running", "op": "fill", "value": 0.0}, "buffers only"),
        ({"pattern": "nothing.*", "op": "fill", "value": 0.0}, "no parameter matches"),
        ({"pattern": "f", "op": "fill"}, "needs a value"),
        ({"pattern": "f", "op": "add"}, "needs a value or data"),
        ({"pattern": "f", "op": "lerp", "data": True}, "needs a weight"),
        ({"pattern": "f", "op": "fill", "value": 1.0, "min": 0.0}, "takes no min"),
        ({"pattern": "f", "op": "add", "value": 1.0, "data": True}, "takes no value"),
        ({"pattern": "f", "op": "clamp", "min": math.nan}, "NaN"),
    ],
)
def test_wrong_words_are_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises((UsageError, NotFoundError), match=words):
        edit_ops(NameIndex(PLAIN), [OpSpec(**fields)])  # type: ignore[arg-type]
