"""Watch at a glance: every way of leaving is noticed, as by looking at each tensor."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from paramd.trainer.home import glance
from paramd.trainer.home.glance import CHANGES, Glance, Places, find_places, glance_at
from paramd.trainer.home.watch import SHAPE_COUNT, Watch, Watched
from paramd.trainer.model.local_shard import Slot

WIDTH = 8


def _model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))


def _watch(model: nn.Module) -> Watch:
    items = [
        Watched(f"{name}.{key}", Slot(module._parameters, key), tensor.data_ptr())
        for name, module in model.named_modules()
        for key, tensor in module._parameters.items()
        if tensor is not None
    ]
    return Watch(items, model, glances=True)


@pytest.fixture(params=["at a glance", "one by one"])
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    if request.param == "one by one":
        monkeypatch.setattr(glance, "find_places", lambda: None)
    return _model()


def _looked_at(model: nn.Module) -> Watch:
    watch = _watch(model)
    for _ in range(3):
        assert watch.look() == []
    return watch


def _replaced(layer: nn.Linear) -> None:
    layer._parameters["weight"] = nn.Parameter(torch.zeros(WIDTH, WIDTH))  # no hook hears of it


def _other_data(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data + 1


def _set(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.set_(torch.zeros(WIDTH, WIDTH))


LEAVING: dict[str, Callable[[nn.Linear], object]] = {
    "replaced": _replaced,
    "deleted": lambda layer: layer._parameters.pop("weight"),
    "set to None": lambda layer: layer._parameters.update(weight=None),
    "other data": _other_data,
    "another place": lambda layer: setattr(layer.weight, "data", layer.weight.data[1:]),
    "shorter": lambda layer: setattr(layer.weight, "data", layer.weight.data[:2]),
    "transposed": lambda layer: setattr(layer.weight, "data", layer.weight.data.t()),
    "another shape": lambda layer: setattr(layer.weight, "data", layer.weight.data.view(-1)),
    "another type": lambda layer: layer.to(torch.bfloat16),
    "swapped": lambda layer: torch.utils.swap_tensors(
        layer.weight, nn.Parameter(torch.zeros(WIDTH, WIDTH))
    ),
    "set": _set,
    "memory moved": lambda layer: layer.weight.untyped_storage().resize_(1 << 22),
    "shared with processes": lambda layer: layer.weight.share_memory_(),
}


@pytest.mark.parametrize("how", LEAVING)
def test_a_parameter_that_leaves_is_named_at_the_next_look(model: nn.Module, how: str) -> None:
    watch = _looked_at(model)
    LEAVING[how](model[1])
    assert "1.weight" in watch.look()
    assert "1.weight" in watch.look(), "also when it is asked again"
    watch.close()
    model[1].weight = nn.Parameter(torch.zeros(1))  # memory that is shared has a descriptor


@pytest.mark.parametrize("how", ["shorter", "transposed", "another shape"])
def test_another_thread_sees_a_changed_shape_too(model: nn.Module, how: str) -> None:
    watch = _looked_at(model)
    assert watch.in_place()
    LEAVING[how](model[1])
    assert not watch.in_place()
    watch.close()


def test_the_shapes_that_no_glance_sees_are_compared_in_rotation() -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(SHAPE_COUNT)))
    for layer in model:
        layer.weight = nn.Parameter(layer.weight.detach().view(1, 2, 1, 2, 2, WIDTH))
    watch = _looked_at(model)
    model[-1].weight.data = model[-1].weight.data.transpose(1, 3)
    looks = [watch.look() for _ in range(2)]
    assert [f"{SHAPE_COUNT - 1}.weight"] in looks
    watch.close()


def test_a_parameter_of_another_class_is_watched_too(model: nn.Module) -> None:
    class Own(nn.Parameter):
        pass

    model[1].weight = Own(torch.zeros(WIDTH, WIDTH))
    watch = _looked_at(model)
    _other_data(model[1])
    assert watch.look() == ["1.weight"]
    _other_data(model[2])
    assert watch.look() == ["1.weight", "2.weight"]
    watch.close()


def test_a_module_that_is_replaced_without_a_hook_is_noticed(model: nn.Module) -> None:
    watch = _looked_at(model)
    model._modules["1"] = nn.Linear(WIDTH, WIDTH)
    watch.look()
    assert watch.added
    watch.close()


def test_what_comes_back_is_in_its_place_again(model: nn.Module) -> None:
    watch = _looked_at(model)
    weight, data = model[1].weight, model[1].weight.data
    weight.data = data + 1
    assert watch.look() == ["1.weight"]
    weight.data = data
    assert watch.look() == []
    weight.data = data + 1
    assert watch.look() == ["1.weight"]
    watch.close()


def test_another_parameter_with_the_same_memory_is_watched_from_then_on(model: nn.Module) -> None:
    watch = _looked_at(model)
    model[1]._parameters["weight"] = nn.Parameter(model[1].weight.data)
    assert watch.look() == []
    assert watch.look() == []
    model[1].weight.data = model[1].weight.data + 1
    assert watch.look() == ["1.weight"]
    watch.close()


def test_glances_are_taken_here() -> None:
    assert find_places() is not None, "without them each step costs several times as much"
    watch = _looked_at(_model())
    assert watch._glance is not None
    assert watch._glance.same()
    watch.close()


@pytest.mark.parametrize("part", Places._fields)
def test_words_of_other_places_are_not_used(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    places = find_places()
    assert places is not None
    wrong = places._replace(**{part: 1 if part != "version" else 5})
    monkeypatch.setattr(glance, "find_places", lambda: wrong)
    table = {"tensor": torch.zeros(9)[1:]}

    if part == "version":
        # Whether a table's word tells of changes is tried, for nobody says what it should be.
        assert not all(glance._notices(wrong, change) for change in CHANGES)
    else:
        assert glance_at([table], [table["tensor"]]) is None


def test_each_change_that_a_glance_must_notice_is_one() -> None:
    places = find_places()
    assert places is not None
    for change in CHANGES:
        table = {"tensor": glance._tensor()}
        seen = Glance([table], [table["tensor"]], places)
        assert seen.same()
        change(table)
        assert not seen.same(), change.__name__
