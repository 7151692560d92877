"""What a training does, and what changes in it."""

# `timeout=` as in other clients; it bounds the whole call with its retries, not one await.
# ruff: noqa: ASYNC109

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from paramd.layout.select import Pattern
from paramd.mesh.edits.calls import Mark
from paramd.mesh.insight.diff import MARK, Now, compute_diff
from paramd.mesh.insight.reports import (
    Alerts,
    AlertState,
    RankLog,
    Why,
    ask_alerts,
    ask_log,
    ask_why,
)
from paramd.mesh.insight.spectrum import Spectrum, compute_spectrum
from paramd.mesh.insight.updates import Updates, compute_updates
from paramd.mesh.loop import UNSET, Timeout
from paramd.mesh.parts.host import MeshPart
from paramd.mesh.peers.discovery import SidecarFinder

if TYPE_CHECKING:
    import torch

    from paramd.mesh.insight.compare import Diff


class InsightPart(MeshPart):
    """Alerts, stacks and logs of the ranks; differences, updates and spectra of parameters."""

    async def alerts(
        self, *, state: AlertState = "all", incarnation: int | None = None, limit: int = 100
    ) -> Alerts:
        """The job's alerts: those firing, then those resolved, each newest first.

        Args:
            state: "firing" or "resolved" for those alone.
            incarnation: The run; None means the job's last one. Alerts of a past one may still be
                "firing" if its control plane ended before they were resolved.
            limit: Most alerts to return.

        Raises:
            UsageError: an argument is wrong.
        """
        return await ask_alerts(self._host.job_rest, state, incarnation, limit)

    async def why(self, *ranks: int, log_lines: int = 10) -> Why:
        """The ranks' present activity, and the rank that keeps the others waiting (`verdict`).

        Works while training hangs. Stacks, collectives, memory and the last lines of output come
        from the trainers through their sidecars, which neither stop nor slow them.

        Args:
            ranks: Those to ask, at most 64; none means all, or the 64 that look worst.
            log_lines: Last lines of each trainer's output, 0 to 100; of tokens that may not see
                logs, none.

        Raises:
            UsageError: an argument is wrong. NotFoundError: the job has no such rank.
            DeniedError: the token may not read.
        """
        return await ask_why(self._host.job_rest, ranks, log_lines)

    async def logs(self, rank: int, *, lines: int = 100) -> RankLog:
        """The last lines of a rank's sidecar, and of its trainer if that writes to a file.

        Also after the trainer has died, while its sidecar lingers: its last lines show why.
        Requires the editor or admin role, since logs may contain anything the script prints.

        Args:
            rank: Rank whose logs to read.
            lines: Most last lines of each log, 1 to 1000.

        Raises:
            UsageError: an argument is wrong. NotFoundError: the job has no such rank.
            DeniedError: the token may not see logs.
        """
        return await ask_log(self._host.job_rest, rank, lines)

    async def diff(
        self,
        a: Now | int | str | Path | Mark | Mapping[str, torch.Tensor] | MeshPart,
        b: Now | int | str | Path | Mark | Mapping[str, torch.Tensor] | MeshPart = "now",
        *patterns: Pattern,
        cells: int = 0,
        timeout: Timeout = UNSET,
    ) -> Diff:
        """The differences between the weights of a and b, tensor by tensor.

            mesh.diff("checkpoints/step-1000")         # a checkpoint and the training now
            mesh.diff("+1", "+101")                    # two steps to come, 100 steps apart
            mesh.diff("mark:before")                   # a restore point and now
            mesh.diff(params)                          # tensors summoned before, and now
            mesh.diff(other)                           # another job, and this one

        Reads tensor by tensor while both states are pinned, so memory is that of a few tensors.

        Args:
            a, b: "now"; a step of this job to come, or "+N": N steps after the next one that can
                surely be asked for (both states must fit into the snapshots' budget);
                a restore point, as "mark:NAME" or a `Mark` with a name; "mark:STEP", a standing
                snapshot that is still kept (`marks`); a safetensors file or directory on this
                machine, such as an export; tensors by name; another mesh, as it is now.
            patterns: Globs over names; none means all parameters.
            cells: Also a heat map of each tensor's difference (`row.cells`), of at most this many
                rows and columns, up to 512; 0 for none.
            timeout: Seconds for all of it; 60 by default, None means no limit.

        Returns:
            Rows with name, norm (of the difference), relative norm, cosine, changed elements and
            the rows that differ most, the largest relative difference first.

        Raises:
            UsageError: an argument is wrong. ConflictError: a step is past, or the training has
                ended before it; or there is no such restore point. DeadlineError: it did not
                come in time. NotFoundError: a pattern matches nothing, a path does not exist.
            ParamdError: as `summon`.
        """
        await self._host.transfer.load_torch()
        return await compute_diff(
            self._host.reach,
            self._host.transfer,
            f"{MARK}{a.name}" if isinstance(a, Mark) else a,
            f"{MARK}{b.name}" if isinstance(b, Mark) else b,
            patterns or ("*",),
            self._host.deadline(timeout),
            _reach_of,
            cells=cells,
        )

    async def updates(
        self, *patterns: Pattern, steps: int = 1, timeout: Timeout = UNSET
    ) -> Updates:
        """The changes of each parameter by the next updates: norm, and its ratio to the weight.

        The sidecars compute it from snapshots of two steps, so no weights travel. Large selections
        are taken in groups, each with its own `step`. With `resume="auto"` also Adam's second
        moment and the effective learning rate, from memory that trainer and sidecar share.

        Args:
            patterns: Globs over names; none means all parameters.
            steps: Number of updates to measure together.

        Raises:
            UsageError: `steps` is out of range. ConflictError: the parameters are mirrored.
            DeadlineError: training is too quick or has stopped, so no two steps could be pinned.
            ParamdError: as `summon`.
        """
        return await compute_updates(
            self._host.reach, patterns or ("*",), self._host.deadline(timeout), steps
        )

    async def spectrum(self, name: str, k: int = 8, *, timeout: Timeout = UNSET) -> Spectrum:
        """The largest singular values of one weight, and its dead and equal rows.

        The sidecars multiply their shards with narrow matrices, so the weight never travels. Work
        is bounded: at most 256 products with a column. A weight with a side of at most 128 is
        exact, with all its singular values; of larger ones the condition number is a lower bound.

        Args:
            name: A parameter of 2 dims or more (those beyond the second count as columns) and
                floating-point numbers, or a slice of it.
            k: Number of singular values, 1 to 32.

        Raises:
            UsageError: not exactly one matrix, k is out of range, or numpy is not installed.
            ParamdError: as `summon`.
        """
        return await compute_spectrum(self._host.reach, name, k, self._host.deadline(timeout))


def _reach_of(source: object) -> SidecarFinder | None:
    """What finds the sidecars of another job's mesh; None for anything else."""
    return source._host.reach if isinstance(source, MeshPart) else None
