"""`paramd status`: what every rank is doing."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from paramd.cli.options import Output, Target, with_target
from paramd.cli.output import Column, Listing, count, emit, seconds, size
from paramd.cli.shell import say
from paramd.errors import PartialError

if TYPE_CHECKING:
    from paramd.mesh.results import MeshStatus

COLUMNS = (
    Column("rank", "RANK", right=True),
    Column("phase", "PHASE"),
    Column("step", "STEP", lambda step: count(step) if step >= 0 else "-", right=True),
    Column("step_time_s", "STEP TIME", lambda s: seconds(s) if s else "-", right=True),
    Column("stall_count", "STALLS", count, right=True),
    Column("stall_total_s", "STALLED", seconds, right=True),
    Column("arena_bytes", "ARENA", size, right=True),
    Column("snapshot_bytes", "SNAPSHOTS", size, right=True),
    Column("reason", "NOTE"),
)


@with_target
def status(target: Target, output: Output = None) -> None:
    """Show what every rank of a job is doing.

    STALLS counts the updates that waited for a copy, STALLED is the time they
    waited. Exit code 6 when a rank does not answer or cannot be served.
    """
    with target.connect() as mesh:
        found = mesh.status()
    emit(listing(found), target.format)
    say(f"job {found.job}, epoch {found.epoch}, step {found.step}")
    bad = [row.rank for row in found if row.reason]
    if bad or len(found) < found.world_size:
        raise PartialError(
            f"{len(found) - len(bad)} of {found.world_size} ranks are well; see NOTE, the "
            "sidecars' logs in the state dir, and: paramd doctor"
        )


def listing(found: MeshStatus) -> Listing:
    """The answer as rows."""
    return Listing(
        name="ranks",
        rows=[asdict(row) for row in found],
        columns=COLUMNS,
        about={"job": found.job, "epoch": found.epoch, "world_size": found.world_size},
        id_key="rank",
    )
