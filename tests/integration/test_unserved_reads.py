"""Readers of a rank that does not serve its parameters get its reason, and soon."""

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import paramd
from paramd.errors import ParamdError

pytestmark = pytest.mark.usefixtures("grpc_is_up")

PATIENCE_S = 60.0


@pytest.mark.in_turns
def test_every_reader_is_told_which_rank_and_why_and_is_served_once_it_is_over(
    tmp_path: Path,
) -> None:
    environment = {**os.environ, "PARAMD_LISTEN": "127.0.0.1:0", "OMP_NUM_THREADS": "1"}
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(
            [sys.executable, "-m", "tests.integration.pruning_trainer", "pruned"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        ) as process,
    ):
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            assert select.select([process.stdout], [], [], PATIENCE_S)[0]
            with paramd.connect("pruned", timeout=PATIENCE_S) as mesh:
                mesh.add_destination("here", str(tmp_path))
                reads: dict[str, Callable[[], object]] = {
                    "summon": lambda: mesh.summon("*"),
                    "buffers": lambda: mesh.summon("*", buffers=True),
                    "optimizer": mesh.optimizer,
                    "both": lambda: mesh.summon("*", optimizer=True),
                    "export": lambda: mesh.export("here/a").wait(),
                    "checkpoint": lambda: mesh.export("here/b", format="dcp").wait(),
                }
                with ThreadPoolExecutor(len(reads)) as threads:
                    asked = {name: threads.submit(_refused, read) for name, read in reads.items()}
                    told = {name: one.result(PATIENCE_S) for name, one in asked.items()}
                for name, (took_s, error) in told.items():
                    assert "rank 0" in str(error), name
                    assert "'0.weight' was float32" in str(error), f"{name}: {error!r}"
                    # They look for 2 s; their whole patience is 60 s.
                    assert took_s < 20, f"{name}: {error!r}"
                # Gradients are where their parameters are: only this one has no place any more.
                frame = next(iter(mesh.grads("*")))
                assert list(frame.none) == ["0.weight"]
                assert "attachment.refresh()" in frame.none["0.weight"]
                process.stdin.write(b"\n")
                process.stdin.flush()
                mesh.export("here/c").wait(timeout=PATIENCE_S)
                assert "0.weight" in mesh.optimizer("0.weight")
            process.stdin.close()
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()


def _refused(read: Callable[[], object]) -> tuple[float, ParamdError]:
    """How long a read took, and its error."""
    began_s = time.monotonic()
    with pytest.raises(ParamdError) as error:
        read()
    return time.monotonic() - began_s, error.value
