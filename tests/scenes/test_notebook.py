"""The notebook's widget beside a real training: in a real kernel, and where widgets are off."""

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import paramd
from docs import notebook
from paramd.cli.main import main
from paramd.integrations.notebook import Column, Watched
from paramd.mesh.mesh import Mesh
from tests.integration.client_job import wait_for
from tests.launch import start_ranks
from tests.needs import missing
from tests.scenes.test_manual_examples import DOCS, blocks, wait_until_trained

WIDGET = "application/vnd.jupyter.widget-view+json"


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the tutorial's training runs, and its state dir is."""
    found = tmp_path_factory.mktemp("notebook")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARAMD_STATE_DIR", str(found / "state"))
        (found / "train.py").write_text(blocks((DOCS / "tutorial.md").read_text())[0])
        with start_ranks(found / "train.py", 2, state_dir=found / "state") as ranks:
            wait_until_trained(ranks)
            # Before any test begins: helpers that start later would count as that test's.
            wait_for(lambda: main(["status", "-o", "name"]) == 0, "all ranks well")
            yield found


@pytest.fixture
def folder(training: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, where this test looks for it."""
    monkeypatch.setenv("PARAMD_STATE_DIR", str(training / "state"))
    return training


@pytest.fixture
def mesh(folder: Path) -> Iterator[Mesh]:
    with paramd.connect(job="tutorial") as found:
        yield found


def data_of(cell: dict[str, Any]) -> dict[str, str]:
    """What the last output of a cell is, by media type."""
    found = cell["outputs"][-1]["data"]
    return {kind: "".join(told) if isinstance(told, list) else told for kind, told in found.items()}


def steps_in(text: str) -> tuple[int, int]:
    """First and last step of the caption in a widget's text."""
    words = text.split("binary exponents at steps ")[1].split()
    return int(words[0]), int(words[2].rstrip(";"))


@pytest.mark.timeout(240)
def test_the_manuals_notebook_runs_and_its_widget_is_live(folder: Path) -> None:
    if not (find_spec("anywidget") and find_spec("nbclient") and find_spec("ipykernel")):
        missing("anywidget, nbclient and ipykernel (pip install 'paramd[notebook]', and [dev])")
    target = folder / "out.ipynb"
    done = subprocess.run(
        [sys.executable, "-m", "docs.notebook", str(target)],
        capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ran = json.loads(target.read_text())["cells"]
    kept = json.loads(notebook.SOURCE.read_text())["cells"]
    assert [cell["source"] for cell in ran] == [cell["source"] for cell in kept]
    assert [len(cell.get("outputs", ())) for cell in ran] == [
        len(cell.get("outputs", ())) for cell in kept
    ], "the outputs in docs/ are of other cells: run python -m docs.notebook"
    found = next(data_of(cell) for cell in ran if "sleep" in "".join(cell["source"]))
    assert found[WIDGET]
    first, last = steps_in(found["text/plain"])
    assert first < last, "it is not live"
    assert "<svg" in found["text/html"]
    assert "2 of 2 ranks healthy" in found["text/plain"]


def test_names_like_attacks_stay_text(mesh: Mesh) -> None:
    view = Watched(mesh, (), "").view
    view.name = "<img src=x onerror=alert(1)>"
    assert "<img" not in view._repr_html_()
    view.columns = [Column(1, mesh.stats("up.bias").total.summary)]
    assert "no finite nonzero elements" in view._repr_html_()
    assert "no finite nonzero elements" in repr(view)
