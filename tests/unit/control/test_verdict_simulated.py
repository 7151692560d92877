"""The verdict on 64 ranks, simulated: their reports and samples are made by hand, with the noise of
real ones, and the clock is the event loop's own, which jumps to whatever is due next.

Planted troubles are each told within 60 s of the training's time, at default settings, the right
cause and rank first and no other; an hour of healthy training, with a warm-up, spikes of the loss,
checkpoints and evaluations, is told of with no word.
"""

import asyncio
import random
import selectors
from collections.abc import Sequence
from typing import Any, cast

import pytest

from paramd.layout.types import Box, Layout, Piece, TensorKind, TensorLayout
from paramd.mesh.edits.calls import PauseWord
from paramd.mesh.insight.reports import Collective
from paramd.v1 import common_pb2
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.alerts.config import AlertConfig
from paramd_service.alerts.drift import ReplicaGroup
from paramd_service.alerts.health import verdict_of
from paramd_service.alerts.sampling import (
    DigestRound,
    GradientRound,
    MeshSampler,
    StatsRound,
    TensorInput,
)
from paramd_service.alerts.store import AlertStore
from paramd_service.alerts.watcher import Watcher
from paramd_service.alerts.webhook import Webhooks
from paramd_service.control.mesh.evidence import Evidence
from paramd_service.control.mesh.health import Seen
from paramd_service.control.mesh.registry import MeshView, Report
from tests.memory_stores import MemoryStore
from tests.unit.control.reports import report, view

RANKS = 64
STEP_S = 0.5
ODD = 37
LAYERS = 6
LAYER = "layers.3.weight"
PLANTED_S = 330.0
TOLD_S = 60.0
LAYOUT = Layout(
    world_size=RANKS,
    arena_bytes=(1 << 20,) * RANKS,
    tensors=tuple(
        TensorLayout(f"layers.{n}.weight", "float32", (64, 64), TensorKind.PARAMETER, pieces)
        for n, pieces in enumerate(
            tuple(Piece(rank, 16384 * n, Box((0, 0), (64, 64))) for rank in range(RANKS))
            for n in range(LAYERS)
        )
    ),
)


