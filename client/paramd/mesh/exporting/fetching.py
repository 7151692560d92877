"""Downloading as a method of AsyncMesh."""

# `timeout=` is what users of every other client write; it bounds retries, not one await.
# ruff: noqa: ASYNC109

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from paramd.layout.export_settings import NameMap
from paramd.mesh.choosing import choose
from paramd.mesh.timeouts import deadline

if TYPE_CHECKING:
    import torch

    from paramd.mesh.exporting.download import Downloaded
    from paramd.mesh.exporting.file_plan import Wanted
    from paramd.mesh.reach import Reach
    from paramd.mesh.sidecars import Sidecars
    from paramd.mesh.transfer import Transfer


class AsyncDownloading:
    """Parameters into local files. Part of AsyncMesh."""

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
        from paramd.mesh.exporting.download import Download
        from paramd.mesh.exporting.file_plan import Wanted, request_key
        from paramd.mesh.exporting.journal import PartialFile

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
