"""What `attach` takes as an optimizer: found inside wrappers, or refused with its type named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import paramd
from paramd.errors import UsageError
from paramd.trainer.attaching.checks import optimizers_of


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
    "a name": (lambda: "adam", "not str"),
    "a number": (lambda: 3, "not int"),
    "a dict": (lambda: {"generator": sgd()}, "not str"),
    "a module": (lambda: torch.nn.Linear(2, 2), "torch.nn.modules.linear.Linear"),
    "parameters": (lambda: torch.nn.Linear(2, 2).parameters(), "torch.nn.parameter.Parameter"),
    "a scheduler": (
        lambda: torch.optim.lr_scheduler.StepLR(sgd(), 1),
        "torch.optim.lr_scheduler.StepLR",
    ),
    "a wrapper of nothing": (lambda: Wrapper(None), "Wrapper"),
    "a wrapper of itself": (endless, "Wrapper"),
    "hollow": (Hollow, "Hollow: it was never initialised as one"),
    "one's own": (Own, "Own: nobody is told of the steps"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_optimizer_is_refused_by_its_type(case: str) -> None:
    make, named = REFUSED[case]
    with pytest.raises(UsageError, match="optimizer must be") as caught:
        optimizers_of(make())
    assert named in str(caught.value)


NO_MODELS: dict[str, tuple[Any, str]] = {
    "nothing": (None, "model must be a torch.nn.Module or a dict of them, not NoneType"),
    "a class": (torch.nn.Linear, "not the class torch.nn.modules.linear.Linear"),
    "a state dict": ({"weight": torch.ones(2)}, "model['weight'] must be a torch.nn.Module, not"),
    "no modules": ({}, "model is an empty dict"),
    "no name": ({"a.b": torch.nn.Linear(2, 2)}, "model has the key 'a.b'"),
}


@pytest.mark.parametrize("case", NO_MODELS)
def test_what_is_no_model_is_refused_by_its_type(case: str) -> None:
    model, said = NO_MODELS[case]
    with pytest.raises(UsageError) as caught:
        paramd.attach(model, sgd(), job="none")
    assert said in str(caught.value)


def test_another_thing_than_an_accelerator_is_refused_by_its_type() -> None:
    with pytest.raises(UsageError, match=r"must be an accelerate\.Accelerator, not object"):
        paramd.attach(accelerator=object(), job="none")  # type: ignore[arg-type]


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


def test_what_was_not_given_is_named_before_anything_is_moved() -> None:
    model = torch.nn.Linear(2, 2)
    address = model.weight.data_ptr()
    calls: dict[str, Callable[[], Any]] = {
        "model must be a torch.nn.Module or a dict of them, not NoneType": lambda: paramd.attach(
            None
        ),  # type: ignore[arg-type]
        "optimizer is missing; call paramd.attach(model, optimizer, job=NAME)": lambda: (
            paramd.attach(model, job="none")
        ),
        "job must be a name, not NoneType": lambda: paramd.attach(model, sgd()),
        "derive its class from torch.optim.Optimizer": lambda: paramd.attach(
            model, Own(), job="none"
        ),  # type: ignore[arg-type]
    }
    for said, call in calls.items():
        with pytest.raises(UsageError) as caught:
            call()
        assert said in str(caught.value)
    assert model.weight.data_ptr() == address
