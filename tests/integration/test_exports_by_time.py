"""Exports by time, as the manual and the example say: a line of a crontab, a CronJob.

Neither cron nor a cluster runs here: the commands are taken from the page and from the manifest,
and run with what cron and a kubelet would give them.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.client_job import JOB
from tests.integration.export_job import ExportingJob, exporting_job
from tests.launch import ROOT

PARAMD = str(Path(sys.executable).with_name("paramd"))
INSTALLED = "/opt/paramd/bin/paramd"
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExportingJob]:
    with exporting_job(tmp_path_factory.mktemp("by-time")) as found:
        found.job.train(lambda rank, step: None, 0.02)
        yield found


def run(command: list[str], environment: Mapping[str, str], folder: Path) -> str:
    """What a command says that is given nothing but this environment."""
    done = subprocess.run(
        command, env=dict(environment), cwd=folder, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def check_exported(site: ExportingJob, key: str) -> None:
    (folder,) = (site.folder / key).glob("step-*")
    assert re.fullmatch(r"step-\d+", folder.name), "{step} is filled in"
    tensors = load_file(folder / "model.safetensors")
    assert set(tensors) == set(site.whole)
    assert all(torch.equal(tensors[name], one) for name, one in site.whole.items())


def crontab_line() -> str:
    """The command of the manual's line, without its five fields of time."""
    (line,) = re.findall(r"^ {4}(\S+ \S+ \* \* \* .*)$", page("exports"), re.MULTILINE)
    assert "%" not in line, "which cron takes for the end of the line"
    return str(line.split(maxsplit=5)[5])


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text()


def context_of_the_manual(site: ExportingJob) -> str:
    """The file of contexts that docs/deploy.md shows, for the job here."""
    (shown,) = re.findall(r"^ {4}context = .*\n(?:^ {4}.*\n|\n)+", page("deploy"), re.MULTILINE)
    shown = re.sub(r"^ {4}", "", shown, flags=re.MULTILINE)
    for name, value in (("url", site.job.url), ("job", JOB)):
        there = re.compile(rf'^{name} = ".*"$', re.MULTILINE)
        shown, count = there.subn(f'{name} = "{value}"', shown)
        assert count == 1
    # The job is served on loopback, without TLS.
    return re.sub(r"^tls_ca = .*\n", "", shown, flags=re.MULTILINE)


def test_the_manuals_crontab_line_exports_a_running_job(site: ExportingJob, tmp_path: Path) -> None:
    home = tmp_path / "home"
    config = home / ".config" / "paramd"
    config.mkdir(parents=True)
    (config / "paramd.toml").write_text(context_of_the_manual(site))
    token = config / "lab.token"
    token.write_text(site.job.token + "\n")
    token.chmod(0o600)
    token.chmod(0o600)
    line = crontab_line()
    assert line.count(INSTALLED) == 1
    line = line.replace(INSTALLED, shlex.quote(PARAMD))
    bare = {"HOME": str(home), "PATH": "/usr/bin:/bin", "SHELL": "/bin/sh", "LOGNAME": "ops"}
    run(["/bin/sh", "-c", line], bare, home)
    check_exported(site, "my-run")
    assert site.job.token not in line
    assert "checkpoints/my-run/step-" in (home / "paramd-export.log").read_text()
