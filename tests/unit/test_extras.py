"""Extras are those of pyproject.toml, and what lacks one says which."""

import re
import subprocess
import sys
import tomllib

import pytest

from paramd import extras
from paramd.integrations.trackers import _PACKAGES
from tests.launch import ROOT

BLOCKED = """
import sys
sys.modules.update(dict.fromkeys(sys.argv[1].split(",")))  # None: neither found nor imported
"""


def without(modules: tuple[str, ...], code: str) -> str:
    """The last line on stderr of a program that runs where modules are not installed."""
    command = [sys.executable, "-c", BLOCKED + code, ",".join(modules)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return "ok" if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


RANGE = re.compile(r'require\("(.+?)", at_least="(.+?)", below="(.+?)", extra="(.+?)"\)')


def ranges_of_integrations() -> dict[str, set[str]]:
    """What the integrations check themselves when they are imported, by extra."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "client/paramd/integrations").glob("*.py"):
        for package, least, below, extra in RANGE.findall(path.read_text()):
            found.setdefault(extra, set()).add(f"{package}>={least},<{below}")
    found["trackers"] = {f"{name}>={least},<{end}" for name, least, end in _PACKAGES.values()}
    return found


def test_the_extras_of_integrations_have_the_ranges_that_these_check() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranges = ranges_of_integrations()
    assert len(ranges) > 5
    for extra, checked in ranges.items():
        brought = {line for line in project["optional-dependencies"][extra] if "[" not in line}
        # Lightning is taken under its other name, too.
        assert brought == checked - {"pytorch-lightning>=2.5,<3"}, extra


def test_a_reader_needs_no_extra() -> None:
    everything = (*extras.TORCH, *extras.SERVICE, "psycopg")
    code = (
        "import paramd, paramd.aio; paramd.connect, paramd.aio.connect;"
        "from paramd.cli.commands import PartCommands; dict(PartCommands())"
    )
    assert without(everything, code) == "ok"
    read = "import paramd.mesh.amesh, paramd.cli.doctor, paramd.cli.dashboard"
    assert without(everything, read) == "ok"


@pytest.mark.parametrize("name", ["attach", "summon_full_params", "pre_dp_module_transform"])
def test_a_training_without_torch_is_told_what_to_install(name: str) -> None:
    said = without(("torch",), f"from paramd import {name}")
    assert said == (
        f"ModuleNotFoundError: paramd.{name} needs torch; run: pip install 'paramd[torch]'"
    )
