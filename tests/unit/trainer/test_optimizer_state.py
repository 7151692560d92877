"""Which optimizer state belongs to which bytes of the arena."""

from __future__ import annotations

import torch
from torch import nn

from paramd.layout.edits.kinds import EditKind
from paramd.memory.edit_program import Record
from paramd.trainer.boundary.moments import find_owned, owner_of, zero_moments
from paramd.trainer.home.moving import address


def stepped(*params: nn.Parameter) -> torch.optim.Adam:
    """An optimizer whose moments are zero nowhere."""
    optimizer = torch.optim.Adam(params, lr=0.01)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


def test_columns_of_one_tensor_are_told_apart() -> None:
    both = torch.randn(4, 7)
    first, second = nn.Parameter(both[:, :3]), nn.Parameter(both[:, 3:])
    optimizer = stepped(first, second)
    owned = find_owned([optimizer], address(both), both.nbytes)
    # Rows 1 and 2, columns 1 and 2 of `first`: behind the first byte of `second`.
    record = Record(EditKind.FILL, "float32", (7 + 1) * 4, (2, 2), (7, 1), reset_moments=True)
    owner = owner_of(owned, record)
    assert owner is not None
    assert owner.param is first
    zero_moments(owner, record)
    for key in ("exp_avg", "exp_avg_sq"):
        assert optimizer.state[second][key].count_nonzero() == second.numel()
        zero = optimizer.state[first][key] == 0
        assert zero[1:3, 1:].all()
        assert zero.sum() == 4


def test_the_count_of_steps_is_no_moment() -> None:
    scale = nn.Parameter(torch.tensor(1.5))
    optimizer = stepped(scale)
    (owner,) = find_owned([optimizer], address(scale), 4)
    assert sorted(key for key, _ in owner.moments()) == ["exp_avg", "exp_avg_sq"]
    zero_moments(owner, Record(EditKind.FILL, "float32", 0, (), (), reset_moments=True))
    assert float(optimizer.state[scale]["step"]) == 1.0
    assert float(optimizer.state[scale]["exp_avg"]) == 0.0


def test_what_no_optimizer_has_is_nobodys() -> None:
    both = torch.randn(4, 7)
    owned = find_owned([stepped(nn.Parameter(both[:, :3]))], address(both), both.nbytes)
    assert owner_of(owned, Record(EditKind.FILL, "float32", 3 * 4, (2, 1), (7, 1))) is None
