"""Exporting as methods of Mesh: thin twins of those in methods.py."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from paramd.mesh.exports import Export, ExportInfo, Progress

if TYPE_CHECKING:
    import torch

    from paramd.mesh.amesh import AsyncMesh
    from paramd.mesh.editing.results import Edit
    from paramd.mesh.exporting.download import Downloaded

Result = TypeVar("Result")


class Exporting:
    """Checkpoints of a running job, at places that its operator allows. Part of Mesh."""

    _mesh: AsyncMesh

    if TYPE_CHECKING:

        def _run(self, work: Coroutine[Any, Any, Result]) -> Result: ...

    def export(
        self,
        destination: str,
        *,
        format: str = "safetensors",
        max_shard_size: str | int | None = None,
        dtype: str | None = None,
        include: Sequence[str] = ("parameters", "buffers"),
        tied: str = "drop",
        overwrite: bool = False,
        name_map: Mapping[str, str] | None = None,
        assets: str | Path | None = None,
        verify: bool = True,
        timeout_s: float | None = None,
    ) -> Export:
        """Begins to write a checkpoint of one step; training goes on. See docs/exports.md.

        Args, Raises: as `AsyncMesh.export`. Returns the export under way; its `wait()`
        returns when it is there.
        """
        begun = self._run(
            self._mesh.export(
                destination,
                format=format,
                max_shard_size=max_shard_size,
                dtype=dtype,
                include=include,
                tied=tied,
                overwrite=overwrite,
                name_map=name_map,
                assets=assets,
                verify=verify,
                timeout_s=timeout_s,
            )
        )
        return Export(self, begun.info)

    def download(
        self,
        path: str | Path,
        *patterns: str,
        dtype: torch.dtype | None = None,
        buffers: bool = False,
        replace: bool = False,
        name_map: Mapping[str, str] | None = None,
        timeout: float | None = None,
        moved: Callable[[int, int], object] = lambda done_bytes, size_bytes: None,
        said: Callable[[str], object] = lambda text: None,
    ) -> Downloaded:
        """Full tensors of one step into a local safetensors file; training goes on.

        After a break the same call goes on where it was. Args, Raises: as
        `AsyncMesh.download`.
        """
        return self._run(
            self._mesh.download(
                path,
                *patterns,
                dtype=dtype,
                buffers=buffers,
                replace=replace,
                name_map=name_map,
                timeout=timeout,
                moved=moved,
                said=said,
            )
        )

    def exports(self, *, state: str | None = None, limit: int = 100) -> list[ExportInfo]:
        """The newest exports of the job, newest first; without their files."""
        return self._run(self._mesh.exports(state=state, limit=limit))

    def get_export(self, export_id: str) -> ExportInfo:
        """One export, with its files. Raises NotFoundError."""
        return self._run(self._mesh.get_export(export_id))

    def cancel_export(self, export_id: str) -> ExportInfo:
        """Ends an export. Raises ConflictError when it has ended in another way."""
        return self._run(self._mesh.cancel_export(export_id))

    def export_ended(
        self, info: ExportInfo, timeout: float | None = None, progress: Progress | None = None
    ) -> ExportInfo:
        """The export once it has ended. Args, Raises: as `AsyncExport.wait`."""
        return self._run(self._mesh.export_ended(info, timeout, progress))

    def restore(
        self,
        destination: str,
        *,
        if_step: int | None = None,
        reset_moments: bool = False,
        note: str | None = None,
        timeout: float | None = None,
        moved: Callable[[int, int], object] = lambda done_bytes, size_bytes: None,
    ) -> Edit:
        """Writes the parameters of a safetensors export into the running mesh, as one edit.

        Args, Raises: as `AsyncMesh.restore`.
        """
        return self._run(
            self._mesh.restore(
                destination,
                if_step=if_step,
                reset_moments=reset_moments,
                note=note,
                timeout=timeout,
                moved=moved,
            )
        )

    def create_export_schedule(
        self,
        destination: str,
        *,
        every_steps: int | None = None,
        every_s: float | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        format: str = "safetensors",
        max_shard_size: str | int | None = None,
        dtype: str | None = None,
        include: Sequence[str] = ("parameters", "buffers"),
        tied: str = "drop",
        name_map: Mapping[str, str] | None = None,
        assets: str | Path | None = None,
        verify: bool = True,
    ) -> dict[str, Any]:
        """Exports every so many steps or seconds, until it is deleted.

        Args, Raises: as `AsyncMesh.create_export_schedule`.
        """
        return self._run(
            self._mesh.create_export_schedule(
                destination,
                every_steps=every_steps,
                every_s=every_s,
                keep_last=keep_last,
                keep_every=keep_every,
                format=format,
                max_shard_size=max_shard_size,
                dtype=dtype,
                include=include,
                tied=tied,
                name_map=name_map,
                assets=assets,
                verify=verify,
            )
        )

    def export_schedules(self) -> list[dict[str, Any]]:
        """Schedules in force, oldest first."""
        return self._run(self._mesh.export_schedules())

    def delete_export_schedule(self, schedule_id: str) -> dict[str, Any]:
        """Ends a schedule; what it exported stays. Raises NotFoundError."""
        return self._run(self._mesh.delete_export_schedule(schedule_id))

    def destinations(self) -> list[dict[str, Any]]:
        """Names and kinds of the places that exports may go to."""
        return self._run(self._mesh.destinations())
