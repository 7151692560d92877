"""Exporting as methods of AsyncMesh."""

# `timeout=` is what users of every other client write; it bounds retries, not one await.
# ruff: noqa: ASYNC109

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from paramd.errors import DeadlineError, UnreachableError
from paramd.layout.exports.settings import NameMap
from paramd.mesh.exports.calls import ExportCalls, new_export_id, read_assets
from paramd.mesh.exports.results import AsyncExport, ExportInfo, Progress
from paramd.mesh.loop import UNSET, Timeout, deadline
from paramd.mesh.reading.select import choose

if TYPE_CHECKING:
    import torch

    from paramd.layout.types import Layout
    from paramd.mesh.edits.results import Edit
    from paramd.mesh.exports.download import Downloaded
    from paramd.mesh.exports.file_plan import Wanted
    from paramd.mesh.peers.control import RestClient
    from paramd.mesh.peers.discovery import Reach
    from paramd.mesh.peers.sidecars import Sidecars
    from paramd.mesh.reading.transfer import Transfer

_LOOK_S: Final = 0.5
_FIRST_LOOK_S: Final = 0.05
_AWAY_S: Final = 60.0
_CREATE_S: Final = 15.0


class AsyncDownloading:
    """Parameters into local files. Part of AsyncMesh."""

    _rest: RestClient
    _reach: Reach
    _transfer: Transfer

    async def download(
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

        After a break (of the network, or of this program) the same call goes on where it
        was, with the same step, while the snapshot's lease of two minutes lives; else it
        begins anew and says so. Bytes that are here are checked before they count.

        Args:
            path: The file; it appears when it is whole. Its partial file and journal stand
                beside it, hidden.
            patterns: Globs over names, as in `summon`; all when none is given.
            dtype: Dtype of all tensors; None keeps each one's own.
            buffers: Whether buffers may match.
            replace: Whether a file of that name may be replaced.
            name_map: Names in the model to names in the file; each may hold one "*".
            timeout: Seconds; None waits for as long as it takes.
            moved: Told bytes that are there, and bytes in all.
            said: Told in words when it goes on, tries again or begins anew.

        Raises: as `summon`, and
            ConflictError: the name is taken, or another process downloads to it.
            ExhaustedError: the disk has not the room.
        """
        from paramd.mesh.exports.download import Download
        from paramd.mesh.exports.file_plan import Wanted, request_key
        from paramd.mesh.exports.journal import PartialFile

        await self._transfer.load_torch()
        rules = NameMap.of(name_map) if name_map else NameMap()

        async def wanted(sidecars: Sidecars) -> Wanted:
            chosen = await choose(self._reach, sidecars, patterns or ("*",), buffers=buffers)
            names = rules.apply(item[0] for item in chosen.names)
            aliases = {alias: names[item[0]] for item in chosen.names for alias in item[1:]}
            document = sidecars.document
            return Wanted(
                chosen=chosen,
                dtype=dtype,
                names=names,
                metadata={**aliases, "format": "pt", "paramd_job": document.job},
                key=request_key(document.job, document.layout_digest, chosen.plan, dtype, names),
            )

        file = PartialFile(Path(path))
        file.check(replace=replace)
        download = Download(self._reach, file, replace=replace, moved=moved, said=said)
        return await download.run(wanted, deadline(timeout, 0.0))


class AsyncExporting(AsyncDownloading):
    """Checkpoints of a running job, at places that its operator allows. Part of AsyncMesh."""

    if TYPE_CHECKING:

        async def read_layout(self) -> Layout: ...

        async def edit(
            self,
            *patterns: str,
            set: torch.Tensor | Mapping[str, torch.Tensor] | None = None,
            if_step: int | None = None,
            reset_moments: bool = False,
            note: str = "",
            timeout: Timeout = UNSET,
        ) -> Edit: ...

    async def export(
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
    ) -> AsyncExport:
        """Begins to write a checkpoint of one step; training goes on. See docs/exports.md.

        Args:
            destination: Name of a configured destination, "/", a relative key, such as
                "checkpoints/step-100".
            format: "safetensors" as Hugging Face lays models out, or "dcp".
            max_shard_size: Most bytes of tensors in one file of safetensors, a number or
                a text such as "5GB", which is the default.
            dtype: Cast floating tensors to it; None keeps each one's own.
            include: Some of "parameters", "buffers", "optimizer".
            tied: "drop" writes tied tensors once, "keep" under each name.
            overwrite: Whether what stands at the key may be replaced.
            name_map: Names in the model to names in the files; each may hold one "*".
            assets: Directory whose plain files are copied beside, 64 MiB in all.
            verify: Read everything back before it becomes visible.
            timeout_s: The export fails after so many seconds; None: the control plane's limit.

        Returns:
            The export under way; its `wait()` returns when it is there.

        Raises:
            UsageError: an argument is wrong, or the destination's name or key is none.
            NotFoundError: no such destination. DeniedError: the role does not suffice.
            ExhaustedError: too many exports wait.
        """
        body = _body(
            destination, format, max_shard_size, dtype, include, tied, overwrite, name_map, verify
        )
        if timeout_s is not None:
            body["timeout_s"] = timeout_s
        body["assets"] = await self._upload(body["id"], assets)
        info = await self._exports().create(body, time.monotonic() + _CREATE_S)
        return AsyncExport(self, info)

    async def exports(self, *, state: str | None = None, limit: int = 100) -> list[ExportInfo]:
        """The newest exports of the job, newest first; without their files.

        Raises:
            UsageError: `state` is no state.
        """
        return await self._exports().all(state=state, limit=limit)

    async def get_export(self, export_id: str) -> ExportInfo:
        """One export, with its files. Raises NotFoundError."""
        return await self._exports().get(export_id)

    async def cancel_export(self, export_id: str) -> ExportInfo:
        """Ends an export. Raises ConflictError when it has ended in another way."""
        return await self._exports().cancel(export_id, time.monotonic() + _CREATE_S)

    async def export_ended(
        self, info: ExportInfo, timeout: float | None = None, progress: Progress | None = None
    ) -> ExportInfo:
        """The export once it has ended. Args, Raises: as `AsyncExport.wait`."""
        began_s = heard_s = time.monotonic()
        pause_s = _FIRST_LOOK_S
        while not info.ended:
            left_s = timeout - (time.monotonic() - began_s) if timeout is not None else pause_s
            if left_s <= 0:
                raise DeadlineError(
                    f"export {info.id} is {info.state} after {timeout:g} s and goes on; wait "
                    f"longer, or end it: paramd exports --cancel {info.id}"
                )
            await asyncio.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LOOK_S)
            try:
                info = await self.get_export(info.id)
            except UnreachableError:
                # A control plane that was killed goes on with it when it is back.
                if time.monotonic() - heard_s > _AWAY_S:
                    raise
                continue
            heard_s = time.monotonic()
            if progress is not None:
                progress(info)
        return info

    async def restore(
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

        On all ranks at one step, or on none. Buffers and the optimizer's state stay as they
        are. What was renamed gets its name back; what was cast is cast back.

        Args:
            destination: Name of a configured destination, "/", key.
            if_step: As in `edit`.
            reset_moments: Zero the optimizer's state of the parameters, too.
            note: Why, for the log; None says what was restored.
            timeout: Seconds; None waits for as long as it takes.
            moved: Told bytes read of the export, and bytes in all.

        Raises: as `edit`, and
            NotFoundError: no export stands there, or it has not all parameters.
            UsageError: it is no export of safetensors, or a shape differs.
            DataLossError: its files are not what was exported.
        """
        from paramd.mesh.exports.restoring import ExportFiles, values_of

        await self._transfer.load_torch()
        layout = await self.read_layout()
        files = ExportFiles(self._rest, self._reach.document.job, destination)
        manifest = await files.manifest()
        tensors = await files.tensors(manifest, moved)
        values = values_of(layout, tensors, manifest["renamed"])
        said = f"restored {destination}, step {manifest['step']} of {manifest['job']}"
        return await self.edit(
            set=values,
            if_step=if_step,
            reset_moments=reset_moments,
            note=note if note is not None else said,
            timeout=timeout,
        )

    async def create_export_schedule(
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

        Args:
            destination: As in `export`. "{step}" in the key becomes the step; without it
                each export goes to "<key>/step-<step>".
            every_steps: At, or soon after, each multiple of it.
            every_s: So many seconds after the last one began.
            keep_last: The newest so many stay; None removes none.
            keep_every: Beside them every so many-th stays.

        An occasion that comes while the previous export runs is skipped. Retention removes
        only what this schedule itself wrote. Other Args, Raises: as `export`.
        """
        body = _body(
            destination, format, max_shard_size, dtype, include, tied, False, name_map, verify
        )
        del body["overwrite"]
        rhythm = {
            "every_steps": every_steps,
            "every_s": every_s,
            "keep_last": keep_last,
            "keep_every": keep_every,
        }
        body |= {key: value for key, value in rhythm.items() if value is not None}
        body["assets"] = await self._upload(body["id"], assets)
        return await self._exports().create_schedule(body)

    async def export_schedules(self) -> list[dict[str, Any]]:
        """Schedules in force, oldest first."""
        return await self._exports().schedules()

    async def delete_export_schedule(self, schedule_id: str) -> dict[str, Any]:
        """Ends a schedule; what it exported stays. Raises NotFoundError."""
        return await self._exports().delete_schedule(schedule_id)

    async def destinations(self) -> list[dict[str, Any]]:
        """Names and kinds of the places that exports may go to."""
        return await self._exports().destinations()

    async def _upload(self, owner_id: str, assets: str | Path | None) -> list[str]:
        if assets is None:
            return []
        files = await asyncio.to_thread(read_assets, Path(assets))
        await self._exports().upload_assets(owner_id, files)
        return [name for name, _ in files]

    def _exports(self) -> ExportCalls:
        return ExportCalls(self._rest, self._reach.document.job)


def _body(
    destination: str,
    format: str,
    max_shard_size: str | int | None,
    dtype: str | None,
    include: Sequence[str],
    tied: str,
    overwrite: bool,
    name_map: Mapping[str, str] | None,
    verify: bool,
) -> dict[str, Any]:
    body: dict[str, Any] = {
        "id": new_export_id(),
        "destination": destination,
        "format": format,
        "include": [include] if isinstance(include, str) else list(include),
        "tied": tied,
        "overwrite": overwrite,
        "verify": verify,
    }
    if max_shard_size is not None:
        body["max_shard_size"] = str(max_shard_size)
    if dtype is not None:
        body["dtype"] = dtype.removeprefix("torch.")
    if name_map:
        body["name_map"] = dict(name_map)
    return body
