"""What ranks record of their loops is joined to the very bits that they had."""

import pickle
from pathlib import Path

import torch

from tests.sequences.loops.packing import packed, unpacked
from tests.sequences.loops.truth import Name, Truth

TENSORS: dict[str, torch.Tensor | None] = {
    "turned": torch.randn(3, 5).t(),
    "half": torch.tensor([1.5, -0.0, float("nan")], dtype=torch.bfloat16),
    "none": None,
    "double": torch.randn(7, dtype=torch.float64),
    "empty": torch.zeros(0, 4),
    "number": torch.tensor(3, dtype=torch.int64),
}


def test_packed_tensors_have_the_same_bits_again() -> None:
    found = dict(unpacked(packed(TENSORS)))
    assert list(found) == list(TENSORS)
    for name, wanted in TENSORS.items():
        got = found[name]
        if wanted is None:
            assert got is None
            continue
        assert got is not None
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        assert packed({name: got}) == packed({name: wanted})
    zero = {"a": torch.zeros(2)}
    assert packed(zero) == packed({"a": torch.zeros(2)})
    assert packed(zero) != packed({"a": torch.tensor([0.0, -0.0])})


def test_states_are_found_by_their_names_and_joined_of_all_ranks(tmp_path: Path) -> None:
    truth = Truth(tmp_path, 2, how="dim 0")

    def put(rank: int, kind: str, name: Name, first: float) -> None:
        part = packed({"w": torch.full((rank + 1, 2), first)})
        row = pickle.dumps((kind, *name, part, packed({}), packed({}), 4, {"lr": 0.5}))
        with (tmp_path / f"truth-{rank}-000000").open("ab") as file:
            file.write(len(row).to_bytes(8, "little") + row)

    one, edited = Name(1, 0, 7, 0), Name(1, 0, 7, 1)
    for rank in range(2):
        put(rank, "settled", one, 1.0)
        put(rank, "settled", one, 1.0)  # the same again is the same state
        put(rank, "resting", one, 2.0)
        put(rank, "settled", edited, 3.0)
    put(0, "settled", Name(1, 0, 8, 1), 9.0)  # of one rank: not yet a state
    truth.read()

    def firsts(step: int, *, resting: bool) -> list[tuple[Name, float]]:
        found = truth.variants(1, step, lambda _: True, resting=resting)
        assert all(state.parameters["w"].shape == (3, 2) for _, state in found)
        return [(name, float(state.parameters["w"][2, 1])) for name, state in found]

    assert firsts(7, resting=False) == [(edited, 3.0), (one, 1.0)]
    assert firsts(7, resting=True) == [(edited, 3.0), (one, 1.0), (one, 2.0)]
    assert firsts(8, resting=True) == firsts(6, resting=True) == []
    assert (truth.had(1, 1, 7), truth.had(1, 2, 7), truth.had(2, 0, 7)) == (True, False, False)
    assert truth.count == 3
    put(1, "settled", Name(1, 0, 8, 1), 9.0)
    truth.read()
    assert firsts(8, resting=False) == [(Name(1, 0, 8, 1), 9.0)]
    assert truth.state(1, 1, 8).rates == {"lr": 0.5}


def test_what_is_too_old_is_forgotten(tmp_path: Path) -> None:
    truth = Truth(tmp_path, 1, how="whole")
    part = packed({"w": torch.zeros(1)})
    with (tmp_path / "truth-0-000000").open("wb") as file:
        for step in range(1503):
            row = pickle.dumps(("settled", 1, 0, step, 0, part, packed({}), packed({}), None, {}))
            file.write(len(row).to_bytes(8, "little") + row)
    truth.read()
    assert not truth.had(1, 0, 2)
    assert truth.had(1, 0, 3)
    assert truth.had(1, 0, 1502)
    assert len(truth.names()) == 1500
