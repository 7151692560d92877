"""What `attach` takes as an optimizer: found inside wrappers, or refused with its type named."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import paramd
from paramd.errors import ConflictError, UsageError
from paramd.trainer.attaching.checks import check_attachable, check_trained, optimizers_of, resolve
from paramd.trainer.home.mirrored import MirroredHome


class Wrapper:
    """Keeps an optimizer as `.optimizer`, and is none."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.param_groups = getattr(optimizer, "param_groups", [])


class Own:
    """An optimizer of somebody's own, which torch knows nothing of."""

    def __init__(self) -> None:
        self.param_groups: list[Any] = []

    def step(self) -> None:
        pass


class Hollow(torch.optim.Optimizer):
    """An optimizer by its type that was never made as one."""

    def __init__(self) -> None:
        self.state: Any = {}


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)


def test_several_each_once_in_their_order() -> None:
    first, second = sgd(), sgd()
    assert optimizers_of(None) == []
    assert optimizers_of(first) == [first]
    assert optimizers_of(o for o in (second, Wrapper(Wrapper(first)), second)) == [second, first]


def endless() -> Wrapper:
    wrapper = Wrapper(None)
    wrapper.optimizer = wrapper
    return wrapper


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a class": (lambda: torch.optim.SGD, "the class torch.optim.sgd.SGD"),
    "one of several": (lambda: [sgd(), "adam"], "not str"),
    "a number": (lambda: 3, "not int"),
    "parameters": (lambda: torch.nn.Linear(2, 2).parameters(), "torch.nn.parameter.Parameter"),
    "a scheduler": (lambda: torch.optim.lr_scheduler.StepLR(sgd(), 1), "lr_scheduler.StepLR"),
    "a wrapper of nothing": (lambda: Wrapper(None), "Wrapper"),
    "a wrapper of itself": (endless, "Wrapper"),
    "hollow": (Hollow, "Hollow: it was never initialised as one"),
    "one's own": (Own, "Own: the steps of a custom optimizer"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_optimizer_is_refused_by_its_type(case: str) -> None:
    make, named = REFUSED[case]
    with pytest.raises(UsageError, match="optimizer must be") as caught:
        optimizers_of(make())
    assert named in str(caught.value)


def test_the_optimizers_within_a_container_are_meant() -> None:
    inner = [sgd(), sgd()]

    class Container(torch.optim.Optimizer):
        def __init__(self) -> None:
            self.optimizers = inner
            super().__init__([p for o in inner for p in o.param_groups[0]["params"]], {})

    class LayerWise(torch.optim.Optimizer):
        def __init__(self) -> None:
            self.optimizer_dict = dict(enumerate(inner))
            super().__init__([torch.nn.Parameter(torch.zeros(1))], {})

    assert optimizers_of(Container()) == inner
    assert optimizers_of(LayerWise()) == inner


MODEL = torch.nn.Linear(2, 2)
GIVEN: dict[str, dict[str, Any]] = {
    "model must be a torch.nn.Module or a dict of them, not NoneType": {"model": None},
    "not the class torch.nn.modules.linear.Linear": {"model": torch.nn.Linear},
    "model['weight'] must be a torch.nn.Module, not": {"model": {"weight": torch.ones(2)}},
    "model is an empty dict": {"model": {}},
    "model has the key 'a.b'": {"model": {"a.b": MODEL}},
    "optimizer is missing; call paramd.attach(model, optimizer, job=NAME)": {"optimizer": None},
    "job must be a name, not NoneType": {"job": None},
    'resume must be "never" or "auto", not True': {"resume": True},
    "derive its class from torch.optim.Optimizer": {"optimizer": Own()},
    "must be an accelerate.Accelerator, not object": {
        "model": None, "optimizer": None, "accelerator": object()
    },
}  # fmt: skip


@pytest.mark.parametrize("said", GIVEN)
def test_what_cannot_be_is_named_before_anything_is_moved(said: str) -> None:
    address = MODEL.weight.data_ptr()
    wanted: dict[str, Any] = {"model": MODEL, "optimizer": sgd(), "job": "none"} | GIVEN[said]
    with pytest.raises(UsageError) as caught:
        paramd.attach(**{name: value for name, value in wanted.items() if value is not None})
    assert said in str(caught.value)
    assert MODEL.weight.data_ptr() == address


def test_a_model_that_has_nothing_to_serve_says_why() -> None:
    with pytest.raises(UsageError, match="the model has no parameters; attach the one that is"):
        check_trained(torch.nn.ReLU(), [sgd()])
    with pytest.raises(ConflictError, match=r"'weight' is on meta, so .*model\.to_empty\("):
        MirroredHome(torch.nn.Linear(2, 2, device="meta"))


def test_an_average_that_no_optimizer_updates_is_no_reason_for_a_warning() -> None:
    net, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    models = {"net": net, "ema": torch.optim.swa_utils.AveragedModel(net)}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    # A warning would be an error.
    check_attachable(*_resolved(models, optimizer), "averages")
    with pytest.warns(UserWarning, match="belong to none of the given optimizers"):
        check_attachable(*_resolved(models | {"other": other}, optimizer), "averages")


def _resolved(
    models: dict[str, torch.nn.Module], optimizer: torch.optim.Optimizer
) -> tuple[torch.nn.Module, list[torch.optim.Optimizer]]:
    model, found = resolve(models, optimizer, "averages", None)
    return model, optimizers_of(found)
