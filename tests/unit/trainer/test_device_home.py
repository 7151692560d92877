"""Parameters that live on a device, within one process and on the simulated driver."""

import copy
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from paramd.errors import ConflictError, UnreachableError
from paramd.memory.control_page import PAGE_BYTES, ControlPage, Word, digest_of
from paramd.memory.descriptors import SparseMemory, create_memory, create_sparse
from paramd.memory.device_arena import DeviceReader, create, create_allocation
from paramd.memory.handover import Allocation
from paramd.trainer.home import device as device_module
from paramd.trainer.home.device import CAPTURED, DeviceHome
from paramd.trainer.home.mirrored import home_of
from paramd.trainer.resume.codec import encode
from paramd.trainer.resume.optimizer_home import OptimizerHome
from tests.gpu.driver import Standin, driver_in

LIMIT_BYTES = 64 << 20


class Inside:
    """A model in an arena on the simulated device, and a sidecar's reader of it."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7))
        home = home_of(self.model, "device")
        assert isinstance(home, DeviceHome)
        self.home = home
        self._page = create_memory("page", PAGE_BYTES)
        self.page = ControlPage(self._page)
        device = home.device
        self._arena = create(device.driver, device.device, home.arena_bytes)
        self.arena = home.open_arena(self._arena, self.page)
        home.move_in(self.arena.buffer)
        self.reader = DeviceReader(device.request, self._arena, home.arena_bytes, self.page.words)

    def close(self) -> None:
        self.home.move_out()
        self.reader.close()
        self.page.close()
        os.close(self._arena)
        os.close(self._page)


@pytest.fixture
def standin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Standin]:
    with driver_in(tmp_path) as (driver, found):
        for module in (device_module, __import__("paramd.memory.device_arena", fromlist=["x"])):
            monkeypatch.setattr(module, "load", lambda *_: driver)
        yield found


@pytest.fixture
def inside(standin: Standin) -> Iterator[Inside]:
    made = Inside()
    yield made
    made.close()


def test_changes_at_rest_and_strays_show_by_version_counters(inside: Inside) -> None:
    home, contents = inside.home, inside.home.contents
    assert contents is not None
    home.check()
    contents.remember()
    assert contents.digest() == digest_of(b"")
    assert home.in_place()
    assert not contents.strayed()
    with torch.no_grad():
        inside.model[0].bias.add_(1)
    assert contents.digest() != digest_of(b"")
    assert not home.in_place()
    assert contents.strayed()


def test_an_update_captured_in_a_graph_is_refused_from_then_on(
    inside: Inside, standin: Standin
) -> None:
    inside.home.device.publish()
    fence = inside.page[Word.DEVICE_FENCE]
    assert fence
    standin.capture(True)
    inside.home.device.publish()
    standin.capture(False)
    assert inside.page[Word.DEVICE_FENCE] == fence  # nothing was queued into the graph
    with pytest.raises(ConflictError, match="CUDA graph") as refused:
        inside.home.check()
    assert str(refused.value) == CAPTURED


class State:
    """Memory for optimizer state beside such a model, as a trainer has it."""

    def __init__(self, inside: Inside) -> None:
        self.allocations: list[Allocation] = []
        self.answers = True
        self._inside = inside
        self._host = create_sparse("optimizer", LIMIT_BYTES)
        self.host = SparseMemory(self._host)

    def home(self, optimizer: torch.optim.Optimizer) -> OptimizerHome:
        state = self._inside.home.open_state(self.allocations, LIMIT_BYTES, self.add)
        return OptimizerHome(self.host, self._inside.page, [optimizer], state)

    def add(self, size_bytes: int) -> None:
        if not self.answers:
            raise UnreachableError("no sidecar")
        device = self._inside.home.device
        self.allocations.append(create_allocation(device.driver, device.device, size_bytes))
        self._inside.reader.has_state(self.allocations)

    def close(self) -> None:
        self.host.close()
        os.close(self._host)
        for allocation in self.allocations:
            os.close(allocation.descriptor)


@pytest.fixture
def state(inside: Inside) -> Iterator[State]:
    made = State(inside)
    yield made
    made.close()


def test_state_that_finds_no_sidecar_waits_for_one_and_grows(inside: Inside, state: State) -> None:
    optimizer = torch.optim.AdamW(inside.model.parameters())
    home = state.home(optimizer)
    inside.model(torch.randn(4, 5)).square().sum().backward()
    optimizer.step()
    state.answers = False
    for _ in range(2):
        with pytest.raises(UnreachableError):
            home.settle()
    # On the device: state in host memory moves once that has a place.
    used = home.used_bytes[1]
    state.answers = True
    assert home.settle()
    assert home.used_bytes[1] == used
    before = copy.deepcopy(optimizer.state_dict()["state"])
    # More than the first allocation has room for.
    weight = inside.model[0].weight
    optimizer.state[weight]["more"] = torch.full((1 << 20,), 5.0)
    assert home.settle()
    assert len(state.allocations) == 2
    assert bool((optimizer.state[weight].pop("more") == 5).all())
    assert encode(optimizer.state_dict()["state"]) == encode(before)
    home.move_out()
