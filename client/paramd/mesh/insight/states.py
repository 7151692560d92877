"""States to compare: a job now, a job at a step to come, a checkpoint on disk, tensors at hand.

A state is read tensor by tensor, so that comparing two needs the memory of a few tensors.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

from paramd.errors import (
    AbortedError,
    ConflictError,
    DeadlineError,
    NotFoundError,
    ParamdError,
    UsageError,
)
from paramd.layout.plan import ReadPlan
from paramd.mesh.exports.restoring import MANIFEST
from paramd.mesh.frames.stepping import TrainingEndedError
from paramd.mesh.insight.moments import MAX_WAIT_S, hold
from paramd.mesh.peers.discovery import SidecarFinder
from paramd.mesh.peers.sidecars import Pinned, Sidecars
from paramd.mesh.reading.pin import choose, pinned
from paramd.mesh.reading.transfer import Chosen, Transfer
from paramd.mesh.results import STATE_TIMEOUT_S
from paramd.state import At
from paramd.v1 import common_pb2
from paramd.v1 import sidecar_pb2 as pb

if TYPE_CHECKING:
    import torch

Value = TypeVar("Value")

Now = Literal["now"]

AHEAD = 4
"""Steps that may pass before the sidecars have heard of a request."""

AHEAD_S = 0.5
"""The same, as time: of a quick training, more steps than that."""

MARK = "mark:"
"""How the name of a mark begins where other states can be given, too."""

MAX_FILES = 10_000


class State(Protocol):
    """Tensors of one state. Opened by an async context manager, which also ends its leases."""

    @property
    def label(self) -> str:
        """The state in words."""

    @property
    def names(self) -> Sequence[str]: ...

    async def read(self, name: str) -> torch.Tensor:
        """One tensor, on the CPU."""


@dataclass(frozen=True, slots=True)
class HeldTensors:
    """Tensors at hand, such as a `Summoned`."""

    tensors: Mapping[str, torch.Tensor]
    label: str

    @property
    def names(self) -> Sequence[str]:
        return list(self.tensors)

    async def read(self, name: str) -> torch.Tensor:
        return self.tensors[name].detach().cpu()


@dataclass(frozen=True, slots=True)
class LiveState:
    """A job's tensors while they are pinned at one step."""

    sidecars: Sidecars
    transfer: Transfer
    chosen: Chosen
    pinned: Pinned
    deadline_s: float
    label: str

    @property
    def names(self) -> Sequence[str]:
        return [tensor.name for tensor in self.chosen.plan.tensors]

    async def read(self, name: str) -> torch.Tensor:
        index = self.names.index(name)
        found = await self.transfer.tensors(
            self.sidecars,
            self.chosen,
            [index],
            self.pinned,
            dtype=None,
            transport="auto",
            deadline_s=self.deadline_s,
        )
        return next(iter(found.values()))


@dataclass(frozen=True, slots=True)
class StoredState:
    """Tensors of safetensors files."""

    files: Mapping[str, Path]
    """The file of each tensor."""
    label: str

    @property
    def names(self) -> Sequence[str]:
        return list(self.files)

    async def read(self, name: str) -> torch.Tensor:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.files[name], framework="pt") as file:
                found: torch.Tensor = file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise UsageError(f"{self.files[name]}: {name} cannot be read: {error}") from error
        return found


@asynccontextmanager
async def live_state(
    reach: SidecarFinder,
    transfer: Transfer,
    patterns: Sequence[str],
    at: str | int | At,
    deadline_s: float,
) -> AsyncIterator[LiveState]:
    """A job's tensors, pinned now, at a step to come (a number is of the present history), or as a
    mark ("mark:NAME") has them.

    Raises:
        ConflictError: the step is past, or the training has ended before it; or there is no such
            mark.
        DeadlineError: it did not come in time.
        ParamdError: as `AsyncMesh.summon`.
    """
    async with AsyncExitStack() as stack:

        async def attempt(sidecars: Sidecars) -> LiveState:
            chosen = await choose(reach, sidecars, patterns, buffers=False)
            job = sidecars.document.job
            mark = at.removeprefix(MARK) if isinstance(at, str) and at.startswith(MARK) else ""
            if isinstance(at, int | At):
                named = at if isinstance(at, At) else At((await present(sidecars)).history, at)
                pins = await pin_step(stack, sidecars, chosen.plan, named, deadline_s)
            else:
                pins = await stack.enter_async_context(
                    pinned(reach, sidecars, chosen, deadline_s, mark=mark)
                )
            label = f"mark {mark}, " * bool(mark) + f"step {pins.step} of {job}"
            return LiveState(sidecars, transfer, chosen, pins, deadline_s, label)

        yield await reach.attempts(attempt, deadline_s)


