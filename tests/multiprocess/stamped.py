"""Readers of a stamp trainer: every value must equal the step the answer carries."""

import threading
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

import paramd
from paramd.errors import ParamdError
from paramd.mesh.reading.stream import Transport
from tests.launch import Ranks, start_ranks
from tests.multiprocess.truth import connect_to

WORKER = "tests.multiprocess.workers.stamp"
LONGEST_S = 30.0

Lane = tuple[Transport, str]
LANES: tuple[Lane, ...] = (
    ("grpc", "*"),
    ("same-host", "*weight*"),
    ("auto", "*"),
    ("stream", "*"),
    ("stream", "*weight*"),
)
"""Transport and pattern of each reader."""


@dataclass(slots=True)
class Readings:
    """What several readers saw."""

    answers: int = 0
    steps: set[int] = field(default_factory=set)
    lanes: set[Lane] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    longest_refusal_s: float = 0.0


@contextmanager
def stamp_trainer(
    tmp_path: Path, kind: str, world_size: int, *options: str, timeout_s: float = 60.0
) -> Iterator[Ranks]:
    """Runs the trainer until the block ends; then it must end well by itself."""
    stop = tmp_path / "stop"
    arguments = ["--kind", kind, "--stop", str(stop), *options]
    with start_ranks(WORKER, world_size, args=arguments) as ranks:
        ranks.wait_for_text("attached", rank=0)
        try:
            yield ranks
        finally:
            stop.touch()
        ranks.end_well(timeout_s)


def assert_stamped(
    folder: Path, case: tuple[str, int, str], *, seconds: float, at_least: tuple[int, int]
) -> None:
    """Runs a case (kind, world size, "free" or "lockstep"): every value is its answer's step."""
    kind, world_size, pace = case
    options = ["--lockstep", "--gap-ms", "3"] if pace == "lockstep" else []
    with stamp_trainer(folder, kind, world_size, *options) as ranks:
        readings = read_stamps(ranks.state_dir, seconds=seconds, at_least=at_least, timeout_s=60.0)
    print(f"{kind} x{world_size} {pace}: {readings.answers} answers, {len(readings.steps)} steps")
    assert readings.wrong == []
    assert readings.refused == []
    assert readings.lanes == set(LANES)
    assert readings.answers >= at_least[0]
    assert len(readings.steps) >= at_least[1]


def read_stamps(
    state_dir: Path,
    *,
    seconds: float,
    at_least: tuple[int, int] = (0, 0),
    readers: int = len(LANES),
    during: Callable[[], None] = lambda: None,
    timeout_s: float = 20.0,
) -> Readings:
    """Summons as fast as it goes, with several clients at once, while `during` runs.

    A busy machine is given longer, until there were `at_least` so many answers, of so
    many steps.
    """
    readings, lock = Readings(), threading.Lock()
    end_s = time.monotonic() + seconds
    last_s = end_s + LONGEST_S

    def goes_on() -> bool:
        now_s = time.monotonic()
        answers, steps = at_least
        few = readings.answers < answers or len(readings.steps) < steps
        few = few or len(readings.lanes) < min(readers, len(LANES))
        return now_s < end_s or (few and now_s < last_s)

    def read(index: int) -> None:
        transport, pattern = LANES[index % len(LANES)]
        with connect_to(state_dir, "stamp") as mesh:
            while goes_on():
                begin_s = time.monotonic()
                try:
                    params = mesh.summon(pattern, transport=transport, timeout=timeout_s)
                except ParamdError as error:
                    with lock:
                        readings.refused.append(f"{type(error).__name__}: {error}")
                        readings.longest_refusal_s = max(
                            readings.longest_refusal_s, time.monotonic() - begin_s
                        )
                    continue
                bad = differing(params, params)
                with lock:
                    readings.answers += 1
                    readings.lanes.add((transport, pattern))
                    readings.steps.add(params.step)
                    readings.wrong += bad

    threads = [threading.Thread(target=read, args=(index,)) for index in range(readers)]
    for thread in threads:
        thread.start()
    during()
    for thread in threads:
        thread.join()
    return readings


def differing(params: paramd.mesh.results.Summoned, names: Container[str]) -> list[str]:
    """What of these names is not the step of the answer."""
    stamp = torch.tensor(params.step)
    return [
        f"step {params.step}: {name} holds {tensor.unique().tolist()[:4]}"
        for name, tensor in params.items()
        if name in names and not bool((tensor == stamp.to(tensor.dtype)).all())
    ]
