"""A real PostgreSQL server for tests: Debian's, in a directory of its own, on a Unix socket."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import psycopg

USER = "paramd"
PASSWORD = "a/secret:of@postgres"
START_TIMEOUT_S = 30.0
_SERVER_ACCOUNT = "postgres"
"""Debian's package makes it; the server refuses to run as root."""


@dataclass(frozen=True)
class Postgres:
    """A running server. Its one user needs its password."""

    directory: Path
    process: subprocess.Popen[bytes]

    def url(self, database: str = "postgres") -> str:
        """For PARAMD_STORE_URL; holds the password."""
        host = quote(str(self.directory), safe="")
        return f"postgresql://{USER}:{quote(PASSWORD, safe='')}@/{database}?host={host}"

    def new_database(self, name: str) -> str:
        """Makes an empty database; returns its URL."""
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"'.encode())
        return self.url(name)


@contextmanager
def postgres() -> Iterator[Postgres]:
    """Starts a server and ends it."""
    directory = Path(tempfile.mkdtemp(prefix="pg-"))
    process: subprocess.Popen[bytes] | None = None
    try:
        password = directory / "password"
        password.write_text(PASSWORD + "\n")
        run_as = _give_away(directory, password)
        initdb = [
            *run_as,
            *(str(_program("initdb")), "-D", str(directory / "data"), "-U", USER),
            *("--auth=scram-sha-256", f"--pwfile={password}", "-E", "UTF8", "--locale=C"),
            "--no-sync",
        ]
        done = subprocess.run(initdb, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        process = _start(directory, run_as)
        server = Postgres(directory, process)
        _wait(server)
        yield server
    finally:
        if process is not None:
            # At once: nobody needs the data.
            process.kill()
            process.wait()
        shutil.rmtree(directory, ignore_errors=True)


def _start(directory: Path, run_as: list[str]) -> subprocess.Popen[bytes]:
    options = ["-c", "listen_addresses=", "-c", "shared_buffers=16MB", "-c", "max_connections=40"]
    command = [str(_program("postgres")), "-D", str(directory / "data"), "-k", str(directory)]
    with (directory / "log").open("wb") as log:
        return subprocess.Popen(
            [*run_as, *command, *options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _wait(server: Postgres) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            psycopg.connect(server.url(), connect_timeout=2).close()
            return
        except psycopg.OperationalError:
            log = (server.directory / "log").read_text()
            assert server.process.poll() is None, log
            assert time.monotonic() < deadline, log
            time.sleep(0.05)


def _program(name: str) -> Path:
    versions = sorted(Path("/usr/lib/postgresql").glob("[0-9]*"), key=lambda p: int(p.name))
    found = versions[-1] / "bin" / name if versions else shutil.which(name)
    assert found, "PostgreSQL is not installed; run: make system"
    return Path(found)


def _give_away(*paths: Path) -> list[str]:
    """Gives the paths to whom the server runs as; what its command begins with.

    That is us, or when we are root somebody else. Not by Popen's `user`: that forks, and
    gRPC's threads are restarted around a fork.
    """
    if os.geteuid() != 0:
        return []
    account = pwd.getpwnam(_SERVER_ACCOUNT)
    for path in paths:
        os.chown(path, account.pw_uid, account.pw_gid)
    return ["setpriv", f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--clear-groups"]
