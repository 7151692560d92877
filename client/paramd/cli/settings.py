"""Settings of the command line: flags, then PARAMD_*, then paramd.toml, then defaults.

A context given by `--context` takes precedence over the environment; one given by
PARAMD_CONTEXT or paramd.toml does not. Its job, token and CA belong to its url: if another
url takes precedence, none of them are used. Contexts are read from the user's own paramd.toml:

    context = "lab"                       # the default context

    [contexts.lab]
    url = "https://control.lab.example:8470"
    token_file = "~/.config/paramd/lab.token"
    job = "my-run"
    tls_ca = "~/.config/paramd/lab-ca.pem"

A token is never an argument itself, which other users could read and shells would save:
`--token -` reads it from stdin, `--token @FILE` from a file.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TextIO, TypeVar
from urllib.parse import urlsplit

from paramd import gone
from paramd.errors import UsageError
from paramd.state_files import check_private, file_places, read_toml

TABLE = "contexts"
KEYS = ("url", "token_file", "job", "tls_ca")

ENVIRONMENT_KEYS = ("job", "url", "tls_ca", "output")
FILE_KEYS = ("job", "url", "token_file", "tls_ca", "output", "context")
MAX_TOKEN_BYTES = 16 << 10
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """A named context. None defers to settings of lower precedence."""

    name: str
    url: str
    token_file: str | None = None
    job: str | None = None
    tls_ca: str | None = None


def choose(name: str) -> Context:
    """The context of this name in the user's paramd.toml; UsageError suggests others."""
    found = own_contexts()
    if name in found:
        return found[name]
    near = difflib.get_close_matches(name, found, n=1)
    if near:
        hint = f"did you mean {near[0]!r}?"
    elif found:
        hint = f"expected one of {', '.join(sorted(found))}"
    else:
        hint = f"it has no contexts; add a table [{TABLE}.{name}] with a url"
    raise UsageError(f"context {name!r} is not in {own_file()}; {hint}")


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
            raise UsageError(f"{where}: {key} must be a non-empty string, is {value!r}")
    if "url" not in table:
        raise UsageError(f'{where}: url is missing; for example url = "http://127.0.0.1:8470"')
    return Context(name=name, **table)


_Flags = TypeVar("_Flags", bound="Flags")


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Options of the command line; None where not given."""

    job: str | None = None
    url: str | None = None
    token: str | None = None
    """"-" or "@FILE"."""
    tls_ca: str | None = None
    output: str | None = None
    context_name: str | None = None
    """The named context; of `Settings`, the one in use."""

    def over(self, below: _Flags) -> _Flags:
        """These flags, falling back to `below` where they are None."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        return replace(below, **given)


@dataclass(frozen=True, kw_only=True)
class Settings(Flags):
    """The effective settings. None leaves the choice to `paramd.connect`."""

    token: str | None = field(default=None, repr=False)
    """The token itself."""
    url_file: Path | None = None
    """The file in the working directory that named the url, which gets no token of other sources:
    whoever wrote the file could listen there. None if the url is from elsewhere."""


def load(flags: Flags, *, stdin: TextIO) -> Settings:
    """Merge flags, environment, files and context; UsageError if one is invalid."""
    files = _read_files()
    here = files[0]
    context = context_in_force(flags, files)
    if context is not None:
        flags, files = _with_context(context, flags, files)
    named = {key: os.environ.get(f"PARAMD_{key.upper()}") for key in ENVIRONMENT_KEYS}
    # Earlier sources take precedence.
    sources = [{key: value for key, value in named.items() if value}, *files]
    merged: dict[str, str] = {}
    for source in sources:
        merged = {**source, **merged}
    url = flags.url if flags.url is not None else merged.get("url")
    # A context leaves nothing of the working directory's file but its job and output.
    is_here = flags.url is None and not named["url"] and files[0] is here and "url" in here
    url_file = file_places()[0][0].absolute() if is_here else None
    below = Settings(
        job=merged.get("job"),
        url=merged.get("url"),
        tls_ca=merged.get("tls_ca"),
        output=merged.get("output"),
        context_name=context.name if context is not None else None,
    )
    token = read_token(flags.token, stdin=stdin) if flags.token is not None else None
    if token is None and url_file is None:
        token = os.environ.get("PARAMD_TOKEN") or _token_of_files(files, url, stdin)
    return replace(flags.over(below), token=token, url_file=url_file)


def _token_of_files(
    files: Sequence[Mapping[str, str]], url: str | None, stdin: TextIO
) -> str | None:
    """The token of the first file that names one, if it is for this url.

    A file with a url of its own has the token for that one alone.
    """
    for found in files:
        if "token_file" in found:
            own_url = found.get("url")
            if own_url is not None and url is not None and not _same_url(own_url, url):
                return None
            return read_token("@" + found["token_file"], stdin=stdin)
    return None


def _same_url(one: str, other: str) -> bool:
    return one.rstrip("/") == other.rstrip("/")


