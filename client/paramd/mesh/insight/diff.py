"""`mesh.diff`: two states, wherever they are, tensor by tensor.

A state is a job now, a job at a step to come, a restore point, a checkpoint on disk, or given
tensors. It is read tensor by tensor, so that comparing two needs the memory of a few tensors.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from paramd import bounds
from paramd.answers import parsed_json, read_file
from paramd.errors import NotFoundError, UsageError
from paramd.layout.select import Names, Pattern, each_pattern
from paramd.mesh.exports.calls import MANIFEST
from paramd.mesh.insight.steps import next_step, pin_step, present
from paramd.mesh.peers.discovery import SidecarFinder
from paramd.mesh.peers.grpc import all_ended
from paramd.mesh.peers.sidecars import Sidecars
from paramd.mesh.reading.pin import choose, pinned
from paramd.mesh.reading.stream import Reading
from paramd.mesh.reading.transfer import Transfer
from paramd.state import At

if TYPE_CHECKING:
    import torch

    from paramd.mesh.insight.compare import Diff, TensorDiff

Value = TypeVar("Value")

Now = Literal["now"]

MARK = "mark:"
"""Prefix of a mark's name where other states can be given, too."""

MAX_FILES = 10_000

MAX_CELLS = 512

Source = Any
"""As the arguments of `AsyncMesh.diff`."""

ReachOf = Callable[[Source], SidecarFinder | None]
"""What finds the sidecars of a source that is another mesh; None for others."""


@dataclass(frozen=True, slots=True)
class State:
    """Tensors of one state; its maker ends its leases."""

    label: str
    """The state in words."""
    names: Sequence[str]
    read: Callable[[str], Awaitable[torch.Tensor]]
    """One tensor by its name, on the CPU."""


def held_state(tensors: Mapping[str, torch.Tensor], label: str) -> State:
    """Tensors at hand, such as a `Summoned`."""

    async def read(name: str) -> torch.Tensor:
        return tensors[name].detach().cpu()

    return State(label, list(tensors), read)


@asynccontextmanager
async def live_state(
    reach: SidecarFinder,
    transfer: Transfer,
    patterns: Sequence[Pattern],
    at: str | int | At,
    deadline_s: float,
) -> AsyncIterator[State]:
    """A job's tensors, pinned now, at a step to come (a number is of the present history), or as a
    mark ("mark:NAME") has them.

    Raises:
        ConflictError: If the step is past, training ended before it or there is no such restore
            point.
        DeadlineError: If the step did not come in time, else as `AsyncMesh.summon`.
    """
    async with AsyncExitStack() as stack:

        async def attempt(sidecars: Sidecars) -> State:
            chosen = await choose(reach, sidecars, patterns, buffers=False)
            job = sidecars.document.job
            mark = at.removeprefix(MARK) if isinstance(at, str) and is_mark(at) else ""
            if isinstance(at, int | At):
                named = at if isinstance(at, At) else At((await present(sidecars)).history, at)
                pins = await pin_step(stack, sidecars, chosen.plan, named, deadline_s)
            else:
                pins = await stack.enter_async_context(
                    pinned(reach, sidecars, chosen, deadline_s, mark=mark)
                )
            label = f"mark {mark}, " * bool(mark) + f"step {pins.state.step} of {job}"
            label += " (not settled)" * pins.unsettled
            reading = Reading(sidecars, pins, deadline_s)
            names = [tensor.name for tensor in chosen.plan.tensors]

            async def read(name: str) -> torch.Tensor:
                tensors = await transfer.tensors(reading, chosen, [names.index(name)])
                return next(iter(tensors.values()))

            return State(label, names, read)

        yield await reach.attempts(attempt, deadline_s)


def stored_state(path: Path, patterns: Sequence[Pattern]) -> State:
    """A safetensors file, or a directory of them such as an export.

    Raises:
        NotFoundError: If it does not exist or no tensor matches.
        UsageError: If it has no tensors.
    """
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        mark = path.name == str(path) and not path.suffix
        hint = f" (a restore point is written '{MARK}{path}')" if mark else ""
        raise NotFoundError(f"{path}: there is no such file or directory{hint}")
    paths = sorted(path.glob("*.safetensors"))[:MAX_FILES] if path.is_dir() else [path]
    if not paths:
        raise UsageError(
            f"{path}: no *.safetensors in it; expected an export made with --format safetensors"
        )
    files: dict[str, Path] = {}
    for file in paths:
        try:
            with safe_open(file, framework="pt") as opened:
                files |= dict.fromkeys(opened.keys(), file)
        except (OSError, SafetensorError) as error:
            raise UsageError(f"{file}: not a readable safetensors file: {error}") from error
    chosen = matching(files, patterns)
    if not chosen:
        raise NotFoundError(f"{path}: no tensor matches {', '.join(each_pattern(patterns))[:200]}")

    async def read(name: str) -> torch.Tensor:
        try:
            with safe_open(chosen[name], framework="pt") as opened:
                tensor: torch.Tensor = opened.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise UsageError(f"{chosen[name]}: {name} cannot be read: {error}") from error
        return tensor

    return State(_label(path), list(chosen), read)


def matching(items: Mapping[str, Value], patterns: Sequence[Pattern]) -> dict[str, Value]:
    """The matching items, in order."""
    names, mask = Names(list(items)), 0
    for pattern in each_pattern(patterns):
        mask |= names.resolve(pattern)[0]
    return dict(compress(items.items(), names.columns.flags(mask)))


