"""A training that learns, with numbers in it by which every answer can be judged.

The model is one of tests/multiprocess/kinds.py; its parameters have three roles:

    stamped   blocks.0: the optimizer fills them with `stamp(step, salt)`
    edited    blocks.1: the optimizer leaves them alone, and their output is multiplied by 0,
              so edits of them change no loss; their gradient is filled with `mark(step)`
    learned   all others: SGD with momentum

Every rank appends each loss, bit for bit, to `losses-<rank>`, and keeps the number of updates
that are finished in `progress-<rank>`. With `--plain` the same training runs without paramd:
what it writes is the truth.

    stop   ends the training        detach   it detaches and attaches again, as a new incarnation
"""

import argparse
import mmap
import os
import struct
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import paramd
from paramd.trainer.attaching.attachment import Attachment
from tests.ending import end
from tests.multiprocess import kinds
from tests.soak.inject import sitecustomize

STAMPS = 4093
RATE, MOMENTUM = 0.01, 0.9
LOOK_EVERY = 10
"""Updates between two looks at the files that tell it what to do; a collective."""


def stamp(step: int, salt: int) -> float:
    """What stamped parameters hold after `step` updates; exact in float32."""
    return ((step + 97 * salt) % STAMPS) / 4096


def mark(step: int) -> float:
    """What the gradients of edited parameters hold for update `step`."""
    return float(1 + step % STAMPS)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter or of a gradient."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local.detach()


def role_of(name: str) -> str:
    """What happens to a parameter, by any of its names."""
    return "stamped" if "blocks.0." in name else "edited" if "blocks.1." in name else "learned"


class StampAndLearn(torch.optim.Optimizer):
    """Stamps slowly, so that an update is caught in the middle; learns; leaves alone."""

    def __init__(self, model: nn.Module, *, salt: int, rest_s: float, step: int) -> None:
        roles: dict[str, list[nn.Parameter]] = {"stamped": [], "learned": [], "edited": []}
        for name, parameter in model.named_parameters():
            roles[role_of(name)].append(parameter)
        super().__init__([{"params": p, "role": r} for r, p in roles.items() if p], {})
        self._salt, self._rest_s = salt, rest_s
        self.updates = step

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.updates += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if group["role"] == "stamped":
                    self._stamp(local_of(parameter))
                elif group["role"] == "learned" and parameter.grad is not None:
                    self._learn(parameter)

    def _stamp(self, local: torch.Tensor) -> None:
        for part in local.reshape(-1).chunk(2) if local.is_contiguous() else [local]:
            part.fill_(stamp(self.updates, self._salt))
            if self._rest_s:
                time.sleep(self._rest_s)

    def _learn(self, parameter: nn.Parameter) -> None:
        gradient = local_of(parameter.grad)
        state = self.state[parameter]
        momentum = state.setdefault("momentum", torch.zeros_like(gradient))
        momentum.mul_(MOMENTUM).add_(gradient)
        local_of(parameter).add_(momentum, alpha=-RATE)


class Notes:
    """What a rank leaves for the oracle."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._losses = (folder / f"losses-{rank}").open("a", buffering=1)
        path = folder / f"progress-{rank}"
        path.write_bytes(bytes(8))
        with path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), 8)

    def loss(self, loss: torch.Tensor) -> None:
        self._losses.write(f"{float(loss.detach()).hex()}\n")

    def finished(self, updates: int) -> None:
        self._page[:] = struct.pack("<q", updates)


def main() -> None:
    arguments = _parsed()
    sitecustomize.inject(f"trainer-{os.environ['RANK']}")
    torch.set_num_threads(1)
    if "," in arguments.sidecar_ports:
        ports = arguments.sidecar_ports.split(",")[2 * int(os.environ["RANK"]) :]
        os.environ["PARAMD_SIDECAR_LISTEN"] = f"127.0.0.2:{ports[0]}"
        os.environ["PARAMD_STREAM_PORT"] = ports[1]
    dist.init_process_group("gloo")
    built = kinds.named(arguments.kind).build()
    _prepare(built.model, arguments.salt)
    optimizer = StampAndLearn(
        built.model, salt=arguments.salt, rest_s=arguments.rest_ms / 1e3, step=0
    )
    notes = Notes(arguments.folder, int(os.environ["RANK"]))
    attachment = None if arguments.plain else _attached(built.model, optimizer, arguments.job)
    for update in range(1, arguments.rounds + 1):
        loss = built.loss(update)
        notes.finished(update - 1)  # training goes on, so the update before is over
        notes.loss(loss)
        loss.backward()
        _mark(optimizer, update)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(arguments.gap_ms / 1e3)
        if attachment is not None and update % LOOK_EVERY == 0:
            if _everybody((arguments.folder / "stop").exists()):
                break
            attachment = _reattached(attachment, built.model, optimizer, arguments)
    if attachment is not None:
        attachment.detach()
    print(f"ended after {optimizer.updates} updates", flush=True)
    if attachment is not None:
        # Of a run without paramd only the losses count, and once gloo's group never ended there.
        dist.destroy_process_group()


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", required=True)
    parser.add_argument("--job", default="main")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--salt", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=1_000_000)
    parser.add_argument("--rest-ms", type=float, default=0.3)
    parser.add_argument("--gap-ms", type=float, default=40.0)
    parser.add_argument("--sidecar-ports", default="", help="two for each rank, each with a comma")
    parser.add_argument("--plain", action="store_true", help="without paramd")
    return parser.parse_args()


def _prepare(model: nn.Module, salt: int) -> None:
    """Values that the oracle expects before the first update; edits that change no loss."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if role_of(name) == "stamped":
                local_of(parameter).fill_(stamp(0, salt))
            elif role_of(name) == "edited":
                local_of(parameter).fill_(0)
    (block,) = [m for n, m in model.named_modules() if n == "blocks.1" or n.endswith(".blocks.1")]

    def without_effect(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        return inputs[0] + 0 * (output - inputs[0])

    block.register_forward_hook(without_effect)


def _mark(optimizer: StampAndLearn, update: int) -> None:
    for parameter in _of_role(optimizer.param_groups, "edited"):
        if parameter.grad is not None:
            local_of(parameter.grad).fill_(mark(update))


def _of_role(groups: Iterable[dict[str, Any]], role: str) -> Iterator[nn.Parameter]:
    for group in groups:
        if group["role"] == role:
            yield from group["params"]


def _attached(model: nn.Module, optimizer: StampAndLearn, job: str) -> Attachment:
    attachment = paramd.attach(model, optimizer, job=job, step=optimizer.updates)
    print(f"attached incarnation {attachment.incarnation}", flush=True)
    return attachment


def _reattached(
    attachment: Attachment, model: nn.Module, optimizer: StampAndLearn, given: argparse.Namespace
) -> Attachment:
    wanted = given.folder / "detach"
    if not _everybody(wanted.exists()):
        return attachment
    dist.barrier()
    wanted.unlink(missing_ok=True)
    attachment.detach()
    return _attached(model, optimizer, given.job)


def _everybody(mine: bool) -> bool:
    told = torch.tensor([int(mine)])
    dist.all_reduce(told, op=dist.ReduceOp.MIN)
    return bool(told.item())


if __name__ == "__main__":
    end(main)
