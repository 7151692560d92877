"""A mesh on one machine: a site's control plane, and ranks that train the GPT example.

Everything it creates is in one temporary directory, removed at the end; the user's own state,
jobs and control planes are not touched. Run by `deploy/local-mesh`.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from paramd.cli.demo import Training, started
from paramd.errors import ParamdError, UnreachableError
from paramd.mesh.connect import connect
from paramd.places import check_job_name

START_S = 30.0
OPEN_S = 180.0
STOP_S = 20.0
POLL_S = 0.3


def main(arguments: Sequence[str]) -> int:
    """Run the mesh until Ctrl-C or the end of the training; return the exit code."""
    chosen = parse(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory(prefix="paramd-mesh-") as folder:
            run(chosen, Path(folder))
    except ParamdError as error:
        say(f"local-mesh: {error}")
        return 1
    except KeyboardInterrupt:
        say("The mesh has ended.")
        return 0
    say("The training ended unexpectedly; see its last lines above.")
    return 1


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="local-mesh", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=4, help="1 to 16 (default 4)")
    parser.add_argument("--job", default="gpt", help="name of the job (default gpt)")
    parser.add_argument(
        "--listen",
        default="127.0.0.1:8470",
        metavar="HOST:PORT",
        help="where the control plane listens; the next free port if taken",
    )
    chosen = parser.parse_args(arguments)
    if not 1 <= chosen.ranks <= 16:
        parser.error(f"--ranks: {chosen.ranks}; expected 1 to 16")
    return chosen  # fmt: skip


def run(chosen: argparse.Namespace, folder: Path) -> None:
    """Start the mesh and wait; returns only if the training ends."""
    check_job_name(chosen.job)
    token_file = write_token(folder / "token")
    # Inherited by the ranks and their sidecars.
    os.environ["PARAMD_STATE_DIR"] = str(folder / "state")
    os.environ["PARAMD_TOKEN_FILE"] = str(token_file)
    for name in ("PARAMD_CONTROL", "PARAMD_TOKEN", "PARAMD_URL", "PARAMD_JOB"):
        os.environ.pop(name, None)
    with control_plane(chosen.listen, token_file, folder / "control.log") as url:
        say(f"The control plane serves at {url}; starting {chosen.ranks} ranks ...")
        with started(chosen.job, folder, keep=True, ranks=chosen.ranks, control=url) as ranks:
            step = wait_until_well(url, token_file.read_text().strip(), ranks)
            introduce(chosen, url, token_file, step)
            try:
                ranks.wait()
            except KeyboardInterrupt:
                say("Stopping after the next step ...")
                raise
            print(ranks.last_lines(), file=sys.stderr)


def write_token(path: Path) -> Path:
    """A new token that only this user can read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_urlsafe(32) + "\n")
    return path


@contextmanager
def control_plane(listen: str, token_file: Path, log_path: Path) -> Iterator[str]:
    """A site's control plane; yields its URL.

    Raises:
        UnreachableError: it did not start; the message has its log.
    """
    command = [sys.executable, "-m", "paramd_service.control"]
    command += ["--listen", listen, "--token-file", str(token_file)]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            # Keeps Ctrl-C from reaching it: it has to outlive the ranks.
            start_new_session=True,
        )
    try:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], START_S)
        line = process.stdout.readline() if ready else b""
        if not line:
            raise UnreachableError(f"the control plane did not start:\n{log_path.read_text()}")
        yield str(json.loads(line)["url"])
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def wait_until_well(url: str, token: str, training: Training) -> int:
    """Wait until every rank answers and has finished an update; return the step.

    Raises:
        UnreachableError, DeadlineError: the training ended first, or it took too long.
    """
    deadline_s = time.monotonic() + OPEN_S
    while True:
        # Fails until the job has registered.
        with suppress(ParamdError), connect(url, token, job=training.job) as mesh:
            found = mesh.status()
            if found.step > 0 and not any(row.reason for row in found):
                return int(found.step)
        training.check(deadline_s, "its ranks were not all reachable")
        time.sleep(POLL_S)


def introduce(chosen: argparse.Namespace, url: str, token_file: Path, step: int) -> None:
    """Print to stdout what to type in another terminal."""
    print(
        f"All {chosen.ranks} ranks are well, at step {step}. In another terminal:\n\n"
        f"    export PARAMD_URL={url} PARAMD_JOB={chosen.job}\n"
        f'    export PARAMD_TOKEN="$(cat {token_file})"     # role admin\n'
        "    paramd status\n"
        "    paramd stats 'layers.0.*'\n"
        "    paramd summon 'head.*' -f head.safetensors\n\n"
        "Ctrl-C stops everything.",
        flush=True,
    )


def say(text: str) -> None:
    """A message for people, on stderr."""
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
