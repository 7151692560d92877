"""Writes requirements.lock: what the image installs beside torch, each file by its sha256.

    .venv/bin/python deploy/lock.py [MACHINE...]

Run it after a change of constraints.txt or of paramd's dependencies, with pip in the environment.
Names come from what is installed here, versions from constraints.txt, and hashes from what pip's
default index lists for these processors (x86_64). Of pip's settings only the system-wide ones count
(`--isolated`), so that no wheel of this host's own is taken for the public one.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LOCK = Path(__file__).with_name("requirements.lock")
CONSTRAINTS = LOCK.parents[1] / "constraints.txt"
INSTALLED = "paramd[demo,postgres]", "hatchling"
"""What the image installs; the latter builds the former."""
APART = {"paramd", "torch"}
"""paramd is built; torch comes from an index of its own, whose builds for the CPU PyPI has not."""
PYTHON = "3.11"
GLIBC = "manylinux_2_34", "manylinux_2_28", "manylinux_2_17", "manylinux2014"
"""What wheels are built against; Debian 12 has 2.36."""


def closure(*wanted: str) -> set[str]:
    """Names of all that these requirements need, by the metadata of what is installed."""
    found, left = set[tuple[str, str]](), [Requirement(one) for one in wanted]
    while left:
        requirement = left.pop()
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            if (name, extra) in found:
                continue
            found.add((name, extra))
            for text in requires(name) or ():
                inner = Requirement(text)
                if inner.marker is None or inner.marker.evaluate({"extra": extra}):
                    left.append(inner)
    return {name for name, _ in found}


def pins() -> dict[str, str]:
    """Versions by name, of constraints.txt."""
    lines = [one.split("==") for one in CONSTRAINTS.read_text().splitlines() if "==" in one]
    return {canonicalize_name(name): version for name, version in lines}


def names() -> list[str]:
    """What the lock is of; what torch wants beyond constraints.txt is CUDA's."""
    return sorted(closure(*INSTALLED) & set(pins()) - APART)


def hashes(pinned: list[str], machine: str) -> dict[str, str]:
    """The sha256 of the wheel of each that pip would take there."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report")
        command = [sys.executable, "-m", "pip", "--isolated", "install", "--quiet", "--dry-run"]
        command += ["--no-deps", "--only-binary", ":all:", "--python-version", PYTHON]
        command += ["--target", folder, "--report", str(report)]
        for glibc in GLIBC:
            command += ["--platform", f"{glibc}_{machine}"]
        subprocess.run([*command, *pinned], check=True)
        found = json.loads(report.read_text())["install"]
    return {
        canonicalize_name(one["metadata"]["name"]): str(
            one["download_info"]["archive_info"]["hashes"]["sha256"]
        )
        for one in found
    }


def main() -> None:
    """Write the file."""
    version, wanted = pins(), names()
    pinned = [f"{name}=={version[name]}" for name in wanted]
    found = [hashes(pinned, machine) for machine in sys.argv[1:] or ["x86_64"]]
    lines = ["# Written by deploy/lock.py: what the image installs, with --require-hashes."]
    for name, pin in zip(wanted, pinned, strict=True):
        shown = sorted({of[name] for of in found})
        lines.append(" ".join([pin, *(f"--hash=sha256:{one}" for one in shown)]))
    LOCK.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
