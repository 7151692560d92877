"""Named contexts: a control plane, its job and its token under one short name.

    context = "lab"                       # the one to use when none is named

    [contexts.lab]
    url = "https://control.lab.example:8470"
    token_file = "~/.config/paramd/lab.token"
    job = "my-run"
    tls_ca = "~/.config/paramd/lab-ca.pem"

They stand in the user's own paramd.toml. All that one says belongs to its url: with
`--context lab --url URL` another URL is asked without its token, job and CA.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paramd.errors import UsageError

TABLE = "contexts"
KEYS = ("url", "token_file", "job", "tls_ca")


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """One of them. None leaves the choice to what comes after it."""

    name: str
    url: str
    token_file: str | None = None
    job: str | None = None
    tls_ca: str | None = None

    def said(self) -> dict[str, str]:
        """Its keys and values, as a file would have them."""
        texts = {key: getattr(self, key) for key in KEYS}
        return {key: text for key, text in texts.items() if text is not None}


def parse(path: Path, tables: object) -> dict[str, Context]:
    """The contexts in the table `[contexts]` of the file `path`, by their names.

    Raises:
        UsageError: one is malformed.
    """
    if not isinstance(tables, Mapping):
        raise UsageError(f"{path}: {TABLE} must be a table of tables, such as [{TABLE}.lab]")
    return {name: _context(path, name, table) for name, table in tables.items()}


def choose(found: Mapping[str, Context], name: str, path: Path) -> Context:
    """The context called `name`.

    Raises:
        UsageError: there is none; the text names those that are.
    """
    if name in found:
        return found[name]
    near = difflib.get_close_matches(name, found, n=1)
    if near:
        hint = f"did you mean {near[0]!r}?"
    elif found:
        hint = f"expected one of {', '.join(sorted(found))}"
    else:
        hint = f"there are none; add a table [{TABLE}.{name}] with its url"
    raise UsageError(f"context {name!r} is not in {path}; {hint}")


def _context(path: Path, name: str, table: object) -> Context:
    where = f"{path}: [{TABLE}.{name}]"
    if not isinstance(table, Mapping):
        raise UsageError(f"{where} must be a table with the keys {', '.join(KEYS)}")
    for key, value in table.items():
        if key == "token":
            raise UsageError(f"{where}: a token does not belong here; name its file: token_file")
        if key not in KEYS:
            raise UsageError(f"{where}: unknown key {key!r}; expected one of {', '.join(KEYS)}")
        if not isinstance(value, str) or not value:
            raise UsageError(f"{where}: {key} must be a string that is not empty, is {value!r}")
    if "url" not in table:
        raise UsageError(f'{where}: url is missing; for example url = "http://127.0.0.1:8470"')
    return Context(name=name, **table)
