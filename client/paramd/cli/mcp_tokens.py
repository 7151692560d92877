"""Tokens of `paramd mcp --http`: what its clients show, and what its tools ask with.

An admin's token is never the password of a port. An admin's server makes tokens of its own, with
the roles that its tools need, and keeps them in files for its next start. Whoever has another token
shows that one: its role is what its owner chose.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paramd import state_files
from paramd.answers import read_file
from paramd.bounds import SMALL_FILE
from paramd.cli.options import Target
from paramd.errors import DeniedError

LOOKING, EXPORTING, CHANGING = "reader", "exporter", "editor"
FOLDER = "_mcp"


@dataclass(frozen=True, kw_only=True)
class Doors:
    """What a server's clients show, and with which tokens its tools ask."""

    password: str
    looking: str
    """Token of all tools but `export`."""
    exporting: str
    """Token of the tool `export`."""
    told: str
    """Which password clients show, in words."""


def doors_of(target: Target, job: str, *, changes: bool) -> Doors:
    """The tokens of a server for this job; an admin's are made, or found from its last start.

    Raises:
        UsageError: the state dir cannot be written.
        ParamdError: the control plane does not answer.
    """
    session = target.ask("GET", "/session")
    own = target.token_of(job)
    if "administer" not in session["actions"]:
        told = f"clients send your token {session['name']!r}, role {session['role']}"
        return Doors(password=own, looking=own, exporting=own, told=told)
    path = _folder() / f"{job}-{CHANGING if changes else LOOKING}.token"
    if session["readonly"]:
        # Such a control plane makes no token; this password opens this server alone.
        password = secrets.token_urlsafe(32)
        _write(path, password)
        told = f"clients send the password in {path}"
        return Doors(password=password, looking=own, exporting=own, told=told)
    looking, name = _token(target, job, CHANGING if changes else LOOKING)
    exporting = _token(target, job, EXPORTING)[0] if changes else looking
    told = f"clients send the token in {path}; paramd token revoke {name} ends it"
    return Doors(password=looking, looking=looking, exporting=exporting, told=told)


def _token(target: Target, job: str, role: str) -> tuple[str, str]:
    """(token, name): the last start's, if it is still good, else a new one for this job."""
    path = _folder() / f"{job}-{role}.token"
    kept = read_file(path, SMALL_FILE).decode().strip() if path.exists() else ""
    if kept:
        try:
            session = target.holding(kept, job).ask("GET", "/session")
        except DeniedError:
            session = {}  # revoked, expired, or of another control plane
        if session.get("role") == role:
            return kept, str(session["name"])
    body: dict[str, Any] = {"role": role, "name": f"mcp-{secrets.token_hex(4)}"}
    if role != EXPORTING:
        # One for some jobs would write below a folder of the job alone.
        body["jobs"] = job
    made = target.ask("POST", "/tokens", body)
    _write(path, made["token"])
    return str(made["token"]), str(made["name"])


def _folder() -> Path:
    return state_files.state_dir() / FOLDER


def _write(path: Path, secret: str) -> None:
    with state_files.state_dir_errors():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        state_files.replace(path, f"{secret}\n")