def _label(path: Path) -> str:
    try:
        step = parsed_json(read_file(path / MANIFEST, bounds.MANIFEST), bounds.MANIFEST)["step"]
    except (OSError, ValueError, KeyError, TypeError):
        return str(path)
    return f"{path} (step {step})"


async def compute_diff(
    reach: SidecarFinder,
    transfer: Transfer,
    a: Source,
    b: Source,
    patterns: Sequence[Pattern],
    deadline_s: float,
    reach_of: ReachOf,
    *,
    cells: int = 0,
) -> Diff:
    """Compare two states tensor by tensor, as `AsyncMesh.diff`.

    Args:
        reach: What finds this job's sidecars.
        transfer: What reads tensors from them.
        a: The one state.
        b: The other one.
        patterns: Globs over names.
        deadline_s: When it must be done, by the monotonic clock.
        reach_of: Finds another mesh's sidecars.
        cells: Most rows and columns of a heat map; 0 for none.

    Raises:
        ParamdError: As `AsyncMesh.diff`.
    """
    check_order(a, b)
    if not 0 <= cells <= MAX_CELLS:
        raise UsageError(f"cells: {cells}; expected 0 to {MAX_CELLS}")
    async with AsyncExitStack() as stack:
        from paramd.mesh.insight.compare import Diff, order

        opening = _Opening(
            stack=stack,
            reach=reach,
            transfer=transfer,
            patterns=patterns,
            deadline_s=deadline_s,
            reach_of=reach_of,
        )
        state_a, state_b = await opening.both(a, b)
        names = dict.fromkeys([*state_a.names, *state_b.names])
        rows = [await _row(name, state_a, state_b, cells) for name in names]
        return Diff(sorted(rows, key=order), a=state_a.label, b=state_b.label)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opening:
    """Opens states; leases end with the stack."""

    stack: AsyncExitStack
    reach: SidecarFinder
    transfer: Transfer
    patterns: Sequence[Pattern]
    deadline_s: float
    reach_of: ReachOf

    async def both(self, a: Source, b: Source) -> tuple[State, State]:
        """Open a and b, at the same time if both are steps to come."""
        if not (is_to_come(a) and is_to_come(b)):
            return await self.state(a, "a"), await self.state(b, "b")
        # Request both before either comes: steps may follow each other quickly.
        first = await next_step(self.reach, self.deadline_s)
        ahead = [first.step + int(s) if is_ahead(s) else s for s in (a, b)]
        steps = [At(first.history, step) for step in ahead]
        state_a, state_b = await all_ended(
            [self.state(at, name) for at, name in zip(steps, "ab", strict=True)]
        )
        return state_a, state_b

    async def state(self, source: Source, name: str) -> State:
        """Open one; `name` stands for tensors that were given."""
        if isinstance(source, Mapping):
            step = getattr(source, "step", None)
            label = f"{name} (step {step})" if step is not None else name
            return held_state(matching(source, self.patterns), label)
        whose = self.reach_of(source)
        if whose is not None:
            source = "now"
        if is_ahead(source):
            # Looked up as late as possible: what is open before takes steps, too.
            first = await next_step(self.reach, self.deadline_s)
            source = At(first.history, first.step + int(source))
        if isinstance(source, int | At) or source == "now" or is_mark(source):
            whose = whose if whose is not None else self.reach
            return await self.stack.enter_async_context(
                live_state(whose, self.transfer, self.patterns, source, self.deadline_s)
            )
        return await asyncio.to_thread(stored_state, Path(source), self.patterns)


def check_order(a: Source, b: Source) -> None:
    """Raise UsageError for an invalid source, or steps in the wrong order."""
    for name, source in (("a", a), ("b", b)):
        if isinstance(source, bool) or source is None or (isinstance(source, int) and source < 0):
            raise UsageError(
                f"{name}: {source!r}; expected 'now', a step to come, '+N', 'mark:NAME', a path, "
                "tensors or a mesh"
            )
        if is_mark(source) and not source.removeprefix(MARK):
            raise UsageError(
                f"{name}: {source!r}; expected a restore point with a name (mesh.mark('NAME'))"
            )
    same_kind = is_to_come(a) and is_to_come(b) and is_ahead(a) == is_ahead(b)
    if same_kind and int(a) >= int(b):
        raise UsageError(f"a, b: {a} and {b}; expected two steps to come, the earlier one first")


def is_ahead(source: Source) -> bool:
    """Whether a source is "+N": N steps from now."""
    return isinstance(source, str) and source[:1] == "+" and source[1:].isdecimal()


def is_mark(source: Source) -> bool:
    """Whether a source is "mark:NAME"."""
    return isinstance(source, str) and source.startswith(MARK)


def is_to_come(source: Source) -> bool:
    """Whether a source is a step to come."""
    return isinstance(source, int) or is_ahead(source)


async def _row(name: str, a: State, b: State, cells: int) -> TensorDiff:
    from paramd.mesh.insight.compare import compare, not_compared

    if name not in b.names:
        return not_compared(name, await a.read(name), problem=f"only {a.label} has it")
    if name not in a.names:
        return not_compared(name, await b.read(name), problem=f"only {b.label} has it")
    tensor_a, tensor_b = await a.read(name), await b.read(name)
    return await asyncio.to_thread(compare, name, tensor_a, tensor_b, cells)
