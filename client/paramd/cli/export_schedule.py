"""`paramd export-schedule`: exports that begin by themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paramd.cli.exports import (
    AssetsDir,
    Dtype,
    FormatOption,
    Include,
    KeepTied,
    NameMapFile,
    NoVerify,
    ShardSize,
    included,
    read_name_map,
    when,
)
from paramd.cli.options import Output, Target, examples, with_target
from paramd.cli.output import Column, Listing, count, emit, seconds
from paramd.cli.shell import say
from paramd.errors import NotFoundError

if TYPE_CHECKING:
    from paramd.mesh.mesh import Mesh

schedule = typer.Typer(
    help="Export every so many steps or seconds, and keep some of it.", no_args_is_help=True
)

COLUMNS = (
    Column("id", "ID", lambda found: found[:8]),
    Column("destination", "DESTINATION"),
    Column("format", "FORMAT"),
    Column("every_steps", "STEPS", count, right=True),
    Column("every_s", "EVERY", seconds, right=True),
    Column("keep_last", "KEEP", count, right=True),
    Column("keep_every", "AND EACH", count, right=True),
    Column("last_step", "LAST STEP", count, right=True),
    Column("last_s", "LAST", when),
    Column("skipped_count", "SKIPPED", count, right=True),
    Column("actor", "WHO"),
)


@schedule.command(
    epilog=examples(
        "paramd export-schedule create checkpoints/run --every-steps 1000 --keep-last 3",
        "paramd export-schedule create checkpoints/run-{step} --every 600 --keep-last 2 "
        "--keep-every 10",
    )
)
@with_target
def create(
    target: Target,
    destination: Annotated[
        str, typer.Argument(metavar="DEST/KEY", help="{step} in it is named; else /step-N follows.")
    ],
    every_steps: Annotated[
        int | None, typer.Option("--every-steps", metavar="N", help="At, or soon after, each N-th.")
    ] = None,
    every_s: Annotated[
        float | None, typer.Option("--every", metavar="S", help="Every so many seconds.")
    ] = None,
    keep_last: Annotated[
        int | None, typer.Option("--keep-last", metavar="N", help="The newest N stay; else all.")
    ] = None,
    keep_every: Annotated[
        int | None, typer.Option("--keep-every", metavar="N", help="And each N-th beside them.")
    ] = None,
    format: FormatOption = "safetensors",
    max_shard_size: ShardSize = None,
    dtype: Dtype = None,
    include: Include = None,
    keep_tied: KeepTied = False,
    name_map: NameMapFile = None,
    assets: AssetsDir = None,
    no_verify: NoVerify = False,
    output: Output = None,
) -> None:
    """Have exports begin by themselves, from now on.

    An occasion that comes while the previous export runs is skipped. Only what the schedule
    itself wrote is ever removed.
    """
    with target.connect() as mesh:
        found = mesh.create_export_schedule(
            destination,
            every_steps=every_steps,
            every_s=every_s,
            keep_last=keep_last,
            keep_every=keep_every,
            format=format,
            max_shard_size=max_shard_size,
            dtype=dtype,
            include=included(include),
            tied="keep" if keep_tied else "drop",
            name_map=read_name_map(name_map) if name_map is not None else None,
            assets=assets,
            verify=not no_verify,
        )
        emit(_listing(mesh, [found]), target.format)


@schedule.command("list", epilog=examples("paramd export-schedule list -o json"))
@with_target
def list_(target: Target, output: Output = None) -> None:
    """List the schedules in force."""
    with target.connect() as mesh:
        emit(_listing(mesh, mesh.export_schedules()), target.format)


@schedule.command(epilog=examples("paramd export-schedule delete 3f2a9c01"))
@with_target
def delete(
    target: Target,
    schedule_id: Annotated[str, typer.Argument(metavar="ID", help="Its first characters suffice.")],
) -> None:
    """End a schedule. What it exported stays; an export under way goes on."""
    with target.connect() as mesh:
        ids = [str(one["id"]) for one in mesh.export_schedules()]
        found = [one for one in ids if one.startswith(schedule_id)]
        if len(found) != 1:
            raise NotFoundError(
                f"{len(found)} schedules' ids begin with {schedule_id[:40]!r}; see: paramd "
                "export-schedule list"
            )
        mesh.delete_export_schedule(found[0])
    say(f"schedule {found[0]} has ended; its exports stay")


def _listing(mesh: Mesh, rows: Sequence[Mapping[str, Any]]) -> Listing:
    return Listing(
        name="schedules", rows=rows, columns=COLUMNS, about={"job": mesh.job}, id_key="id"
    )
