"""A page of torch's own debug server with the output of `paramd why`.

from torch.distributed.debug import start_debug_server
from torch.distributed.debug._debug_handlers import default_handlers
from paramd.integrations.torch_debug import ParamdHandler

start_debug_server(handlers=[*default_handlers(), ParamdHandler(job="my-run")])

torch's server requires no token and listens on all interfaces: everyone who reaches it sees this
page. So it has no lines of output unless `log_lines` asks for them.
"""

from __future__ import annotations

import json
from typing import Any

from paramd.errors import ParamdError, UsageError
from paramd.mesh.connect import connect
from paramd.mesh.insight.reports import MAX_WHY_LINES, RankActivity, Why

try:
    # Where torch 2.13 has them; its server is still experimental.
    from torch.distributed.debug._frontend import DebugHandler, NavLink, Route  # type: ignore[import-not-found,unused-ignore]
except ImportError as error:
    raise UsageError(
        f"torch's debug server cannot be imported here ({error}); it needs torch 2.13, jinja2, "
        "tabulate and aiohttp: pip install jinja2 tabulate aiohttp"
    ) from error

PATH = "/paramd"
TEMPLATE = """
{% extends "base.html" %}
{% block header %}<h1>{% block title %}paramd{% endblock %}</h1>{% endblock %}
{% block content %}
<p><strong>{{ verdict | e }}</strong></p>
<pre>{{ text | e }}</pre>
<p><a href="/paramd_json">as JSON</a></p>
{% endblock %}
"""


class ParamdHandler(DebugHandler):
    """The activity of each rank, and the one that keeps the others waiting.

    Served at /paramd and, as JSON, at /paramd_json; both take `rank=`, several times. It also
    dumps itself: `start_debug_server(dump_dir=..., enabled_dumps={"paramd"})`. Works while training
    hangs, since torch's server runs in a separate process and asks paramd's.
    """

    def __init__(self, *, job: str, url: str | None = None, log_lines: int = 0) -> None:
        """No I/O.

        Args:
            job: Name of the job.
            url: URL of its control plane; None finds it as `paramd.connect` does. The token is
                found likewise, and never shown.
            log_lines: Last lines of each trainer's output to show, 0 to 100.

        Raises:
            UsageError: log_lines is out of range.
        """
        if not 0 <= log_lines <= MAX_WHY_LINES:
            raise UsageError(f"log_lines: {log_lines}; expected 0 to {MAX_WHY_LINES}")
        self._job, self._url, self._log_lines = job, url, log_lines

    def routes(self) -> list[Any]:
        return [Route(PATH, self._page), Route(f"{PATH}_json", self._json)]

    def nav_links(self) -> list[Any]:
        return [NavLink(PATH, "paramd")]

    def templates(self) -> dict[str, str]:
        return {"paramd.html": TEMPLATE}

    def dump(self) -> str | None:
        """The page as text; the reason when paramd does not answer."""
        try:
            why = self._ask(())
        except ParamdError as error:
            return f"paramd has no answer: {error}\n"
        return f"{why.verdict}\n\n{_text(why)}"

    def dump_filename(self) -> str:
        return "paramd"

    def _page(self, request: Any) -> bytes:
        try:
            why = self._ask(_ranks(request))
            verdict, text = why.verdict, _text(why)
        except ParamdError as error:
            verdict, text = "paramd has no answer", str(error)
        page: bytes = request.frontend.render_template("paramd.html", verdict=verdict, text=text)
        return page

    def _json(self, request: Any) -> bytes:
        try:
            why = self._ask(_ranks(request))
            found = {"verdict": why.verdict, "ranks": [dict(row.document) for row in why]}
        except ParamdError as error:
            found = {"error": str(error)}
        # torch's server says that it is HTML, so nothing in it may be read as such.
        return json.dumps(found).replace("<", "\\u003c").encode()

    def _ask(self, ranks: tuple[int, ...]) -> Why:
        with connect(self._url, job=self._job, timeout=self.fetch_timeout) as mesh:
            return mesh.why(*ranks, log_lines=self._log_lines)


def _ranks(request: Any) -> tuple[int, ...]:
    texts = request.get_query().get("rank", [])
    if not all(text.isdecimal() for text in texts):
        raise UsageError(f"rank: {texts!r}; expected numbers of ranks")
    return tuple(map(int, texts))


def _text(why: Why) -> str:
    return "\n".join(line for row in why for line in _lines(row))


def _lines(row: RankActivity) -> list[str]:
    """One rank: its state, its training thread's stack, its collectives and its output."""
    lines = [f"rank {row.rank}, step {row.step}, {row.phase}: {row.error or row.doing}"]
    for thread in row.threads:
        if thread.training:
            lines += [f"    {frame}" for frame in thread.frames]
    if row.missing:
        lines.append(f"    no stack: {row.missing}")
    for one in row.collectives:
        state = "done" if one.done else "not done"
        lines.append(
            f"    {one.name} #{one.sequence} of {one.group}: {state}, {one.age_s:.1f} s ago"
        )
    return [*lines, *(f"    | {line}" for line in row.log_lines), ""]
