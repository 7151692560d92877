"""Updates repeated, and compared bit by bit."""

# `timeout=` as in other clients; it bounds the whole call with its retries, not one await.
# ruff: noqa: ASYNC109

from __future__ import annotations

from paramd.layout.select import Pattern
from paramd.mesh.insight.replay import Replay, compute_replay
from paramd.mesh.loop import UNSET, Timeout
from paramd.mesh.parts.host import MeshPart


class IntegrityPart(MeshPart):
    """Proof that an update was computed as its optimizer computes it."""

    async def verify(self, *patterns: Pattern, rank: int = 0, timeout: Timeout = UNSET) -> Replay:
        """Repeat the next update of one rank, and compare it bit by bit.

        Its sidecar recomputes it on copies, with torch's own optimizer, from the parameters, the
        optimizer's state and the gradients that it consumed; training continues. A flipped bit is
        found without replicas. Needs `resume="auto"`, and Adam, AdamW or SGD of torch.optim.

        Args:
            patterns: Globs over names; none means all parameters.
            rank: Rank whose update to repeat.

        Returns:
            A row per parameter and kind of state, those that differ first; `clean` and `summary()`
            tell the verdict.

        Raises:
            ConflictError: the rank's optimizer state is not in memory that its sidecar shares.
            UsageError: no optimizer of the rank has a part of what matches.
            NotFoundError: the job has no such rank, or a pattern matches nothing.
            DeadlineError: training is too quick or has stopped, so no update was captured.
            ParamdError: as `summon`.
        """
        self._host.job_rest.check_outside("verify")
        return await compute_replay(
            self._host.reach, rank, patterns or ("*",), self._host.deadline(timeout)
        )
