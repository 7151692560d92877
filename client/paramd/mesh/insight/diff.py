"""`mesh.diff`: two states, wherever they are, tensor by tensor."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paramd.errors import UsageError
from paramd.mesh.insight.states import HeldTensors, State, live_state, stored_state
from paramd.mesh.peers.discovery import SidecarFinder

if TYPE_CHECKING:
    from paramd.mesh.insight.compare import Diff, TensorDiff

Source = Any
"""As the arguments of `AsyncMesh.diff`."""


async def compute_diff(
    reach: SidecarFinder,
    a: Source,
    b: Source,
    patterns: Sequence[str],
    deadline_s: float,
    reach_of: Any,
) -> Diff:
    """Args, Returns, Raises: as `AsyncMesh.diff`. `reach_of` finds another mesh's sidecars."""
    check_order(a, b)

    async def opened(stack: AsyncExitStack, source: Source, name: str) -> State:
        if isinstance(source, Mapping):
            step = getattr(source, "step", None)
            return HeldTensors(source, f"{name} (step {step})" if step is not None else name)
        other = reach_of(source)
        if other is not None:
            return await stack.enter_async_context(live_state(other, patterns, "now", deadline_s))
        if source == "now" or isinstance(source, int):
            return await stack.enter_async_context(live_state(reach, patterns, source, deadline_s))
        return await asyncio.to_thread(stored_state, Path(source), patterns)

    async with AsyncExitStack() as stack:
        from paramd.mesh.insight.compare import Diff

        if isinstance(a, int) and isinstance(b, int):
            # Both are asked for before either comes: steps may follow each other quickly.
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(opened(stack, s, n)) for s, n in ((a, "a"), (b, "b"))]
            one, other = (task.result() for task in tasks)
        else:
            one, other = await opened(stack, a, "a"), await opened(stack, b, "b")
        rows = [await _row(name, one, other) for name in dict.fromkeys([*one.names, *other.names])]
        return Diff(rows, a=one.label, b=other.label)


def check_order(a: Source, b: Source) -> None:
    """Raises UsageError for what is no source, or for steps that come in the wrong order."""
    for name, one in (("a", a), ("b", b)):
        if isinstance(one, bool) or one is None or (isinstance(one, int) and one < 0):
            raise UsageError(
                f"{name}: {one!r}; expected 'now', a step to come, a path, tensors or a mesh"
            )
    if isinstance(a, int) and isinstance(b, int) and a >= b:
        raise UsageError(f"a, b: {a} and {b}; expected two steps to come, the earlier one first")


async def _row(name: str, a: State, b: State) -> TensorDiff:
    from paramd.mesh.insight.compare import compare, not_compared

    if name not in b.names:
        return not_compared(name, await a.read(name), problem=f"only {a.label} has it")
    if name not in a.names:
        return not_compared(name, await b.read(name), problem=f"only {b.label} has it")
    one, other = await a.read(name), await b.read(name)
    return await asyncio.to_thread(compare, name, one, other)
