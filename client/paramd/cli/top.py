"""`paramd top`: all ranks and alerts on one live screen."""

import asyncio
import sys

from paramd import extras
from paramd.cli.options import Every, Target, with_target
from paramd.cli.shell import one_line
from paramd.cli.status import open_door, text_of


@with_target
def top(target: Target, every: Every = 1.0) -> None:
    """Watch ranks and alerts on a full screen.

    Arrow keys scroll, / filters ranks by number, phase or note, Escape clears
    the filter, q quits. Needs an extra: pip install 'paramd\\[top]'.
    Without a terminal, as in a pipe or under cron, it prints the state once as
    text and exits; `paramd status -w` keeps printing.
    """
    on_screen = all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))
    if on_screen:
        extras.need("paramd top", "top")
    asyncio.run(_show(target, every, on_screen))


async def _show(target: Target, every_s: float, on_screen: bool) -> None:
    async with open_door(target) as door:
        # The first request runs before the screen opens, so that its error stays on the shell.
        first = await door.look()
        if not on_screen:
            print(*map(one_line, text_of(first)), sep="\n")
            return
        from paramd.cli.top_screen import TopApp

        await TopApp(door.look, first=first, source=door.url, every_s=every_s).run_async()
