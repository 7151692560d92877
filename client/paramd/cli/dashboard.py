"""`paramd dashboard`: open the control plane's page, signed in by a link that works once.

The link has a code, not a token, in the fragment, which browsers do not send. The code is valid for
one minute. A browser gets the link from a file that only this user can read: its arguments, which
other users of the machine can read, have only the file's name.
"""

import asyncio
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

from typer import Option

from paramd import places, state_files
from paramd.cli import ended
from paramd.cli.options import Target, with_target
from paramd.cli.parts import LOOK, CommandPart, Commands
from paramd.cli.shell import one_line, say

PAGE_FILE = "sign-in.html"
CODES = "/session/codes"

_PAGE = """<!doctype html>
<meta charset="utf-8">
<meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0; url={link}">
<title>paramd</title>
<a href="{link}">the dashboard</a>
"""


@with_target
def dashboard(
    target: Target,
    browser: Annotated[
        bool, Option("--browser/--no-browser", help="Open it in a browser, if there is one.")
    ] = True,
) -> None:
    """Open the dashboard, signed in.

    Prints the link, which signs in once, within a minute, with the rights of
    your token. The token itself is in no URL. From another machine, forward the
    port first: ssh -L 8470:127.0.0.1:8470 HOST

    A job that has ended (--job NAME) is shown from its records, at the address
    that it had, until Ctrl-C or its next start, which has the same address.
    """
    past = ended.find(target)
    if past is None:
        _open(target, browser)
        return
    with past.served() as (endpoint, server):
        past.say()
        _open(target.at(endpoint), browser)
        if server is not None:
            say("the records are shown until Ctrl-C, or until the job starts again")
            with suppress(KeyboardInterrupt):
                server.wait()


def _open(target: Target, browser: bool) -> None:
    import webbrowser

    url, link, ttl_s = asyncio.run(_link(target))
    opened = browser and has_browser() and webbrowser.open(page_file(link).as_uri())
    print(one_line(link))
    sys.stdout.flush()
    say(
        f"{'opened' if opened else 'open the link for'} {url}; the link signs in once, within "
        f"{ttl_s:.0f} s"
    )


async def _link(target: Target) -> tuple[str, str, float]:
    async with target.rest() as (client, job):
        made = await client.send("POST", CODES)
        place = f"/{quote(job, safe='')}" if job is not None else ""
        return client.url, f"{client.url}/#/sign-in/{made['code']}{place}", float(made["ttl_s"])


def page_file(link: str) -> Path:
    """A file of this user alone that leads a browser to the link. Raises UsageError."""
    from html import escape

    path = places.state_dir() / PAGE_FILE
    with state_files.state_dir_errors():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        state_files.replace(path, _PAGE.format(link=escape(link)))
    return path


def has_browser() -> bool:
    """Whether a browser would get a window; one in the terminal would take over the shell."""
    import webbrowser

    shown = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    if sys.platform != "darwin" and not any(os.environ.get(name) for name in shown):
        return False
    try:
        webbrowser.get()
    except webbrowser.Error:
        return False
    return True


class Dashboard(CommandPart):
    """The way to the page."""

    name = "dashboard"

    def add_to(self, commands: Commands) -> None:
        commands.add(LOOK, dashboard, "", "--job my-run --no-browser")
