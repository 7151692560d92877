"""`make packages`: build what a release is, install it where nothing of ours is, and use it.

The source archive is below 2 MiB and builds the very wheel; the wheel has the page and the manual.
In a fresh environment outside the checkout the demo trains and reads; environments without any
extra, one for each Python that is here, read that training and say which extra they lack.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.launch import ROOT

SDIST_MAX_BYTES = 2 << 20
MANUAL_MAX_BYTES = 6_000_000
PYTHONS = ("3.11", "3.12", "3.13")
"""As pyproject.toml claims. Where torch is not at hand for one, it reads and does not train."""

IN_WHEEL = (
    "paramd/py.typed",
    "paramd_service/py.typed",
    "paramd_service/control/web/index.html",
    "paramd_service/control/manual/index.html",
    "paramd_service/control/manual/search.html",
)
JOB = "packaged"
START_S = 300.0
LACKING = (
    (["-m", "paramd.cli", "demo"], "paramd[demo]"),
    (["-m", "paramd.cli", "control", "serve"], "paramd[service]"),
    (["-m", "paramd.cli", "certs", "init", "certs"], "paramd[service]"),
    (["-m", "paramd.cli", "summon", "*", "-f", "x.safetensors"], "paramd[torch]"),
    (["-c", "from paramd import attach"], "paramd[torch]"),
)
"""What an installation without extras is asked, and the extra that it must name."""


def main() -> int:
    """Build, check, install, use; raises on the first thing that is wrong."""
    with tempfile.TemporaryDirectory(prefix="paramd-packages-") as name:
        folder = Path(name)
        wheel = build(folder)
        with ThreadPoolExecutor(1) as pool:
            readers = {
                version: pool.submit(environment, folder / version, found, str(wheel))
                for version, found in pythons()
            }
            python = environment(folder / "full", sys.executable, f"{wheel}[demo]", torch=True)
        with training(folder, python):
            for version, reader in readers.items():
                use(folder, reader.result())
                print(f"Python {version}: installed without extras, reads a running training")
        run(folder, python, "-m", "paramd.cli", "demo", "--job", "toured")
        print(f"Python {sys.version_info[0]}.{sys.version_info[1]}: paramd[demo] trains and reads")
    return 0


def build(folder: Path) -> Path:
    """The wheel, once it and the source archive are as they should be."""
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    (archive,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    size_bytes = archive.stat().st_size
    check(size_bytes < SDIST_MAX_BYTES, f"the source archive has {size_bytes} bytes")
    with tarfile.open(archive) as tar:
        names = tar.getnames()
        tar.extractall(folder / "source", filter="data")
    check(not [name for name in names if "node_modules" in name], "node_modules is in it")
    with zipfile.ZipFile(wheel) as found:
        inside = set(found.namelist())
        manual = [item for item in found.infolist() if "/control/manual/" in item.filename]
    for name in IN_WHEEL:
        check(name in inside, f"the wheel lacks {name} (make web manual)")
    manual_bytes = sum(item.file_size for item in manual)
    check(manual_bytes < MANUAL_MAX_BYTES, f"the manual has {manual_bytes} bytes")
    rebuilt = folder / "rebuilt"
    (source,) = (folder / "source").iterdir()
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(rebuilt)],
        cwd=source,
        env=os.environ | {"PARAMD_PAGE": "skip"},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    (again,) = rebuilt.glob("*.whl")
    with zipfile.ZipFile(again) as found:
        # What the archive is without (pyproject.toml).
        left_out = ("/control/web/", "/control/manual/", ".pyi")
        code = {name for name in inside if not any(part in name for part in left_out)}
        check(set(found.namelist()) == code, "the source archive builds another wheel")
    print(f"source archive {size_bytes / 1e6:.2f} MB, wheel {wheel.stat().st_size / 1e6:.2f} MB")
    return wheel


def pythons() -> Iterator[tuple[str, str]]:
    """Versions that pyproject.toml claims and that are here, with their interpreters."""
    root = shutil.which("pyenv") and subprocess.check_output(["pyenv", "root"], text=True).strip()
    for version in PYTHONS:
        built = sorted(Path(root or "/nowhere").glob(f"versions/{version}.*/bin/python"))
        found = str(built[-1]) if built else shutil.which(f"python{version}")
        if found is None:
            print(f"Python {version} is not here: not tried")
        else:
            yield version, found


def environment(folder: Path, python: str, what: str, *, torch: bool = False) -> str:
    """A fresh environment with `what` and the versions of constraints.txt; its Python."""
    subprocess.run([python, "-m", "venv", folder], check=True)
    constraints = ROOT / "constraints.txt"
    first = [line for line in constraints.read_text().splitlines() if line.startswith("torch==")]
    command = [str(folder / "bin/python"), "-m", "pip", "install", "-q", "--no-compile"]
    quiet = ["--disable-pip-version-check", "-c", str(constraints), *(first if torch else [])]
    subprocess.run([*command, *quiet, what], check=True)
    return str(folder / "bin/python")


@contextmanager
def training(folder: Path, python: str) -> Iterator[None]:
    """A training of the demo that goes on meanwhile."""
    command = [python, "-P", "-m", "paramd.cli", "demo", "--keep", "--job", JOB]
    with (folder / "demo.log").open("wb") as log:
        demo = subprocess.Popen(
            command, cwd=folder, env=surroundings(folder), stdout=log, stderr=log
        )
        try:
            deadline_s = time.monotonic() + START_S
            while b"Ctrl-C" not in (folder / "demo.log").read_bytes():
                check(demo.poll() is None, "the demo ended early")
                check(time.monotonic() < deadline_s, "the demo did not get through its tour")
                time.sleep(0.2)
            yield
        finally:
            demo.terminate()
            demo.wait(120)


def use(folder: Path, python: str) -> None:
    """Read the training as a user without extras does, and ask for what needs one."""
    paramd = str(Path(python).parent / "paramd")
    shown = run(folder, paramd, "--version")
    check(shown.startswith("paramd 0."), f"--version says {shown!r}")
    names = run(folder, paramd, "params", "*", "-o", "name", "--job", JOB)
    check("layers.0.up.weight" in names, f"params says {names!r}")
    norm = "print(paramd.connect(job='packaged').stats('head.weight')[0].summary.norm)"
    check(float(run(folder, python, "-c", f"import paramd; {norm}")) > 0, "no norm")
    for arguments, extra in LACKING:
        said = subprocess.run(
            [python, "-P", *arguments],
            cwd=folder,
            env=surroundings(folder) | {"PARAMD_JOB": JOB},
            capture_output=True,
            text=True,
            check=False,
        ).stderr.strip()
        last = said.splitlines()[-1] if said else ""
        check(f"pip install '{extra}'" in last, f"{arguments} says {said!r}")


def surroundings(folder: Path) -> dict[str, str]:
    """The environment of a user who has neither our checkout nor any setting."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    return kept | {"PARAMD_STATE_DIR": str(folder / "state"), "PARAMD_LISTEN": "127.0.0.1:0"}


def run(folder: Path, *command: str) -> str:
    """What a program prints; raises when it fails."""
    done = subprocess.run(
        command, cwd=folder, env=surroundings(folder), capture_output=True, text=True, check=False,
        timeout=300,
    )  # fmt: skip
    check(done.returncode == 0, f"{command} ended with {done.returncode}: {done.stderr}")
    return done.stdout.strip()


def check(holds: bool, what: str) -> None:
    """Raise SystemExit with `what` unless it holds."""
    if not holds:
        raise SystemExit(f"packages: {what}")


if __name__ == "__main__":
    sys.exit(main())
