"""The watcher with a mesh made by hand: from what sidecars say to who is told."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import httpx2
import pytest

from paramd.errors import NotFoundError, UnreachableError
from paramd.layout.types import Box, Layout, Piece, TensorKind, TensorLayout
from paramd.v1 import common_pb2
from paramd_service.control.alerts import watcher as watcher_module
from paramd_service.control.alerts.book import Alert, State
from paramd_service.control.alerts.config import AlertConfig
from paramd_service.control.alerts.drift import Difference, ReplicaGroup
from paramd_service.control.alerts.sampling import DigestRound, StatsRound, TensorInput
from paramd_service.control.alerts.service import Watchers
from paramd_service.control.alerts.watcher import Watcher
from paramd_service.control.alerts.webhook import Webhooks
from paramd_service.control.base.config import Bootstrap
from paramd_service.control.mesh.jobs import ControlIdentity, Jobs
from paramd_service.control.mesh.registry import MeshView, Report, mesh_view
from paramd_service.control.store.silences import Silence
from tests.memory_stores import MemoryStore

LAYOUT = Layout(
    world_size=3,
    arena_bytes=(4096,) * 3,
    tensors=tuple(
        TensorLayout(
            fqn=f"w{n}",
            dtype="float32",
            shape=(8,),
            kind=TensorKind.PARAMETER,
            pieces=tuple(Piece(rank, 32 * n, Box((0,), (8,))) for rank in range(3)),
        )
        for n in range(4)
    ),
)


class World:
    """Clock, reports and sidecars under the test's control."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.reports = {rank: self.report(rank) for rank in range(3)}
        self.bad: dict[str, TensorInput] = {}
        self.differing: dict[str, tuple[int, ...]] = {}
        self.asked: list[frozenset[int]] = []
        self.fails = False
        self.mirrored = False

    def report(self, rank: int, **state: object) -> Report:
        return Report(
            rank=rank,
            step=5,
            layout_digest="d",
            peer=common_pb2.Peer(rank=rank, address=f"127.0.0.1:{rank + 1}"),
            state=common_pb2.RankState(rank=rank, agreement_works=True, **state),
            version="1",
            leaving=False,
            connected=True,
            changed_s=self.now_s,
        )

    def view(self) -> MeshView:
        return mesh_view(self.reports, world_size=3, now_s=self.now_s, silent_after_s=6.0)

    def clock(self) -> float:
        return self.now_s

    async def layout(self) -> Layout:
        if self.fails:
            raise UnreachableError("nobody answers")
        return replace(LAYOUT, mirrored=self.mirrored)

    async def stats(self, tensors: Sequence[TensorLayout], *, timeout_s: float) -> StatsRound:
        well = {
            t.fqn: TensorInput(fqn=t.fqn, count=8, nan_count=0, inf_count=0, norm=3.0)
            for t in tensors
        }
        return StatsRound(step=7, tensors=tuple((well | self.bad).values()))

    async def digests(self, groups: Sequence[ReplicaGroup], *, timeout_s: float) -> DigestRound:
        self.asked.append(frozenset(rank for group in groups for rank in group.begins))
        found = tuple(
            Difference(group=g, ranks=self.differing[g.fqn], majority=2)
            for g in groups
            if g.fqn in self.differing
        )
        return DigestRound(step=9, differences=found, places={})


@pytest.fixture
def world() -> World:
    return World()


def watcher_of(
    world: World,
    told: list[Alert],
    config: AlertConfig | None = None,
    store: MemoryStore | None = None,
    webhooks: Webhooks | None = None,
) -> Watcher:
    config = config if config is not None else AlertConfig(watch=True)
    return Watcher(
        config,
        webhooks=webhooks if webhooks is not None else Webhooks(config),
        job="job",
        incarnation=1,
        view=world.view,
        sampler=world,
        store=store if store is not None else MemoryStore(),
        tell=told.append,
        clock=world.clock,
    )


async def looking(world: World, told: list[Alert], store: MemoryStore | None = None) -> Watcher:
    """A watcher that has begun; its rounds run when the test says so."""
    watcher = watcher_of(world, told, AlertConfig(watch=False), store)
    watcher.start()
    await _until(lambda: watcher.ready)
    return watcher


