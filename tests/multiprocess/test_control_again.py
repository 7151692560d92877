"""A control plane is killed and starts again from its store: ranks train on, and join it."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from shutil import copy2

import pytest

import paramd
from paramd import places
from paramd.errors import ParamdError
from paramd.layout.edits.ops import EditState
from paramd.mesh.mesh import Mesh
from tests.hosts import wait_until as wait_on_hosts
from tests.integration.control_process import site_plane, site_token
from tests.multiprocess.frozen import edit_to, frozen
from tests.multiprocess.striking import allowed_s, end_well, helper
from tests.multiprocess.truth import connect_to, wait_until
from tests.postgres import postgres
from tests.scenes.test_hosts import training

BACK_S = 10.0
"""Within this time all ranks are told again."""

OCCUPY = """
import socket, sys
ports, taken = [int(port) for port in sys.argv[2:]], []
print("waiting", flush=True)
while ports:
    try:
        taken.append(socket.create_server((sys.argv[1], ports[0])))
        del ports[0]
    except OSError:
        pass
print("taken", flush=True)
sys.stdin.read()
"""
"""Takes ports as soon as they are free, and answers nobody there."""


@contextmanager
def occupying(command: Sequence[str], *addresses: str) -> Iterator[subprocess.Popen[str]]:
    """A program that waits for the ports of a control plane; `command` runs Python."""
    host = addresses[0].rpartition("//")[2].rpartition(":")[0]
    ports = [address.rpartition(":")[2] for address in addresses]
    with subprocess.Popen(
        [*command, "-c", OCCUPY, host, *ports],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        yield process
        process.kill()


def is_whole(mesh: Mesh, step: int) -> bool:
    """Whether all ranks are told, well and beyond that step."""
    try:
        return all(not row.reason and row.step > step for row in mesh.status())
    except ParamdError:
        return False


def check_after(mesh: Mesh, edit_id: str) -> None:
    """The store is the one from before, and training obeys its new control plane."""
    assert [edit.id for edit in mesh.edits()] == [edit_id]
    assert edit_to(mesh, 9).state is EditState.APPLIED
    assert all(bool((tensor == 9).all()) for tensor in mesh.summon("*").values())


@pytest.mark.in_turns
@pytest.mark.timeout(180)
def test_a_killed_one_comes_back_at_another_port_with_its_store_and_all_ranks(
    tmp_path: Path,
) -> None:
    with frozen(tmp_path, "fsdp2", 2) as ranks:
        with connect_to(ranks.state_dir, "frozen") as mesh:
            edit = edit_to(mesh, 7)
            step = max(row.step for row in mesh.status())
        path = ranks.state_dir / "frozen" / places.ENDPOINT_FILE
        before = json.loads(path.read_text())
        with occupying([sys.executable], before["url"], before["grpc_address"]) as taker:
            control, begin_s = helper(ranks, "control"), time.monotonic()
            control.kill()
            assert taker.stdout is not None
            assert taker.stdout.readline() == "taken\n"

            def is_back() -> bool:
                if json.loads(path.read_text())["pid"] == control.pid:
                    return False
                with connect_to(ranks.state_dir, "frozen") as mesh:
                    return is_whole(mesh, step)

            wait_until(is_back, "all ranks at another port", timeout_s=allowed_s(BACK_S))
            print(f"all ranks back after {time.monotonic() - begin_s:.1f} s, at another port")
            with connect_to(ranks.state_dir, "frozen") as mesh:
                assert mesh.url != before["url"]
                assert json.loads(path.read_text())["grpc_address"] != before["grpc_address"]
                check_after(mesh, edit.id)


@pytest.mark.in_turns
@pytest.mark.timeout(180)
def test_a_site_that_was_killed_starts_again_on_another_host_with_its_store_and_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From PostgreSQL, with the site's key and token and no other file."""
    with ExitStack() as stack:
        server = stack.enter_context(postgres())
        monkeypatch.setenv("PARAMD_STORE_URL", server.new_database("site"))
        site, token = stack.enter_context(site_plane()), site_token()
        monkeypatch.setenv("PARAMD_CONTROL", site.url)
        monkeypatch.setenv("PARAMD_TOKEN", token)
        ranks = stack.enter_context(frozen(tmp_path, "fsdp2", 2))
        mesh = stack.enter_context(paramd.connect(site.url, token, job="frozen"))
        edit = edit_to(mesh, 7)
        step = max(row.step for row in mesh.status())
        begin_s = time.monotonic()
        site.process.kill()
        site.process.wait()
        files = places.state_dir() / "_site"
        monkeypatch.setenv("PARAMD_STATE_DIR", str(tmp_path / "state"))
        there = tmp_path / "state" / "_site"
        there.mkdir(mode=0o700, parents=True)
        for name in ("key", "token"):
            copy2(files / name, there / name)
        # As systemd, Slurm or Kubernetes would.
        again = stack.enter_context(site_plane(listen=site.url.removeprefix("http://")))
        assert (again.url, again.grpc_address) == (site.url, site.grpc_address)
        wait_until(lambda: is_whole(mesh, step), "all ranks", timeout_s=allowed_s(BACK_S))
        print(f"all ranks back after {time.monotonic() - begin_s:.1f} s, at a site")
        check_after(mesh, edit.id)
        end_well(ranks, tmp_path)


WATCH = """
import sys, paramd
for line in sys.stdin:
    try:
        with paramd.connect(job="far") as mesh:
            if line == "edit\\n":
                mesh.edit("0.weight[0:1]", fill=7.0)
            steps = [row.step if not row.reason else -1 for row in mesh.status()]
            print(mesh.url, min(steps), max(steps), len(mesh.edits()), flush=True)
    except paramd.errors.ParamdError as error:
        print(repr(error), flush=True)
"""


@pytest.mark.in_turns
@pytest.mark.timeout(300)
def test_ranks_on_other_hosts_find_it_at_another_port(tmp_path: Path) -> None:
    with training(2, tmp_path) as (job, _):
        job.start()
        before, one = job.wait_attached(), job.hosts[0]
        python = one.command([sys.executable])
        with (
            one.conversation(WATCH) as ask,
            occupying(python, before["url"], before["grpc_address"]) as taker,
        ):
            _, _, step, edits = ask("edit").split()
            assert edits == "1"
            begin_s = time.monotonic()
            one.run(["kill", "-9", str(before["pid"])])
            assert taker.stdout is not None
            assert taker.stdout.readline() == "taken\n"
            told = ""

            def is_back() -> bool:
                nonlocal told
                told = ask("look")
                words = told.split()
                if len(words) != 4 or words[0] == before["url"]:
                    return False
                assert words[3] == "1", "the edit before"
                return int(words[1]) > int(step)

            wait_on_hosts("all ranks", is_back, timeout_s=allowed_s(BACK_S), told=lambda: told)
            print(f"all ranks back after {time.monotonic() - begin_s:.1f} s, on two hosts")
        job.stop()
