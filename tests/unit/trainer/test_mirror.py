"""Mirrored homes: nothing moves, copies are of what was asked for, places are found by adding."""

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from paramd.errors import ConflictError
from paramd.layout.edits.kinds import EditKind
from paramd.memory.arena import HostArena, pack_wanted, unpack_wanted
from paramd.memory.control_page import ControlPage, Word
from paramd.memory.edit_program import Record
from paramd.memory.gate import TrainerGate
from paramd.memory.handover import Descriptors
from paramd.trainer.boundary.agreement import CAPTURE, Request
from paramd.trainer.home.mirrored import MirroredHome, _live


class Odd(nn.Module):
    """Columns of one tensor, transposed memory, a 0-dim parameter, tied names, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        both = torch.arange(24.0).view(3, 8)
        self.first, self.second = nn.Parameter(both[:, :3]), nn.Parameter(both[:, 3:])
        self.turned = nn.Parameter(torch.arange(10.0, dtype=torch.float64).view(2, 5).t())
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.tied = self.turned
        self.register_buffer("count", torch.tensor(3))


class Bench:
    def __init__(self) -> None:
        self.model = Odd()
        self.home = MirroredHome(self.model)
        self.shared = Descriptors.create(self.home.arena_bytes)
        self.page = ControlPage(self.shared.page)
        self.arena = HostArena(self.shared.arena, self.home.arena_bytes)
        self.gate = TrainerGate(self.page, stall_budget_ns=0)
        self.pointers = {name: p.data_ptr() for name, p in self.model.named_parameters()}
        self.home.move_in(self.arena.buffer)
        self.number = 0

    def place(self, name: str) -> int:
        return min(begin for shard, begin in self.home.pieces() if shard.fqn == name)

    def refresh(self, *names: str) -> None:
        """A capture that wants these, as a sidecar would ask for it."""
        spans = [
            (begin, begin + shard.tensor.numel() * shard.tensor.itemsize)
            for shard, begin in self.home.pieces()
            if shard.fqn in names
        ]
        self.number += 1
        request = Request(self.number, 1, CAPTURE, pack_wanted(spans))
        self.home.refresh_for(request, self.gate)

    def held(self, name: str) -> torch.Tensor:
        """What the arena holds of a parameter, in its own shape."""
        parameter = getattr(self.model, name)
        flat = torch.frombuffer(self.arena.buffer, dtype=parameter.dtype)
        start = self.place(name) // flat.itemsize
        return flat.as_strided(parameter.shape, parameter.stride(), start).clone()


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.home.move_out()
    bench.home.move_out()
    bench.page.close()
    bench.arena.close()
    bench.shared.close()


def test_nothing_moves_and_a_capture_copies_what_the_training_has(bench: Bench) -> None:
    names = list(bench.pointers)
    bench.refresh(*names)
    assert {n: p.data_ptr() for n, p in bench.model.named_parameters()} == bench.pointers
    for name, parameter in bench.model.named_parameters():
        assert torch.equal(bench.held(name), parameter.detach()), name
    assert (bench.page[Word.MIRRORED_FOR], bench.page[Word.SEQ] & 1) == (1, 0)
    assert bench.page[Word.STALL_COUNT] == 1
    with torch.no_grad():
        bench.model.turned.fill_(70)
    assert not bool((bench.held("turned") == 70).any()), "copied though nobody asked"
    bench.refresh("turned")
    assert bool((bench.held("turned") == 70).all())


def test_replaced_parameters_are_followed_and_changed_ones_refused(bench: Bench) -> None:
    bench.model.scale = nn.Parameter(torch.tensor(2.5))
    bench.model.turned.data = torch.ones(2, 5, dtype=torch.float64).t()
    assert bench.home.check() == []
    bench.refresh("scale", "turned")
    assert bench.held("scale").item() == 2.5
    assert bool((bench.held("turned") == 1).all())
    bench.model.scale = nn.Parameter(torch.ones(3))
    with pytest.raises(ConflictError, match="'scale' was float32"):
        bench.home.check()
    with pytest.raises(ConflictError):
        bench.refresh("turned")
    assert (bench.page[Word.MIRRORED_FOR], bench.page[Word.SEQ] & 1) == (0, 0)


def test_an_edits_elements_are_the_trainings_own(bench: Bench) -> None:
    at, turned = bench.place("turned"), bench.model.turned
    record = Record(EditKind.FILL, "float64", at + 8, (2, 2), (1, 5), value=50.0)
    version = turned._version
    bench.home.live([record])[0].fill_(50.0)
    assert bool((turned[1:3] == 50).all())
    assert int((turned == 50).sum()) == 4
    assert turned._version == version, "autograd must not see an edit"
    with pytest.raises(ConflictError, match="no parameter's"):
        bench.home.live([Record(EditKind.FILL, "bfloat16", at, (1,), (1,), value=0.0)])


def test_what_is_wanted_survives_its_word() -> None:
    assert unpack_wanted(pack_wanted([(5, 9), (9000, 9001)])) == (0, 12288)
    far = 7 << 40
    assert unpack_wanted(pack_wanted([(far, far + 1)])) == (far, far + 4096)
    begin, end = unpack_wanted(pack_wanted([]))
    assert begin == end
    assert pack_wanted([]) != pack_wanted([(0, 9 << 40)]) == 0


@pytest.mark.parametrize(
    ("own", "said", "fits"),
    [
        ("complex64", "int64", True), ("float8_e5m2", "uint8", True), ("float16", "float16", True),
        ("float16", "bfloat16", False), ("uint16", "uint8", False),
    ],
)  # fmt: skip
def test_an_edit_is_of_the_parameters_dtype_or_of_its_bits(own: str, said: str, fits: bool) -> None:
    record = Record(op=EditKind.SET, dtype=said, arena_begin=0, sizes=(2,), strides=(1,))
    pieces: Any = [(0, SimpleNamespace(tensor=torch.empty(2, dtype=getattr(torch, own))))]
    with nullcontext() if fits else pytest.raises(ConflictError, match="no parameter's"):
        assert _live(pieces, record).dtype == getattr(torch, said)
