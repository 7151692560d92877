"""The manual's notebook beside a real training, in a real kernel."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from docs import notebook
from tests.launch import start_ranks
from tests.needs import missing
from tests.scenes.test_manual_examples import DOCS, blocks, wait_until_trained


def html_of(cell: dict[str, Any]) -> str:
    """The last output of a cell, as a notebook shows it."""
    return "".join(cell["outputs"][-1]["data"]["text/html"])


@pytest.mark.timeout(240)
def test_the_manuals_notebook_runs_and_shows_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (find_spec("nbclient") and find_spec("ipykernel")):
        missing("nbclient and ipykernel (pip install --group integrations)")
    monkeypatch.setenv("PARAMD_STATE_DIR", str(tmp_path / "state"))
    script, target = tmp_path / "train.py", tmp_path / "out.ipynb"
    script.write_text(blocks((DOCS / "tutorial.md").read_text())[0])
    with start_ranks(script, 2, state_dir=tmp_path / "state") as ranks:
        wait_until_trained(ranks)
        done = subprocess.run(
            [sys.executable, "-m", "docs.notebook", str(target)],
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )
    assert done.returncode == 0, done.stderr
    ran = json.loads(target.read_text())["cells"]
    kept = json.loads(notebook.SOURCE.read_text())["cells"]
    assert [cell["source"] for cell in ran] == [cell["source"] for cell in kept]
    assert [len(cell.get("outputs", ())) for cell in ran] == [
        len(cell.get("outputs", ())) for cell in kept
    ], "the outputs in docs/ are of other cells: run python -m docs.notebook"
    status = next(cell for cell in ran if "mesh.status()" in "".join(cell["source"]))
    assert "<table" in html_of(status)
    stats = next(cell for cell in ran if "mesh.stats" in "".join(cell["source"]))
    assert "up.weight" in html_of(stats)
