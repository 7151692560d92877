"""Marks of one job, and its standing snapshots: states that training can return to.

A mark is made at one boundary of all ranks. All of them allocate memory for it, training is paused,
and every sidecar copies its rank's state. The copies count if all have the same step, history and
number of edits. On any failure, the mark is dropped everywhere.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from paramd.errors import ConflictError, ExistsError, NotFoundError, ParamdError, UnreachableError
from paramd.mesh.edits.calls import Mark
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.control.access.authority import Principal
from paramd_service.control.mesh.jobs import Incarnation
from paramd_service.control.mesh.registry import MeshView, listed
from paramd_service.control.mesh.sidecars import on_all
from paramd_service.control.records.records import Records
from paramd_service.edits.pauses import Pause
from paramd_service.edits.runner import STAGE_S

_GONE = "no rank has it (their sidecars were restarted)"


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptState(Mark):
    """A state that the sidecars keep, and the history it belongs to."""

    lineage: int
    edits: int


@dataclass(eq=False)
class Marks:
    """The restore points (marks) of one incarnation's ranks. Use on one event loop."""

    mesh: Incarnation
    pause: Pause
    records: Records
    on_change: Callable[[str, str, KeptState | None], None]
    """Called with job, name and mark for each mark made, and with None for each dropped."""

    def __post_init__(self) -> None:
        self._making = asyncio.Lock()
        self._met, self._named = False, dict[str, KeptState]()
        self._sidecars: list[tuple[int, str]] = []
        self._lost: list[KeptState] = []

    async def all(self, *, of_all: bool = False) -> list[KeptState]:
        """Every state that some rank keeps, by step.

        Raises:
            UnreachableError: If no rank answers, or with `of_all` if one does not.
        """
        view = self.mesh.registry.view()
        found: dict[int, list[pb.KeptState]] = {}
        failure: ParamdError | None = None

        async def ask(rank: int, address: str) -> None:
            nonlocal failure
            try:
                request = pb.ListKeptStatesRequest()
                answer = await self.mesh.calls.ask(rank, address, request)
                found[rank] = list(answer.states)
            except ParamdError as error:
                failure = error

        await asyncio.gather(*(ask(report.rank, report.address) for report in view.joined))
        if not found or (of_all and failure is not None):
            raise failure if failure is not None else UnreachableError("no rank is joined")
        states = merged(found, self.mesh.bootstrap.world_size)
        self._met |= any(one.name for one in states)
        return states

    async def lost(self) -> Sequence[KeptState]:
        """Marks that some rank has no longer, as last known: once one was met here, ranks are asked
        when sidecars or marks are others than they were. Raises as `all`."""
        joined = self.mesh.registry.view().joined
        sidecars = [(one.state.sidecar_pid, one.address) for one in joined]
        asks = (self._met or self._named) and len(sidecars) == self.mesh.bootstrap.world_size
        if asks and sidecars != self._sidecars and not self._making.locked():
            async with self._making:  # while one is made, some ranks have it and others do not
                states = {one.name: one for one in await self.all(of_all=True) if one.name}
                self._named |= {name: one for name, one in states.items() if one.whole}
                gone = [
                    replace(self._named[name], reason=_GONE) for name in self._named.keys() - states
                ]
                self._lost = [*(one for one in states.values() if not one.whole), *gone]
                self._sidecars = sidecars
        return self._lost

    async def find(self, to: str | int) -> KeptState:
        """The state named by a mark, or the newest of a step.

        Raises:
            NotFoundError: When there is none.
            ConflictError: When not all ranks have it.
        """
        states = await self.all()
        named = [
            one for one in states if (one.name == to if isinstance(to, str) else one.step == to)
        ]
        whole = [one for one in named if one.whole]
        if whole:
            # Prefer a mark: the next standing snapshot may replace the last one.
            return max(whole, key=lambda one: (bool(one.name), one.edits))
        if named:
            raise ConflictError(f"{_called(to)}: {named[0].reason}")
        there = [_named(one) for one in states if one.whole]
        if there:
            raise NotFoundError(f"{_called(to)} is not kept; there is {', '.join(there)}")
        raise NotFoundError(
            f"{_called(to)} is not kept; there are no restore points: mesh.mark(name), or "
            "paramd mark NAME, makes one"
        )

    async def make(self, by: Principal, name: str) -> KeptState:
        """Keep the state of the next common boundary under a name.

        Raises:
            ExistsError: The name is taken.
            ExhaustedError: No memory for it.
            ConflictError: This training keeps no states, or is paused by somebody else.
            UnreachableError: Not all ranks are joined.
        """
        self.mesh.check()
        async with self._making:
            self._sidecars = []
            if any(one.name == name for one in await self.all()):
                raise ExistsError(
                    f"restore point {name!r} exists already; choose another name, or delete it "
                    "(paramd unmark)"
                )
            async with self.records.recorded(by, "mark.create", {"mark": name}, self.mesh) as entry:
                made = self._named[name] = await self._made(by, name)
                entry.outcome(step=made.step, size_bytes=made.size_bytes)
        self.on_change(self.mesh.job, name, made)
        return made

    async def drop(self, by: Principal, name: str) -> bool:
        """Delete a mark on all ranks; False if there was none. Idempotent."""
        asked = {"mark": name}
        async with self._making, self.records.recorded(by, "mark.delete", asked, self.mesh):
            view = self.mesh.coordinator.joined()
            dropped = await self._forget(view, name)
            self._named.pop(name, None)
            self._lost = [one for one in self._lost if one.name != name]
            self._sidecars = []
        if dropped:
            self.on_change(self.mesh.job, name, None)
        return dropped

    async def _forget(self, view: MeshView, name: str) -> bool:
        request = pb.DropMarkRequest(mark=name)
        found = await on_all(view, lambda rank, at: self.mesh.calls.ask(rank, at, request))
        return any(one.dropped for one in found.values())

    async def _made(self, by: Principal, name: str) -> KeptState:
        view = self.mesh.coordinator.joined()

        async def make(rank: int, address: str, *, fill: bool) -> pb.KeptState:
            """Have memory allocated for it, or with `fill` the state copied."""
            request = pb.MakeMarkRequest(mark=name, by=by.name, fill=fill)
            answer = await self.mesh.calls.ask(rank, address, request, timeout_s=STAGE_S)
            state: pb.KeptState = answer.state
            return state

        try:
            # Before training is paused: allocating memory takes longer than the copy.
            await on_all(view, lambda rank, at: make(rank, at, fill=False))
            async with self.pause.during(by):
                found = await on_all(view, lambda rank, at: make(rank, at, fill=True))
            (made,) = merged({rank: [one] for rank, one in found.items()}, len(view.ranks))[:1]
            if made.reason:
                raise ConflictError(f"the ranks' copies are of different states: {made.reason}")
        except BaseException:
            with suppress(Exception):
                await asyncio.shield(self._forget(view, name))
            raise
        return made


