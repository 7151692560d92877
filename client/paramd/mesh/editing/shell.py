"""Editing and holding as methods of Mesh: thin twins of those in methods.py."""

from __future__ import annotations

from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from paramd.mesh.editing.holding import LEASE_S
from paramd.mesh.editing.results import Edit, Edits, Hold
from paramd.mesh.timeouts import UNSET, Timeout

if TYPE_CHECKING:
    import torch

    from paramd.mesh.amesh import AsyncMesh
    from paramd.mesh.editing.upload import Progress
    from paramd.mesh.results import Summoned
    from paramd.mesh.transfer import Transport

Result = TypeVar("Result")


class Editing:
    """What changes a running job. Part of Mesh."""

    _mesh: AsyncMesh

    if TYPE_CHECKING:

        def _run(self, work: Coroutine[Any, Any, Result]) -> Result: ...

    def edit(
        self,
        *patterns: str,
        fill: float | None = None,
        add: float | torch.Tensor | Mapping[str, torch.Tensor] | None = None,
        mul: float | torch.Tensor | Mapping[str, torch.Tensor] | None = None,
        set: torch.Tensor | Mapping[str, torch.Tensor] | None = None,
        lerp: torch.Tensor | Mapping[str, torch.Tensor] | None = None,
        weight: float | None = None,
        clamp: tuple[float | None, float | None] | None = None,
        if_step: int | None = None,
        reset_moments: bool = False,
        allow_nonfinite: bool = False,
        dry_run: bool = False,
        note: str = "",
        wait: bool = True,
        timeout: Timeout = UNSET,
        progress: Progress | None = None,
        transport: Transport = "auto",
    ) -> Edit:
        """Changes parameters of the running training, on all ranks at one step or on none.

        Args, Returns, Raises: as `AsyncMesh.edit`.
        """
        return self._run(
            self._mesh.edit(
                *patterns,
                fill=fill,
                add=add,
                mul=mul,
                set=set,
                lerp=lerp,
                weight=weight,
                clamp=clamp,
                if_step=if_step,
                reset_moments=reset_moments,
                allow_nonfinite=allow_nonfinite,
                dry_run=dry_run,
                note=note,
                wait=wait,
                timeout=timeout,
                progress=progress,
                transport=transport,
            )
        )

    def edits(self, *, state: str | None = None, limit: int = 100) -> Edits:
        """Edits of the job, newest first; `state` chooses one kind."""
        return self._run(self._mesh.edits(state=state, limit=limit))

    def get_edit(self, edit_id: str, *, wait: bool = False, timeout: Timeout = UNSET) -> Edit:
        """One edit, by its id or the first 8 characters or more of it."""
        return self._run(self._mesh.get_edit(edit_id, wait=wait, timeout=timeout))

    def abort_edit(self, edit_id: str) -> Edit:
        """Calls an edit off. Raises ConflictError when it is too late."""
        return self._run(self._mesh.abort_edit(edit_id))

    def undo(
        self, edit_id: str, *, force: bool = False, wait: bool = True, timeout: Timeout = UNSET
    ) -> Edit:
        """Undoes an applied edit; returns the edit that does it. Raises: as `AsyncMesh.undo`."""
        return self._run(self._mesh.undo(edit_id, force=force, wait=wait, timeout=timeout))

    def hold_state(self) -> Hold:
        """Whether training waits on request."""
        return self._run(self._mesh.hold_state())

    def pause(
        self, *, lease_s: float = LEASE_S, renew: bool = True, timeout: Timeout = UNSET
    ) -> Hold:
        """Has all ranks wait at their next common boundary. As `AsyncMesh.pause`."""
        return self._run(self._mesh.pause(lease_s=lease_s, renew=renew, timeout=timeout))

    def step(self, steps: int = 1, *, timeout: Timeout = UNSET) -> Hold:
        """Lets held training finish that many updates and waits again."""
        return self._run(self._mesh.step(steps, timeout=timeout))

    def resume(self, *, timeout: Timeout = UNSET) -> Hold:
        """Lets held training go on. Idempotent."""
        return self._run(self._mesh.resume(timeout=timeout))

    @contextmanager
    def writeback(
        self,
        *patterns: str,
        hold: bool = True,
        mode: str | None = None,
        if_step: bool = False,
        reset_moments: bool = False,
        note: str = "",
        timeout: Timeout = UNSET,
        progress: Progress | None = None,
    ) -> Iterator[Summoned]:
        """Full parameters to be changed; what was changed is written back at the end.

        `summon(..., writeback=True)` is the same. Args, Raises: as `AsyncMesh.writeback`.
        """
        block = self._mesh.writeback(
            *patterns,
            hold=hold,
            mode=mode,
            if_step=if_step,
            reset_moments=reset_moments,
            note=note,
            timeout=timeout,
            progress=progress,
        )
        found = self._run(block.__aenter__())
        try:
            yield found
        except BaseException as error:
            self._run(_left(block.__aexit__(type(error), error, error.__traceback__)))
            raise
        self._run(_left(block.__aexit__(None, None, None)))


async def _left(leaving: Any) -> None:
    await leaving
