"""`mesh.diff`: two states, wherever they are, tensor by tensor."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paramd.errors import UsageError
from paramd.mesh.insight.states import (
    MARK,
    HeldTensors,
    State,
    live_state,
    matching,
    next_step,
    stored_state,
)
from paramd.mesh.peers.discovery import SidecarFinder
from paramd.mesh.reading.transfer import Transfer, all_ended
from paramd.state import At

if TYPE_CHECKING:
    from paramd.mesh.insight.compare import Diff, TensorDiff

MAX_CELLS = 512

Source = Any
"""As the arguments of `AsyncMesh.diff`."""


async def compute_diff(
    reach: SidecarFinder,
    transfer: Transfer,
    a: Source,
    b: Source,
    patterns: Sequence[str],
    deadline_s: float,
    reach_of: Any,
    *,
    cells: int = 0,
) -> Diff:
    """Args, Returns, Raises: as `AsyncMesh.diff`. `reach_of` finds another mesh's sidecars."""
    check_order(a, b)
    if not 0 <= cells <= MAX_CELLS:
        raise UsageError(f"cells: {cells}; expected 0 to {MAX_CELLS}")

    async def opened(stack: AsyncExitStack, source: Source, name: str) -> State:
        if isinstance(source, Mapping):
            step = getattr(source, "step", None)
            label = f"{name} (step {step})" if step is not None else name
            return HeldTensors(matching(source, patterns), label)
        other = reach_of(source)
        if other is not None:
            return await stack.enter_async_context(
                live_state(other, transfer, patterns, "now", deadline_s)
            )
        if is_ahead(source):
            # Looked up as late as possible: what is open before takes steps, too.
            first = await next_step(reach, deadline_s)
            source = At(first.history, first.step + int(source))
        if isinstance(source, int | At) or source == "now" or is_mark(source):
            return await stack.enter_async_context(
                live_state(reach, transfer, patterns, source, deadline_s)
            )
        return await asyncio.to_thread(stored_state, Path(source), patterns)

    async with AsyncExitStack() as stack:
        from paramd.mesh.insight.compare import Diff

        if is_to_come(a) and is_to_come(b):
            # Both are asked for before either comes: steps may follow each other quickly.
            first = await next_step(reach, deadline_s)
            ahead = [first.step + int(s) if is_ahead(s) else s for s in (a, b)]
            steps = [At(first.history, step) for step in ahead]
            found: dict[str, State] = {}

            async def keep(name: str, at: At) -> None:
                found[name] = await opened(stack, at, name)

            await all_ended([keep("a", steps[0]), keep("b", steps[1])])
            one, other = found["a"], found["b"]
        else:
            one, other = await opened(stack, a, "a"), await opened(stack, b, "b")
        names = dict.fromkeys([*one.names, *other.names])
        rows = [await _row(name, one, other, cells) for name in names]
        return Diff(rows, a=one.label, b=other.label)


def check_order(a: Source, b: Source) -> None:
    """Raises UsageError for what is no source, or for steps that come in the wrong order."""
    for name, one in (("a", a), ("b", b)):
        if isinstance(one, bool) or one is None or (isinstance(one, int) and one < 0):
            raise UsageError(
                f"{name}: {one!r}; expected 'now', a step to come, '+N', 'mark:NAME', a path, "
                "tensors or a mesh"
            )
        if is_mark(one) and not one.removeprefix(MARK):
            raise UsageError(f"{name}: {one!r}; expected the name of a mark after {MARK!r}")
    same_kind = is_to_come(a) and is_to_come(b) and is_ahead(a) == is_ahead(b)
    if same_kind and int(a) >= int(b):
        raise UsageError(f"a, b: {a} and {b}; expected two steps to come, the earlier one first")


def is_ahead(source: Source) -> bool:
    """Whether a source is "+N", so many steps from now."""
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
    one, other = await a.read(name), await b.read(name)
    return await asyncio.to_thread(compare, name, one, other, cells)
