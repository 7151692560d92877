"""Our own processes without the parts of some subjects."""

from collections.abc import Sequence

_SIDECAR = """
import sys
from paramd_service import parts

without = sys.argv.pop(1).split(",")
parts.SIDECAR = tuple(name for name in parts.SIDECAR if name.split(".")[1] not in without)
from paramd_service.sidecar.main import main

sys.exit(main())
"""
_CONTROL = """
import sys
from paramd_service import parts

without = sys.argv.pop(1).split(",")
parts.CONTROL = tuple(name for name in parts.CONTROL if name.split(".")[1] not in without)
from paramd_service.control.main import main

sys.exit(main(sys.argv[1:]))
"""


def subjects(names: Sequence[str]) -> tuple[str, ...]:
    """Those that have parts in a list of them."""
    return tuple(dict.fromkeys(name.split(".")[1] for name in names))


def sidecar(without: Sequence[str]) -> list[str]:
    """Arguments of an interpreter, as `-m paramd_service.sidecar`."""
    return ["-c", _SIDECAR, ",".join(without)] if without else ["-m", "paramd_service.sidecar"]


def control(without: Sequence[str]) -> list[str]:
    """As `-m paramd_service.control`."""
    return ["-c", _CONTROL, ",".join(without)] if without else ["-m", "paramd_service.control"]
