"""`paramd export`, `exports`, `export-schedule`, `restore`: checkpoints of a running job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from paramd.answers import parsed_json
from paramd.bounds import NAME_MAP
from paramd.cli import completion
from paramd.cli.edit import show_edit
from paramd.cli.options import (
    Adapter,
    Dtype,
    Merge,
    Replica,
    Target,
    completed,
    duration,
    examples,
    with_output,
    with_target,
)
from paramd.cli.output import Column, Format, count, seconds, size, when
from paramd.cli.parts import CHANGE, LOOK, CommandPart, Commands
from paramd.cli.shell import say
from paramd.cli.summon import bar
from paramd.errors import UsageError
from paramd.layout.exports.settings import FORMATS

if TYPE_CHECKING:
    from paramd.mesh.exports.calls import ExportInfo
    from paramd.mesh.mesh import Mesh

_SHORT_CHARS = 8

FormatOption = Annotated[
    str, Option("--format", metavar="NAME", help=f"One of {', '.join(FORMATS)}.")
]
ShardSize = Annotated[
    str | None,
    Option(
        "--max-shard-size", metavar="SIZE", help="Maximum size of a safetensors file; default 5GB."
    ),
]
Include = Annotated[
    list[str] | None,
    Option(
        "--include",
        metavar="KIND",
        help="optimizer, in addition to parameters and buffers; or list every kind wanted.",
    ),
]
KeepTied = Annotated[
    bool, Option("--keep-tied", help="Write tied tensors under each of their names.")
]
Only = Annotated[
    list[str] | None,
    Option("--names", metavar="PATTERN", help="Only tensors that match; may be repeated."),
]
NameMapFile = Annotated[
    Path | None,
    Option("--name-map", metavar="FILE", help='JSON of renames, e.g. {"model.*": "*"}.'),
]
WeightsFrom = Annotated[
    str | None,
    Option(
        "--weights-from",
        metavar="NAME",
        help="Averaged weights: a model given to attach, a state of the optimizers, or "
        "schedule-free.",
    ),
]
AssetsDir = Annotated[
    Path | None, Option("--assets", metavar="DIR", help="Also copy the files in DIR, up to 64 MiB.")
]
NoVerify = Annotated[
    bool, Option("--no-verify", help="Publish without reading the files back first.")
]

schedule = typer.Typer(help="Export at multiples of a step, with retention.", no_args_is_help=True)


@with_output
def restore(
    target: Target,
    destination: Annotated[
        str, completed("DEST/KEY", "A safetensors export.", completion.finished_exports)
    ],
    if_step: Annotated[
        int | None, Option("--if-step", metavar="N", help="Apply only at this step.")
    ] = None,
    reset_moments: Annotated[
        bool, Option("--reset-moments", help="Also zero the optimizer state.")
    ] = False,
    note: Annotated[
        str | None, Option("--note", metavar="TEXT", help="Reason, kept with the edit.")
    ] = None,
) -> None:
    """Load the parameters of an export back into the running job, as one edit.

    On all ranks at one step, or on none. Buffers are left alone, and so is the
    optimizer state without --reset-moments. `paramd undo` reverts it.
    """
    with target.connect() as mesh, bar(destination) as moved:
        found = mesh.restore(
            destination,
            if_step=if_step,
            reset_moments=reset_moments,
            note=note,
            progress=lambda done_bytes, size_bytes: moved(destination, done_bytes, size_bytes),
        )
    show_edit(target, found)


COLUMNS = (
    Column("id", "ID", lambda found: found[:_SHORT_CHARS]),
    Column("incarnation", "RUN", lambda n: str(n) if n else "", right=True, if_many=True),
    Column("state", "STATE"),
    Column("step", "STEP", lambda found: count(found) if found >= 0 else "", right=True),
    Column("destination", "DESTINATION"),
    Column("format", "FORMAT", drop=4),
    Column("size_bytes", "SIZE", size, right=True, drop=2),
    Column("created_s", "WHEN", when, drop=1),
    Column("actor", "WHO", drop=3),
    Column("reason", "REASON"),
)

FILE_COLUMNS = (
    Column("name", "FILE"),
    Column("state", "STATE"),
    Column("size_bytes", "SIZE", size, right=True),
    Column("written_bytes", "WRITTEN", size, right=True),
    Column("rank", "RANK", lambda found: count(found) if found >= 0 else "", right=True),
    Column("checksum", "XXH3", drop=1),
)


@with_output
def export(
    target: Target,
    destination: Annotated[
        str | None,
        completed(
            "[DEST/KEY]",
            "Destination and key; by default step-{step} in checkpoints, or in "
            "the only destination.",
            completion.destinations,
        ),
    ] = None,
    format: FormatOption = "safetensors",
    max_shard_size: ShardSize = None,
    dtype: Dtype = None,
    include: Include = None,
    keep_tied: KeepTied = False,
    only: Only = None,
    replica: Replica = None,
    name_map: NameMapFile = None,
    adapter: Adapter = None,
    merge: Merge = False,
    weights_from: WeightsFrom = None,
    assets: AssetsDir = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace an existing export.")] = False,
    no_verify: NoVerify = False,
    timeout_s: Annotated[
        float,
        Option("--timeout", metavar="S", parser=duration, help="Give up after S."),
    ] = 3600,
    wait: Annotated[bool, Option("--wait", help="Wait until it is done or failed.")] = False,
) -> None:
    """Write a checkpoint of one step to a destination, while training continues.

    The sidecars write directly to the destination, where it becomes visible
    once complete. Without --wait it runs in the background: see paramd exports.
    """
    with target.connect() as mesh:
        begun = mesh.export(
            destination,
            format=format,
            max_shard_size=max_shard_size,
            dtype=dtype,
            include=included(include),
            tied="keep" if keep_tied else "drop",
            names=only,
            replica=replica if replica is not None else 0,
            overwrite=overwrite,
            name_map=read_name_map(name_map) if name_map is not None else None,
            adapter=adapter,
            merge=merge,
            weights_from=weights_from,
            assets=assets,
            verify=not no_verify,
            timeout=timeout_s,
        )
        if not wait:
            say(f"export {begun.id} runs in the background; see: paramd exports {begun.id[:8]}")
            _show(target, mesh, [begun.info])
            return
        _show(target, mesh, [_follow(mesh, begun.info)])


def _follow(mesh: Mesh, info: ExportInfo) -> ExportInfo:
    """Wait for an export, with a progress bar. Raises ConflictError if it fails."""
    from paramd.mesh.exports.calls import check_done

    try:
        with bar("waiting") as moved:
            found = mesh.export_ended(
                info,
                progress=lambda now: moved(now.state.lower(), now.written_bytes, now.size_bytes),
            )
    except KeyboardInterrupt:
        short = info.id[:_SHORT_CHARS]
        say(
            f"interrupted; export {short} continues. To see it: paramd exports {short}; to cancel "
            f"it: paramd exports {short} --cancel"
        )
        raise
    from paramd.mesh.results import differ_text, unsettled_text

    check_done(found)
    took_s = (found.ended_s if found.ended_s is not None else found.created_s) - found.created_s
    say(
        f"{found.destination}: {size(found.size_bytes)} of step {found.step} in "
        f"{len(found.files)} files, {seconds(took_s)}"
        f"{unsettled_text(unsettled=found.unsettled, label='')}{differ_text(found.replicas_differ)}"
    )
    if found.missing:
        names = ", ".join(found.missing[:4]) + " ..." * (len(found.missing) > 4)
        say(f"not in it, for the reasons in its manifest: {names}")
    return found


@with_output
def exports(
    target: Target,
    export_id: Annotated[
        str | None, completed("[ID]", "Show one export and its files.", completion.export_ids)
    ] = None,
    state: Annotated[
        str | None,
        Option("--state", metavar="STATE", help="Only exports in this state, e.g. FAILED."),
    ] = None,
    limit: Annotated[int, Option("--limit", metavar="N", help="List at most N.")] = 50,
    cancel: Annotated[bool, Option("--cancel", help="Cancel the export ID.")] = False,
    wait: Annotated[bool, Option("--wait", help="Wait for the export ID.")] = False,
    destinations: Annotated[bool, Option("--destinations", help="List destinations.")] = False,
    add: Annotated[
        str | None,
        Option("--add-destination", metavar="NAME=ROOT", help="Add a destination (admins)."),
    ] = None,
) -> None:
    """List the exports of a job, newest first; with an ID, show one and its files."""
    if export_id is None and (cancel or wait):
        raise UsageError("--cancel, --wait: give the ID of an export")
    with target.connect() as mesh:
        if add is not None:
            name, _, root = add.partition("=")
            mesh.add_destination(name, root)
        if destinations or add is not None:
            columns = (Column("name", "NAME"), Column("kind", "KIND"), Column("root", "ROOT"))
            target.show("destinations", mesh.destinations(), columns)
        elif export_id is None:
            wanted = state.upper() if state is not None else None
            _show(target, mesh, mesh.exports(state=wanted, limit=limit))
        else:
            _show_one(target, mesh, export_id, cancel=cancel, wait=wait)


def _show_one(target: Target, mesh: Mesh, export_id: str, *, cancel: bool, wait: bool) -> None:
    found = mesh.get_export(export_id)
    if cancel:
        found = mesh.cancel_export(found.id)
    elif wait:
        found = _follow(mesh, found)
    if target.format in (Format.JSON, Format.JSONL):
        _show(target, mesh, [found])
        return
    from paramd.mesh.results import unsettled_text

    rests = unsettled_text(unsettled=found.unsettled, label="")
    say(f"{found.destination}: {found.state}, step {found.step}{rests} {found.reason}".rstrip())
    target.show("files", found.raw["files"], FILE_COLUMNS, job=mesh.job, id=found.id)


def _show(target: Target, mesh: Mesh, found: Sequence[ExportInfo]) -> None:
    target.show("exports", [one.raw for one in found], COLUMNS, id_key="id", job=mesh.job)


def included(kinds: Sequence[str] | None) -> list[str]:
    """Return the kinds that `--include` means; "optimizer" alone adds to the other two."""
    if not kinds or set(kinds) == {"optimizer"}:
        return ["parameters", "buffers", *(kinds if kinds else ())]
    return list(dict.fromkeys(kinds))


def read_name_map(path: Path) -> dict[str, str]:
    """A JSON object of names. Raises UsageError."""
    try:
        with path.open("rb") as file:  # perhaps a pipe of the shell
            found = parsed_json(file.read(NAME_MAP.most_bytes + 1), NAME_MAP)
    except (OSError, ValueError) as error:
        raise UsageError(f"--name-map: {path} cannot be read: {error}") from None
    if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
        raise UsageError(f"--name-map: {path}: expected a JSON object that maps names to names")
    return found


SCHEDULE_COLUMNS = (
    Column("id", "ID", lambda found: found[:8]),
    Column("destination", "DESTINATION"),
    Column("format", "FORMAT", drop=4),
    Column("every_steps", "STEPS", count, right=True),
    Column("keep_last", "KEEP", count, right=True),
    Column("keep_every", "KEEP EVERY", count, right=True),
    Column("last_step", "SINCE STEP", count, right=True, drop=1),
    Column("skipped_count", "SKIPPED", count, right=True, drop=3),
    Column("actor", "WHO", drop=5),
)


@schedule.command(
    epilog=examples(
        "paramd export-schedule create checkpoints/run --every-steps 1000 --keep-last 3",
        "paramd export-schedule create checkpoints/run-{step} --every-steps 500 --keep-last 2 "
        "--keep-every 10",
    )
)
@with_output
def create(
    target: Target,
    destination: Annotated[
        str,
        completed(
            "DEST/KEY",
            "{step} in it becomes the step; else /step-N is appended.",
            completion.destinations,
        ),
    ],
    every_steps: Annotated[
        int, Option("--every-steps", metavar="N", help="Every N steps, or soon after.")
    ],
    keep_last: Annotated[
        int | None, Option("--keep-last", metavar="N", help="Keep the newest N; by default all.")
    ] = None,
    keep_every: Annotated[
        int | None, Option("--keep-every", metavar="N", help="Also keep every N-th.")
    ] = None,
    format: FormatOption = "safetensors",
    max_shard_size: ShardSize = None,
    dtype: Dtype = None,
    include: Include = None,
    keep_tied: KeepTied = False,
    only: Only = None,
    replica: Replica = None,
    name_map: NameMapFile = None,
    adapter: Adapter = None,
    merge: Merge = False,
    weights_from: WeightsFrom = None,
    assets: AssetsDir = None,
    no_verify: NoVerify = False,
) -> None:
    """Export periodically from now on.

    A run is skipped while the previous one is still in progress. Retention only
    removes exports that the schedule itself wrote.
    """
    with target.connect() as mesh:
        found = mesh.create_export_schedule(
            destination,
            every_steps=every_steps,
            keep_last=keep_last,
            keep_every=keep_every,
            format=format,
            max_shard_size=max_shard_size,
            dtype=dtype,
            include=included(include),
            tied="keep" if keep_tied else "drop",
            names=only,
            replica=replica if replica is not None else 0,
            name_map=read_name_map(name_map) if name_map is not None else None,
            adapter=adapter,
            merge=merge,
            weights_from=weights_from,
            assets=assets,
            verify=not no_verify,
        )
        _show_schedules(target, mesh, [found])


@schedule.command("list", epilog=examples("paramd export-schedule list -o json"))
@with_output
def list_(target: Target) -> None:
    """List the active schedules."""
    with target.connect() as mesh:
        _show_schedules(target, mesh, mesh.export_schedules())


@schedule.command(epilog=examples("paramd export-schedule delete 3f2a9c01"))
@with_target
def delete(
    target: Target,
    schedule_id: Annotated[
        str, completed("ID", "The schedule's ID, or its first characters.", completion.schedule_ids)
    ],
) -> None:
    """Delete a schedule. Its exports stay, and one in progress continues."""
    with target.connect() as mesh:
        found = mesh.delete_export_schedule(schedule_id)
    say(f"schedule {found['id']} is deleted; its exports stay")


def _show_schedules(target: Target, mesh: Mesh, rows: Sequence[Mapping[str, Any]]) -> None:
    target.show("schedules", rows, SCHEDULE_COLUMNS, id_key="id", job=mesh.job)


class Restores(CommandPart):
    """Exports that are loaded back."""

    name = "restores"

    def add_to(self, commands: Commands) -> None:
        commands.add(
            CHANGE,
            restore,
            "checkpoints/step-1000",
            "checkpoints/step-1000 --reset-moments --note 'before the spike'",
        )


class Exports(CommandPart):
    """Exports, and their schedules."""

    name = "exports"

    def add_to(self, commands: Commands) -> None:
        commands.add(
            LOOK,
            export,
            "checkpoints/step-{step} --wait",
            "checkpoints/final --max-shard-size 2GB --dtype bfloat16 --assets hf-config",
            "checkpoints/resume --format dcp",
        )
        commands.add(
            LOOK, exports, "", "--state FAILED -o json", "3f2a9c01 --wait", "3f2a9c01 --cancel"
        )
        commands.add_group(LOOK, "export-schedule", schedule)
