"""`paramd audit`: list the audit trail, and verify its hash chain."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from functools import wraps
from typing import Annotated, Any
from urllib.parse import quote

import typer
from typer import Option

from paramd.chain import ChainCheck, Link
from paramd.cli import ended
from paramd.cli.options import Target, examples, with_output
from paramd.cli.output import Column
from paramd.cli.parts import RUN, CommandPart, Commands
from paramd.cli.shell import say
from paramd.errors import ParamdError, UsageError

PAGE = 1000
ALL = 1_000_000_000

audit = typer.Typer(
    help="Who changed what, as recorded by the control plane. Needs an admin token."
)


def _when(time_ms: int) -> str:
    moment = datetime.fromtimestamp(time_ms / 1000, UTC)
    return moment.isoformat(sep=" ", timespec="seconds").removesuffix("+00:00")


def detail_text(detail: Mapping[str, Any]) -> str:
    """A record's details as text, without empty values. JSON has all of them."""
    said = ((key.replace("_", " "), _text(value)) for key, value in sorted(detail.items()))
    return "; ".join(f"{key}: {text}" for key, text in said if text)


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        if "op" in value and "pattern" in value:
            from paramd.mesh.edits.calls import op_text

            return op_text(value)
        said = ((key.replace("_", " "), _text(one)) for key, one in sorted(value.items()))
        return ", ".join(f"{key} {text}" for key, text in said if text)
    if isinstance(value, (list, tuple)):
        return ", ".join(text for one in value if (text := _text(one)))
    return str(value)


COLUMNS = (
    Column("seq", "RECORD", right=True),
    Column("time_ms", "TIME (UTC)", _when),
    Column("actor", "ACTOR"),
    Column("incarnation", "RUN", right=True, if_many=True),
    Column("kind", "KIND", drop=2),
    Column("method", "METHOD"),
    Column("of", "OF", right=True, drop=3),
    Column("result", "RESULT", drop=1),
    Column("detail", "DETAIL", detail_text),
)
VERDICT_COLUMNS = (
    Column("chain", "AUDIT OF"),
    Column("count", "GOOD RECORDS", right=True),
    Column("bad_seq", "FIRST BAD", right=True),
    Column("hash", "LAST HASH"),
)

Own = Annotated[bool, Option("--site", help="The control plane's own audit trail, not a job's.")]
Limit = Annotated[
    int, Option("-n", "--limit", min=1, max=1_000_000, help="Newest records to show.")
]


@with_output
def list_records(target: Target, limit: Limit = 100, site: Own = False) -> None:
    """Show the newest records: intents, logged before they take effect, outcomes, and events."""
    about, records = asyncio.run(_newest(target, site, limit))
    for record in records:
        del record["body"]
    target.show("records", records, COLUMNS, id_key="seq", **about)
    say(f"{len(records):,} records, newest first")


@with_output
def verify(target: Target, site: Own = False) -> None:
    """Check that no record was changed, and none removed before another.

    The client verifies the chain record by record; of a job that has ended,
    in its store. Reports the first bad record and exits with code 1. To
    notice records cut off at the end, keep the printed hash and compare it.
    """
    chain, found = asyncio.run(_verified(target, site))
    row = {
        "chain": chain or "the site",
        "count": found.count,
        "hash": found.hash,
        "good": found.good,
        "bad_seq": found.bad_seq,
        "reason": found.reason,
    }
    target.show("checks", [row], VERDICT_COLUMNS, id_key="chain")
    if not found.good:
        say(f"{found.reason}; first bad record: {found.bad_seq}")
        raise typer.Exit(1)
    say(f"{found.count:,} records verified")


async def _newest(
    target: Target, site: bool, limit: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    found: list[dict[str, Any]] = []
    about: dict[str, Any] = {}
    # A past job's records come as one page.
    async for page in _pages(target, site, "newest", limit):
        about = {"job": page["job"]}
        found += page["records"]
        if len(found) >= limit:
            break
    return about, found[:limit]


async def _verified(target: Target, site: bool) -> tuple[str, ChainCheck]:
    check: ChainCheck | None = None
    chain = ""
    async for page in _pages(target, site, "oldest", PAGE):
        if check is None:
            chain = str(page["job"])
            check = ChainCheck(chain)
        for record in page["records"]:
            if not check.take(Link(int(record["seq"]), str(record["body"]), str(record["hash"]))):
                break
    assert check is not None
    return chain, check


async def _pages(
    target: Target, site: bool, order: str, limit: int
) -> AsyncIterator[Mapping[str, Any]]:
    past = ended.find(target) if not site else None
    if past is not None:
        past.say()
        yield past.audit(oldest=order == "oldest", limit=ALL if order == "oldest" else limit)
        return
    async with target.rest() as (client, named):
        try:
            job = _only(await client.jobs()) if named is None and not site else named
            path = f"/jobs/{quote(str(job), safe='')}/audit" if not site else "/audit"
            async for page in client.pages(path, min(limit, PAGE), order=order):
                yield page
        except (KeyError, TypeError, ValueError) as error:
            raise ParamdError(
                f"{client.url} returned an audit page that this client cannot parse ({error!r}); "
                "client and control plane may run different versions of paramd"
            ) from error


def _only(jobs: list[str]) -> str:
    if len(jobs) != 1:
        names = f"its jobs: {', '.join(sorted(jobs)[:8])}" if jobs else "it has no jobs"
        raise UsageError(f"give --job, or --site for the control plane's own audit trail; {names}")
    return jobs[0]


@wraps(list_records)
def _bare(context: typer.Context, **given: Any) -> None:
    # `paramd audit` without a subcommand lists.
    if context.invoked_subcommand is None:
        list_records(context, **given)


_EXAMPLES = ("paramd audit", "paramd audit -n 20 -o json", "paramd audit verify")
audit.callback(invoke_without_command=True, epilog=examples(*_EXAMPLES))(_bare)
audit.command("list", epilog=examples("paramd audit list -o jsonl"))(list_records)
audit.command("verify", epilog=examples("paramd audit verify", "paramd audit verify --job my-run"))(
    verify
)


class Audit(CommandPart):
    """Who changed what."""

    name = "audit"

    def add_to(self, commands: Commands) -> None:
        commands.add_group(RUN, "audit", audit)
