"""Alerts and history in a real SQLite file, over a restart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paramd_service.control.alerts.book import (
    Alert,
    Finding,
    KeptAlerts,
    Point,
    Severity,
    State,
    alert_of,
    row_of,
    series_name,
    subject_of,
)
from paramd_service.control.alerts.config import Rule
from paramd_service.control.store.alerts import AlertStore as AlertTable
from paramd_service.control.store.engine import sqlite_address
from paramd_service.control.store.history import MetricHistory, SeriesKey
from paramd_service.control.store.silences import Silence, SilenceStore
from paramd_service.control.store.store import Store

ALERT = Alert(
    id="job-2-1-abc",
    job="job",
    incarnation=2,
    finding=Finding(
        rule=Rule.REPLICA_DRIFT,
        subject="layers.0.weight",
        severity=Severity.CRITICAL,
        reason="rank 1 differs",
        ranks=(1,),
        fqn="layers.0.weight",
        step=9,
    ),
    state=State.FIRING,
    first_seen_s=100.5,
    last_seen_s=160.5,
    seen_count=2,
)
OTHER_INCARNATION = replace(ALERT, id="job-1-1-abc", incarnation=1)


def test_an_alert_survives_its_row() -> None:
    assert alert_of(row_of(ALERT)) == ALERT
    over = replace(ALERT, state=State.RESOLVED, resolved_s=170.0)
    assert alert_of(row_of(over)) == over


@pytest.mark.parametrize("wrong", [{"rule": "of-the-future"}, {"detail": {}}])
def test_a_row_of_another_version_is_left_out(wrong: dict[str, object]) -> None:
    assert alert_of(replace(row_of(ALERT), **wrong)) is None  # type: ignore[arg-type]


def test_long_names_stay_apart_and_fit() -> None:
    names = {series_name("norm", "x" * 100 + str(n)) for n in range(50)}
    assert len(names) == 50
    assert max(map(len, names)) <= 64
    assert series_name("norm", "layers.0.weight") == "norm:layers.0.weight"
    for name in names:
        assert series_name(*subject_of(SeriesKey(job="job", incarnation=1, name=name))) == name


async def test_a_restart_finds_what_fires_and_goes_on_with_its_row(tmp_path: Path) -> None:
    address = sqlite_address(tmp_path / "paramd.db")
    store = Store(address)
    await store.start()
    try:
        table, history = AlertTable(store), MetricHistory(store, clock=lambda: 200.0)
        before = KeptAlerts(table, history, SilenceStore(store))
        await before.save_alerts([OTHER_INCARNATION, ALERT])
        after = KeptAlerts(table, history, SilenceStore(store))
        assert list(await after.load_firing("job", 2)) == [ALERT]
        over = replace(ALERT, state=State.RESOLVED, resolved_s=170.0)
        await after.save_alerts([over])
        assert list(await after.load_firing("job", 2)) == []
        assert [alert_of(row) for row in await table.page("job", limit=9)] == [
            over,
            OTHER_INCARNATION,
        ]
        for incarnation, only_resolved, expected in (
            (1, False, [OTHER_INCARNATION]),
            (1, True, []),
            (2, True, [over]),
        ):
            rows = await table.page(
                "job", limit=9, incarnation=incarnation, only_resolved=only_resolved
            )
            assert [alert_of(row) for row in rows] == expected
        after.offer(
            [
                Point(
                    job="job",
                    incarnation=2,
                    name=name,
                    subject=subject,
                    step=3,
                    time_s=150.0,
                    value=1.5,
                )
                for name, subject in (("step_time_s", "7"), ("norm", "7"), ("norm", "w"))
            ]
        )
        await history.flush()
        for series in (
            SeriesKey(job="job", incarnation=2, rank=7, name="step_time_s"),
            SeriesKey(job="job", incarnation=2, name="norm:7"),
            SeriesKey(job="job", incarnation=2, name="norm:w"),
        ):
            (point,) = await history.read(series, begin_s=100, end_s=200)
            assert (point.mean, point.step) == (1.5, 3)
        listed = [("norm", "7"), ("norm", "w"), ("step_time_s", "7")]
        assert [subject_of(one) for one in await history.series("job", 2)] == listed
        (first,) = await history.series("job", 2, limit=1)
        rest = await history.series("job", 2, after=(first.name, first.rank))
        assert [subject_of(one) for one in rest] == listed[1:]
        assert await history.series("job", 1) == []
    finally:
        await store.stop()


async def test_silences_in_force_are_those_not_ended_and_not_over(tmp_path: Path) -> None:
    store = Store(sqlite_address(tmp_path / "paramd.db"))
    await store.start()
    try:
        silences = SilenceStore(store)
        one = Silence(
            id="a", job="job", rule="straggler", subject="rank 1", actor="ann", note="known",
            created_s=100.0, until_s=200.0,
        )  # fmt: skip
        whole = replace(one, id="b", rule="", subject="", created_s=101.0, until_s=300.0)
        for each in (one, whole, replace(one, id="c", job="other")):
            await silences.add(each)
        assert await silences.in_force("job", 150.0) == [one, whole]
        assert await silences.in_force("job", 200.0) == [whole]
        await silences.end("b", 210.0)
        await silences.end("b", 220.0)
        assert await silences.in_force("job", 210.0) == []
    finally:
        await store.stop()
    assert one.covers("straggler", "rank 1", 150.0)
    assert not one.covers("straggler", "rank 2", 150.0)
    assert not one.covers("non-finite", "rank 1", 150.0)
    assert not one.covers("straggler", "rank 1", 200.0)
    assert whole.covers("non-finite", "w", 150.0)
