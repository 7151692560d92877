"""The packages of each extra, and the advice when one is missing.

`pip install paramd` has the client's packages; the extras have the rest.
"""

from __future__ import annotations

from importlib.util import find_spec

from paramd.errors import UsageError

TORCH = ("torch", "numpy", "safetensors")
SERVICE = (
    "cryptography",
    "jwt",
    "fastapi",
    "starlette",
    "uvicorn",
    "prometheus_client",
    "sqlalchemy",
    "alembic",
    "obstore",
    "grpc_health",
    "grpc_reflection",
    "grpc_status",
)
MODULES = {
    "torch": TORCH,
    "service": (*TORCH, *SERVICE),
    "demo": (*TORCH, *SERVICE),
    "postgres": ("psycopg",),
}
"""Modules that each extra of pyproject.toml brings, beside those of every installation."""

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio", "prometheus")
"""Trackers of `paramd track` and `attach(log=...)`, each with a package of the extra `trackers`."""


def need(what: str, extra: str) -> None:
    """Check, without importing anything, that an extra of pyproject.toml is installed.

    UsageError names `what` needs it, a missing module, and the command that installs it.
    """
    missing = [name for name in MODULES[extra] if find_spec(name) is None]
    if missing:
        raise UsageError(f"{what} needs {', '.join(missing)}; {install(extra)}")


def advice(what: str, error: ModuleNotFoundError) -> str | None:
    """The same message for an import that failed; None when no extra brings that module."""
    name = (error.name or "").partition(".")[0]
    for extra, modules in MODULES.items():
        if name in modules:
            return f"{what} needs {name}; {install(extra)}"
    return None


def install(extra: str) -> str:
    """The command to run, for the end of a message."""
    return f"run: pip install 'paramd[{extra}]'"
