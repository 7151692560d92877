"""Moments: optimizer state in arena-shaped rooms, and the table that says what is where."""

from __future__ import annotations

import json
import struct
import zlib
from typing import Any

import torch

from paramd.memory.arena import HostArena
from paramd.memory.control_page import ControlPage, Word
from paramd.memory.descriptors import SparseMemory, pages
from paramd.memory.handover import MOMENT_ROOMS, Descriptors
from paramd.trainer.boundary.moments import Moments

ARENA_BYTES = 1 << 14


def test_rooms_hold_the_state_at_the_places_of_its_elements() -> None:
    shared = Descriptors.create(ARENA_BYTES)
    page, arena = ControlPage(shared.page), HostArena(shared.arena, ARENA_BYTES)
    moments = Moments(page, arena, SparseMemory(shared.moments))
    reader = SparseMemory(shared.moments)
    flat = torch.frombuffer(arena.buffer, dtype=torch.float32)
    first = torch.nn.Parameter(flat[16:28].view(3, 4))
    second = torch.nn.Parameter(flat[64:69])
    groups: list[dict[str, Any]] = [{"params": [first], "lr": 0.25}, {"params": [second]}]
    adam = torch.optim.AdamW(groups)
    moments.optimizers = [adam]
    for param in (first, second):
        param.grad = torch.randn_like(param)
    adam.step()
    adam.state[second]["odd"] = torch.zeros(7)
    page[Word.STEP] = 9
    moments.mirror()
    begin = MOMENT_ROOMS * pages(ARENA_BYTES)
    (length,) = struct.unpack_from("q", reader.buffer, begin)
    table = json.loads(zlib.decompress(reader.buffer[begin + 8 : begin + 8 + length]))
    assert (table["step"], table["keys"], table["failure"]) == (9, ["exp_avg", "exp_avg_sq"], "")
    assert [(p["begin"], p["end"], p["group"]) for p in table["params"]] == [
        (64, 112, 0),
        (256, 276, 1),
    ]
    assert table["params"][0]["scalars"] == {"step": 1.0}
    assert "odd" in table["params"][1]["left_out"]
    assert table["groups"][0][0]["lr"] == 0.25
    for room, key in enumerate(table["keys"]):
        for param, begin in ((first, 64), (second, 256)):
            found = torch.frombuffer(
                reader.buffer,
                dtype=torch.float32,
                count=param.numel(),
                offset=room * pages(ARENA_BYTES) + begin,
            )
            assert torch.equal(found, adam.state[param][key].reshape(-1))
            del found
    moments.optimizers = []
    moments.close()
    reader.close()
    page.close()
    del flat, first, second, adam, param
    arena.close()
    shared.close()
