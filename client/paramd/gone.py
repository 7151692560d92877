"""Names that existed before this release, and what to use instead: one table for all doors.

The command line, the settings, REST and Python look a name up here when it is not known, and
say what replaces it. A row stays for one release.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Door = Literal["command", "flag", "setting", "rest", "python"]


class Gone(NamedTuple):
    """One name that is no more."""

    door: Door
    """Where the name was used."""
    name: str
    """As a user wrote it: a command ("alerts silence"), a flag with its command ("exports
    --every-s"), a setting's field ("standby"; its variable and option follow from it), a method
    and a path below /api/v1 with `{}` for each parameter ("POST /jobs/{}/silences"), or a Python
    name with its class ("Mesh.silence")."""
    instead: str
    """What to do instead, as the rest of a sentence: "use ..."."""


GONE: tuple[Gone, ...] = (
    Gone(
        "rest",
        "POST /jobs/{}/alerts/acknowledge",
        "silence the alert in Prometheus' Alertmanager while you work on it (docs/alerts.md)",
    ),
    Gone("rest", "GET /jobs/{}/alert-silences", "use amtool silence query (docs/alerts.md)"),
    Gone("rest", "POST /jobs/{}/alert-silences", "use amtool silence add (docs/alerts.md)"),
    Gone("rest", "DELETE /jobs/{}/alert-silences/{}", "use amtool silence expire (docs/alerts.md)"),
    Gone(
        "setting",
        "alerts.webhook_attempts",
        "have Prometheus' Alertmanager deliver what must arrive (docs/alerts.md)",
    ),
    Gone("setting", "alerts.webhook_timeout_s", "leave it out: it is 5 s"),
    Gone(
        "setting", "alerts.straggler_hold_s", "set stall_window_s: a straggler is slow at both ends"
    ),
    Gone("setting", "alerts.clear_after_s", "leave it out: it is 5 s"),
)
"""Every name that this release took away, in the order of the CHANGELOG."""
