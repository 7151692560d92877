"""Finds what a thread is doing from its Python stack. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Frame(NamedTuple):
    file: str
    line: int
    function: str
    """Qualified if the trainer could tell."""


@dataclass(frozen=True, slots=True)
class Activity:
    """What a training thread is doing."""

    kind: str
    """collective, dataloader, checkpoint, debugger, paramd, lock, optimizer, backward, forward,
    code (none of these); empty: unknown."""
    what: str
    """Words that follow "is": "in DataLoader.next"."""
    where: str = ""
    """Innermost frame of the user's code: "train.py:41 in load"."""


@dataclass(frozen=True, slots=True)
class _Rule:
    kind: str
    file: re.Pattern[str]
    function: re.Pattern[str]
    what: str
    """`{}` is replaced by the function's name."""


def _rule(kind: str, file: str, what: str, function: str = "") -> _Rule:
    return _Rule(kind, re.compile(file + "$"), re.compile(function), what)


_SPECIFIC = (
    _rule("debugger", r"/(pdb|bdb|IPython/.*|debugpy/.*)\.py", "in a debugger"),
    _rule("paramd", r"/paramd/trainer/boundary/hold\.py", "paused by paramd (paramd resume)"),
    _rule(
        "paramd",
        r"/paramd/trainer/boundary/agreement\.py",
        "waiting for other ranks in a round of paramd",
    ),
    _rule("checkpoint", r"/torch/distributed/checkpoint/.*\.py", "in torch.distributed.checkpoint"),
    _rule("checkpoint", r"/torch/serialization\.py", "in torch.{}", r"^(save|load)$"),
    _rule("checkpoint", r"/safetensors/.*\.py", "in safetensors' {}"),
    _rule(
        "collective",
        r"/torch/distributed/(distributed_c10d|_functional_collectives|nn/functional)\.py",
        "in {}",
        r"^(?!_|P2POp|Work)",
    ),
    # Here FSDP waits for data of the other ranks.
    _rule("collective", r"/torch/distributed/fsdp/_fully_shard/_fsdp_collectives\.py", "in {}"),
    _rule("collective", r"/torch/distributed/rendezvous\.py", "in the rendezvous"),
    _rule(
        "dataloader",
        r"/torch/utils/data/.*\.py",
        "in DataLoader.next",
        r"(__next__|_next_data|_get_data|_try_get_data|fetch)$",
    ),
)
_GENERAL = (
    _rule("lock", r"/queue\.py", "waiting for a queue", r"(get|put)$"),
    _rule("lock", r"/threading\.py", "waiting for a thread", r"(wait|acquire|join)"),
    _rule("lock", r"/concurrent/futures/_base\.py", "waiting for a future"),
    _rule("lock", r"/(subprocess|multiprocessing/\w+)\.py", "waiting for another process"),
    _rule("lock", r"/(socket|ssl|selectors)\.py", "waiting for the network or a pipe"),
    _rule("optimizer", r"/torch/optim/.*\.py", "in the optimizer's step"),
    _rule("backward", r"/torch/(autograd/.*|_tensor)\.py", "in backward", r"backward"),
    _rule("forward", r"/torch/nn/modules/module\.py", "in a forward", r"_call_impl$"),
)
"""Searched only if no specific rule fits: a DataLoader waits for a queue, too."""

_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3\.|^<|/paramd/")


def activity_of(frames: Sequence[Frame]) -> Activity:
    """The activity of a thread with this stack, innermost frame first."""
    if not frames:
        return Activity("", "at an unknown place")
    own = next((frame for frame in frames if not _LIBRARY.search(frame.file)), None)
    where = _shown(own) if own is not None else ""
    for rules in (_SPECIFIC, _GENERAL):
        for index, frame in enumerate(frames):
            rule = _fitting(frame, rules)
            if rule is not None:
                return Activity(rule.kind, rule.what.format(_outermost(frames, index, rule)), where)
    return Activity("code", f"at {where}" if where else f"at {_shown(frames[0])}", where)


def _fitting(frame: Frame, rules: Sequence[_Rule]) -> _Rule | None:
    name = frame.function.rpartition(".")[2]
    for rule in rules:
        if rule.file.search(frame.file) and rule.function.search(name):
            return rule
    return None


def _outermost(frames: Sequence[Frame], index: int, rule: _Rule) -> str:
    """Name of the outermost function that fits: `all_gather_object`, not the `all_gather` in it."""
    name = frames[index].function
    for frame in frames[index + 1 :]:
        if _LIBRARY.search(frame.file) is None:
            break
        if _fitting(frame, (rule,)) is not None:
            name = frame.function
    return name.rpartition(".")[2]


def _shown(frame: Frame) -> str:
    return f"{frame.file.rpartition('/')[2]}:{frame.line} in {frame.function}"


_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+)(?: \[([^]]*)\])?")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')


def parse_faulthandler(text: str) -> list[tuple[str, list[Frame]]]:
    """(pthread id, frames) of each thread in faulthandler's output; the oldest thread last."""
    threads: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        if (head := _THREAD.match(line)) is not None:
            threads.append((head[1], []))
        elif threads and (found := _FRAME.match(line)) is not None:
            number = int(found[2]) if found[2].isdigit() else 0
            threads[-1][1].append(Frame(found[1], number, found[3]))
    return threads
