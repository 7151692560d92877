"""What a sidecar that lies says is bounded, and nothing of other jobs is taken from it."""

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paramd.v1 import sidecar_pb2 as pb
from paramd_service.alerts import numbers
from paramd_service.alerts.config import AlertConfig
from paramd_service.alerts.numbers import LoggedRounds
from paramd_service.control.metrics.passed_on import own_series
from paramd_service.control.store.history import Sample

MIB = 1 << 20


class Watcher:
    """What a watcher takes of logged numbers."""

    config = AlertConfig()

    def __init__(self) -> None:
        self.samples: list[Sample] = []

    def clock(self) -> float:
        return 0.0

    def offer(self, samples: list[Sample]) -> None:
        self.samples += samples

    def observe(self, found: object, about: object) -> None:
        pass

    def series(self, name: str, subject: str) -> Any:
        return (name, subject)


def view(logged_count: int) -> Any:
    state = SimpleNamespace(logged_count=logged_count, sidecar_pid=1)
    return SimpleNamespace(joined=[SimpleNamespace(rank=0, state=state)])


async def rounds(answer: Any, *, count: int = 2**60, times: int = 3) -> tuple[Watcher, list[int]]:
    watcher, asked = Watcher(), []

    async def ask(report: object, request: pb.GetLoggedRequest) -> pb.GetLoggedResponse:
        asked.append(request.after)
        return cast("pb.GetLoggedResponse", answer(request))

    taking = LoggedRounds(cast("Any", watcher), lambda: view(count), ask)
    for _ in range(times):
        await taking.round()
    return watcher, asked


async def test_a_rank_that_always_has_more_is_asked_so_often_and_no_more() -> None:
    def more(request: pb.GetLoggedRequest) -> pb.GetLoggedResponse:
        entry = pb.LoggedEntry(number=request.after + 1, step=1, time_s=1.0, values={"loss": 1.0})
        return pb.GetLoggedResponse(count=2**60, entries=[entry])

    _, asked = await rounds(more)
    assert asked == list(range(3 * numbers.LOGGED_ANSWERS))


async def test_entries_that_are_numbered_otherwise_are_not_taken() -> None:
    entries = [pb.LoggedEntry(number=number, values={"loss": 1.0}) for number in (3, 2, 1, 0, -5)]
    watcher, asked = await rounds(lambda request: pb.GetLoggedResponse(count=5, entries=entries))
    assert len(watcher.samples) == 1
    assert asked == [0, 3, 5, 5], "a second answer with nothing new ends the asking"


@pytest.mark.parametrize("chars", [65, MIB])
async def test_a_name_that_no_training_could_log_is_not_kept(chars: int) -> None:
    entry = pb.LoggedEntry(number=1, values={"x" * chars: 1.0, "loss": 2.0})
    answer = pb.GetLoggedResponse(count=1, entries=[entry])
    watcher, _ = await rounds(lambda request: answer, count=1)
    assert [sample.value for sample in watcher.samples] == [2.0]


async def test_names_and_values_are_bounded() -> None:
    def many(request: pb.GetLoggedRequest) -> pb.GetLoggedResponse:
        entries = [
            pb.LoggedEntry(
                number=request.after + n + 1,
                values={f"n{request.after + n}-{name}": math.nan for name in range(200)},
            )
            for n in range(100)
        ]
        return pb.GetLoggedResponse(count=2**60, entries=entries)

    watcher, _ = await rounds(many)
    names = {sample.series[0] for sample in watcher.samples}  # type: ignore[index]
    assert len(names) == numbers.LOGGED_NAMES


OWN = 'paramd_sidecar_step{job="team-a-run",rank="1"} 7\n'
CAUSE = 'paramd_sidecar_stands_total{job="team-a-run",rank="1",cause="edit"} 2\n'


def test_a_sidecars_own_series_are_passed_on() -> None:
    told = "# HELP paramd_sidecar_step Finished updates, -1 before attach\n"
    told += f"# TYPE paramd_sidecar_step gauge\n{OWN}{CAUSE}"
    told += 'paramd_sidecar_cpu_seconds_total{job="team-a-run",rank="1"} 1.5e-05\n'
    assert own_series(told, job="team-a-run", rank=1) == told


@pytest.mark.parametrize(
    "line",
    [
        'paramd_sidecar_step{job="team-b-run",rank="1"} 7',
        'paramd_sidecar_step{job="team-a-run",rank="2"} 7',
        'paramd_sidecar_step{job="teamxa-run",rank="1"} 7',
        'paramd_sidecar_step{job="team-a-run",rank="1",job="team-b-run"} 7',
        'paramd_sidecar_step{job="team-a-run",rank="1",cause="a\\"b"} 7',
        'paramd_world_size{job="team-a-run",rank="1"} 7',
        'up{job="team-a-run",rank="1"} 0',
        'paramd_sidecar_step{job="team-a-run",rank="1"} 7 1700000000000',
        'paramd_sidecar_step{job="team-a-run",rank="1"} 7 # {trace="x"} 1',
        "paramd_sidecar_step 7",
        "# EOF",
        "# TYPE paramd_world_size gauge",
    ],
)
def test_what_is_of_others_is_left_out(line: str) -> None:
    assert own_series(f"{OWN}{line}\n{CAUSE}", job="team-a-run", rank=1) == OWN + CAUSE


def test_text_without_end_is_cut() -> None:
    found = own_series(OWN * 100_000, job="team-a-run", rank=1)
    assert len(found) <= 256 << 10
    assert found.count("\n") <= 2000
