"""Trains kinds of models with Adam; looks at what an edit with `reset_moments` left.

A hook that runs before paramd's own keeps what each update computed; what the edit changed
at the same boundary is told apart from that, bit by bit. Wherever the client's fill value
stands afterwards, all moments must be zero; everything else must be as the update left it.

    attached <job>          printed when edits may come
    <folder>/<job>.seen     the client has seen the edit; paramd is detached
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import paramd
from paramd.memory.control_page import Word
from paramd.trainer.attaching.attachment import Attachment
from tests.ending import end
from tests.multiprocess import kinds
from tests.multiprocess.workers.train import DEADLINE_S, Training, adam, everybody, raw

FILL = 3.25
"""Far from whatever is trained here, and the same number in every dtype."""

MOST_UPDATE = 0.05
"""Adam at a rate of 0.01 and with moments of zero moves an element by less."""

STEPS_BEFORE = 3
REPLICATED = ("ddp-odd", "fsdp1-mixed-no-shard")
"""Kinds whose ranks hold the same."""


@dataclass(slots=True)
class Held:
    """One parameter of this rank, local: clones."""

    value: torch.Tensor
    state: dict[str, torch.Tensor]


def held_now(optimizer: torch.optim.Optimizer) -> list[Held]:
    return [
        Held(
            local_of(param).clone(),
            {
                key: local_of(value).clone()
                for key, value in optimizer.state.get(param, {}).items()
                if isinstance(value, torch.Tensor)
            },
        )
        for group in optimizer.param_groups
        for param in group["params"]
    ]


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local.detach()


def wrong_after_edit(updated: list[Held], edited: list[Held]) -> tuple[list[str], int]:
    """What is not as it must be, and how many elements lost moments that were not zero."""
    wrong, lost = [], 0
    for number, (before, after) in enumerate(zip(updated, edited, strict=True)):
        filled = after.value == FILL
        if not torch.equal(after.value[~filled], before.value[~filled]):
            wrong.append(f"parameter {number}: changed where it was not edited")
        for key, moment in after.state.items():
            if key == "step":
                if not torch.equal(moment, before.state[key]):
                    wrong.append(f"parameter {number}: step is {moment}")
                continue
            if moment[filled].count_nonzero():
                wrong.append(f"parameter {number}: {key} is not zero where it was edited")
            if raw(moment[~filled]) != raw(before.state[key][~filled]):
                wrong.append(f"parameter {number}: {key} changed where it was not edited")
            lost += int(before.state[key][filled].count_nonzero())
    return wrong, lost


def wrong_after_next(edited: list[Held], updated: list[Held]) -> list[str]:
    """The next update must have begun from what the edit wrote."""
    wrong = []
    for number, (before, after) in enumerate(zip(edited, updated, strict=True)):
        moved = (after.value - FILL)[before.value == FILL].abs()
        if moved.numel() and float(moved.max()) > MOST_UPDATE:
            wrong.append(f"parameter {number}: moved by {float(moved.max())} in one update")
    return wrong


def train(name: str, folder: Path) -> list[str]:
    training = Training(kinds.named(name), adam)
    (optimizer,) = training.optimizers
    # An edit is applied when training goes on: between one step's end and the next one's begin.
    ends: list[list[Held]] = [[], []]
    begins: list[list[Held]] = [[]]
    optimizer.register_step_pre_hook(lambda *_: begins.__setitem__(0, held_now(optimizer)))
    optimizer.register_step_post_hook(lambda *_: ends.append(held_now(optimizer)))
    for _ in range(STEPS_BEFORE):
        training.step()
    attachment = paramd.attach(training.built.model, optimizer, job=name)
    print(f"attached {name}.", flush=True)
    step_until_edited(training, attachment)
    edited, before, after = begins[0], ends[-2], ends[-1]
    wrong, lost = wrong_after_edit(before, edited)
    told = torch.tensor([lost])
    dist.all_reduce(told)
    if not told.item():
        wrong.append("no moment was reset on any rank")
    if name in REPLICATED:
        wrong += differing_replicas(edited)
    wrong += wrong_after_next(edited, after)
    deadline_s = time.monotonic() + DEADLINE_S
    while not everybody((folder / f"{name}.seen").exists):
        assert time.monotonic() < deadline_s, "the client has not seen the edit"
        training.step()
    attachment.detach()
    return wrong


def step_until_edited(training: Training, attachment: Attachment) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while attachment._page[Word.EDITS] == 0:
        assert time.monotonic() < deadline_s, "no edit came"
        training.step()


def differing_replicas(mine: list[Held]) -> list[str]:
    bytes_of = [[raw(one.value), *map(raw, one.state.values())] for one in mine]
    everyone: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, bytes_of)
    return [] if all(one == everyone[0] for one in everyone) else ["replicas differ"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kinds", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in arguments.kinds.split(","):
        wrong = train(name, arguments.folder)
        print(f"{'FAILED' if wrong else 'ok'} {name} {wrong[:5]}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    end(main)
