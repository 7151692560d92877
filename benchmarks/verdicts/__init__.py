"""Does the first line tell the truth: `python -m benchmarks verdicts`.

Small real trainings of two ranks at default settings, healthy and sick; the verdict is read from
outside, as a user reads it. `healthy.py` and `sick.py` have the cases, `one.py` runs one of them,
`run.py` several at once, `table.py` judges.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.report import Report
    from benchmarks.verdicts.case import Case

OF_CI = (
    "calm", "warm-up", "bursts-of-data",
    "killed", "an-exception", "stopped", "hang-in-a-collective", "lost-host", "nan-in-one-rank",
    "flipped-bit",
)  # fmt: skip
"""Three healthy and seven sick cases that a minute on a busy machine is enough for: none of them
needs a past to compare with."""


@cache
def cases() -> dict[str, Case]:
    """All cases by name, the healthy ones first. Imports torch."""
    from benchmarks.verdicts.healthy import HEALTHY
    from benchmarks.verdicts.sick import SICK

    return {**HEALTHY.found, **SICK.found}


def run(*, quick: bool) -> Report:
    """All cases for three minutes each; the quick ones of CI for one."""
    from benchmarks.verdicts.run import campaign

    if quick:
        return campaign(OF_CI, minutes=1.0, parallel=4)
    return campaign(list(cases()), minutes=3.0, parallel=4)
