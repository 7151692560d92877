"""`paramd doctor`: whether this machine and its jobs are well, and what to do if not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import asdict, replace

import typer

from paramd import places
from paramd.cli.checks import Finding, Verdict, machine
from paramd.cli.options import Output, Target, with_target
from paramd.cli.output import Column, Listing, emit
from paramd.cli.shell import explain, say
from paramd.errors import ParamdError

COLUMNS = (
    Column("check", "CHECK"),
    Column("verdict", "RESULT"),
    Column("detail", "FOUND"),
    Column("advice", "WHAT TO DO"),
)


@with_target
def doctor(target: Target, output: Output = None) -> None:
    """Check this machine and its running jobs, and say what to do.

    Looks at versions, the state dir, shared memory, sockets, ports, the clock and
    files of TLS; compares clocks with the control planes, looks at their
    certificates, and asks every running job (or the one named) for its ranks.
    Exit code 1 when anything has failed; a warning alone is 0.
    """
    # Loads gRPC.
    from paramd.cli import remote_checks

    chosen = target.settings
    findings = [*machine(), *remote_checks.tls_files(chosen.tls_ca)]
    for url in _urls(target):
        findings += remote_checks.control_plane(url, chosen.tls_ca)
    findings += jobs(target)
    rows = [{**asdict(finding), "verdict": finding.verdict.value} for finding in findings]
    emit(
        Listing(name="checks", rows=rows, columns=COLUMNS, about={}, id_key="check"),
        target.format,
    )
    failed = [finding for finding in findings if finding.verdict is Verdict.FAILED]
    warned = [finding for finding in findings if finding.verdict is Verdict.WARNING]
    say(f"{len(findings)} checks, {len(failed)} failed, {len(warned)} warnings")
    if failed:
        raise typer.Exit(1)


def _urls(target: Target) -> list[str]:
    """The control planes to look at: the one named, else those of the jobs that run here."""
    chosen = target.settings
    if chosen.url is not None:
        return [chosen.url]
    running = places.running_jobs()
    return sorted({found.url for found in running if chosen.job in (None, found.job)})


def jobs(target: Target) -> Iterator[Finding]:
    """One finding for each running job, and one for each of its ranks that is not well."""
    chosen = target.settings
    if chosen.url is not None and chosen.job is None:
        try:
            targets = [Target(replace(chosen, job=name)) for name in asyncio.run(_served(target))]
        except (ParamdError, OSError) as error:
            yield _silent(chosen.url, error)
            return
        if not targets:
            yield Finding(check="jobs", verdict=Verdict.OK, detail=f"none is at {chosen.url}")
    elif chosen.url is not None or chosen.job is not None:
        targets = [target]
    else:
        running = places.running_jobs()
        targets = [
            Target(replace(chosen, job=job.job, url=job.url, token=job.token)) for job in running
        ]
        if not running:
            yield Finding(check="jobs", verdict=Verdict.OK, detail="none runs here")
    for one in targets:
        yield from _job(one)


async def _served(target: Target) -> list[str]:
    """Names of the jobs at the control plane of `target`."""
    from paramd.mesh.connect import resolve
    from paramd.mesh.rest import RestClient
    from paramd.tls import ClientTls

    chosen = target.settings
    url, token, _ = resolve(chosen.url, chosen.token, None)
    client = RestClient(url, token, tls=ClientTls.from_environment(chosen.tls_ca))
    try:
        return await client.jobs()
    finally:
        await client.close()


def _silent(name: str, error: Exception) -> Finding:
    return Finding(
        check=name,
        verdict=Verdict.FAILED,
        detail=explain(error)[0],
        advice=f"is it still running? Its logs lie in {places.state_dir()}",
    )


def _job(target: Target) -> Iterator[Finding]:
    chosen = target.settings
    name = f"job {chosen.job}" if chosen.job is not None else str(chosen.url)
    try:
        with target.connect() as mesh:
            found = mesh.status()
    except (ParamdError, OSError) as error:
        yield _silent(name, error)
        return
    yield Finding(
        check=f"job {found.job}",
        verdict=Verdict.OK,
        detail=f"epoch {found.epoch}, step {found.step}, {found.world_size} ranks",
    )
    for row in found:
        if row.reason:
            yield Finding(
                check=f"job {found.job} rank {row.rank}",
                verdict=Verdict.FAILED,
                detail=f"{row.phase}: {row.reason}",
                advice=f"see rank-{row.rank}.log in {places.state_dir() / found.job}",
            )
