"""`python -m tests.doors [--strict] [--floods] [--seconds S]`: all attacks, as three users.

Each attack runs as the user that the table names: another token's holder, a peer that lies, or
another user of this host (65534 and 65533, which takes root; without it those rows say "skipped").
A row has the attack, as whom, what is expected, and the result. Ends with 1 if one did not hold.

The floods run last: the owner's requests have to be answered and nothing may end. Their ratio to a
plain server's needs a calm machine, so it is printed; `--strict` also holds it at a half.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.doors.attacks import ATTACKS, Attack
from tests.doors.floods import FLOODS, LISTENERS, rows, site

ROOT = Path(__file__).parents[2]
PATIENCE_S = 600.0
QUICK_LISTENERS = ("REST", "gRPC")
QUICK = ("none", "dropped at once", "half a request")
"""Floods of a run that is not strict."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of the tests of one attack."""

    passed: int = 0
    skipped: int = 0
    failed: int = 0

    @property
    def is_bad(self) -> bool:
        """Whether a test failed, or there was none."""
        return bool(self.failed) or not (self.passed or self.skipped)

    def result(self) -> str:
        """In a word or two."""
        if self.is_bad:
            return f"FAILED ({self.failed or 'no test'})"
        return f"held ({self.passed})" if self.passed else "skipped"


def outcomes(attacks: Sequence[Attack]) -> Mapping[Attack, Outcome]:
    """Run the tests of all attacks in one go."""
    names = list(dict.fromkeys(name for one in attacks for name in one.tests))
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += [f"--junit-xml={report}", *(f"tests/{name}" for name in names)]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        if done.returncode not in (0, 1) or not report.exists():
            raise SystemExit(done.stdout[-4000:] + done.stderr[-4000:])
        if done.returncode:
            print(done.stdout[-8000:], file=sys.stderr)
        cases = list(ET.parse(report).getroot().iter("testcase"))
    return {one: _outcome(one, cases) for one in attacks}


def _outcome(attack: Attack, cases: Sequence[ET.Element]) -> Outcome:
    passed = skipped = failed = 0
    for case in cases:
        module = case.get("classname", "").removeprefix("tests.").replace(".", "/")
        name = f"{module}.py::{case.get('name', '').partition('[')[0]}"
        if name not in attack.tests and f"{module}.py" not in attack.tests:
            continue
        bad = case.find("failure") is not None or case.find("error") is not None
        left_out = case.find("skipped") is not None
        failed, skipped = failed + bad, skipped + left_out
        passed += not bad and not left_out
    return Outcome(passed=passed, skipped=skipped, failed=failed)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--strict", action="store_true", help="hold the ratio of all floods")
    parser.add_argument("--floods", action="store_true", help="the floods alone")
    parser.add_argument("--seconds", type=float, default=0.0, help="of each flood")
    given = parser.parse_args()
    failed = 0
    if not given.floods:
        print(f"{'attack':62} {'as':22} {'expected':30} result")
        for attack, outcome in outcomes(ATTACKS).items():
            failed += outcome.is_bad
            print(f"{attack.what:62} {attack.who:22} {attack.expected:30} {outcome.result()}")
        print()
    seconds = given.seconds or (3.0 if given.strict else 0.7)
    print(f"{'listener':11} {'flood, of two users':26} {'ours/s':>8} {'plain/s':>8} {'ratio':>6}")
    with site() as ours:
        for listener in LISTENERS if given.strict else QUICK_LISTENERS:
            for row in rows(listener, FLOODS if given.strict else QUICK, seconds, ours):
                problem = row.problem(strict=given.strict)
                failed += bool(problem)
                print(
                    f"{row.listener:11} {row.flood:26} {row.ours_per_s:8.1f} "
                    f"{row.plain_per_s:8.1f} {row.ratio:6.2f}  "
                    f"{f'FAILED: {problem}' if problem else 'held'}",
                    flush=True,
                )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
