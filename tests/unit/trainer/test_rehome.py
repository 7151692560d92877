"""Home on models of one process: what moves, what is noticed, what is refused."""

import copy
import gc
import mmap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from paramd.errors import ConflictError
from paramd.layout.merge import merge_layouts
from paramd.layout.types import Box, row_major
from paramd.trainer.home.owned import ParameterStorage

pytestmark = pytest.mark.usefixtures("few_objects")


class Arena:
    """Anonymous memory in an arena's place."""

    def __init__(self, size_bytes: int) -> None:
        self.map = mmap.mmap(-1, max(size_bytes, 1))
        self.memory = memoryview(self.map)
        self.begin = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()

    def holds(self, tensor: torch.Tensor) -> bool:
        return 0 <= tensor.data_ptr() - self.begin < len(self.memory)

    def close(self) -> None:
        self.memory.release()
        self.map.close()


MoveIn = Callable[[nn.Module], tuple[ParameterStorage, Arena]]


@pytest.fixture
def move_in() -> Iterator[MoveIn]:
    """Moves models in, and proves at the end that they let go of the memory."""
    moved: list[tuple[ParameterStorage, Arena]] = []

    def move(model: nn.Module) -> tuple[ParameterStorage, Arena]:
        home = ParameterStorage(model)
        arena = Arena(home.arena_bytes)
        home.move_in(arena.memory)
        moved.append((home, arena))
        return home, arena

    yield move
    for home, arena in moved:
        home.move_out()
        arena.close()


def read(home: ParameterStorage, arena: Arena) -> dict[str, torch.Tensor]:
    """All tensors as a reader of the arena sees them."""
    full: dict[str, torch.Tensor] = {}
    for tensor in merge_layouts([home.local_layout(0)]).tensors:
        full[tensor.fqn] = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
        for piece in tensor.pieces:
            assert isinstance(piece.region, Box)
            sizes = piece.region.sizes
            strides = piece.strides if piece.strides is not None else row_major(sizes)
            flat = torch.frombuffer(
                bytearray(arena.memory[piece.arena_begin :]), dtype=full[tensor.fqn].dtype
            )
            spans = zip(piece.region.begin, piece.region.end, strict=True)
            place = full[tensor.fqn][tuple(slice(b, e) for b, e in spans)]
            place.copy_(flat.as_strided(sizes, strides))
    return full


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.int64, torch.int8, torch.uint8, torch.bool, torch.complex64,
]  # fmt: skip
SHAPES = [(), (1,), (5,), (3, 7), (2, 0, 3), (2, 3, 5, 7)]


def test_every_dtype_and_shape_reads_back_byte_equal(move_in: MoveIn) -> None:
    model = nn.Module()
    for dtype in DTYPES:
        for shape in SHAPES:
            name = f"{str(dtype).removeprefix('torch.')}_{'x'.join(map(str, shape))}"
            values = torch.randint(0, 2, shape).to(dtype)
            model.register_parameter(name, nn.Parameter(values, requires_grad=False))
            model.register_buffer(name + "_buffer", values.clone())
    expected = {k: v.clone() for k, v in model.state_dict().items()}

    home, arena = move_in(model)

    for state in (read(home, arena), model.state_dict()):
        assert set(state) == set(expected)
        for name, value in expected.items():
            assert state[name].dtype == value.dtype
            assert bytes(state[name].contiguous().view(-1).view(torch.uint8).numpy()) == bytes(
                value.contiguous().view(-1).view(torch.uint8).numpy()
            ), name


def test_parameters_that_view_one_storage_keep_sharing_it(move_in: MoveIn) -> None:
    whole = torch.randn(5, 7)
    model = nn.ParameterList([nn.Parameter(whole[:, :3]), nn.Parameter(whole[:, 3:])])

    home, arena = move_in(model)
    with torch.no_grad():
        whole.fill_(2.0)

    assert arena.holds(whole)
    assert all(bool((p == 2).all()) for p in model.parameters())
    assert all(bool((t == 2).all()) for t in read(home, arena).values())


def test_tensors_that_nobody_announced_follow_their_parameter(move_in: MoveIn) -> None:
    model = nn.Linear(3, 5)
    kept = [p.data for p in model.parameters()]
    row = model.weight.detach()[2]

    home, _ = move_in(model)
    with torch.no_grad():
        model.weight.fill_(3.0)
    assert bool((kept[0] == 3).all())
    assert bool((row == 3).all())
    home.move_out()
    kept[0].fill_(4.0)
    assert bool((model.weight == 4).all())


