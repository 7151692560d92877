"""What a hyper-parameter may be set to."""

from typing import Any

import pytest
import torch

from paramd.errors import UsageError
from paramd.trainer.boundary.optimizers import converted

GROUP: dict[str, Any] = {
    "params": [], "lr": 0.1, "betas": (0.9, 0.999), "weight_decay": 0, "steps": 5, "amsgrad": False,
    "foreach": None, "rate": torch.tensor(0.5),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("lr", 1, 1.0),
        ("lr", 0.0, 0.0),
        ("betas", [0.5, 0.75], (0.5, 0.75)),
        ("weight_decay", 0.25, 0.25),
        ("steps", 7.0, 7.0),
        ("rate", 0.125, 0.125),
    ],
)
def test_numbers_are_taken_in_the_form_that_the_group_has(
    name: str, value: Any, found: Any
) -> None:
    assert converted(name, value, GROUP) == found
    assert type(converted(name, value, GROUP)) is type(found)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("momentum", 0.9, "has no 'momentum'; it has lr, betas, weight_decay, steps, rate"),
        ("params", 1.0, "has no 'params'"),
        ("lr", -0.1, "lr: -0.1; expected 0 or more"),
        ("lr", float("nan"), "expected a finite number"),
        ("lr", True, "expected a finite number"),
        ("lr", [0.1], "expected a number, as in 0.1"),
        ("betas", [0.9], "expected 2 numbers"),
        ("betas", [0.9, 1.0], "below 1"),
        ("steps", 1.5, "expected a whole number"),
        ("amsgrad", 1, "a switch"),
        ("foreach", 1, "a switch"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(name: str, value: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        converted(name, value, GROUP)


def test_parameters_of_the_group_are_not_looked_at() -> None:
    """A shard may be empty where the whole has one element; its value cannot be read."""
    group = {**GROUP, "params": [torch.empty(1, device="meta")]}
    assert converted("lr", 0.5, group) == 0.5
