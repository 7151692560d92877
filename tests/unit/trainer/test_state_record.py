"""What readers are told of optimizer state without `resume`: where it lies, or why not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from paramd.memory.arena import HostArena, pack_wanted
from paramd.memory.continuation import read_pair
from paramd.memory.control_page import ControlPage, Word
from paramd.memory.descriptors import SparseMemory
from paramd.memory.handover import Descriptors
from paramd.memory.optimizer_state import OptimizerState, parse_state, read_record
from paramd.trainer.boundary.agreement import CAPTURE, Request
from paramd.trainer.home.owned import ParameterStorage
from paramd.trainer.resume.optimizer_home import OptimizerHome
from paramd.trainer.resume.state_record import CopiedState, MovedState


class Bench:
    """A model with its parameters in an arena, and the memories beside it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(5, 3)
        self.home = ParameterStorage(self.model)
        self.shared = Descriptors.create(self.home.arena_bytes)
        self.page = ControlPage(self.shared.page)
        self.arena = HostArena(self.shared.arena, self.home.arena_bytes)
        self.home.move_in(self.arena.buffer)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.5)
        self.memory = SparseMemory(self.shared.optimizer)
        self.kept = SparseMemory(self.shared.continuation)

    def step(self) -> None:
        self.model(torch.randn(2, 5)).sum().backward()
        self.optimizer.step()

    def moved(self) -> MovedState:
        state = OptimizerHome(
            SparseMemory(self.shared.optimizer), self.page, [self.optimizer], resumable=False
        )
        kept = SparseMemory(self.shared.continuation)
        found = MovedState(kept, self.page, self.home, state)
        found.optimizers = [self.optimizer]
        return found

    def copied(self) -> CopiedState:
        memories = (SparseMemory(self.shared.continuation), SparseMemory(self.shared.optimizer))
        found = CopiedState(*memories, self.page, self.home, locator=None)
        found.optimizers = [self.optimizer]
        return found

    def told(self) -> tuple[OptimizerState, dict[str, Any]]:
        """As the sidecar reads it."""
        pair = read_pair(self.kept.buffer)
        assert pair is not None
        return parse_state(pair[1]), read_record(pair[0])

    def state_of(self, told: OptimizerState, key: str) -> list[bytes]:
        return [
            bytes(self.memory.buffer[one.places[key] : one.places[key] + one.size_bytes])
            for one in told.params
        ]

    def truth(self, key: str) -> list[bytes]:
        """The optimizer's own, by place of the parameter in the arena."""
        params = sorted(self.model.parameters(), key=torch.Tensor.data_ptr)
        return [self.optimizer.state[one][key].numpy().tobytes() for one in params]


@pytest.fixture
def bench() -> Iterator[Bench]:
    found = Bench()
    yield found
    found.home.move_out()
    for memory in (found.memory, found.kept, found.page, found.arena, found.shared):
        memory.close()


def request(number: int, *spans: tuple[int, int]) -> Request:
    return Request(number, 1, CAPTURE, pack_wanted(spans))


def test_state_moves_where_the_sidecar_reads_it_and_follows_what_replaces_it(bench: Bench) -> None:
    record = bench.moved()
    record.settle(0)
    assert bench.told()[0].keys == []
    for step in (1, 2):
        bench.step()
        record.settle(step)
        told, noted = bench.told()
        assert bench.page[Word.RECORD_STEP] == step
        assert noted["groups"][0][0]["lr"] == 0.5
        assert bench.state_of(told, "exp_avg") == bench.truth("exp_avg")
    bench.optimizer.load_state_dict(bench.optimizer.state_dict())
    bench.optimizer.param_groups[0]["lr"] = 0.25
    bench.step()
    record.settle(3)
    told, noted = bench.told()
    assert noted["groups"][0][0]["lr"] == 0.25
    assert bench.state_of(told, "exp_avg_sq") == bench.truth("exp_avg_sq")
    record.close()
    before = bench.truth("exp_avg")
    bench.memory.release(0, bench.memory.size_bytes)
    assert bench.truth("exp_avg") == before


def test_a_copy_takes_the_strides_of_its_parameter(bench: Bench) -> None:
    record = bench.copied()
    bench.step()
    weight = bench.model.weight
    state = bench.optimizer.state[weight]
    state["exp_avg"] = state["exp_avg"].t().contiguous().t()
    assert state["exp_avg"].stride() != weight.stride()
    record.copy_for(request(1, (0, bench.home.arena_bytes)))
    expected = [tensor.contiguous().numpy().tobytes() for tensor in (state["exp_avg"],)]
    assert expected[0] in bench.state_of(bench.told()[0], "exp_avg")
    record.close()
