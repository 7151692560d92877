"""Shell completion of names that only a control plane or the state dir knows.

Each answers within a second of the shell's question or gives nothing: no error, no message. It asks
by the standard library's HTTP client alone, since importing ours takes half of that time.

Names and notes are the words of ranks and of other people, and a shell reads what it is offered as
part of a command: zsh even while somebody only presses Tab. So nothing that a shell interprets is
offered.
"""

from __future__ import annotations

import io
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

import typer

from paramd import bounds, places
from paramd.answers import parsed_json
from paramd.cli import settings
from paramd.errors import ParamdError
from paramd.layout.globs import literal
from paramd.security.loopback import ask_over, connected_beside

if TYPE_CHECKING:
    import http.client

WHOLE_S = bounds.COMPLETION.within_s
"""From the start of the process, which the shell waits for."""
LEAST_S = 0.5
"""Left for asking when the start alone took long, on a busy machine."""
MAX_ANSWER_BYTES = bounds.COMPLETION.most_bytes
MAX_SHOWN = 200
SHORT_ID = 8

ROLES = {
    "viewer": "names, state, statistics",
    "reader": "also values",
    "editor": "also edits, logs",
    "exporter": "values and exports",
    "trainer": "registers jobs",
    "admin": "everything",
}

Item = tuple[str, str]
"""A completion, and a help text."""

_OFFERED = re.compile(r"[\w./][\w./:@%+=,-]*")
"""What all shells take as it is: no quotes, expansions, globs or options."""
_ODD = re.compile(r"[^\w./:@%+=,-]+")
"""Characters that help texts lose: zsh evaluates help texts, too."""

Complete = Callable[[typer.Context, str], list[Item]]
Ask = Callable[[str], Any]
"""GET of a path below /api/v1; "{job}" in it is the job."""


def _completer(items: Callable[[typer.Context, str], Iterable[Item]]) -> Complete:
    """Bound a source of items in time, and keep its errors and odd names from the shell."""

    def complete(ctx: typer.Context, incomplete: str) -> list[Item]:
        found: list[Item] = []

        def work() -> None:
            # Whatever happens: somebody is typing.
            with suppress(Exception):
                found.extend(items(ctx, incomplete))

        # A daemon: a server that does not answer must not keep the process.
        worker = threading.Thread(target=work, name="paramd-completion", daemon=True)
        worker.start()
        worker.join(max(WHOLE_S - _age_s(), LEAST_S))
        if worker.is_alive():
            return []
        return [
            (text, _ODD.sub(" ", about))
            for text, about in found
            if text.startswith(incomplete) and _OFFERED.fullmatch(text)
        ][:MAX_SHOWN]

    return complete


def _served(items: Callable[[Ask, str], Iterable[Item]]) -> Complete:
    """Items from the control plane that the command line names."""
    return _completer(lambda ctx, incomplete: items(_asker(ctx), incomplete))


@_served
def names(ask: Ask, incomplete: str) -> Iterator[Item]:
    begun = literal(incomplete).replace('"', '""')
    wanted = quote(f'"{begun}*"', safe="")
    for one in ask(f"/jobs/{{job}}/params?limit={MAX_SHOWN}&filter={wanted}")["params"]:
        yield one["name"], f"{one['dtype']} {'x'.join(map(str, one['shape']))}"


def _ids(path: str, name: str, *about: str) -> Complete:
    """The ids in the list `name` at a path below the job's, with these keys of each as help."""

    def items(ask: Ask, incomplete: str) -> Iterator[Item]:
        chars = SHORT_ID if len(incomplete) <= SHORT_ID else None
        for row in ask(f"/jobs/{{job}}/{path}")[name]:
            yield str(row["id"])[:chars], " ".join(str(row[key]) for key in about if row[key])

    return _served(items)


edit_ids = _ids("edits?limit=100", "edits", "state", "note")
export_ids = _ids("exports?limit=100", "exports", "state", "destination")
schedule_ids = _ids("export-schedules", "schedules", "actor")


@_served
def destinations(ask: Ask, incomplete: str) -> Iterator[Item]:
    for one in ask("/destinations")["destinations"]:
        yield f"{one['name']}/", one["kind"]


