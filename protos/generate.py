"""Writes the Python stubs of the protos into client/paramd/v1.

The generators are pinned and live in an environment of their own, because stubs made
by newer ones refuse to import on protobuf 5 and 6. `--check` writes nothing and fails
when a stub is missing, stale or left over.

    make protos                      # generate
    make verify                      # runs --check, among others
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
STUBS = ROOT / "client" / "paramd" / "v1"
TOOLS = ROOT / ".venv-protos"
REQUIREMENTS = PROTOS / "requirements.txt"
PACKAGE_DOC = '"""Generated stubs of the protos; `make protos` writes them."""\n'


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare only; 1 when stale")
    options = parser.parse_args(arguments)
    python = _tool_environment()
    with tempfile.TemporaryDirectory() as folder:
        generated = _generate(python, Path(folder))
    if options.check:
        return _report_stale(generated)
    _write(generated)
    return 0


def _tool_environment() -> Path:
    """The python of the generators' environment, made or brought up to date."""
    python = TOOLS / "bin" / "python"
    stamp = TOOLS / "requirements.txt"
    wanted = REQUIREMENTS.read_text()
    if python.exists() and stamp.exists() and stamp.read_text() == wanted:
        return python
    venv.EnvBuilder(with_pip=True, clear=True, symlinks=True).create(TOOLS)
    pip: list[str | Path] = [python, "-m", "pip", "install", "--quiet", "-r", REQUIREMENTS]
    subprocess.run(pip, check=True)
    stamp.write_text(wanted)
    return python


def _generate(python: Path, out: Path) -> dict[str, bytes]:
    """Runs protoc for all protos. Returns file name -> content."""
    protos = [p.relative_to(PROTOS) for p in sorted(PROTOS.glob("paramd/v1/*.proto"))]
    protoc: list[str | Path] = [python, "-m", "grpc_tools.protoc"]
    # By way of a descriptor set, which has no comments: the stubs would repeat all of the protos'.
    descriptors = out / "descriptors"
    messages = [
        f"--proto_path={PROTOS}",
        f"--descriptor_set_out={descriptors}",
        f"--python_out={out}",
    ]
    subprocess.run([*protoc, *messages, *protos], check=True, cwd=PROTOS)
    command = [
        *protoc,
        f"--plugin=protoc-gen-mypy={TOOLS / 'bin' / 'protoc-gen-mypy'}",
        f"--plugin=protoc-gen-mypy_grpc={TOOLS / 'bin' / 'protoc-gen-mypy_grpc'}",
        f"--descriptor_set_in={descriptors}",
        f"--grpc_python_out={out}",
        f"--mypy_out=quiet:{out}",
        f"--mypy_grpc_out=quiet:{out}",
        *protos,
    ]
    subprocess.run(command, check=True, cwd=PROTOS)
    files = {p.name: p.read_bytes() for p in (out / "paramd" / "v1").iterdir()}
    files["__init__.py"] = PACKAGE_DOC.encode()
    return {name: data for name, data in files.items() if not _is_empty_service(name, data)}


def _is_empty_service(name: str, data: bytes) -> bool:
    """protoc writes a service module for every proto, also for those without a service."""
    stub_of = name.split("_pb2_grpc.")[0]
    if "_pb2_grpc." not in name:
        return False
    return b"\nservice " not in (PROTOS / "paramd" / "v1" / f"{stub_of}.proto").read_bytes()


def _present() -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in STUBS.iterdir() if p.is_file()}


def _report_stale(generated: dict[str, bytes]) -> int:
    present = _present() if STUBS.exists() else {}
    stale = sorted(name for name in generated | present if generated.get(name) != present.get(name))
    for name in stale:
        print(f"client/paramd/v1/{name} does not match protos/; run `make protos`", file=sys.stderr)
    return 1 if stale else 0


def _write(generated: dict[str, bytes]) -> None:
    STUBS.mkdir(exist_ok=True)
    for name in _present().keys() - generated.keys():
        (STUBS / name).unlink()
    for name, data in generated.items():
        (STUBS / name).write_bytes(data)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