def context_in_force(
    flags: Flags, files: Sequence[Mapping[str, str]] | None = None
) -> Context | None:
    """The context named by a flag, PARAMD_CONTEXT or a file. Does not read its token.

    `files` is the files' content; None reads them. Raises UsageError if there is no such context,
    or a file is malformed.
    """
    files = files if files is not None else _read_files()
    name = flags.context_name
    if name is None:
        name = os.environ.get("PARAMD_CONTEXT") or None
    if name is None:
        name = next((found["context"] for found in files if "context" in found), None)
    return choose(name) if name is not None else None


def _with_context(
    context: Context, flags: Flags, files: Sequence[dict[str, str]]
) -> tuple[Flags, list[dict[str, str]]]:
    """Insert a context: below the flags if `--context` named it, else above the files.

    Dropped if another url takes precedence over its own.
    """
    by_flag = flags.context_name is not None
    url = flags.url
    if url is None and not by_flag:
        url = os.environ.get("PARAMD_URL") or None
    if url is not None and not _same_url(url, context.url):
        return flags, list(files)
    # A token or CA from another file must not be used with this context's url.
    rest: list[dict[str, str]] = [
        {key: found[key] for key in ("job", "output") if key in found} for found in files
    ]
    if by_flag:
        token = f"@{context.token_file}" if context.token_file is not None else None
        said = Flags(job=context.job, url=context.url, token=token, tls_ca=context.tls_ca)
        return flags.over(said), rest
    said_by = {
        "url": context.url,
        "token_file": context.token_file,
        "job": context.job,
        "tls_ca": context.tls_ca,
    }
    return flags, [{key: text for key, text in said_by.items() if text is not None}, *rest]


def _read_files() -> list[dict[str, str]]:
    return [read_file(path, trusted=trusted) for path, trusted in file_places()]


def read_file(path: Path, *, trusted: bool) -> dict[str, str]:
    """The command line's keys in one paramd.toml; empty if there is no such file.

    A file in the working directory (not `trusted`) may belong to somebody else's project. It may
    choose the job, but neither send our token to another host nor have our files read. Raises
    UsageError if it is not TOML, or has an unknown key or one not allowed in an untrusted file.
    """
    found = read_toml(path)
    # Tables belong to other programs, such as the control plane's destinations.
    values = {key: value for key, value in found.items() if not isinstance(value, dict)}
    for key, value in values.items():
        _check_key(path, key, value)
    if not trusted:
        if TABLE in found:
            raise UsageError(f"{path}: {TABLE} are read only from {own_file()}")
        _check_foreign(path, values)
    return values


def own_file() -> Path:
    """Path of the user's own paramd.toml, which may not exist."""
    return file_places()[-1][0]


def own_contexts() -> dict[str, Context]:
    """The contexts in the user's own paramd.toml, by name; UsageError if malformed."""
    path = own_file()
    tables = read_toml(path).get(TABLE, {})
    if not isinstance(tables, Mapping):
        raise UsageError(f"{path}: {TABLE} must be a table of tables, such as [{TABLE}.lab]")
    return {name: _context(path, name, table) for name, table in tables.items()}


def _check_key(path: Path, key: str, value: object) -> None:
    if key == "token":
        raise UsageError(f"{path}: a token does not belong here; name its file: token_file = ...")
    if key not in FILE_KEYS:
        gone.check("setting", key, f"{path}: {key!r}")
        near = difflib.get_close_matches(key, FILE_KEYS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(FILE_KEYS)}"
        raise UsageError(f"{path}: unknown key {key!r}; {hint}")
    if not isinstance(value, str):
        raise UsageError(f"{path}: {key} must be a string, is {value!r}")


def _check_foreign(path: Path, values: Mapping[str, str]) -> None:
    own = own_file()
    for key in ("token_file", "tls_ca", "context"):
        if key in values:
            raise UsageError(f"{path}: {key} is read only from {own}; move it there")
    if "url" in values and urlsplit(values["url"]).hostname not in LOOPBACK:
        raise UsageError(
            f"{path}: url in the working directory must point to this machine, is "
            f"{values['url']!r}; use --url, PARAMD_URL or {own} instead"
        )


def read_token(source: str, *, stdin: TextIO) -> str:
    """The token from "-" (first line of stdin) or "@FILE" (first line of the file).

    Raises UsageError for other sources, or without a token there. The message never contains
    `source`, which may be a token.
    """
    if source == "-":
        token, place = stdin.readline(MAX_TOKEN_BYTES).strip(), "stdin"
    elif source.startswith("@") and len(source) > 1:
        path = Path(source[1:]).expanduser()
        check_private(path)
        try:
            with path.open(encoding="utf-8") as file:
                token, place = file.readline(MAX_TOKEN_BYTES).strip(), str(path)
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"token: its file {path} cannot be read: {error}") from error
    else:
        raise UsageError(
            "--token: a token on the command line is visible to other users of this machine; "
            "set PARAMD_TOKEN, or use --token @FILE, or --token - with the token on stdin"
        )
    if not token:
        raise UsageError(f"token: no token on the first line of {place}")
    return token
