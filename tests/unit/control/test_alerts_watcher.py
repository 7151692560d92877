"""The watcher with a mesh made by hand: from what sidecars say to who is told."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import cast

import httpx2
import pytest

from paramd.errors import UnreachableError
from paramd.layout.types import Box, Layout, Piece, TensorKind, TensorLayout
from paramd.v1 import common_pb2
from paramd_service.control.alerts import watcher as watcher_module
from paramd_service.control.alerts import webhook
from paramd_service.control.alerts.config import AlertConfig
from paramd_service.control.alerts.drift import Difference, ReplicaGroup
from paramd_service.control.alerts.sampling import DigestRound, MeshSampler, StatsRound, TensorInput
from paramd_service.control.alerts.service import Watchers
from paramd_service.control.alerts.watcher import Watcher
from paramd_service.control.alerts.webhook import Webhooks
from paramd_service.control.base.config import Bootstrap
from paramd_service.control.mesh.jobs import ControlIdentity, Jobs
from paramd_service.control.mesh.registry import MeshView, Report, mesh_view
from paramd_service.control.store.alerts import Alert, AlertStore, State
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
    store = store if store is not None else MemoryStore()
    return Watcher(
        config,
        webhooks=webhooks if webhooks is not None else Webhooks(config.webhooks),
        job="job",
        incarnation=1,
        view=world.view,
        sampler=cast("MeshSampler", world),
        store=cast("AlertStore", store),
        offer=store.offer,
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
    assert [(a.rule, a.ranks) for a in told] == [("stale-rank", (2,))]
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
    assert [a.rule for a in told] == ["stall-budget"]
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
    assert [(a.rule, a.name) for a in told] == [("non-finite", "w2")]
    names = {one.series.name for one in store.points}
    assert {name for name in names if "norm" in name} == {f"norm:w{n}" for n in range(4)}
    world.bad = {}
    world.now_s += 60
    await watcher.rounds.stats()
    assert told[-1].state == State.RESOLVED
    await watcher.close()
    assert store.alerts[told[-1].id].state == State.RESOLVED


async def test_a_drifting_replica_is_compared_again_until_it_is_equal(world: World) -> None:
    told: list[Alert] = []
    watcher = watcher_of(world, told, AlertConfig(watch=True, sample_bytes=32))
    world.differing = {"w1": (2,)}
    for _ in range(4):
        await watcher.rounds.digests()
    assert [(a.name, a.ranks) for a in told] == [("w1", (2,))]
    assert watcher.book.firing[0].last_seen_s == world.now_s
    world.differing = {}
    world.now_s += 60
    await watcher.rounds.digests()
    assert told[-1].state == State.RESOLVED
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


async def test_without_a_store_alerts_go_on_and_are_kept_when_it_is_back(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Away(MemoryStore):
        away = True

        async def save(self, alerts: Sequence[Alert]) -> None:
            if self.away:
                raise UnreachableError("disk full")
            await super().save(alerts)

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
    assert [a.name for a in told] == ([] if mirrored else ["w1"])


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


@pytest.mark.parametrize("status", [200, 301, 404, 503])
async def test_a_change_is_posted_once_whatever_the_receiver_answers(
    world: World, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    seen: list[httpx2.Request] = []

    def receive(request: httpx2.Request) -> httpx2.Response:
        seen.append(request)
        return httpx2.Response(status, headers={"location": "http://127.0.0.1/elsewhere"})

    url = "https://hooks.example.com/secret-path"
    hooks = Webhooks([url], transport=httpx2.MockTransport(receive))
    watcher = watcher_of(world, [], webhooks=hooks)
    world.differing = {"w0": (1,)}
    await watcher.rounds.digests()
    await watcher.rounds.digests()
    await _until(lambda: hooks.posted_count + hooks.failed_count == 1)
    await watcher.close(incarnation_over=True)
    await _until(lambda: hooks.posted_count + hooks.failed_count == 2)
    await hooks.close()
    assert [str(request.url) for request in seen] == [url] * 2
    first, last = (json.loads(request.content) for request in seen)
    assert (first["rule"], first["name"], first["ranks"]) == ("replica-drift", "w0", [1])
    assert (first["state"], last["state"], first["id"]) == ("firing", "resolved", last["id"])
    assert hooks.posted_count == (2 if status == 200 else 0)
    told = [r.getMessage() for r in caplog.records if "is not posted" in r.getMessage()]
    assert len(told) == hooks.failed_count
    assert all(text.endswith(f"HTTP {status}") for text in told)
    assert "secret-path" not in caplog.text


async def test_posts_are_bounded_and_a_receiver_that_hangs_delays_nobody(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(request: httpx2.Request) -> httpx2.Response:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(webhook, "MAX_POSTS", 3)
    hooks = Webhooks(["https://a.example.com/secret-path"], transport=httpx2.MockTransport(hang))
    watcher = watcher_of(world, [], webhooks=hooks)
    world.differing = {f"w{n}": (1,) for n in range(4)}
    await watcher.rounds.digests()
    assert (hooks.posted_count, hooks.failed_count) == (0, 1)
    assert "3 posts are under way" in caplog.text
    assert "secret-path" not in caplog.text
    await watcher.close()
    await hooks.close()


async def test_a_missing_rank_is_waited_for_and_a_restart_ends_no_alert_of_it(
    world: World,
) -> None:
    told: list[Alert] = []
    store = MemoryStore()
    before = await looking(world, told, store)
    del world.reports[2]
    before.tick(world.view())
    assert told == []
    world.now_s += 11
    world.reports = {rank: world.report(rank) for rank in (0, 1)}
    before.tick(world.view())
    assert [(alert.rule, alert.ranks) for alert in told] == [("stale-rank", (2,))]
    await before.close()
    world.now_s += 60
    after = await looking(world, told, store)
    world.reports = {rank: world.report(rank) for rank in (0, 1)}
    after.tick(world.view())
    assert len(told) == 1
    world.now_s += 1
    world.reports[2] = world.report(2)
    after.tick(world.view())
    assert [alert.state for alert in told] == ["firing", "resolved"]
    await after.close()


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
        store=cast("AlertStore", MemoryStore()),
        offer=lambda samples: None,
        make_sampler=lambda mesh: cast("MeshSampler", world),
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
