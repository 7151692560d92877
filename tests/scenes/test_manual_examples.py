"""What the manual shows runs: its trainings on two ranks, and everything beside them, in order."""

import re
import shlex
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from paramd.places import running_jobs
from tests.integration.client_job import wait_for
from tests.launch import ROOT, Ranks, start_ranks
from tests.longer import sample

DOCS = ROOT / "docs"
PAGES = ("quickstart", "script", "integrations/pytorch", "integrations/trainers",
    "integrations/deepspeed-megatron")  # fmt: skip
BEFORE = {
    # It allocates on CUDA devices alone.
    "Megatron-Core": f"import sys\nsys.path.append({str(ROOT)!r})\n"
    "from tests import cuda_on_host\ncuda_on_host.enter()\n"
}
"""By section, what its script needs on a machine without a GPU."""

STARTS = ("torchrun", "python", "pip", "make", "pkill", "mkdir", "PARAMD_", ". ")
"""Lines that a person types before anything of ours runs, or to end it."""

BESIDE = ("install", "read", "gradients", "edits", "exports", "insight", "alerts", "security")
"""Pages whose commands work on the quickstart's training."""

BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def examples(page: str) -> dict[str, str]:
    """What has a script of its own: the page, or with several scripts its sections, by heading."""
    text = (DOCS / f"{page}.md").read_text()
    scripts = "```python\n# train.py\n"
    if text.count(scripts) == 1:
        return {page: text}
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    return {
        title: part for title, part in zip(parts[1::2], parts[2::2], strict=True) if scripts in part
    }


EXAMPLES = {title: text for page in PAGES for title, text in examples(page).items()}
CHOSEN = ("script", "FSDP2, FSDP1, HSDP", "Hugging Face Trainer, TRL")


def blocks(text: str) -> tuple[str, list[tuple[str, str]]]:
    """The training's script, and what is run beside it, in order."""
    found = [(kind, text) for kind, text in BLOCK.findall(text)]
    (script,) = [text for _, text in found if text.startswith("# train.py\n")]
    return script, [(kind, text) for kind, text in found if text != script]


def typed_in(page: str) -> list[str]:
    """The console blocks of a page without a script."""
    found = BLOCK.findall((DOCS / f"{page}.md").read_text())
    return [text for kind, text in found if kind == "console"]


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

    wait_for(trains, "a healthy training", timeout_s=180)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("title", sample(list(EXAMPLES), CHOSEN))
def test_an_example_trains_and_is_read(title: str, tmp_path: Path, private_state_dir: Path) -> None:
    script, beside = blocks(EXAMPLES[title])
    (tmp_path / "train.py").write_text(BEFORE.get(title, "") + script)
    with start_ranks(tmp_path / "train.py", 2, state_dir=private_state_dir) as ranks:
        wait_until_trained(ranks)
        said = [run(kind, text, tmp_path) for kind, text in beside]
    assert any(said), "the page reads nothing"


@pytest.mark.timeout(300)
def test_the_commands_of_all_other_pages_work(tmp_path: Path, private_state_dir: Path) -> None:
    (tmp_path / "train.py").write_text(blocks(EXAMPLES["quickstart"])[0])
    with start_ranks(tmp_path / "train.py", 2, state_dir=private_state_dir) as ranks:
        wait_until_trained(ranks)
        for page in BESIDE:
            for text in typed_in(page):
                run("console", text, tmp_path)


@pytest.mark.timeout(240)
def test_the_tutorial_can_be_followed_from_top_to_bottom(
    tmp_path: Path, private_state_dir: Path
) -> None:
    script, beside = blocks((DOCS / "tutorial.md").read_text())
    killed = next(place for place, (_, text) in enumerate(beside) if "pkill" in text)
    beside += [("console", text) for text in typed_in("rollback")]
    (tmp_path / "train.py").write_text(script)
    said = outputs = ""
    # What was killed leaves its sidecars, until the end.
    with ExitStack() as started:
        for part in (beside[:killed], beside[killed:]):
            ranks = started.enter_context(
                start_ranks(tmp_path / "train.py", 2, state_dir=private_state_dir)
            )
            wait_until_trained(ranks)
            said += "".join(run(kind, text, tmp_path) for kind, text in part)
            for rank in ranks:
                rank.process.kill()
            outputs = ranks.outputs()
    assert "job 'tutorial' resumes at step" in outputs
    assert "APPLIED" in said
    assert list(private_state_dir.glob("tutorial/checkpoints/step-*/model.safetensors"))


def test_every_page_with_a_script_or_a_command_is_run() -> None:
    assert len(EXAMPLES) >= 10
    for page in DOCS.rglob("*.md"):
        name = page.relative_to(DOCS).with_suffix("").as_posix()
        if re.search(r"^# train.py$|^\$ paramd ", page.read_text(), re.MULTILINE):
            assert name in (*PAGES, *BESIDE, "tutorial", "rollback"), page
    for title, text in EXAMPLES.items():
        script, beside = blocks(text)
        compile(script, title, "exec")
        assert any(kind == "python" for kind, _ in beside), title
