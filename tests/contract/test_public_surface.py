"""What others rely on changes only on purpose."""

from __future__ import annotations

import difflib

from paramd.errors import ErrorCodes, ParamdError, codes_of
from tests.contract.surface import COMMAND, FROZEN, surface

DOCUMENTED_EXIT_CODES = {0, 1, 2, 3, 4, 5, 6, 7, 8}


def test_the_surface_is_the_frozen_one() -> None:
    frozen, now = FROZEN.read_text(), surface()
    change = difflib.unified_diff(frozen.splitlines(), now.splitlines(), "frozen", "now", n=0)
    assert now == frozen, f"run `{COMMAND}` if this is wanted:\n" + "\n".join(change)


def test_every_error_has_documented_codes() -> None:
    kinds = [ParamdError, *_subclasses(ParamdError)]
    assert {_codes(kind).exit for kind in kinds} <= DOCUMENTED_EXIT_CODES - {0}
    assert {_codes(kind).http // 100 for kind in kinds} <= {4, 5}


def _codes(kind: type[ParamdError]) -> ErrorCodes:
    # Some take arguments of their own; only the class matters here.
    return codes_of(kind.__new__(kind))


def _subclasses(kind: type[ParamdError]) -> list[type[ParamdError]]:
    return [s for sub in kind.__subclasses__() for s in (sub, *_subclasses(sub))]
