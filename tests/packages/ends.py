"""`make versions`: each integration at the lowest and the highest versions that it allows.

    python -m tests.packages.ends [EXTRA ...] [--only lowest|highest]

For each end of an extra's ranges in pyproject.toml an environment is made that has these versions
in front of everything that the checks run with, and the integration's own tests run there. Not part
of CI: it installs whatever has been released since, and takes minutes for each.
"""

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from tests.launch import ROOT

TRAINERS = "tests/scenes/test_trainers.py"
PARTITIONS = "tests/scenes/test_partitions.py"
TESTS = {
    "hf": [TRAINERS, "-k", "hf-plain or hf-fsdp2-2 or hf-scaled or accelerate-ddp or train_hf"],
    "lightning": [TRAINERS, "-k", "lightning-plain or lightning-model or lightning-raises"],
    "deepspeed": [PARTITIONS, "-k", "zero or deepspeed"],
    "megatron": [PARTITIONS, "-k", "megatron"],
    "ray": ["tests/scenes/test_ray.py"],
    "mcp": ["tests/scenes/test_mcp.py"],
    "trackers": ["tests/scenes/test_trackers.py"],
}
"""What shows that an integration works. torchtitan's tests need a machine on which it imports."""


def main() -> int:
    """Try what is asked for; the versions that were tried, and whether the tests passed."""
    parser = argparse.ArgumentParser(description="Try integrations at the ends of their ranges.")
    parser.add_argument("extras", nargs="*", metavar="EXTRA", help="all by default")
    parser.add_argument("--only", choices=("lowest", "highest"))
    arguments = parser.parse_args()
    if unknown := set(arguments.extras) - TESTS.keys():
        parser.error(f"{', '.join(sorted(unknown))}: expected some of {', '.join(TESTS)}")
    failed = 0
    for extra in arguments.extras or TESTS:
        for end in ("lowest", "highest"):
            if arguments.only in (None, end):
                failed += not tried(extra, end)
    return min(failed, 1)


def tried(extra: str, end: str) -> bool:
    """Install the versions of one end and run the integration's tests with them."""
    wanted = requirements(extra)
    pins = [pinned(one) if end == "lowest" else str(one) for one in wanted]
    with tempfile.TemporaryDirectory(prefix="paramd-ends-") as name:
        python = environment(Path(name), pins)
        shown = versions(python, [one.name for one in wanted])
        done = subprocess.run(
            [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "timeout=300",
             *TESTS[extra]],
            cwd=ROOT,
            # What other versions warn of is theirs.
            env=os.environ | {"PARAMD_TESTS_ALL": "1", "PYTHONWARNINGS": "default"},
            capture_output=True,
            text=True,
            check=False,
        )  # fmt: skip
    last = done.stdout.strip().splitlines()[-1:] or [done.stderr[-500:]]
    print(f"{extra} {end}: {shown}: {last[0]}", flush=True)
    if done.returncode:
        print(done.stdout[-6000:], file=sys.stderr, flush=True)
    return done.returncode == 0


def requirements(extra: str) -> list[Requirement]:
    """The packages of an extra that have a range, without paramd's own and parts of packages."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = [Requirement(text) for text in project["optional-dependencies"][extra]]
    return [one for one in found if one.name != "paramd" and len(one.specifier) == 2]


def pinned(one: Requirement) -> str:
    """The requirement at the lowest version that it allows."""
    (lowest,) = [spec.version for spec in one.specifier if spec.operator == ">="]
    return f"{one.name}=={lowest}"


def environment(folder: Path, pins: list[str]) -> str:
    """An environment with these packages in front of those of this one; its Python."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    inside = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    here = [sysconfig.get_paths()["purelib"], *(p for p in sys.path if p.endswith("-packages"))]
    ours = [str(ROOT / "client"), str(ROOT / "service")]
    (Path(inside) / "zz_checks.pth").write_text("\n".join([*ours, *dict.fromkeys(here)]) + "\n")
    subprocess.run(
        [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-U", *pins],
        check=True,
    )
    return str(python)


def versions(python: str, names: list[str]) -> str:
    """The versions that are installed there."""
    text = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    found = subprocess.run(
        [python, "-c", text, *names], capture_output=True, text=True, check=True
    ).stdout.split()
    return ", ".join(f"{name} {one}" for name, one in zip(names, found, strict=True))


if __name__ == "__main__":
    sys.exit(main())
