"""Checkpoints: exported by the ranks, downloaded to here, restored into the training."""

# `timeout=` as in other clients; it bounds the whole call with its retries, not one await.
# ruff: noqa: ASYNC109

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paramd.errors import UsageError
from paramd.layout.exports.settings import NameMap
from paramd.layout.select import Pattern
from paramd.mesh.edits.calls import Edit
from paramd.mesh.exports.calls import (
    MAX_TIMEOUT_S,
    AsyncExport,
    ExportCalls,
    ExportFiles,
    ExportInfo,
    Exports,
    check_no_path,
    export_body,
    located,
)
from paramd.mesh.exports.calls import Progress as ExportProgress
from paramd.mesh.exports.download import Content, Download, Downloaded, PartialFile
from paramd.mesh.loop import UNSET, Timeout, allowed_s, deadline
from paramd.mesh.parts.edits import EditsPart
from paramd.mesh.parts.host import MeshHost
from paramd.mesh.reading.stream import Transport
from paramd.mesh.reading.transfer import check_transport
from paramd.mesh.results import Records, file_format

if TYPE_CHECKING:
    import torch


class ExportsPart(EditsPart):
    """Exports, their schedules and destinations; downloads; restoring, which is an edit."""

    def __init__(self, host: MeshHost) -> None:
        super().__init__(host)
        self._exports = ExportCalls(host.job_rest)

    async def export(
        self,
        destination: str | None = None,
        *,
        format: str = "safetensors",
        max_shard_size: str | int | None = None,
        dtype: str | None = None,
        include: Sequence[str] = ("parameters", "buffers"),
        tied: str = "drop",
        names: Sequence[str] | None = None,
        replica: int = 0,
        overwrite: bool = False,
        name_map: Mapping[str, str] | None = None,
        adapter: str | None = None,
        merge: bool = False,
        weights_from: str | None = None,
        assets: str | Path | None = None,
        verify: bool = True,
        timeout: Timeout = UNSET,
    ) -> AsyncExport:
        """Start exporting a checkpoint of one step; training continues. See docs/exports.md.

        Args:
            destination: "NAME/KEY": one of `destinations` and a relative key, such as
                "checkpoints/step-100". A name alone stands for "NAME/step-{step}", a key alone for
                that key in "checkpoints", or in the only destination; None for both.
            format: "safetensors" in Hugging Face's file layout, "dcp", or "peft" for an adapter
                as `PeftModel.from_pretrained` loads it.
            max_shard_size: Maximum tensor bytes per safetensors file, a number or a text such
                as "5GB", the default.
            dtype: Cast floating tensors to it; None keeps each one's own.
            include: Any of "parameters", "buffers", "optimizer".
            tied: "drop" writes tied tensors once, "keep" under each name.
            names: Names and patterns of the tensors to write, each in full, with their optimizer
                state if that is included; None means all.
            replica: A rank; everything is of its replica, as in `summon`. The manifest names it,
                and lists in `replicas_differ` the tensors that differ on other ranks.
            overwrite: Replace an existing export at the key.
            name_map: Names in the model to names in the files; each may hold one "*".
            adapter: The adapter that format "peft" or `merge` is about; None means the only one.
            merge: Write the base model, under its own names, with the adapter (LoRA) merged in.
            weights_from: Write other weights than the parameters: a model that `attach` was
                given by name, such as "ema", a kind of the optimizers' state, or "schedule-free"
                (docs/averages.md).
            assets: Directory whose regular files are copied into the export, 64 MiB in total.
            verify: Read everything back before publishing.
            timeout: Seconds for the whole export, or a text such as "20m"; one hour by default,
                None means the longest that the control plane allows, a day.

        Returns:
            The running export; `wait()` returns when it is published.

        Raises:
            UsageError: an argument is wrong, or the destination's name or key is malformed.
            NotFoundError: no such destination. DeniedError: the role does not suffice.
            ExhaustedError: too many exports are queued.
        """
        where = await self._located(destination)
        body = export_body(
            where,
            format,
            max_shard_size,
            dtype,
            include,
            tied,
            name_map,
            verify,
            names,
            replica,
            adapter,
            merge,
            weights_from,
        ) | {"overwrite": overwrite}
        if timeout is not UNSET:
            body["timeout_s"] = MAX_TIMEOUT_S if timeout is None else allowed_s(timeout)
        return AsyncExport(self._exports, await self._exports.create(body, assets))

    async def exports(self, *, state: str | None = None, limit: int = 100) -> Exports:
        """The newest exports of the job, newest first; without their files.

        Raises:
            UsageError: there is no such state.
        """
        return Exports(await self._exports.all(state=state, limit=limit))

    async def get_export(self, export_id: str) -> ExportInfo:
        """One export, with its files, by its id or its first characters.

        Raises:
            NotFoundError, UsageError: none, or several, begin so.
        """
        return await self._exports.get(export_id)

    async def cancel_export(self, export_id: str) -> ExportInfo:
        """Cancel an export.

        Raises:
            ConflictError: When it is DONE or FAILED, and as `get_export`.
        """
        return await self._exports.cancel(export_id)

    async def export_ended(
        self, info: ExportInfo, timeout: float | None = None, progress: ExportProgress | None = None
    ) -> ExportInfo:
        """The export once it has ended. Args, Raises: as `AsyncExport.wait`."""
        return await self._exports.ended(info, timeout, progress)

    async def download(
        self,
        path: str | Path,
        *patterns: Pattern,
        dtype: torch.dtype | str | None = None,
        buffers: bool = False,
        replica: int | None = None,
        overwrite: bool = False,
        name_map: Mapping[str, str] | None = None,
        merge: bool = False,
        adapter: str | None = None,
        timeout: float | None = None,
        transport: Transport = "auto",
        progress: Callable[[int, int], object] = lambda done_bytes, size_bytes: None,
        on_message: Callable[[str], object] = lambda text: None,
    ) -> Downloaded:
        """Download full tensors of one step into a local safetensors file.

        After an interruption (of the network, or of this program) the same call resumes at the
        same step while the snapshot's two-minute lease lasts, and starts over otherwise. What
        the earlier attempt's bytes belong to is verified before they are used.

        Args:
            path: The file, "x.safetensors" or without a suffix; it appears once complete. A hidden
                partial file stands next to it until then.
            patterns: Globs over names, as in `summon`; none means all.
            dtype: Dtype of all tensors; None keeps each one's own.
            buffers: Match buffers too.
            replica: As in `summon`.
            overwrite: Replace an existing file.
            name_map: Names in the model to names in the file; each may hold one "*".
            merge: Merge an adapter (LoRA) into its base here, and name tensors as the base model
                does. The patterns are over the training's own names.
            adapter: The adapter to merge; None means the only one.
            timeout: Seconds; None, the default, means no limit.
            transport: As in `summon`.
            progress: Called with bytes done and total bytes.
            on_message: Called with a message when the download resumes, retries or starts over.

        Raises: as `summon`, and
            UsageError: the file's name says another format.
            ConflictError: the file exists, or another process downloads to it.
            ExhaustedError: not enough disk space.
        """
        check_transport(transport)
        if file_format(path) != "safetensors":
            raise UsageError(
                f"path: {str(path)!r}; a download is written as safetensors, so expected "
                "NAME.safetensors. A file for torch.load: "
                f"mesh.summon('*', buffers=True).save({str(path)!r})"
            )
        await self._host.transfer.load_torch()
        content = Content(
            patterns=patterns or ("*",),
            dtype=await self._host.transfer.dtype(dtype),
            buffers=buffers,
            name_map=NameMap.of(name_map) if name_map else NameMap(),
            replica=replica,
            merge=merge,
            adapter=adapter if adapter is not None else "",
        )
        file = PartialFile(Path(path))
        file.check(overwrite=overwrite)
        download = Download(
            reach=self._host.reach,
            transfer=self._host.transfer,
            file=file,
            overwrite=overwrite,
            transport=transport,
            moved=progress,
            said=on_message,
        )
        return await download.run(content, deadline(timeout, 0.0))

    async def restore(
        self,
        destination: str,
        *,
        if_step: int | None = None,
        reset_moments: bool = False,
        note: str | None = None,
        timeout: float | None = None,
        progress: Callable[[int, int], object] = lambda done_bytes, size_bytes: None,
    ) -> Edit:
        """Restore the parameters of a safetensors export into the running mesh, as one edit.

        Applied on all ranks at one step, or on none. Buffers and optimizer state are left
        alone. The export's renames and casts are reversed.

        Args:
            destination: "NAME/KEY", as in `export`.
            if_step: As in `edit`.
            reset_moments: Also zero the parameters' optimizer state.
            note: Reason, for the log; None names the export.
            progress: Called with bytes read and total bytes.

        Raises: as `edit`, and
            NotFoundError: there is no export, or it lacks a parameter.
            UsageError: it is not a safetensors export, or a shape differs.
            DataLossError: a file does not match the manifest's checksum.
        """
        self._edits.check_outside("restore")
        await self._host.transfer.load_torch()
        where = await self._located(destination)
        if "{" in where:
            raise UsageError(f"destination: {destination!r}; expected NAME/KEY, see mesh.exports()")
        files = ExportFiles(self._host.rest, self._host.job_rest.job, where)
        values, said = await files.values(await self.read_layout(), progress)
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
        every_steps: int,
        keep_last: int | None = None,
        keep_every: int | None = None,
        format: str = "safetensors",
        max_shard_size: str | int | None = None,
        dtype: str | None = None,
        include: Sequence[str] = ("parameters", "buffers"),
        tied: str = "drop",
        names: Sequence[str] | None = None,
        replica: int = 0,
        name_map: Mapping[str, str] | None = None,
        adapter: str | None = None,
        merge: bool = False,
        weights_from: str | None = None,
        assets: str | Path | None = None,
        verify: bool = True,
    ) -> dict[str, Any]:
        """Schedule exports at multiples of a step, until the schedule is deleted.

        Args:
            destination: As in `export`. "{step}" in the key becomes the step; without it
                each export goes to "<key>/step-<step>".
            every_steps: Export at, or soon after, each multiple of this step.
            keep_last: Number of newest exports to keep; None keeps all.
            keep_every: Also keep every n-th export.

        An export due while the previous one runs is skipped. Retention removes only
        exports of this schedule. Other Args, Raises: as `export`.
        """
        where = await self._located(destination)
        body = export_body(
            where,
            format,
            max_shard_size,
            dtype,
            include,
            tied,
            name_map,
            verify,
            names,
            replica,
            adapter,
            merge,
            weights_from,
        )
        cadence = {"every_steps": every_steps, "keep_last": keep_last, "keep_every": keep_every}
        body |= {key: value for key, value in cadence.items() if value is not None}
        return await self._exports.create_schedule(body, assets)

    async def export_schedules(self) -> Records[dict[str, Any]]:
        """Active schedules, oldest first."""
        return Records(await self._exports.schedules())

    async def delete_export_schedule(self, schedule_id: str) -> dict[str, Any]:
        """Delete a schedule; its exports stay. Raises NotFoundError."""
        return await self._exports.delete_schedule(schedule_id)

    async def destinations(self) -> Records[dict[str, Any]]:
        """Names and kinds of the export destinations; for admins their roots, too."""
        found = await self._host.rest.send("GET", "/destinations")
        return Records(dict(one) for one in found["destinations"])

    async def add_destination(self, name: str, root: str) -> None:
        """Add an export destination, whose root then stays. Needs role admin. Idempotent.

        Args:
            root: Absolute path of a directory of the job's hosts, or "s3://bucket/prefix".

        Raises:
            UsageError: name or root is malformed. ExistsError: the name has another root.
            DeniedError: not an admin, or the operator configured `{}`: no destinations.
        """
        await self._host.rest.send("POST", "/destinations", {"name": name, "root": root})

    async def _located(self, given: str | None) -> str:
        """As "NAME/KEY". Raises as `check_no_path` and `located`."""
        check_no_path(given)
        if given is not None and "/" in given:
            return given
        return located(given, [str(one["name"]) for one in await self.destinations()])
