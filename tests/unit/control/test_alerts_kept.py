"""Alerts and history in a real SQLite file, over a restart."""

from __future__ import annotations

from pathlib import Path

from paramd_service.control.alerts.book import series_name, series_of, subject_of
from paramd_service.control.store.alerts import Alert, AlertStore, State
from paramd_service.control.store.engine import sqlite_address
from paramd_service.control.store.history import MetricHistory, Sample, SeriesKey
from paramd_service.control.store.store import Store

ALERT = Alert(
    id="job-2-1-abc",
    job="job",
    incarnation=2,
    rule="replica-drift",
    subject="layers.0.weight",
    severity="critical",
    state="firing",
    reason="rank 1 differs",
    ranks=(1,),
    name="layers.0.weight",
    step=9,
    first_seen_s=100.5,
    last_seen_s=160.5,
    resolved_s=None,
)
OTHER_INCARNATION = ALERT.model_copy(update={"id": "job-1-1-abc", "incarnation": 1})


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
        table, history = AlertStore(store), MetricHistory(store, clock=lambda: 200.0)
        await table.save([OTHER_INCARNATION, ALERT])
        after = AlertStore(store)
        assert list(await after.load_firing("job", 2)) == [ALERT]
        over = ALERT.model_copy(update={"state": "resolved", "resolved_s": 170.0})
        await after.save([over])
        assert list(await after.load_firing("job", 2)) == []
        rows = await table.page("job", limit=9)
        assert [alert for _, alert in rows] == [over, OTHER_INCARNATION]
        for incarnation, state, expected in (
            (1, None, [OTHER_INCARNATION]),
            (1, State.RESOLVED, []),
            (2, State.RESOLVED, [over]),
        ):
            rows = await table.page("job", limit=9, incarnation=incarnation, state=state)
            assert [alert for _, alert in rows] == expected
        history.offer(
            Sample(series=series_of("job", 2, name, subject), step=3, time_s=150.0, value=1.5)
            for name, subject in (("step_time_s", "7"), ("norm", "7"), ("norm", "w"))
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
