"""What starts light stays light: torch is loaded only by the modules that need it."""

import subprocess
import sys
from pathlib import Path

import paramd
import paramd_service

NEEDS_TORCH = (
    "paramd.trainer", "paramd.examples", "paramd.integrations", "paramd.tensors",
    "paramd.mesh.reading.assemble", "paramd.mesh.edits.operands", "paramd.mesh.frames.grad_tensors",
    "paramd.mesh.insight.compare", "paramd_service.formats.cast",
    "paramd_service.formats.dcp_writer", "paramd_service.formats.blend_process",
    "paramd_service.sidecar.statistics",
)  # fmt: skip
"""Modules, and packages with all of theirs, that may load torch when imported."""

HEAVY = ("torch", "numpy")

PROBE = """
import importlib, sys
heavy, modules = sys.argv[1].split(","), sys.argv[2:]
for module in modules:
    importlib.import_module(module)
    loaded = [name for name in heavy if name in sys.modules]
    if loaded:
        print(f"{module} loads {loaded}")
        break
"""


def test_no_module_outside_the_trainer_loads_torch_when_imported() -> None:
    modules = [*_modules(paramd.__file__), *_modules(paramd_service.__file__)]
    light = [module for module in modules if not _needs_torch(module)]
    assert len(light) > 20
    assert _first_heavy(light) == ""


def test_a_training_that_attaches_loads_no_clients_of_networks() -> None:
    assert _first_heavy(["paramd.trainer.attaching.attach"], ("grpc", "httpx2")) == ""


def test_the_probe_sees_torch_where_it_is_loaded() -> None:
    assert _first_heavy(["json", "torch.version"]).startswith("torch.version loads ['torch'")


def _modules(init_file: str | None) -> list[str]:
    """Names of all modules of a package, from its files."""
    assert init_file is not None
    package, names = Path(init_file).parent, []
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return [name for name in names if not name.endswith("__main__")]


def _needs_torch(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in NEEDS_TORCH)


def _first_heavy(modules: list[str], heavy: tuple[str, ...] = HEAVY) -> str:
    """Imports modules in order in a process of its own; names the first that loads one of them."""
    command = [sys.executable, "-c", PROBE, ",".join(heavy), *modules]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()
