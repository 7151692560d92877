"""What ranks compare of their unsharded parameters, wrappers refused by name, extra state."""

import os

import torch
from torch import nn

from paramd.memory.continuation import EXTRA, read_kept
from paramd.memory.control_page import Word
from paramd.memory.descriptors import SparseMemory
from paramd.memory.handover import Descriptors
from paramd.memory.optimizer_state import MAX_TABLE_TEXT_BYTES, parse_text
from paramd.trainer.attaching.discovering import contents
from paramd.trainer.model.extra_state import ExtraState
from paramd.trainer.model.shards import find_shards


def digests(model: nn.Module) -> list[int]:
    return list(contents(find_shards(model), [name for name, _ in model.named_parameters()]))


def test_equal_values_have_equal_digests_whatever_their_memory_order() -> None:
    one, other = nn.Linear(3, 5), nn.Linear(3, 5)
    other.load_state_dict(one.state_dict())
    other.weight.data = one.weight.detach().t().contiguous().t()
    assert other.weight.stride() != one.weight.stride()
    assert digests(one) == digests(other)
    with torch.no_grad():
        other.weight[4, 2] = -0.0 if bool(one.weight[4, 2] == 0) else 0.0
    assert [a == b for a, b in zip(digests(one), digests(other), strict=True)] == [False, True]


class Talkative(nn.Module):
    """Has so many reasons why not, and so many long names."""

    reasons = names = 1

    def _save_to_state_dict(self, destination: dict[str, object], *_: object) -> None:
        for number in range(self.reasons):
            destination[f"{number}"] = ValueError(os.urandom(150).hex())
        destination |= {os.urandom(1 << 10).hex(): 1 for _ in range(self.names)}


def test_extra_state_too_long_to_note_is_told_as_such_and_names_are_found_once() -> None:
    shared, words, asked, model = Descriptors.create(4096), [0] * 512, [0], Talkative()
    memory = SparseMemory(shared.continuation)
    extra = ExtraState(memory, words, model, lambda: asked.append(1) or ())
    for reasons, names, count in ((1, 1, 2), (8000, 1, 8001), (8000, 1200, 1)):
        model.reasons, model.names = reasons, names
        extra.note_for(count)
        text = read_kept(memory.buffer, EXTRA)[0].payload
        assert (words[Word.EXTRA_FOR], len(parse_text(text))) == (count, count)
        assert len(text) <= MAX_TABLE_TEXT_BYTES
    assert asked == [0, 1]
    memory.close()
    extra.note_for(2)  # and what else the request wants is done
    assert words[Word.EXTRA_FOR] == 0
    shared.close()