def _called(to: str | int) -> str:
    return f"restore point {to!r}" if isinstance(to, str) else f"step {to}"


def _named(one: KeptState) -> str:
    return f"{one.name!r} (step {one.step})" if one.name else f"step {one.step}"


def merged(found: Mapping[int, Sequence[pb.KeptState]], world_size: int) -> list[KeptState]:
    """The ranks' states as states of the job, by step. Pure."""
    groups: dict[tuple[str, int, int, int], dict[int, pb.KeptState]] = defaultdict(dict)
    for rank, states in found.items():
        for state in states:
            groups[state.mark, state.step, state.lineage, state.edits][rank] = state
    merged = []
    for (mark, step, lineage, edits), parts in groups.items():
        # Standing snapshots of single ranks are replaced all the time.
        if not mark and len(parts) < world_size:
            continue
        kept = list(parts.values())
        made_s = max(one.made_s for one in kept)
        reason = _why_not_whole(parts, world_size)
        merged.append(
            KeptState(
                name=mark,
                step=step,
                lineage=lineage,
                edits=edits,
                size_bytes=sum(one.size_bytes for one in kept),
                made_s=made_s if made_s else None,
                by=kept[0].by,
                whole=not reason,
                reason=reason,
            )
        )
    return sorted(merged, key=lambda one: (one.step, one.made_s if one.made_s is not None else 0.0))


def _why_not_whole(parts: dict[int, pb.KeptState], world_size: int) -> str:
    unready = sorted(rank for rank, one in parts.items() if not one.whole)
    if unready:
        return f"ranks {listed(unready)} have not finished it"
    missing = sorted(set(range(world_size)) - set(parts))
    return (
        f"ranks {listed(missing)} do not have it (their sidecars were restarted)" if missing else ""
    )