async def test_a_lost_sidecar_fires_and_is_resolved_when_it_is_back(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[Alert] = []
    watcher = await looking(world, told)
    watcher.tick(world.view())
    assert told == []
    caplog.set_level(logging.INFO)
    world.now_s += 20
    for rank in (0, 1):
        world.reports[rank] = world.report(rank)
    for _ in range(3):
        watcher.tick(world.view())
    assert [(a.finding.rule.value, a.finding.ranks) for a in told] == [("stale-rank", (2,))]
    assert len([r for r in caplog.records if "rank 2" in r.getMessage()]) == 1
    world.now_s += 5
    world.reports = {rank: world.report(rank) for rank in range(3)}
    watcher.tick(world.view())
    assert [a.state for a in told] == [State.FIRING, State.RESOLVED]
    await watcher.close()


async def test_a_stall_counts_within_its_window(world: World) -> None:
    told: list[Alert] = []
    watcher = await looking(world, told)
    watcher.tick(world.view())
    world.now_s += 2
    world.reports = {rank: world.report(rank) for rank in range(3)}
    world.reports[1] = world.report(1, stall_count=1, stall_total_ns=10**8, stall_max_ns=10**8)
    watcher.tick(world.view())
    assert [a.finding.rule.value for a in told] == ["stall-budget"]
    for _ in range(16):
        world.now_s += 5
        world.reports = {
            rank: world.report(rank, **_kept(world.reports[rank])) for rank in range(3)
        }
        watcher.tick(world.view())
    assert [a.state for a in told] == [State.FIRING, State.RESOLVED]
    await watcher.close()


def _kept(report: Report) -> dict[str, object]:
    state = report.state
    return {
        "stall_count": state.stall_count,
        "stall_total_ns": state.stall_total_ns,
        "stall_max_ns": state.stall_max_ns,
    }


async def test_nan_fires_with_the_tensor_s_name_and_is_over_when_it_has_gone(
    world: World,
) -> None:
    told: list[Alert] = []
    store = MemoryStore()
    watcher = await looking(world, told, store)
    world.bad = {"w2": TensorInput(fqn="w2", count=8, nan_count=1, inf_count=0, norm=1.0)}
    await watcher.rounds.stats()
    watcher.tick(world.view())  # does not cover tensors, so does not end it
    assert [(a.finding.rule.value, a.finding.fqn) for a in told] == [("non-finite", "w2")]
    assert {point.subject for point in store.points if point.name == "norm"} == {
        "w0",
        "w1",
        "w2",
        "w3",
    }
    world.bad = {}
    world.now_s += 60
    await watcher.rounds.stats()
    assert told[-1].state is State.RESOLVED
    await watcher.close()
    assert store.alerts[told[-1].id].state is State.RESOLVED


async def test_a_drifting_replica_is_compared_again_until_it_is_equal(world: World) -> None:
    told: list[Alert] = []
    watcher = watcher_of(world, told, AlertConfig(watch=True, sample_bytes=32))
    world.differing = {"w1": (2,)}
    for _ in range(4):
        await watcher.rounds.digests()
    assert [(a.finding.fqn, a.finding.ranks) for a in told] == [("w1", (2,))]
    assert watcher.book.firing[0].seen_count >= 2
    world.differing = {}
    world.now_s += 60
    await watcher.rounds.digests()
    assert told[-1].state is State.RESOLVED
    await watcher.close()


async def test_ranks_that_are_not_joined_are_not_asked(world: World) -> None:
    watcher = watcher_of(world, [])
    del world.reports[1]
    await watcher.rounds.digests()
    assert world.asked == [frozenset({0, 2})]
    del world.reports[0]
    await watcher.rounds.digests()
    assert len(world.asked) == 1
    await watcher.close()


async def test_a_restart_of_the_control_plane_does_not_tell_again(world: World) -> None:
    told: list[Alert] = []
    store = MemoryStore()
    before = watcher_of(world, told, store=store)
    world.differing = {"w1": (2,)}
    await before.rounds.digests()
    await before.close()
    after = watcher_of(world, told, AlertConfig(watch=False), store=store)
    after.start()
    await _until(lambda: len(after.book.firing) == 1)
    await after.rounds.digests()
    assert len(told) == 1
    await after.close()


async def test_an_acknowledged_alert_fires_on_and_a_restart_knows_who_has_seen_it(
    world: World,
) -> None:
    told: list[Alert] = []
    store = MemoryStore()
    before = await looking(world, told, store)
    world.differing = {"w1": (2,)}
    await before.rounds.digests()
    (alert,) = before.book.firing
    assert before.acknowledge(["of-nobody"], by="ann", note="") == []
    (seen,) = before.acknowledge([alert.id], by="ann", note="on it")
    assert (seen.acknowledged_by, seen.note, told[-1]) == ("ann", "on it", seen)
    await before.rounds.digests()
    await before.close()
    after = await looking(world, told, store)
    assert [one.acknowledged_by for one in after.book.firing] == ["ann"]
    await after.close()


async def test_a_silenced_alert_is_listed_and_not_posted_until_the_silence_is_over(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    posted: list[Alert] = []
    monkeypatch.setattr(Webhooks, "post", lambda self, alerts: posted.extend(alerts))
    store = MemoryStore()
    before = await looking(world, [], store)
    now_s = world.clock()
    silence = Silence(
        id="s1", job="job", rule="replica-drift", subject="", actor="ann", note="",
        created_s=now_s, until_s=now_s + 100.0,
    )  # fmt: skip
    await before.silence(silence)
    await before.close()
    # Later incarnations keep to it.
    watcher = await looking(world, [], store)
    world.differing = {"w1": (2,)}
    await watcher.rounds.digests()
    (alert,) = watcher.book.firing
    assert watcher.silenced(alert)
    assert posted == []
    assert (await watcher.end_silence("s1")).ended_s == world.clock()
    assert not watcher.silenced(alert)
    assert watcher.silences == []
    with pytest.raises(NotFoundError, match="not in force"):
        await watcher.end_silence("s1")
    await watcher.close()


async def test_without_a_store_alerts_go_on_and_are_kept_when_it_is_back(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Away(MemoryStore):
        away = True

        async def save_alerts(self, alerts: Sequence[Alert]) -> None:
            if self.away:
                raise UnreachableError("disk full")
            await super().save_alerts(alerts)

    monkeypatch.setattr(watcher_module, "KEEP_AGAIN_S", 0.01)
    told: list[Alert] = []
    store = Away()
    watcher = await looking(world, told, store)
    world.differing = {"w1": (2,)}
    await watcher.rounds.digests()
    await _until(lambda: "disk full" in caplog.text)
    assert len(told) == 1
    store.away = False
    await _until(lambda: len(store.alerts) == 1)
    await watcher.close()
    assert caplog.text.count("disk full") == 1


async def test_the_end_of_the_incarnation_resolves_what_fires(world: World) -> None:
    told: list[Alert] = []
    store = MemoryStore()
    watcher = await looking(world, told, store)
    world.differing = {"w1": (2,)}
    await watcher.rounds.digests()
    await watcher.close(incarnation_over=True)
    assert [a.state for a in told] == [State.FIRING, State.RESOLVED]
    assert [a.state for a in store.alerts.values()] == [State.RESOLVED]


@pytest.mark.parametrize("mirrored", [False, True])
async def test_replicas_are_compared_by_default_unless_a_copy_would_stop_the_trainer(
    world: World, mirrored: bool
) -> None:
    world.mirrored = mirrored
    told: list[Alert] = []
    watcher = watcher_of(world, told, AlertConfig(digests_every_s=0.01))
    world.differing = {"w1": (2,)}
    watcher.start()
    await _until(lambda: watcher.round_counts["digests"] > 1)
    await watcher.close()
    assert watcher.round_counts["stats"] == 0
    assert bool(world.asked) is not mirrored
    assert [a.finding.fqn for a in told] == ([] if mirrored else ["w1"])


async def test_rounds_that_fail_are_told_once_and_go_on(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    config = AlertConfig(watch=True, stats_every_s=0.01, digests_every_s=0.01)
    watcher = watcher_of(world, [], config)
    world.fails = True
    watcher.start()
    await _until(lambda: min(watcher.failed_counts.values()) > 3)
    world.fails = False
    await _until(lambda: min(watcher.round_counts.values()) > 1)
    await watcher.close()
    failures = [r for r in caplog.records if "nobody answers" in r.getMessage()]
    assert len(failures) == 2


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)


async def test_webhooks_are_retried_and_carry_the_alert(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    answers = [503, 429, 200]
    seen: list[httpx2.Request] = []
    slept: list[float] = []

    def receive(request: httpx2.Request) -> httpx2.Response:
        seen.append(request)
        return httpx2.Response(answers[len(seen) - 1])

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    config = AlertConfig(webhooks=("https://hooks.example.com/secret-path",), watch=False)
    hooks = Webhooks(config, transport=httpx2.MockTransport(receive), sleep=sleep)
    hooks.start()
    watcher = watcher_of(world, [], config, webhooks=hooks)
    world.differing = {"w0": (1,)}
    await watcher.rounds.digests()
    await _until(lambda: hooks.posted_count == 1)
    await watcher.close()
    await hooks.close()
    assert len({request.headers["idempotency-key"] for request in seen}) == 1
    body = json.loads(seen[-1].content)
    assert (body["rule"], body["name"], body["ranks"]) == ("replica-drift", "w0", [1])
    assert len(slept) == 2
    assert slept[0] < slept[1]
    assert "secret-path" not in caplog.text


@pytest.mark.parametrize("status", [301, 400, 404])
async def test_a_receiver_that_refuses_is_not_asked_again_nor_followed(
    world: World, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    seen: list[str] = []

    def receive(request: httpx2.Request) -> httpx2.Response:
        seen.append(str(request.url))
        return httpx2.Response(status, headers={"location": "http://127.0.0.1/elsewhere"})

    config = AlertConfig(webhooks=("https://hooks.example.com/secret-path",), watch=False)
    hooks = Webhooks(config, transport=httpx2.MockTransport(receive))
    hooks.start()
    watcher = watcher_of(world, [])
    world.differing = {"w0": (1,), "w1": (1,)}
    await watcher.rounds.digests()
    hooks.post(watcher.book.firing)
    await _until(lambda: hooks.failed_count == 2)
    await hooks.close()
    await watcher.close()
    assert seen == ["https://hooks.example.com/secret-path"] * 2
    warnings = [r for r in caplog.records if "rejects alerts" in r.getMessage()]
    assert [r.getMessage().endswith(f"HTTP {status}") for r in warnings] == [True]
    assert "secret-path" not in caplog.text


async def test_a_new_incarnation_has_its_own_watcher_and_ends_the_alerts_of_the_old_one(
    world: World,
) -> None:
    published: list[tuple[str, dict[str, object]]] = []

    def publish(kind: str, data: Mapping[str, object], *, job: str) -> None:
        assert job == "run"
        published.append((kind, dict(data)))

    jobs = Jobs(ControlIdentity(generation=1), site=None)
    watchers = Watchers(
        AlertConfig(watch=False),
        publish=publish,
        store=MemoryStore(),
        make_sampler=lambda mesh: world,
        expires_s=lambda: world.now_s + 86_400,
    )
    jobs.open(
        Bootstrap(job="run", incarnation=1, world_size=3, private_key=bytes(32), token="t" * 20)
    )
    watchers.start(jobs)
    first = watchers.get("run")
    assert first is not None
    await _until(lambda: first.ready)
    world.now_s += 20
    first.tick(world.view())
    assert [data["state"] for kind, data in published if kind == "alert"] == ["firing"] * 4
    rules = {str(data["rule"]) for kind, data in published if kind == "alert"}
    assert rules == {"stale-rank", "certificate"}
    jobs.open(
        Bootstrap(job="run", incarnation=2, world_size=3, private_key=bytes(32), token="t" * 20)
    )
    assert watchers.get("run") is not first
    await watchers.close()
    states = [data["state"] for kind, data in published if kind == "alert"]
    assert states == ["firing"] * 4 + ["resolved"] * 4
    await jobs.close()