@_served
def finished_exports(ask: Ask, incomplete: str) -> Iterator[Item]:
    for one in ask("/jobs/{job}/exports?state=DONE&limit=100")["exports"]:
        yield one["destination"], f"step {one['step']}"


@_served
def token_names(ask: Ask, incomplete: str) -> Iterator[Item]:
    for one in ask("/tokens")["tokens"]:
        if one["revoked_s"] is None:
            yield one["name"], one["role"]


@_served
def ranks(ask: Ask, incomplete: str) -> Iterator[Item]:
    yield from ((str(rank), "") for rank in range(min(ask("/jobs/{job}")["world_size"], 4096)))


@_completer
def jobs(ctx: typer.Context, incomplete: str) -> Iterator[Item]:
    running = {endpoint.job for endpoint in places.running_jobs()}
    yield from ((job, "running") for job in sorted(running))
    yield from ((job, "ended") for job in places.known_jobs() if job not in running)


contexts = _completer(
    lambda _, __: [(one.name, one.url) for one in settings.own_contexts().values()]
)
roles = _completer(lambda _, __: ROLES.items())


def _asker(ctx: typer.Context) -> Ask:
    """GET as the settings say, each request on a separate connection.

    Raises ParamdError if no control plane is known, or it is on another host without TLS.
    """
    url, token, job, tls_ca = _where(ctx)

    def ask(path: str) -> Any:
        nonlocal job
        if "{job}" in path and job is None:
            (job,) = [str(one["job"]) for one in _get(url, token, tls_ca, "/jobs")["jobs"]]
        return _get(url, token, tls_ca, path.replace("{job}", quote(job or "", safe="")))

    return ask


def _where(ctx: typer.Context) -> tuple[str, str, str | None, str | None]:
    flags = settings.Flags()
    level: Any = ctx
    while level is not None:
        given = {
            name: level.params.get(name)
            for name in ("job", "url", "token", "tls_ca", "context_name")
        }
        flags = flags.over(settings.Flags(**given))
        level = level.parent
    # Never the shell's stdin: `--token -` completes nothing.
    chosen = settings.load(flags, stdin=io.StringIO(""))
    if chosen.url is None:
        found = places.read_endpoint(chosen.job)
        return found.url, chosen.token or found.token, found.job, chosen.tls_ca
    token = chosen.token
    if token is None:
        known = places.running_jobs()
        token = next(one.token for one in known if one.url == chosen.url.rstrip("/"))
    return chosen.url, token, chosen.job, chosen.tls_ca


def _get(url: str, token: str, tls_ca: str | None, path: str) -> Any:
    # Here, so that no other command pays for it.
    import http.client

    parts = urlsplit(url)
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        # Imports gRPC, so only where it is needed.
        from paramd.mesh.peers.control import client_tls
        from paramd.security.tls import https_context

        context: Any = https_context(url, client_tls(url, tls_ca))
        connection = http.client.HTTPSConnection(parts.netloc, timeout=WHOLE_S, context=context)
    elif parts.hostname in settings.LOOPBACK:
        connection = http.client.HTTPConnection(parts.netloc, timeout=WHOLE_S)
    else:
        raise ParamdError(f"{url} is on another host and not https")
    try:
        near = connected_beside(url, WHOLE_S)
        if near is not None:
            connection.sock = near
        else:
            connection.connect()
        ask_over(connection.sock, url, token)
        connection.request("GET", f"/api/v1{path}", headers={"authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        if answer.status != http.client.OK:
            raise ParamdError(f"{url} answered {answer.status}")
        return parsed_json(answer.read(MAX_ANSWER_BYTES), bounds.COMPLETION)
    finally:
        connection.close()


def _age_s() -> float:
    """Seconds since this process was started; 0 when unknown."""
    try:
        ticks = places.process_start(os.getpid())
        uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError):
        return 0.0
    started_s = ticks / os.sysconf("SC_CLK_TCK")
    return max(min(uptime_s, time.clock_gettime(time.CLOCK_BOOTTIME)) - started_s, 0.0)