class Jumping(selectors.DefaultSelector):
    """Waits for nothing: the time that would pass has passed."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        found = super().select(0 if timeout is not None else 0.01)
        self.now_s += 0.0 if found else max(timeout if timeout is not None else 0.0, 0.0)
        return found


class Training:
    """64 ranks, at a time of theirs; `trouble` is what is planted from `PLANTED_S` on."""

    def __init__(self, selector: Jumping, trouble: str = "") -> None:
        self.selector, self.trouble = selector, trouble
        self.random = random.Random(7)
        self.reports: dict[int, Report] = {}

    @property
    def at_s(self) -> float:
        return self.selector.now_s

    def clock(self) -> float:
        return 1e9 + self.at_s

    def has(self, trouble: str) -> bool:
        return self.trouble == trouble and self.at_s >= PLANTED_S

    @property
    def away_s(self) -> float:
        """For how long no rank has passed a boundary: in an evaluation or a checkpoint."""
        if self.has("stuck collective") or self.has("dead rank"):
            return self.at_s - PLANTED_S
        for every_s, long_s in ((900.0, 40.0), (600.0, 20.0)):
            if self.at_s >= every_s and self.at_s % every_s < long_s:
                return self.at_s % every_s
        return 0.0

    @property
    def step(self) -> int:
        return int(min(self.at_s, PLANTED_S if self.away_s and self.trouble else 1e9) / STEP_S)

    def noise(self, sigma: float) -> float:
        return self.random.lognormvariate(0.0, sigma)

    def view(self) -> MeshView:
        away_s, step = self.away_s, self.step
        slow = 3.0 if self.has("slow rank") or self.has("slow data") else 1.0
        slow *= 4.0 if self.at_s < 60 else 1.0  # compiles, fills caches
        for rank in range(RANKS):
            known = self.reports.get(rank)
            # Every two seconds, some of them late.
            if known is not None and self.at_s - known.changed_s < 2.0 + self.random.random():
                continue
            dead = self.has("dead rank") and rank == ODD
            ended_s = self.at_s - PLANTED_S if dead else 0.0
            self.reports[rank] = report(
                rank,
                changed_s=self.at_s,
                step=step,
                phase=common_pb2.PHASE_ORPHANED if dead else common_pb2.PHASE_CONSTANT,
                phase_reason="its trainer was ended by signal 9" if dead else "",
                trainer_ended_ms=int(1e3 * ended_s) + 1 if dead else 0,
                trainer_signal=9 if dead else 0,
                step_time_ns=int(1e9 * STEP_S * slow * self.noise(0.03)),
                boundary_age_ns=int(1e9 * (away_s + STEP_S * self.random.random())),
                stall_count=step // 20,
                stall_total_ns=int(2e6) * (step // 20),
                stall_max_ns=int(3e6),
                logged_count=step if rank == 0 else 0,
            )
        return view(*self.reports.values(), world_size=RANKS, now_s=self.at_s)

    async def layout(self) -> Layout:
        return LAYOUT

    def _tensors(
        self,
        tensors: Sequence[TensorLayout],
        norm: float,
        *,
        nan_count: int = 0,
        factor: float = 1.0,
    ) -> StatsRound:
        """Of norms with noise; of `LAYER` with so many NaN, and that many times as large."""
        found = []
        for one in tensors:
            nan, times = (nan_count, factor) if one.fqn == LAYER else (0, 1.0)
            noisy = norm * times * self.noise(0.3)
            found.append(
                TensorInput(fqn=one.fqn, count=4096, nan_count=nan, inf_count=0, norm=noisy)
            )
        return StatsRound(step=self.step, tensors=tuple(found))

    async def stats(self, tensors: Sequence[TensorLayout], *, timeout_s: float) -> StatsRound:
        return self._tensors(tensors, 12.0, nan_count=64 if self.has("NaN") else 0)

    async def gradients(self, patterns: Sequence[str], *, timeout_s: float) -> GradientRound:
        # They shrink by a hundred as training converges, and sometimes all are large at once.
        spike = 4.0 if self.random.random() < 0.05 else 1.0
        usual = spike * 0.3 * max(0.01, 0.998 ** (self.at_s / STEP_S / 4))
        change = {"exploding layer": 1e4, "vanishing layer": 1e-5}
        factor = change.get(self.trouble, 1.0) if self.has(self.trouble) else 1.0
        found = self._tensors(LAYOUT.tensors, usual, factor=factor)
        return GradientRound(step=found.step, tensors=found.tensors)

    async def digests(self, groups: Sequence[ReplicaGroup], *, timeout_s: float) -> DigestRound:
        return DigestRound(step=self.step, differences=(), places={})

    async def ask_logged(self, _: Report, request: pb.GetLoggedRequest) -> pb.GetLoggedResponse:
        spike = 3.0 if self.random.random() < 0.02 else 1.0
        loss = float("nan") if self.has("NaN") else 4.0 * spike * self.noise(0.1)
        entry = pb.LoggedEntry(number=self.step, step=self.step, time_s=self.clock())
        entry.values["loss"] = loss
        return pb.GetLoggedResponse(count=self.step, entries=[entry])

    async def look(self) -> list[Evidence]:
        # Of a step that takes three times as long, the others wait for two thirds.
        waits = self.has("slow rank") and self.random.random() < 2 / 3
        return [self._doing(rank, waits) for rank in range(RANKS)]

    def _doing(self, rank: int, waits_for_odd: bool) -> Evidence:
        def at(kind: str, *, seen_for_s: float = 0.0) -> Evidence:
            waits = kind == "collective"
            made = Collective(
                done=False, name="nccl:all_reduce", group="g", sequence=9, age_s=seen_for_s
            )
            return Evidence(
                rank=rank, step=self.step, overdue=self.away_s > 5.0, boundary_age_s=self.away_s,
                kind=kind, what=f"in {kind}", where="train.py:12", seen_for_s=seen_for_s,
                open=(made,) if waits else (),
            )  # fmt: skip

        odd = rank == ODD
        if self.has("dead rank") and odd:
            return Evidence(rank=rank, step=self.step, gone="its trainer was ended by signal 9")
        if self.has("dead rank") or self.has("stuck collective"):
            return at("other" if odd else "collective", seen_for_s=max(self.away_s - 7.0, 0.0))
        if waits_for_odd:
            return at("other" if odd else "collective")
        if self.has("slow data"):
            return at("dataloader")
        if self.away_s and self.at_s % 900.0 < 40.0:  # an evaluation, at many places
            return at(self.random.choice(("forward", "forward", "dataloader", "other")))
        if self.away_s:
            return at("checkpoint" if rank == 0 else "collective", seen_for_s=self.away_s)
        # In step with the others, but for some that are a little ahead or behind.
        phase = int(self.at_s / 2.0 * 7919) % 10
        phase += self.random.choice((-1, 1)) if self.random.random() < 0.02 else 0
        kinds = ("dataloader", "forward", "forward", "forward", "backward", "backward")
        return at((*kinds, "backward", "collective", "collective", "optimizer")[phase % 10])


def simulated(trouble: str, until_s: float) -> list[tuple[float, str, str]]:
    """(time, word, the cause's rule and subject) whenever the verdict changes."""
    selector = Jumping()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now_s  # type: ignore[method-assign]
    training, told = Training(selector, trouble), list[tuple[float, str, str]]()
    store, config = MemoryStore(), AlertConfig()

    async def run() -> None:
        watcher = Watcher(
            config=config, webhooks=Webhooks(config.webhooks), job="job", incarnation=1,
            view=training.view, sampler=cast("MeshSampler", training),
            store=cast("AlertStore", store), offer=store.offer, ask_logged=training.ask_logged,
            look=training.look, trouble=lambda: "disk is full" if training.has("full disk") else "",
            clock=training.clock,
        )  # fmt: skip
        watcher.start()
        while training.at_s < until_s:
            await asyncio.sleep(1.0)
            seen = training.view()
            watcher.tick(seen)
            firing = watcher.book.firing
            reported = Seen(state=seen.state, reason=seen.reason, pause=PauseWord.RUNNING)
            said = verdict_of(reported, firing=firing, watches=watcher.watches())
            first = next(
                (f"{one.rule} {one.name or one.subject}" for one in firing if one.id == said.cause),
                "",
            )
            well = ("running", "ok")
            if (said.word, first) != (told[-1][1:] if told else (said.word, "")) and not (
                not first and said.word in well and not told
            ):
                told.append((training.at_s, said.word, first))
        await watcher.close()

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(run())
    return told


@pytest.mark.parametrize(
    ("trouble", "cause"),
    [
        ("exploding layer", f"gradient-jump {LAYER}"),
        ("vanishing layer", f"gradient-jump {LAYER}"),
        ("slow rank", f"slow-rank rank {ODD}"),
        ("slow data", "slow-rank mesh"),
        ("dead rank", f"stale-rank rank {ODD}"),
        ("stuck collective", f"stuck rank {ODD}"),
        ("NaN", f"non-finite {LAYER}"),
        ("full disk", "store control plane"),
    ],
)
def test_a_planted_trouble_of_64_simulated_ranks_is_told_with_its_cause(
    trouble: str, cause: str
) -> None:
    told = simulated(trouble, PLANTED_S + 2 * TOLD_S)
    assert [one for one in told if one[0] < PLANTED_S] == []
    # The loss is the first to tell of a NaN, and for less than a second.
    assert told[-1][2] == cause, told
    first_s = next(at_s for at_s, _, first in told if first == cause)
    assert first_s - PLANTED_S <= TOLD_S, told
    assert {first for _, _, first in told} - {cause, ""} <= (
        {"logged-number loss of rank 0: nonfinite"} if trouble == "NaN" else set()
    ), told


def test_an_hour_of_healthy_training_of_64_simulated_ranks_is_told_of_with_no_word() -> None:
    assert simulated("", 3600.0) == []
