"""What the manual shows runs: its trainings on two ranks, and everything beside them, in order."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from paramd.places import running_jobs
from tests.integration.client_job import wait_for
from tests.launch import ROOT, Ranks, start_ranks
from tests.longer import sample

DOCS = ROOT / "docs"
PAGES = sorted((DOCS / "integrations").glob("*.md"))
# Ray's is a change to a script that its own test runs (scenes/test_ray.py).
EXAMPLES = [path for path in PAGES if path.stem not in ("index", "ray")]
CHOSEN = [path for path in EXAMPLES if path.stem in ("fsdp", "transformers")]
BEFORE = {
    # It allocates on CUDA devices alone.
    "megatron": f"import sys\nsys.path.append({str(ROOT)!r})\n"
    "from tests import cuda_on_host\ncuda_on_host.enter()\n"
}
"""By page, what its script needs on a machine without a GPU."""

STARTS = ("torchrun", "python", "accelerate", "pip", ". ")
"""Lines that a person types before anything of ours runs."""

BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> tuple[str, list[tuple[str, str]]]:
    """The training's script, and what is run beside it, in order."""
    found = [(kind, text) for kind, text in BLOCK.findall(page.read_text())]
    (script,) = [text for _, text in found if text.startswith("# train.py\n")]
    return script, [(kind, text) for kind, text in found if text != script]


def lines_of(text: str) -> list[str]:
    """Commands of a console block that are ours."""
    typed = [line.removeprefix("$ ") for line in text.splitlines() if line.startswith("$ ")]
    return [line for line in typed if not line.startswith(STARTS)]


def command_of(line: str) -> list[str]:
    """A typed line; with bash where it is more than a command and its arguments."""
    words = shlex.split(line)
    if words[0] == "paramd" and not re.search(r"[|&;<>$`]", line):
        return [sys.executable, "-m", "paramd.cli", *words[1:]]
    ours = f'paramd() {{ {shlex.quote(sys.executable)} -m paramd.cli "$@"; }}'
    return ["bash", "-c", f"{ours}\n{line}"]


def run(kind: str, text: str, folder: Path) -> str:
    """Runs a block as a reader would; returns what it prints."""
    if kind == "python":
        commands = [[sys.executable, "-c", text]]
    else:
        commands = [command_of(line) for line in lines_of(text)]
    said = ""
    for command in commands:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=False, timeout=100
        )
        assert done.returncode == 0, f"{command[-1]}\n{done.stderr}"
        said += done.stdout
    return said


def wait_until_trained(ranks: Ranks) -> None:
    """Wait until the job has made updates and every rank's sidecar says so."""

    def trains() -> bool:
        assert all(rank.process.poll() is None for rank in ranks), ranks.outputs()
        if not running_jobs():
            return False
        status = [sys.executable, "-m", "paramd.cli", "status"]
        return subprocess.run(status, capture_output=True, check=False).returncode == 0

    wait_for(trains, "a healthy training")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("page", sample(EXAMPLES, CHOSEN), ids=lambda path: path.stem)
def test_an_integration_trains_and_is_read(
    page: Path, tmp_path: Path, private_state_dir: Path
) -> None:
    script, beside = blocks(page)
    (tmp_path / "train.py").write_text(BEFORE.get(page.stem, "") + script)
    with start_ranks(tmp_path / "train.py", 2, state_dir=private_state_dir) as ranks:
        wait_until_trained(ranks)
        said = [run(kind, text, tmp_path) for kind, text in beside]
    assert any(said), "the page reads nothing"


@pytest.mark.timeout(240)
def test_the_tutorial_can_be_followed_from_top_to_bottom(
    tmp_path: Path, private_state_dir: Path
) -> None:
    script, beside = blocks(DOCS / "tutorial.md")
    (tmp_path / "train.py").write_text(script)
    with start_ranks(tmp_path / "train.py", 2, state_dir=private_state_dir) as ranks:
        wait_until_trained(ranks)
        said = "".join(run(kind, text, tmp_path) for kind, text in beside)
    assert "(128, 32)" in said
    assert "EditState.APPLIED" in said or "APPLIED" in said
    assert (tmp_path / "model.safetensors").stat().st_size > 4 * (32 * 128 + 128 * 4)


def test_no_page_shows_a_program_that_no_test_runs() -> None:
    assert len(EXAMPLES) >= 5
    index = (DOCS / "integrations" / "index.md").read_text()
    for page in EXAMPLES:
        assert f"({page.name})" in index
        script, beside = blocks(page)
        compile(script, page.name, "exec")
        assert any(kind == "python" for kind, _ in beside), page.name
