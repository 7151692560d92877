"""The state dir: private, traversal-proof, atomic, and honest about what runs."""

import asyncio
import json
import os
import re
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from paramd import places
from paramd.errors import ConflictError, UnreachableError, UsageError
from paramd.memory import handover
from paramd.mesh.connect import async_connect
from paramd.places import Endpoint
from paramd.state_files import beside_port


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PARAMD_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def ended_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def endpoint(job: str = "run", *, pid: int | None = None, token: str = "t") -> Endpoint:
    return Endpoint(
        url="http://127.0.0.1:8470",
        token=token,
        pid=pid if pid is not None else os.getpid(),
        job=job,
        grpc_address="127.0.0.1:8471",
        incarnation=1,
        pid_start=places.process_start(os.getpid()) if pid is None else 0,
    )


def test_the_state_dir_follows_its_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert places.state_dir() == tmp_path / "state"
    monkeypatch.setenv("PARAMD_STATE_DIR", "")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    assert places.state_dir() == tmp_path / "xdg" / "paramd"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert places.state_dir() == tmp_path / ".local" / "state" / "paramd"


BAD_NAMES = ["", ".", "..", "../x", "a/b", "/etc", "~", "-x", "a\x00", "a\n", "ä", "a" * 65, "%2e"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_could_leave_the_state_dir_is_refused(name: str, state: Path) -> None:
    for use in (places.job_dir, places.read_endpoint, places.next_incarnation):
        with pytest.raises(UsageError, match="job"):
            use(name)
    with pytest.raises(UsageError, match="job"):
        places.socket_path(name, 0)
    assert not state.exists()


def test_the_job_dir_is_private_and_made_once(state: Path) -> None:
    path = places.job_dir("my-run.1")
    assert path == state / "my-run.1" == places.job_dir("my-run.1")
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert places.socket_path("my-run.1", 3) == path / "rank-3.sock"


def test_a_job_dir_open_to_others_is_refused_with_the_command_to_run(state: Path) -> None:
    (state / "run").mkdir(parents=True)
    (state / "run").chmod(0o755)
    with pytest.raises(ConflictError, match="chmod 700"):
        places.job_dir("run")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_job_dir_of_another_user_is_refused() -> None:
    os.chown(places.job_dir("run"), 12345, -1)
    with pytest.raises(ConflictError, match="belongs to uid 12345"):
        places.job_dir("run")


def test_a_link_instead_of_a_job_dir_and_a_home_for_nobody_are_refused(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state.mkdir()
    (state / "run").symlink_to(tmp_path)
    with pytest.raises(ConflictError, match="not a directory"):
        places.job_dir("run")
    monkeypatch.setenv("PARAMD_STATE_DIR", "/dev/null/home")
    with pytest.raises(UsageError, match="set PARAMD_STATE_DIR to a directory that this user can"):
        places.job_dir("run")


def test_an_endpoint_comes_back_as_written_and_only_we_can_read_it() -> None:
    path = places.write_endpoint(endpoint())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert places.read_endpoint("run") == places.read_endpoint() == endpoint()
    assert [entry.name for entry in path.parent.iterdir()] == ["endpoint.json"]


def test_several_jobs_must_be_told_apart() -> None:
    places.write_endpoint(endpoint("one"))
    places.write_endpoint(endpoint("two"))
    with pytest.raises(UsageError, match="one, two"):
        places.read_endpoint()
    assert places.read_endpoint("two").job == "two"


@contextmanager
def sidecar(job: str, told: dict[str, object]) -> Iterator[None]:
    """The only rank's socket of a job, which answers each connection with that."""
    places.write_endpoint(endpoint(job))
    line = {"incarnation": 1, "world_size": 1, "began_s": 1.0}
    (places.job_dir(job) / places.HISTORY_FILE).write_text(json.dumps(line) + "\n")
    listener = handover.listen(places.socket_path(job, 0))
    listener.setblocking(True)

    def answer() -> None:
        while True:
            with listener.accept()[0] as peer:
                try:
                    asked, _ = handover.receive(peer)
                except EOFError:
                    return
                assert asked == {"op": "where"}
                handover.send(peer, told)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield
    finally:
        # A connection that asks nothing ends it.
        handover.connect(places.socket_path(job, 0)).close()
        thread.join(60.0)
        listener.close()


def test_a_job_whose_trainers_have_ended_is_not_one_of_several(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with sidecar("dead", {"op": "where", "ended": True}):
        places.write_endpoint(endpoint("silent"))
        assert places.read_endpoint().job == "silent"
        assert "taking job 'silent'; no trainer of dead is alive" in caplog.text
        several = pytest.raises(UsageError, match="several jobs run here: old, silent; name one")
        with sidecar("old", {"op": "where", "address": "as of an older version"}), several:
            places.read_endpoint()
        places.remove_endpoint(endpoint("silent"))
        places.remove_endpoint(endpoint("old"))
        none = pytest.raises(UsageError, match=r"trainers .* have ended: dead, too; name one")
        with sidecar("too", {"op": "where", "ended": True}), none:
            places.read_endpoint()


def test_without_a_job_each_thing_to_do_has_a_line(state: Path, ended_pid: int) -> None:
    with pytest.raises(UnreachableError) as nothing:
        places.read_endpoint()
    places.write_endpoint(endpoint("old", pid=ended_pid))
    with pytest.raises(UnreachableError) as ended:
        places.read_endpoint()
    first, second, third = str(ended.value).split("\n")
    assert first == "no job runs here; paramd.attach(model, optimizer, job=...) starts one"
    assert second == "ended: old (name one to see what is stored of it)"
    assert third.startswith("if it runs elsewhere, give url and token (PARAMD_URL, PARAMD_TOKEN)")
    assert third.endswith(str(state))
    assert str(nothing.value).split("\n") == [first, third]


def test_an_endpoint_whose_process_ended_is_skipped(ended_pid: int) -> None:
    places.write_endpoint(endpoint("old", pid=ended_pid))
    places.write_endpoint(endpoint("new"))
    assert places.read_endpoint().job == "new"
    with pytest.raises(UnreachableError, match=r"'old' has ended; jobs that run here: new"):
        places.read_endpoint("old")


def test_a_job_is_starting_until_its_control_plane_has_begun(
    ended_pid: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    places.write_endpoint(endpoint("old", pid=ended_pid))
    taken = places.next_incarnation("old", above=1)
    history = places.job_dir("old") / places.HISTORY_FILE
    # Killed between the end of its endpoint and the note of its own.
    history.write_text(f'{{"incarnation": {taken}, "world_size": 1, "began_s": 1.0}}\n')
    with pytest.raises(UnreachableError, match="nobody noted when"):
        places.read_endpoint("old")
    history.write_text("")
    for named in ("old", None):
        with pytest.raises(places.StartingError, match="starting"):
            places.read_endpoint(named)
    begins = threading.Timer(0.3, lambda: places.write_endpoint(endpoint("old", token="begun")))
    begins.start()

    async def entered() -> None:
        async with async_connect("old", timeout=30.0):
            raise AssertionError("nobody listens there")

    with pytest.raises(UnreachableError, match=re.escape(endpoint("old").url)):
        asyncio.run(entered())
    assert caplog.messages[0] == "paramd: old is starting; waiting until it is there"
    begins.join()
    places.write_endpoint(endpoint("old", pid=ended_pid))
    monkeypatch.setattr(places, "STARTING_S", 0.0)
    with pytest.raises(UnreachableError, match="has ended"):
        places.read_endpoint("old")


def test_a_reused_pid_is_told_apart_by_its_start() -> None:
    written = places.write_endpoint(endpoint())
    changed = json.loads(written.read_text()) | {"pid_start": 1}
    written.write_text(json.dumps(changed))
    with pytest.raises(UnreachableError, match="has ended"):
        places.read_endpoint("run")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"url": 1}', "\xff", '{"job": "run"}', "[" * 60_000]
)
def test_a_damaged_endpoint_is_as_good_as_none(text: str) -> None:
    places.write_endpoint(endpoint()).write_text(text)
    with pytest.raises(UnreachableError):
        places.read_endpoint("run")


def test_an_endpoint_that_others_may_read_or_write_is_not_trusted() -> None:
    places.write_endpoint(endpoint()).chmod(0o620)
    with pytest.raises(UnreachableError):
        places.read_endpoint("run")


def test_only_its_own_endpoint_is_removed() -> None:
    places.write_endpoint(endpoint(token="new"))
    assert not places.remove_endpoint(endpoint(token="old"))
    assert places.read_endpoint("run").token == "new"
    assert places.remove_endpoint(endpoint(token="new"))
    assert not places.remove_endpoint(endpoint(token="new"))


def test_a_connection_never_takes_the_place_of_a_job_that_lives_here(ended_pid: int) -> None:
    theirs = replace(endpoint(token="theirs"), via="other.example", incarnation=2**62)
    for alive in (True, False):
        mine = endpoint() if alive else replace(endpoint(), pid=ended_pid, pid_start=0)
        path = places.write_endpoint(mine)
        before = path.read_bytes()
        with pytest.raises(ConflictError, match="is here already"):
            places.write_endpoint(theirs)
        assert not places.remove_endpoint(theirs)
        assert path.read_bytes() == before
    path.write_text("damaged")
    with pytest.raises(ConflictError, match="remove that file"):
        places.write_endpoint(theirs)
    path.unlink()
    places.write_endpoint(theirs)
    with pytest.raises(ConflictError, match="is here already"):
        places.write_endpoint(replace(theirs, token="another connection's"))
    # And a job that begins here is not kept from its own name, whatever incarnation theirs claims.
    places.write_endpoint(endpoint())
    assert places.read_endpoint("run") == endpoint()
    assert not places.remove_endpoint(theirs)


def test_an_older_incarnation_does_not_replace_a_running_newer_one(ended_pid: int) -> None:
    newer = replace(endpoint(token="newer"), incarnation=2)
    places.write_endpoint(newer)
    with pytest.raises(ConflictError, match="run 2 of job 'run' is already running"):
        places.write_endpoint(endpoint(token="older"))
    assert places.read_endpoint("run") == newer
    places.write_endpoint(replace(newer, incarnation=3, pid=ended_pid, pid_start=0))
    places.write_endpoint(newer)
    assert places.read_endpoint("run") == newer


def test_incarnations_are_never_handed_out_twice_under_contention() -> None:
    got: list[int] = []
    threads = [
        threading.Thread(
            target=lambda: got.extend(places.next_incarnation("run") for _ in range(10))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert sorted(got) == list(range(1, 41))


@pytest.mark.parametrize("text", ["-1", "1" * 5000])
def test_a_damaged_incarnation_counter_is_not_guessed(text: str) -> None:
    (places.job_dir("run") / "incarnation").write_text(text)
    with pytest.raises(ConflictError, match="does not hold a number"):
        places.next_incarnation("run")


def test_a_port_of_another_loopback_address_has_a_socket_of_its_own() -> None:
    """Two servers may have one port, on two addresses: neither gets the other's clients."""
    assert len({beside_port(ip, 8471) for ip in ("127.0.0.1", "127.0.0.2", "::1")}) == 3
