"""paramd: read and edit the parameters of a running distributed training."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

from paramd.extras import advice
from paramd.version import __version__

if TYPE_CHECKING:
    from paramd import aio as aio
    from paramd.errors import ParamdError as ParamdError
    from paramd.mesh.connect import connect as connect
    from paramd.mesh.mesh import Mesh as Mesh
    from paramd.trainer.attaching.attach import attach as attach
    from paramd.trainer.model.tp_ddp import pre_dp_module_transform as pre_dp_module_transform
    from paramd.trainer.summon import summon_full_params as summon_full_params

# Read by gRPC as it is imported. It brings no connection over a fork in any case, and would report
# that on stderr at each fork, such as for every worker of a DataLoader.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# Loaded on first use, so that `paramd --help` and the sidecar never import torch.
_LAZY = {
    "Mesh": "paramd.mesh.mesh",
    "ParamdError": "paramd.errors",
    "attach": "paramd.trainer.attaching.attach",
    "connect": "paramd.mesh.connect",
    "pre_dp_module_transform": "paramd.trainer.model.tp_ddp",
    "summon_full_params": "paramd.trainer.summon",
}

__all__ = [
    "Mesh",
    "ParamdError",
    "__version__",
    "aio",
    "attach",
    "connect",
    "pre_dp_module_transform",
    "summon_full_params",
]


def __dir__() -> list[str]:
    # Tab completion shows what is loaded on first use, too, and none of our own imports.
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def __getattr__(name: str) -> object:
    if name == "aio":
        return import_module("paramd.aio")
    if name in _LAZY:
        try:
            return getattr(import_module(_LAZY[name]), name)
        except ModuleNotFoundError as error:
            said = advice(f"paramd.{name}", error)
            if said is None:
                raise
            # An ImportError still, for those who write `try: from paramd import attach`.
            raise ModuleNotFoundError(said, name=error.name) from error
    import_module("paramd.gone").check("python", f"paramd.{name}", f"paramd.{name}")
    raise AttributeError(f"module 'paramd' has no attribute {name!r}")
