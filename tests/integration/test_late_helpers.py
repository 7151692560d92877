"""Helper processes that come up long after `attach` has stopped waiting for them."""

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import paramd
from tests.longer import share

pytestmark = pytest.mark.usefixtures("grpc_is_up")

PATIENCE_S = 100.0

HELD = """
import os, sys
if {module!r} in " ".join(sys.orig_argv):
    with open({pids!r}, "a") as file:
        file.write(f"{{os.getpid()}}\\n")
    # Opening a fifo waits until somebody opens it for writing.
    open({gate!r}).close()
"""


@contextmanager
def trainer(job: str, held: str, directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A training whose helper of this module loads only once the gate is opened."""
    gate, site = directory / "gate", directory / "site"
    os.mkfifo(gate)
    site.mkdir()
    text = HELD.format(module=held, pids=str(directory / "pids"), gate=str(gate))
    (site / "sitecustomize.py").write_text(text)
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "PARAMD_SIDECAR_START_TIMEOUT_S": "2",
        "PARAMD_LISTEN": "127.0.0.1:0",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "tests.integration.site_trainer", "", job]
    with (
        (directory / "log").open("wb") as log,
        subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("held", share(["paramd_service.control", "paramd_service.sidecar"], 2))
def test_one_that_is_later_than_attach_waits_is_served_by_in_the_end(
    tmp_path: Path, held: str
) -> None:
    with trainer("late", held, tmp_path) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], PATIENCE_S)[0]
        said = json.loads(process.stdout.readline())
        if held == "paramd_service.control":
            assert not said["url"]
        log = (tmp_path / "log").read_text()
        assert "PARAMD_SIDECAR_START_TIMEOUT_S (now 2)" in log
        # It was not ended: what it had loaded was not thrown away.
        os.close(os.open(tmp_path / "gate", os.O_WRONLY))
        with paramd.connect("late", timeout=PATIENCE_S) as mesh:
            assert tuple(mesh.summon("weight")["weight"].shape) == (4, 8)
        assert len((tmp_path / "pids").read_text().split()) == 1
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0
