"""Editing: programs run on views of the arena, keep what was there, and reset moments."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from paramd.layout.edits.kinds import EditKind
from paramd.memory.arena import HostArena
from paramd.memory.control_page import ControlPage, Refusal, Word
from paramd.memory.descriptors import SparseMemory
from paramd.memory.edit_program import ANY_STEP, Record, write_program
from paramd.memory.gate import TrainerGate, state_of
from paramd.memory.handover import Descriptors
from paramd.trainer.boundary.agreement import EDIT, Request
from paramd.trainer.boundary.edits import Editor
from tests.longer import wait_until

ARENA_BYTES = 8 << 20
DATA, PREIMAGE = 1 << 16, 2 << 20
ROWS, COLUMNS = 6, 8


class Bench:
    """A parameter [6, 8] at the arena's begin and one of 4 behind it, with Adam's state."""

    def __init__(self) -> None:
        self.shared = Descriptors.create(ARENA_BYTES)
        self.page = ControlPage(self.shared.page)
        self.arena = HostArena(self.shared.arena, ARENA_BYTES)
        self.sidecar = SparseMemory(self.shared.edits)
        self.points: list[str] = []
        self.editor = Editor(
            self.page, self.arena, SparseMemory(self.shared.edits), at_point=self.points.append
        )
        self.gate = TrainerGate(self.page, stall_budget_ns=0)
        flat = torch.frombuffer(self.arena.buffer, dtype=torch.float32)
        self.param = torch.nn.Parameter(flat[: ROWS * COLUMNS].view(ROWS, COLUMNS))
        self.other = torch.nn.Parameter(flat[64:68])
        self.adam = torch.optim.Adam([self.param, self.other])
        self.editor.optimizers = [self.adam]
        with torch.no_grad():
            self.param.copy_(torch.arange(48.0).view(ROWS, COLUMNS))
        for param in (self.param, self.other):
            param.grad = torch.ones_like(param)
        self.adam.step()
        self.number = 0

    def request(self, *records: Record, if_step: int = ANY_STEP) -> Request:
        self.sidecar.reserve(0, 4 << 20)
        write_program(self.sidecar.buffer, 0, records, if_step=if_step)
        self.number += 1
        return Request(self.number, 10 * self.number, EDIT, 0)

    def put(self, values: torch.Tensor) -> None:
        """Data of an edit."""
        data = values.contiguous()
        target = torch.frombuffer(
            self.sidecar.buffer, dtype=data.dtype, count=data.numel(), offset=DATA
        )
        target.copy_(data.view(-1))

    def kept(self, *shape: int, begin: int = PREIMAGE) -> torch.Tensor:
        """A pre-image."""
        count = torch.Size(shape).numel()
        found = torch.frombuffer(
            self.sidecar.buffer, dtype=torch.float32, count=count, offset=begin
        )
        return found.view(shape).clone()

    def apply(self, *records: Record) -> None:
        request = self.request(*records)
        wait_until(lambda: self.editor.accept(request, now=True), "it is accepted")
        self.editor.apply(request, self.gate)
        assert self.page[Word.EDIT_APPLIED] == request.number
        assert self.page[Word.EDIT_TOKEN] == request.token

    def close(self) -> None:
        self.editor.close()
        self.page.close()
        # The map goes with the last tensor in it.
        del self.param, self.other, self.adam
        self.editor.optimizers = []
        self.arena.close()
        self.sidecar.close()
        self.shared.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


def block(op: EditKind, **fields: float) -> Record:
    """Rows [1, 3) and columns [2, 6) of the first parameter."""
    begin = 4 * (1 * COLUMNS + 2)
    record = Record(op, "float32", begin, (2, 4), (COLUMNS, 1), preimage_begin=PREIMAGE)
    return replace(record, **fields)  # type: ignore[arg-type]


Expected = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

CASES: dict[str, tuple[Record, Expected]] = {
    "set": (block(EditKind.SET, data_begin=DATA), lambda x, d: d),
    "add data": (block(EditKind.ADD, data_begin=DATA, weight=-2.0), lambda x, d: x - 2 * d),
    "add a value": (block(EditKind.ADD, value=3.0, weight=2.0), lambda x, d: x + 6.0),
    "mul by data": (block(EditKind.MUL, data_begin=DATA), lambda x, d: x * d),
    "mul by a value": (block(EditKind.MUL, value=0.5), lambda x, d: x * 0.5),
    "lerp": (
        block(EditKind.LERP, data_begin=DATA, weight=0.25),
        lambda x, d: torch.lerp(x, d, 0.25),
    ),
    "fill": (block(EditKind.FILL, value=7.0), lambda x, d: torch.full_like(x, 7.0)),
    "clamp": (block(EditKind.CLAMP, min=11.0), lambda x, d: x.clamp(min=11.0)),
}


@pytest.mark.parametrize("case", CASES)
def test_an_operation_changes_its_block_alone_and_keeps_what_was_there(
    bench: Bench, case: str
) -> None:
    record, expected = CASES[case]
    data = torch.linspace(-1, 1, 8).view(2, 4)
    bench.put(data)
    before = bench.param.detach().clone()
    moments = {k: v.clone() for k, v in bench.adam.state[bench.param].items()}
    bench.apply(record)
    after = before.clone()
    after[1:3, 2:6] = expected(before[1:3, 2:6], data)
    assert torch.equal(bench.param.detach(), after)
    assert torch.equal(bench.kept(2, 4), before[1:3, 2:6])
    assert all(torch.equal(v, moments[k]) for k, v in bench.adam.state[bench.param].items())


@pytest.mark.parametrize("rows", [1, 6])
def test_a_swap_leaves_what_was_there_where_the_data_were(bench: Bench, rows: int) -> None:
    data = -torch.arange(1.0, 1 + 4 * rows).view(rows, 4)
    bench.put(data)
    before = bench.param.detach().clone()
    record = Record(EditKind.SET, "float32", 0, (rows, 4), (COLUMNS, 1), DATA, DATA)
    bench.apply(record)
    assert torch.equal(bench.param[:rows, :4].detach(), data)
    assert torch.equal(bench.kept(rows, 4, begin=DATA), before[:rows, :4])
    # Applied once more, it undoes itself.
    bench.apply(record)
    assert torch.equal(bench.param.detach(), before)


def test_moments_with_other_strides_are_reset_too(bench: Bench) -> None:
    state = bench.adam.state[bench.param]
    state["exp_avg"] = state["exp_avg"].t().contiguous().t()
    bench.apply(replace(block(EditKind.MUL, value=1.0), reset_moments=True))
    changed = torch.zeros(ROWS, COLUMNS, dtype=torch.bool)
    changed[1:3, 2:6] = True
    assert torch.equal(state["exp_avg"] == 0, changed)


def test_an_edit_is_a_state_of_its_own_at_the_same_step(bench: Bench) -> None:
    bench.page[Word.STEP] = 5
    bench.apply(block(EditKind.FILL, value=1.0))
    assert state_of(bench.page)[:2] == (5, 1)
    assert bench.page[Word.SEQ] == 2
    assert bench.page[Word.EDIT_STEP] == 5
    assert bench.page[Word.EDIT_NS] > 0
    assert bench.points == ["agreed", "applying", "applied"]


@pytest.mark.parametrize(
    ("step", "now", "told"),
    [(5, True, 5), (7, True, 7), (0, True, 0), (6, False, 7), (5, False, 6)],
)
def test_an_edit_for_another_step_is_refused_and_both_are_named(
    bench: Bench, step: int, now: bool, told: int
) -> None:
    words = bench.page
    words[Word.STEP] = step
    request = bench.request(block(EditKind.FILL, value=1.0), if_step=6)
    assert not bench.editor.accept(request, now=now)
    found = words[Word.REFUSED], words[Word.REFUSED_STEP], words[Word.REFUSED_IF_STEP]
    assert found == (request.number, told, 6)
    assert (words[Word.SEQ], words[Word.EDITS]) == (0, 0)


def test_an_edit_for_its_step_is_applied_there_and_nowhere_else(bench: Bench) -> None:
    bench.page[Word.STEP] = 6
    request = bench.request(block(EditKind.FILL, value=1.0), if_step=6)
    assert bench.editor.accept(request, now=True)
    bench.editor.apply(request, bench.gate)
    assert (bench.page[Word.EDIT_APPLIED], bench.page[Word.EDIT_STEP]) == (request.number, 6)
    # Should its boundary turn out to be another's all the same, nothing is touched.
    request = bench.request(block(EditKind.FILL, value=2.0), if_step=6)
    assert bench.editor.accept(request, now=True)
    bench.page[Word.STEP] = 8
    with pytest.raises(AssertionError, match="another step"):
        bench.editor.apply(request, bench.gate)
    assert bench.page[Word.EDIT_FAILED] == request.number
    assert (bench.page[Word.SEQ], bench.page[Word.EDITS]) == (2, 1)
    assert bool((bench.param[1:3, 2:6] == 1.0).all())


def test_an_edit_that_fails_half_way_is_never_served(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = bench.request(block(EditKind.FILL, value=1.0))
    assert bench.editor.accept(request, now=True)

    def fail(*_: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr("paramd.trainer.boundary.edits.run", fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        bench.editor.apply(request, bench.gate)
    monkeypatch.undo()
    assert bench.editor.failed
    assert bench.page[Word.SEQ] & 1
    assert bench.page[Word.EDIT_FAILED] == request.number
    assert bench.page[Word.EDITS] == bench.page[Word.EDIT_APPLIED] == 0
    later = bench.request(block(EditKind.FILL, value=1.0))
    assert not bench.editor.accept(later, now=True)
    assert bench.page[Word.REFUSED] == later.number
    assert bench.page[Word.REFUSED_STEP] == Refusal.AWAY
