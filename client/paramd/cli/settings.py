"""Which job to ask, and with which token: flag, then PARAMD_*, then paramd.toml, then default.

A token never comes from the command line itself (other users read it there, and shells
keep it): `--token -` reads it from stdin, `--token @FILE` from a file.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO
from urllib.parse import urlsplit

from paramd.errors import UsageError

FILE_NAME = "paramd.toml"
FILE_KEYS = ("job", "url", "token_file", "tls_ca", "output")
MAX_TOKEN_BYTES = 16 << 10
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What stood on the command line; None where nothing did."""

    job: str | None = None
    url: str | None = None
    token: str | None = None
    """"-" or "@FILE"."""
    tls_ca: str | None = None
    output: str | None = None

    def over(self, below: Flags) -> Flags:
        """These flags, and those of `below` where these are None."""
        return Flags(
            job=self.job if self.job is not None else below.job,
            url=self.url if self.url is not None else below.url,
            token=self.token if self.token is not None else below.token,
            tls_ca=self.tls_ca if self.tls_ca is not None else below.tls_ca,
            output=self.output if self.output is not None else below.output,
        )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to use. None leaves the choice to `paramd.connect`."""

    job: str | None
    url: str | None
    token: str | None = field(repr=False)
    tls_ca: str | None
    output: str | None


def load(flags: Flags, *, stdin: TextIO) -> Settings:
    """The settings in force here and now.

    Raises:
        UsageError: a flag, variable or file holds something that cannot be.
    """
    files = [read_file(path, trusted=trusted) for path, trusted in file_places()]
    merged = merge(os.environ, files)
    token = read_token(flags.token, stdin=stdin) if flags.token is not None else None
    if token is None:
        token = os.environ.get("PARAMD_TOKEN") or None
    if token is None and "token_file" in merged:
        token = read_token("@" + merged["token_file"], stdin=stdin)
    return Settings(
        job=flags.job if flags.job is not None else merged.get("job"),
        url=flags.url if flags.url is not None else merged.get("url"),
        token=token,
        tls_ca=flags.tls_ca if flags.tls_ca is not None else merged.get("tls_ca"),
        output=flags.output if flags.output is not None else merged.get("output"),
    )


def merge(environment: Mapping[str, str], files: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Each key's value where it stands first: in the environment, then in each file."""
    named = {
        key: environment.get(f"PARAMD_{key.upper()}") for key in ("job", "url", "tls_ca", "output")
    }
    merged = {key: value for key, value in named.items() if value}
    for found in files:
        merged = {**found, **merged}
    return merged


def file_places() -> list[tuple[Path, bool]]:
    """Where paramd.toml may lie, first one first, and whether it is the user's own."""
    base = os.environ.get("XDG_CONFIG_HOME")
    config = Path(base) if base and os.path.isabs(base) else Path.home() / ".config"
    return [(Path(FILE_NAME), False), (config / "paramd" / FILE_NAME, True)]


def read_file(path: Path, *, trusted: bool) -> dict[str, str]:
    """The keys of one paramd.toml that concern the command line; empty when there is none.

    A file in the working directory may have come with somebody else's project. It may
    choose the job, but neither send a token of ours elsewhere nor have a file of ours read.

    Raises:
        UsageError: not TOML, an unknown key, or something such a file may not say.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not TOML: {error}") from error
    # Tables belong to other programs of ours (destinations of the control plane).
    values = {key: value for key, value in found.items() if not isinstance(value, dict)}
    for key, value in values.items():
        _check_key(path, key, value)
    if not trusted:
        _check_foreign(path, values)
    return values


def _check_key(path: Path, key: str, value: object) -> None:
    if key == "token":
        raise UsageError(f"{path}: a token does not belong here; name its file: token_file = ...")
    if key not in FILE_KEYS:
        near = difflib.get_close_matches(key, FILE_KEYS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(FILE_KEYS)}"
        raise UsageError(f"{path}: unknown key {key!r}; {hint}")
    if not isinstance(value, str):
        raise UsageError(f"{path}: {key} must be a string, is {value!r}")


def _check_foreign(path: Path, values: Mapping[str, str]) -> None:
    own = file_places()[-1][0]
    for key in ("token_file", "tls_ca"):
        if key in values:
            raise UsageError(f"{path}: {key} is read only from {own}; move it there")
    if "url" in values and urlsplit(values["url"]).hostname not in _LOOPBACK:
        raise UsageError(
            f"{path}: a url in the working directory may only name this machine, is "
            f"{values['url']!r}; give it with --url, PARAMD_URL or in {own}"
        )


def read_token(source: str, *, stdin: TextIO) -> str:
    """The token that "-" (first line of stdin) or "@FILE" stands for.

    Raises:
        UsageError: anything else, or nothing was found there. The text never repeats it.
    """
    if source == "-":
        token, place = stdin.readline(MAX_TOKEN_BYTES).strip(), "stdin"
    elif source.startswith("@") and len(source) > 1:
        path = Path(source[1:]).expanduser()
        try:
            with path.open(encoding="utf-8") as file:
                token, place = file.readline(MAX_TOKEN_BYTES).strip(), str(path)
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--token: {path} cannot be read: {error}") from error
    else:
        raise UsageError(
            "--token: a token on the command line is visible to other users of this machine; "
            "set PARAMD_TOKEN, or give --token @FILE, or --token - and the token on stdin"
        )
    if not token:
        raise UsageError(f"--token: {place} holds no token in its first line")
    return token