def test_moving_keeps_identity_gradients_versions_and_randomness() -> None:
    model = nn.Linear(3, 5)
    model.bias.requires_grad_(False)
    model(torch.ones(2, 3)).sum().backward()
    random = torch.get_rng_state()

    def facts() -> list[object]:
        return [(id(p), id(p.grad), p.requires_grad, p._version) for p in model.parameters()]

    before, home = facts(), ParameterStorage(model)
    arena = Arena(home.arena_bytes)
    home.move_in(arena.memory)
    inside = facts()
    home.move_out()
    arena.close()

    assert before == inside == facts()
    assert torch.equal(torch.get_rng_state(), random)


def test_copies_and_checkpoints_of_a_moved_model_are_as_of_any(
    move_in: MoveIn, tmp_path: Path
) -> None:
    model, again = nn.Linear(30, 50), nn.Linear(30, 50)
    torch.save(model, tmp_path / "plain")
    _, arena = move_in(model)
    torch.save(model, tmp_path / "moved")
    assert (tmp_path / "plain").stat().st_size == (tmp_path / "moved").stat().st_size
    for other in (copy.deepcopy(model), torch.load(tmp_path / "moved", weights_only=False)):
        assert torch.equal(other.weight, model.weight)
        assert not any(arena.holds(one) for one in other.parameters())
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        dcp.save(model.state_dict(), checkpoint_id=tmp_path / "dcp", no_dist=True)
        dcp.load(again.state_dict(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert torch.equal(again.weight, model.weight)


@pytest.mark.parametrize(
    "surrounds", [torch.device("meta"), torch.no_grad()], ids=["meta", "no_grad"]
)
def test_a_default_device_or_mode_changes_nothing(move_in: MoveIn, surrounds: Any) -> None:
    model = nn.Linear(3, 5)
    before = model.weight.detach().clone()
    with surrounds:
        home, arena = move_in(model)
    assert torch.equal(read(home, arena)["weight"], before)


def test_a_graph_from_before_the_move_still_runs_backward(move_in: MoveIn) -> None:
    model, reference = nn.Linear(3, 5), nn.Linear(3, 5)
    reference.load_state_dict(model.state_dict())
    inputs = torch.randn(2, 3, requires_grad=True)
    loss = model(inputs).pow(2).sum()

    gc.unfreeze()  # else the graph may be one of a tensor that nobody sees
    move_in(model)
    gc.freeze()
    loss.backward()

    reference(inputs.detach()).pow(2).sum().backward()
    assert torch.equal(model.weight.grad, reference.weight.grad)


@pytest.mark.parametrize("full", [False, True])
def test_loading_with_assign_is_noticed_and_taken_back(move_in: MoveIn, full: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    home, arena = move_in(model)
    assert home.check(full) == []
    loaded = {name: torch.randn_like(value) for name, value in model.state_dict().items()}

    model.load_state_dict(loaded, assign=True)

    assert home.check(full) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert home.take_back() == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert home.check(full) == []
    assert all(arena.holds(p) for p in model.parameters())
    for name, value in read(home, arena).items():
        assert torch.equal(value, loaded[name])
    # The loaded tensors and the parameters are the same memory, as assign promises.
    assert arena.holds(loaded["0.weight"])


def test_all_of_many_parameters_are_looked_at_at_once(move_in: MoveIn) -> None:
    model = nn.ParameterList(nn.Parameter(torch.zeros(1)) for _ in range(2500))
    home, _ = move_in(model)

    model[249].data = torch.ones(1)
    model[2499].data = torch.ones(1)

    assert home.check() == ["249", "2499"]
    assert home.check(full=True) == ["249", "2499"]


def test_memory_put_aside_keeps_its_values(move_in: MoveIn) -> None:
    """Averaged weights swapped in by address: what was put aside is the training's."""
    model = nn.Linear(3, 3)
    home, arena = move_in(model)
    aside = model.weight.data
    view, before = aside[1:], aside.clone()

    model.weight.data = torch.zeros(3, 3)

    assert home.take_back() == ["weight"]
    assert torch.equal(aside, before)
    assert not arena.holds(aside)
    view.zero_()
    assert bool((aside[1:] == 0).all()), "views of one memory stay views of one memory"
    model.weight.data = aside
    assert home.take_back() == ["weight"]
    assert arena.holds(model.weight)
    assert torch.equal(model.weight[0], before[0])


def test_a_parameter_that_an_optimizer_still_has_is_its_own(move_in: MoveIn) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    home, arena = move_in(model)
    old = model.weight.detach().clone()

    model.weight = nn.Parameter(torch.zeros(3, 3))

    assert home.take_back() == ["weight"]
    kept = optimizer.param_groups[0]["params"][0]
    assert torch.equal(kept, old)
    kept.data.add_(1.0)
    assert bool((read(home, arena)["weight"] == 0).all())


def test_memory_that_a_graph_still_needs_is_not_written_to(move_in: MoveIn) -> None:
    model = nn.Linear(3, 3)
    home, _ = move_in(model)
    inputs = torch.ones(2, 3, requires_grad=True)
    loss, old = model(inputs).sum(), model.weight.detach().clone()

    model.weight = nn.Parameter(torch.zeros(3, 3))

    with pytest.raises(ConflictError, match="awaits its backward"):
        home.take_back()
    loss.backward()
    assert torch.equal(inputs.grad, old.sum(0).expand(2, 3))
    del loss
    assert home.take_back() == ["weight"]


def test_what_changes_between_updates_is_seen(move_in: MoveIn) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
    home, _ = move_in(model)
    contents = home.contents
    assert contents is not None

    contents.remember()
    assert not contents.strayed()
    model[1].weight.data.mul_(0.5)  # no version counter tells it
    assert contents.strayed()

    contents.remember()
    with torch.no_grad():
        model[0].weight[0, 0] = 3.0  # hardly a sample, but a version counter
    assert contents.strayed()


CHANGES: dict[str, Callable[[nn.Linear], object]] = {
    "dtype": lambda model: model.double(),
    "shape": lambda model: setattr(model, "weight", nn.Parameter(torch.zeros(4, 3))),
    "strides": lambda model: setattr(model, "weight", nn.Parameter(torch.zeros(3, 5).t())),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_layout_is_refused_and_nothing_is_touched(move_in: MoveIn, change: str) -> None:
    model = nn.Linear(3, 5)
    home, arena = move_in(model)
    before = bytes(arena.memory)

    CHANGES[change](model)
    changed = [p.data_ptr() for p in model.parameters()]

    with pytest.raises(ConflictError, match=r"'weight' was .*attachment\.refresh"):
        home.take_back()
    assert bytes(arena.memory) == before
    assert [p.data_ptr() for p in model.parameters()] == changed


def test_a_replaced_alias_is_noticed_by_the_full_check(move_in: MoveIn) -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    home, _ = move_in(model)

    model["b"].weight = nn.Parameter(torch.zeros(3, 3))

    assert home.check(full=True) == ["a.weight", "b.weight"]
    with pytest.raises(ConflictError, match=r"'b\.weight' was absent"):
        home.take_back()


def test_parameters_that_went_into_shared_memory_stay_there(move_in: MoveIn) -> None:
    model = nn.Linear(3, 5)
    home, _ = move_in(model)

    model.share_memory()

    assert home.check() == ["weight", "bias"]
    with pytest.raises(ConflictError, match="shared with other processes"):
        home.take_back()
    assert model.weight.is_shared()


def test_parameters_that_came_to_share_memory_are_refused(move_in: MoveIn) -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(4)), nn.Parameter(torch.ones(4))])
    home, _ = move_in(model)

    shared = torch.zeros(4)
    model[0].data, model[1].data = shared, shared

    with pytest.raises(ConflictError, match="shares its memory"):
        home.take_back()


def test_a_model_that_changed_while_attaching_is_refused() -> None:
    model = nn.Linear(3, 5)
    home = ParameterStorage(model)
    arena = Arena(home.arena_bytes)
    model.weight.data = torch.zeros(5, 3)

    with pytest.raises(ConflictError, match="changed while"):
        home.move_in(arena.memory)
    assert not any(arena.holds(p) for p in model.parameters())
    arena.close()


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "other device": (lambda: nn.Linear(2, 2, device="meta"), "'weight': parameters on meta"),
    "shared": (lambda: nn.Linear(2, 2).share_memory(), "'weight' is in memory shared"),
    "lazy": (lambda: nn.LazyLinear(2), "'weight' is not initialized"),
    "expanded": (
        lambda: nn.ParameterList([nn.Parameter(torch.zeros(1).expand(3))]),
        "'0' .* overlaps itself",
    ),
    "sparse": (
        lambda: nn.ParameterList([nn.Parameter(torch.eye(3).to_sparse())]),
        "'0' is a Parameter with layout torch.sparse_coo",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_served_is_refused_by_name(case: str) -> None:
    make, message = REFUSED[case]

    with pytest.raises(ConflictError, match=message):
        ParameterStorage(make())


def test_tensors_hidden_by_gc_freeze_are_refused_when_they_use_a_parameter() -> None:
    alone, shared = nn.Linear(3, 5), nn.Linear(3, 5)
    kept = shared.weight.data
    gc.collect()
    gc.freeze()
    home = ParameterStorage(alone)
    arena = Arena(home.arena_bytes)
    home.move_in(arena.memory)
    assert all(arena.holds(p) for p in alone.parameters())
    home.move_out()
    arena.close()

    home = ParameterStorage(shared)
    arena = Arena(home.arena_bytes)
    with pytest.raises(ConflictError, match=r"gc\.unfreeze"):
        home.move_in(arena.memory)
    assert not arena.holds(kept)
    arena.close()
