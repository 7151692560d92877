"""No silent wrong answer: trainings that change parameters in all the places that users do."""

import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import paramd
from paramd.errors import ParamdError
from tests.launch import start_ranks
from tests.longer import seconds, share
from tests.multiprocess.truth import connect_to, wait_until
from tests.multiprocess.workers.patterns import (
    EDITS_REFUSED,
    OF_TWO_RANKS,
    PATTERNS,
    REFUSED,
    final,
)

WORKER = "tests.multiprocess.workers.patterns"
AT_LEAST = 8
"""Answers that a pattern must get, of several steps."""
SECONDS, MOST_SECONDS = seconds(0.5, 2.0), 60.0


@dataclass
class Seen:
    """What one reader saw of one pattern."""

    answers: int = 0
    resting: int = 0
    steps: set[int] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)

    def enough(self, pattern: str) -> bool:
        """Whether it was told why it is refused, or has answers."""
        if why := REFUSED.get(pattern):
            return any(re.search(why, told) for told in self.refused)
        return self.answers >= AT_LEAST and len(self.steps) > 1


def read(state_dir: Path, job: str, wrong: Callable[[paramd.mesh.results.Summoned], str]) -> Seen:
    """Summons as fast as it goes, over both ways."""
    seen = Seen()
    begin_s = time.monotonic()
    with connect_to(state_dir, job) as mesh:
        while not seen.enough(job) or time.monotonic() - begin_s < SECONDS:
            if time.monotonic() - begin_s > MOST_SECONDS:
                break
            transport = "grpc" if seen.answers % 2 else "same-host"
            try:
                params = mesh.summon("*", transport=transport, timeout=5)
            except ParamdError as error:
                seen.refused[str(error)] += 1
                continue
            seen.answers += 1
            seen.resting += params.unsettled
            seen.steps.add(params.step)
            if found := wrong(params):
                seen.wrong.append(found)
        if job in EDITS_REFUSED:
            try:
                edit = mesh.edit("*", mul=1.0, timeout=20)
            except ParamdError as error:
                seen.refused[str(error)] += 1
            else:
                seen.refused[f"{edit.state}: {edit.reason}"] += 1
    return seen


def unlike(pattern: str) -> Callable[[paramd.mesh.results.Summoned], str]:
    def wrong(params: paramd.mesh.results.Summoned) -> str:
        values = sorted({v for t in params.values() for v in t.unique().tolist()})
        if values == [final(pattern, params.step)]:
            return ""
        return f"step {params.step}{' at rest' * params.unsettled}: {values[:5]}"

    return wrong


CASES = [*share([(1, [*PATTERNS][::2]), (1, [*PATTERNS][1::2])], 2), (2, [*OF_TWO_RANKS])]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("world_size", "patterns"), CASES, ids=lambda case: str(case)[:40])
def test_every_answer_is_right_or_refused_with_the_reason(
    world_size: int, patterns: list[str], tmp_path: Path
) -> None:
    found: dict[str, Seen] = {}
    arguments = ["--folder", str(tmp_path), *patterns]
    with start_ranks(WORKER, world_size, args=arguments) as ranks:
        for pattern in patterns:
            served = (tmp_path / f"attached-{pattern}", ranks.state_dir / pattern / "endpoint.json")
            wait_until(
                lambda files=served: all(one.exists() for one in files), f"{pattern} attaches"
            )
            found[pattern] = read(ranks.state_dir, pattern, unlike(pattern))
            (tmp_path / f"stop-{pattern}").touch()
        ranks.end_well()
    for name, seen in found.items():
        print(name, seen.answers, seen.resting, len(seen.steps), len(seen.wrong), seen.refused)
    assert {name: seen.wrong[:3] for name, seen in found.items() if seen.wrong} == {}
    for name, seen in found.items():
        if why := {**REFUSED, **EDITS_REFUSED}.get(name):
            assert any(re.search(why, told) for told in seen.refused), (name, seen)
        if name not in REFUSED:
            assert seen.answers >= AT_LEAST, (name, seen)
            assert len(seen.steps) > 1, (name, seen)
