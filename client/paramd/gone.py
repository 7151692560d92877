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
        "setting",
        "certificate_s",
        "leave it out: a rank's certificate lasts for its incarnation, a year at most",
    ),
    Gone(
        "flag",
        "control serve --certificate-s",
        "leave it out: a certificate lasts for its incarnation, a year at most",
    ),
)
"""Every name that this release took away, in the order of the CHANGELOG."""
