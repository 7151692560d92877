"""Starts a training on two ranks, asks it four things, and counts the files that each entered.

Counted are distinct files of ours in the client, the control plane and the sidecars with a function
that ran between question and answer and does not run when nobody asks: reports and the like go on
meanwhile, and files of which only they run are counted apart.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from paramd.mesh.connect import connect
from paramd.mesh.mesh import Mesh
from tests.launch import ROOT, start_ranks
from tests.walks.inject import sitecustomize

INJECT = Path(__file__).parent / "inject"
IDLE, IDLE_S = 9, 12.0
SETTLE_S = 3.0
GOALS = {"summon": 35, "edit": 50, "gradient frame": 30, "export": 50}


def summon(mesh: Mesh) -> None:
    assert len(mesh.summon("blocks.*")) > 0


def edit(mesh: Mesh) -> None:
    assert mesh.edit("blocks.1.norm*", mul=1.0).step > 0


def gradient_frame(mesh: Mesh) -> None:
    assert next(iter(mesh.grads("blocks.*"))).step > 0


def export(mesh: Mesh) -> None:
    assert mesh.export("exports/walk", include=("parameters",)).wait(60.0).step > 0


WALKS: dict[str, Callable[[Mesh], None]] = {
    "summon": summon,
    "edit": edit,
    "gradient frame": gradient_frame,
    "export": export,
}


@contextmanager
def training(folder: Path) -> Iterator[Mesh]:
    """A mesh over a job of two ranks, all its processes watched."""
    (folder / "exports").mkdir()
    path = [str(INJECT), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PARAMD_WALKS": str(folder),
        "PARAMD_DESTINATIONS": json.dumps({"exports": str(folder / "exports")}),
    }
    arguments = ["--kind", "fsdp2", "--job", "walks", "--folder", str(folder), "--salt", "0"]
    script = str(ROOT / "tests" / "soak" / "trainer.py")
    with start_ranks(
        script, 2, args=arguments, env=environment, state_dir=folder / "state"
    ) as ranks:
        ranks.wait_for_text("attached", rank=0, timeout_s=120)
        os.environ["PARAMD_STATE_DIR"] = str(folder / "state")
        with connect(job="walks") as mesh:
            yield mesh
        (folder / "stop").touch()
        ranks.wait(timeout_s=60)


def told(folder: Path, number: int, trainers: set[str]) -> dict[str, list[str]]:
    """Functions by file of one walk, in the order of their first call in a process."""
    found: dict[str, list[str]] = {}
    for path in folder.iterdir():
        if path.name.isdigit() and path.name not in trainers:
            for line in path.read_text().splitlines():
                walk, file, function = line.split(" ")
                if int(walk) == number:
                    found.setdefault(file, []).append(function)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.walks", description=__doc__)
    parser.add_argument("-v", "--verbose", action="store_true", help="name the files")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="walks-") as name:
        folder = Path(name)
        number = folder / "number"
        number.write_bytes(b"\0")
        # Before any thread of the client's.
        sitecustomize.watch(folder)
        with training(folder) as mesh:
            for what, ask in WALKS.items():
                if what != "export":
                    ask(mesh)
            mesh.export("exports/first", include=("parameters",)).wait(60.0)
            _write(number, IDLE)
            time.sleep(IDLE_S)
            _write(number, 0)
            for position, ask in enumerate(WALKS.values(), 1):
                time.sleep(SETTLE_S)  # what the walk before left to do is none of this one's
                _write(number, position)
                ask(mesh)
                _write(number, 0)
        trainers = {p.name for p in folder.iterdir() if p.name.isdigit() and _is_trainer(p)}
        idle = told(folder, IDLE, trainers)
        for position, what in enumerate(WALKS, 1):
            ran = told(folder, position, trainers)
            own = {
                file: [one for one in functions if one not in idle.get(file, ())]
                for file, functions in ran.items()
            }
            files = {file: functions for file, functions in own.items() if functions}
            print(
                f"{what}: {len(files)} files (goal {GOALS[what]}), and {len(ran) - len(files)} of "
                "which only functions ran that run when nobody asks, too"
            )
            if options.verbose:
                for file in sorted(ran):
                    print(f"  {file}:{files[file][0] if file in files else '*'}")
    return 0


def _write(path: Path, number: int) -> None:
    with path.open("r+b") as file:
        file.write(bytes([number]))


def _is_trainer(path: Path) -> bool:
    return "paramd/trainer/boundary/" in path.read_text()


if __name__ == "__main__":
    raise SystemExit(main())
