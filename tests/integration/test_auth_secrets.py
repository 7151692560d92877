"""A running mesh shows no token, ticket or key, and nothing at all to another local user."""

import base64
import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

import paramd
from paramd import places
from paramd.cli.main import main as paramd_command
from paramd.errors import UnreachableError
from tests.integration.client_job import JOB, Job, halves, running_job
from tests.leaks import open_files

PATIENCE_S = 60.0


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setenv("PARAMD_LOG_LEVEL", "DEBUG")
    with running_job(halves(16)) as found:
        yield found


def used(job: Job) -> list[str]:
    """Uses everything that has a secret once; returns the secrets."""
    secrets = [job.token, job.private_key.hex()]
    secrets.append(base64.urlsafe_b64encode(job.private_key).decode().rstrip("="))
    deadline_s = time.monotonic() + PATIENCE_S
    with paramd.connect(job.url, job.token) as mesh:
        while True:
            try:
                mesh.summon("*", transport="grpc")
                break
            except UnreachableError:
                assert time.monotonic() < deadline_s, "the sidecars have not joined"
                time.sleep(0.05)
        mesh.stats("*")
        secrets.append(mesh._mesh._host.reach.document.ticket)
    return secrets


class Break(Exception):
    """What ends a download in the middle."""


def broken_off(job: Job, folder: Path) -> None:
    """A download that leaves its partial file."""

    def moved(done_bytes: int, size_bytes: int) -> None:
        raise Break

    with paramd.connect(job.url, job.token) as mesh, pytest.raises(Break):
        mesh.download(folder / "all.safetensors", progress=moved)
    assert [path.name for path in folder.glob(".all.*")] == [".all.safetensors.part"]


def processes() -> list[psutil.Process]:
    """Sidecars and control plane: children of this process."""
    found = [p for p in psutil.Process().children(recursive=True) if p.status() != "zombie"]
    ours = [p for p in found if any("paramd_service" in word for word in p.cmdline())]
    assert len(ours) == 3
    return ours


def texts(job: Job, tmp_path: Path) -> Iterator[tuple[str, bytes]]:
    """What others can see: /proc of every process, and every file that one of them wrote."""
    for pid in (*(process.pid for process in processes()), os.getpid()):
        for name in ("cmdline", "environ", "maps", "comm"):
            yield f"{pid} {name}", Path(f"/proc/{pid}/{name}").read_bytes()
        yield f"{pid} fd", "\n".join(open_files(pid).values()).encode()
    for path in (*places.state_dir().rglob("*"), *tmp_path.rglob("*")):
        # Where the owner's token is meant to be, 0600.
        if path.is_file() and path.name != places.ENDPOINT_FILE:
            yield str(path), path.read_bytes()