async def present(sidecars: Sidecars, rank: int | None = None) -> At:
    """Where a rank is; None: the first."""
    rank = rank if rank is not None else min(sidecars.document.peers, default=0)
    header = (await sidecars.state(rank, STATE_TIMEOUT_S)).header
    return At(header.history, header.step)


async def next_step(reach: SidecarFinder, deadline_s: float) -> At:
    """The step that "+0" means: the first that can surely be asked for before it begins."""

    async def attempt(sidecars: Sidecars) -> At:
        found = await sidecars.state(min(sidecars.document.peers, default=0), STATE_TIMEOUT_S)
        step_s = found.state.step_time_ns / 1e9
        ahead = max(AHEAD, int(AHEAD_S / step_s) if step_s > 0 else 0)
        return At(found.header.history, found.header.step + ahead)

    return await reach.attempts(attempt, deadline_s)


async def pin_step(
    stack: AsyncExitStack, sidecars: Sidecars, plan: ReadPlan, at: At, deadline_s: float
) -> Pinned:
    """Pin a step to come on all ranks; `stack` releases it.

    Raises:
        ConflictError: the step is past, or the training has ended before it.
        DeadlineError: it did not come in time.
        ParamdError: as `hold_step`.
    """
    spans = {read.rank: read.spans for read in plan.ranks}
    try:
        left_s = min(deadline_s - time.monotonic(), MAX_WAIT_S)
        held = await hold(stack, sidecars, spans, pb.PinSnapshotRequest(), at, deadline_s)
    except (AbortedError, DeadlineError, TrainingEndedError) as error:
        raise await _why_not_pinned(sidecars, list(spans), at, left_s, error) from error
    return Pinned.at(held.state, held.pins)


async def _why_not_pinned(
    sidecars: Sidecars, ranks: Sequence[int], wanted: At, waited_s: float, error: ParamdError
) -> ParamdError:
    """What is true of a step that could not be pinned, by where the ranks are now."""
    asked = (sidecars.state(rank, STATE_TIMEOUT_S) for rank in ranks)
    answers = await asyncio.gather(*asked, return_exceptions=True)
    found = [answer for answer in answers if not isinstance(answer, BaseException)]
    states, step = [answer.state for answer in found], wanted.step
    if any(answer.header.history != wanted.history for answer in found):
        return ConflictError(
            f"the training was rolled back before step {step} came: it will be another one when it "
            f"comes again; ask for a step of the present history ({error})"
        )
    at = max((state.step for state in states), default=-1)
    ended = isinstance(error, TrainingEndedError) or any(
        state.phase in (common_pb2.PHASE_ORPHANED, common_pb2.PHASE_TORN) for state in states
    )
    if at > step or (at == step and not ended):
        now = ' ("now" is the step that the training is at)' if at == step else ""
        return ConflictError(
            f"step {step} is past{now}, and steps are not kept: give a step to come, or a "
            f"checkpoint of that step on disk ({error})"
        )
    if ended:
        return ConflictError(
            f"step {step} will not come: the training has ended{f' at step {at}' * (at >= 0)}"
        )
    return DeadlineError(
        f"step {step} did not come within {waited_s:.1f} s: the ranks are at step {at}; allow more "
        f"time, or see whether the training goes on (paramd why) ({error})"
    )


def stored_state(path: Path, patterns: Sequence[str]) -> StoredState:
    """A safetensors file, or a directory of them such as an export.

    Raises:
        NotFoundError: it does not exist, or no tensor matches. UsageError: it holds none.
    """
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        raise NotFoundError(f"{path}: there is no such file or directory")
    found = sorted(path.glob("*.safetensors"))[:MAX_FILES] if path.is_dir() else [path]
    if not found:
        raise UsageError(
            f"{path}: no *.safetensors in it; expected an export made with --format safetensors"
        )
    files: dict[str, Path] = {}
    for file in found:
        try:
            with safe_open(file, framework="pt") as opened:
                files |= dict.fromkeys(opened.keys(), file)
        except (OSError, SafetensorError) as error:
            raise UsageError(f"{file}: not a readable safetensors file: {error}") from error
    return StoredState(_matching(files, patterns, path), _label(path))


def matching(found: Mapping[str, Value], patterns: Sequence[str]) -> dict[str, Value]:
    """What matches, in order."""
    return {n: v for n, v in found.items() if any(fnmatchcase(n, p) for p in patterns)}


def _matching(found: Mapping[str, Path], patterns: Sequence[str], where: Path) -> dict[str, Path]:
    chosen = matching(found, patterns)
    if not chosen:
        raise NotFoundError(f"{where}: no tensor matches {', '.join(patterns)[:200]}")
    return chosen


def _label(path: Path) -> str:
    try:
        step = json.loads((path / MANIFEST).read_text())["step"]
    except (OSError, ValueError, KeyError, TypeError):
        return str(path)
    return f"{path} (step {step})"
