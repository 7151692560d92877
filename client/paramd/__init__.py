"""paramd: read and edit the parameters of a running distributed training."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

from paramd.extras import advice
from paramd.version import __version__

if TYPE_CHECKING:
    from paramd import aio as aio
    from paramd.errors import AbortedError as AbortedError
    from paramd.errors import CapacityError as CapacityError
    from paramd.errors import ConflictError as ConflictError
    from paramd.errors import DataLossError as DataLossError
    from paramd.errors import DeadlineError as DeadlineError
    from paramd.errors import DeniedError as DeniedError
    from paramd.errors import ExhaustedError as ExhaustedError
    from paramd.errors import ExistsError as ExistsError
    from paramd.errors import GoneError as GoneError
    from paramd.errors import NotFoundError as NotFoundError
    from paramd.errors import ParamdError as ParamdError
    from paramd.errors import PartialError as PartialError
    from paramd.errors import TornError as TornError
    from paramd.errors import UnknownNameError as UnknownNameError
    from paramd.errors import UnreachableError as UnreachableError
    from paramd.errors import UsageError as UsageError
    from paramd.layout.stats import Summary as Summary
    from paramd.layout.types import Layout as Layout
    from paramd.mesh.amesh import AsyncMesh as AsyncMesh
    from paramd.mesh.connect import connect as connect
    from paramd.mesh.edits.calls import Edit as Edit
    from paramd.mesh.edits.calls import EditOp as EditOp
    from paramd.mesh.edits.calls import Edits as Edits
    from paramd.mesh.edits.calls import HyperparameterGroups as HyperparameterGroups
    from paramd.mesh.edits.calls import Hyperparameters as Hyperparameters
    from paramd.mesh.edits.calls import Mark as Mark
    from paramd.mesh.edits.calls import Marks as Marks
    from paramd.mesh.edits.calls import Pause as Pause
    from paramd.mesh.edits.calls import PauseState as PauseState
    from paramd.mesh.edits.calls import Rollback as Rollback
    from paramd.mesh.edits.calls import Undo as Undo
    from paramd.mesh.edits.calls import ValueRange as ValueRange
    from paramd.mesh.exports.calls import AsyncExport as AsyncExport
    from paramd.mesh.exports.calls import Export as Export
    from paramd.mesh.exports.calls import ExportFile as ExportFile
    from paramd.mesh.exports.calls import ExportInfo as ExportInfo
    from paramd.mesh.exports.calls import Exports as Exports
    from paramd.mesh.exports.download import Downloaded as Downloaded
    from paramd.mesh.frames.frames import GradFrame as GradFrame
    from paramd.mesh.frames.frames import ParamFrame as ParamFrame
    from paramd.mesh.insight.compare import Diff as Diff
    from paramd.mesh.insight.compare import TensorDiff as TensorDiff
    from paramd.mesh.insight.replay import Replay as Replay
    from paramd.mesh.insight.replay import ReplayRow as ReplayRow
    from paramd.mesh.insight.reports import Alert as Alert
    from paramd.mesh.insight.reports import Alerts as Alerts
    from paramd.mesh.insight.reports import Collective as Collective
    from paramd.mesh.insight.reports import LogTail as LogTail
    from paramd.mesh.insight.reports import RankActivity as RankActivity
    from paramd.mesh.insight.reports import RankLog as RankLog
    from paramd.mesh.insight.reports import StackFrame as StackFrame
    from paramd.mesh.insight.reports import ThreadStack as ThreadStack
    from paramd.mesh.insight.reports import Why as Why
    from paramd.mesh.insight.spectrum import Spectrum as Spectrum
    from paramd.mesh.insight.updates import UpdateRow as UpdateRow
    from paramd.mesh.insight.updates import Updates as Updates
    from paramd.mesh.mesh import Mesh as Mesh
    from paramd.mesh.mesh import Parameter as Parameter
    from paramd.mesh.reading.assemble import SnapshotView as SnapshotView
    from paramd.mesh.reading.transfer import Lane as Lane
    from paramd.mesh.reading.transfer import Reach as Reach
    from paramd.mesh.results import MeshStatus as MeshStatus
    from paramd.mesh.results import OptimizerState as OptimizerState
    from paramd.mesh.results import ParamInfo as ParamInfo
    from paramd.mesh.results import Params as Params
    from paramd.mesh.results import RankStatus as RankStatus
    from paramd.mesh.results import Records as Records
    from paramd.mesh.results import StatsTable as StatsTable
    from paramd.mesh.results import Summoned as Summoned
    from paramd.mesh.results import Table as Table
    from paramd.mesh.results import TensorStats as TensorStats
    from paramd.trainer.attaching.attach import attach as attach
    from paramd.trainer.attaching.attachment import Attachment as Attachment
    from paramd.trainer.attaching.attachment import Stalls as Stalls
    from paramd.trainer.attaching.exporting import MadeExport as MadeExport
    from paramd.trainer.model.tp_ddp import pre_dp_module_transform as pre_dp_module_transform
    from paramd.trainer.resume.keeper import Keeping as Keeping
    from paramd.trainer.resume.succession import Resumed as Resumed
    from paramd.trainer.settings import AttachSettings as AttachSettings
    from paramd.trainer.summon import summon_full_params as summon_full_params

# Read by gRPC as it is imported. It brings no connection over a fork in any case, and would report
# that on stderr at each fork, such as for every worker of a DataLoader.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

_HOMES = {
    "paramd.errors": (
        "AbortedError CapacityError ConflictError DataLossError DeadlineError DeniedError "
        "ExhaustedError ExistsError GoneError NotFoundError ParamdError PartialError "
        "TornError UnknownNameError UnreachableError UsageError"
    ),
    "paramd.layout.stats": "Summary",
    "paramd.layout.types": "Layout",
    "paramd.mesh.amesh": "AsyncMesh",
    "paramd.mesh.connect": "connect",
    "paramd.mesh.edits.calls": (
        "Edit EditOp Edits HyperparameterGroups Hyperparameters Mark Marks Pause PauseState "
        "Rollback Undo ValueRange"
    ),
    "paramd.mesh.exports.calls": "AsyncExport Export ExportFile ExportInfo Exports",
    "paramd.mesh.exports.download": "Downloaded",
    "paramd.mesh.frames.frames": "GradFrame ParamFrame",
    "paramd.mesh.insight.compare": "Diff TensorDiff",
    "paramd.mesh.insight.replay": "Replay ReplayRow",
    "paramd.mesh.insight.reports": (
        "Alert Alerts Collective LogTail RankActivity RankLog StackFrame ThreadStack Why"
    ),
    "paramd.mesh.insight.spectrum": "Spectrum",
    "paramd.mesh.insight.updates": "UpdateRow Updates",
    "paramd.mesh.mesh": "Mesh Parameter",
    "paramd.mesh.reading.assemble": "SnapshotView",
    "paramd.mesh.reading.transfer": "Lane Reach",
    "paramd.mesh.results": (
        "MeshStatus OptimizerState ParamInfo Params RankStatus Records StatsTable Summoned "
        "Table TensorStats"
    ),
    "paramd.trainer.attaching.attach": "attach",
    "paramd.trainer.attaching.attachment": "Attachment Stalls",
    "paramd.trainer.attaching.exporting": "MadeExport",
    "paramd.trainer.model.tp_ddp": "pre_dp_module_transform",
    "paramd.trainer.resume.keeper": "Keeping",
    "paramd.trainer.resume.succession": "Resumed",
    "paramd.trainer.settings": "AttachSettings",
    "paramd.trainer.summon": "summon_full_params",
}
"""Public names by their modules, which are loaded on first use: `paramd --help` and the sidecar
never import torch."""

_LAZY = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = [
    "AbortedError",
    "Alert",
    "Alerts",
    "AsyncExport",
    "AsyncMesh",
    "AttachSettings",
    "Attachment",
    "CapacityError",
    "Collective",
    "ConflictError",
    "DataLossError",
    "DeadlineError",
    "DeniedError",
    "Diff",
    "Downloaded",
    "Edit",
    "EditOp",
    "Edits",
    "ExhaustedError",
    "ExistsError",
    "Export",
    "ExportFile",
    "ExportInfo",
    "Exports",
    "GoneError",
    "GradFrame",
    "HyperparameterGroups",
    "Hyperparameters",
    "Keeping",
    "Lane",
    "Layout",
    "LogTail",
    "MadeExport",
    "Mark",
    "Marks",
    "Mesh",
    "MeshStatus",
    "NotFoundError",
    "OptimizerState",
    "ParamFrame",
    "ParamInfo",
    "ParamdError",
    "Parameter",
    "Params",
    "PartialError",
    "Pause",
    "PauseState",
    "RankActivity",
    "RankLog",
    "RankStatus",
    "Reach",
    "Records",
    "Replay",
    "ReplayRow",
    "Resumed",
    "Rollback",
    "SnapshotView",
    "Spectrum",
    "StackFrame",
    "Stalls",
    "StatsTable",
    "Summary",
    "Summoned",
    "Table",
    "TensorDiff",
    "TensorStats",
    "ThreadStack",
    "TornError",
    "Undo",
    "UnknownNameError",
    "UnreachableError",
    "UpdateRow",
    "Updates",
    "UsageError",
    "ValueRange",
    "Why",
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


if not TYPE_CHECKING:
    # A type checker reads the imports above; one that saw this function would let any name pass.

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