def test_no_secret_is_seen_in_a_running_mesh(
    job: Job, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = used(job)
    broken_off(job, tmp_path)
    monkeypatch.setenv("PARAMD_TOKEN", job.token)
    create = ["token", "create", "--url", job.url, "--job", JOB, "--role", "viewer", "--ttl", "5m"]
    assert paramd_command([*create, "--name", "seen"]) == 0
    shown = capfd.readouterr()
    token = shown.out.strip()
    assert token.startswith("pmd_")
    assert token not in shown.err
    secrets.append(token)
    with paramd.connect(job.url, token) as mesh:
        assert mesh.status() is not None
    assert paramd_command(["token", "list", "--url", job.url, "--job", JOB, "-o", "json"]) == 0
    listed = capfd.readouterr()
    assert [row["name"] for row in json.loads(listed.out)["tokens"]] == ["seen"]
    assert paramd_command(["token", "revoke", "seen", "--url", job.url, "--job", JOB]) == 0
    monkeypatch.setenv("PARAMD_TOKEN", token)
    assert paramd_command(["token", "list", "--url", job.url, "--job", JOB]) == 7
    said = capfd.readouterr()
    monkeypatch.delenv("PARAMD_TOKEN")
    seen = [*texts(job, tmp_path), ("cli", (listed.out + said.out + said.err).encode())]
    assert any(name.endswith(".part") for name, _ in seen)
    assert any(name.endswith("cmdline") and b"paramd_service.sidecar" in t for name, t in seen)
    logs = b"".join(text for name, text in seen if name.endswith(".log"))
    assert b"/api/v1/tokens" in logs, "the control plane's log is looked at, with debug lines"
    assert b"attached" in logs
    for name, text in seen:
        for secret in secrets:
            assert secret.encode() not in text, name


def test_helpers_dump_no_core_and_only_root_may_look_into_them(job: Job) -> None:
    for process in processes():
        limits = Path(f"/proc/{process.pid}/limits").read_text()
        (line,) = [line for line in limits.splitlines() if line.startswith("Max core file size")]
        assert line.split()[4:6] == ["0", "0"]
        # Another process of this user would own it, were it open to tracing.
        assert os.stat(f"/proc/{process.pid}/mem").st_uid == 0


def test_helpers_are_the_first_victims_when_memory_runs_out(job: Job) -> None:
    own_score = int(Path("/proc/self/oom_score").read_text())
    found = list(processes())
    assert found
    for process in found:
        assert Path(f"/proc/{process.pid}/oom_score_adj").read_text().strip() == "1000"
        # The kernel's own order: it ends the process with the highest score.
        assert int(Path(f"/proc/{process.pid}/oom_score").read_text()) > own_score


NOBODY = 65534
_TRIES = """
import json, os, socket, sys

def connect(path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one:
        one.connect(path)
        one.settimeout(10)
        one.send(b'{"op": "nothing"}')
        if not one.recv(1000):
            raise PermissionError("hung up")

ways = {"read": lambda path: os.close(os.open(path, os.O_RDONLY)),
        "write": lambda path: os.close(os.open(path, os.O_RDWR)),
        "list": os.listdir, "connect": connect}
user, tries = json.load(sys.stdin)
if user:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)

def outcome(way, path):
    try:
        ways[way](path)
    except OSError as error:
        return type(error).__name__
    return ""

json.dump([outcome(way, path) for way, path in tries], sys.stdout)
"""


def outcomes(tries: list[tuple[str, str]], *, user: int) -> dict[tuple[str, str], str]:
    """How a process of a user fares with each; empty: it gets in."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", _TRIES],
        input=json.dumps([user, tries]),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return dict(zip(tries, json.loads(done.stdout), strict=True))


def test_another_local_user_gets_at_nothing(job: Job, tmp_path: Path) -> None:
    """Socket, files, memory and processes; once more when the directories are open."""
    wanted = {places.ENDPOINT_FILE, "rank-0.log", ".all.safetensors.part"}
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    used(job)
    broken_off(job, tmp_path)
    sockets = [("connect", str(rank.socket_path)) for rank in job.ranks]
    files = [
        *(path for path in places.state_dir().rglob("*") if path.is_file()),
        *tmp_path.glob(".all.*"),
    ]
    assert wanted <= {file.name for file in files}
    tries = [*sockets, *((way, str(file)) for file in files for way in ("read", "write"))]
    memories = 0
    for pid in (*(process.pid for process in processes()), os.getpid()):
        named = [
            line
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
            # But a semaphore of multiprocessing: it holds nothing of ours, and nobody can open it.
            if "/dev/shm/" in line and not ("/dev/shm/sem." in line and line.endswith("(deleted)"))
        ]
        assert not named, "memory has no name"
        tries += [("list", f"/proc/{pid}/fd"), ("read", f"/proc/{pid}/environ")]
        for link, target in open_files(pid).items():
            if target.startswith("/memfd:"):
                memories += 1
                tries.append(("read", str(link)))
    assert memories > 4, "arenas, pages and snapshots of two ranks, at both their ends"
    tries.append(("list", str(places.state_dir() / JOB)))
    mine = outcomes(tries, user=0)
    assert not any(mine.values()), {key: value for key, value in mine.items() if value}
    theirs = outcomes(tries, user=NOBODY)
    assert set(theirs.values()) == {"PermissionError"}, theirs
    # Not only because they cannot come near: a careless chmod of what leads there opens nothing.
    with reachable(*places.state_dir().glob("*"), places.state_dir(), tmp_path):
        theirs = outcomes(tries[:-1], user=NOBODY)
        assert set(theirs.values()) == {"PermissionError"}, theirs
        for _, path in sockets:
            os.chmod(path, 0o666)
        hung_up = outcomes(sockets, user=NOBODY)
        assert set(hung_up.values()) <= {
            "PermissionError",
            "ConnectionResetError",
            "BrokenPipeError",
        }
        assert "" not in hung_up.values()


@contextmanager
def reachable(*leaves: Path) -> Iterator[None]:
    """All directories that lead there may be entered and listed by everybody."""
    found = {leaf for leaf in leaves if leaf.is_dir()}
    found |= {parent for leaf in found for parent in leaf.parents}
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in found}
    try:
        for path, mode in modes.items():
            path.chmod(mode | 0o055)
        yield
    finally:
        for path, mode in modes.items():
            path.chmod(mode)
