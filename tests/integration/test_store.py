"""The store over SQLite and over PostgreSQL: the same cases, the same answers."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect, text

from paramd.clock import now_s
from paramd.errors import ConflictError, NotFoundError, UsageError
from paramd_service.control.alerts.watcher import Watcher
from paramd_service.control.api.choice import NormHistory
from paramd_service.control.exports.schedules import Cadence, cadence_of
from paramd_service.control.records.audit import Action, Audit
from paramd_service.control.store.alerts import AlertRow, AlertStore
from paramd_service.control.store.edits import EditRow, EditStore
from paramd_service.control.store.engine import StoreAddress, StoreError, make_engine, parse_store
from paramd_service.control.store.exports import ExportStore
from paramd_service.control.store.history import (
    KEEP_S,
    MAX_POINTS,
    MetricHistory,
    Sample,
    SeriesKey,
)
from paramd_service.control.store.migrate import MIGRATIONS
from paramd_service.control.store.schema import REVISION, metadata
from paramd_service.control.store.store import Store
from paramd_service.control.store.tokens import TokenRow, TokenStore
from tests.integration.store_process import KINDS, fresh_address, server_of, started
from tests.postgres import PASSWORD, Postgres

FILES = ["control.sqlite" + end for end in ("", "-wal", "-shm", ".lock")]
LOSS = SeriesKey(job="run", incarnation=1, name="loss")


@pytest.fixture(scope="module", params=KINDS)
def server(request: pytest.FixtureRequest) -> Iterator[Postgres | None]:
    with server_of(request.param) as found:
        yield found


@pytest.fixture
def address(server: Postgres | None, tmp_path: Path) -> StoreAddress:
    return fresh_address(server, tmp_path)


async def execute(store: Store, statement: str) -> None:
    await store.write(lambda connection: connection.execute(text(statement)))


def _difference(connection: Connection) -> object:
    context = MigrationContext.configure(connection, opts={"compare_type": True})
    return compare_metadata(context, metadata)


def _described(connection: Connection) -> object:
    """All that the database itself knows of our tables."""
    found = inspect(connection)
    names = sorted(found.get_table_names())
    assert names == sorted([*metadata.tables, "alembic_version"])
    kinds = ("columns", "pk_constraint", "unique_constraints", "foreign_keys", "indexes")
    return {name: [repr(getattr(found, f"get_{kind}")(name)) for kind in kinds] for name in names}


async def test_the_migrations_make_the_same_tables_as_a_new_store_has(
    server: Postgres | None, tmp_path: Path
) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "old").mkdir()
    new, old = (fresh_address(server, tmp_path / name) for name in ("new", "old"))
    engine = make_engine(old)
    with engine.begin() as connection:
        connection.execute(
            text(
                "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL, "
                "CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num))"
            )
        )
    engine.dispose()
    async with started(new) as fresh, started(old) as migrated:
        assert await fresh.read(_difference) == []
        assert await migrated.read(_difference) == []
        assert await fresh.read(_described) == await migrated.read(_described)


async def test_what_an_older_paramd_called_an_epoch_is_kept(address: StoreAddress) -> None:
    async with started(address) as store:
        for table in ("alerts", "metric_series", "exports", "edits"):
            await execute(store, f"ALTER TABLE {table} RENAME COLUMN incarnation TO epoch")
        await execute(store, "ALTER TABLE export_schedules RENAME COLUMN cadence TO rhythm")
        await execute(store, "ALTER TABLE export_schedules ADD COLUMN last_s DOUBLE PRECISION")
        await execute(
            store,
            "INSERT INTO alerts (id, job, epoch, rank, step, rule, severity, text, detail, "
            "raised_s, updated_s) VALUES "
            "(1, 'run', 6, 0, 3, 'nan', 'critical', '', '{}', 1.0, 1.0)",
        )
        await execute(
            store,
            "INSERT INTO export_schedules (id, job, actor, request, rhythm, last_step, last_s, "
            "skipped_count, created_s) VALUES ('s', 'run', 'ops', "
            """'{"destination": "all/{epoch}/{step}"}', '{}', 0, 0.0, 0, 1.0)""",
        )
        await execute(store, "DROP TABLE alert_silences")
        await _as_of_0005(store)
        await execute(store, "UPDATE alembic_version SET version_num = '0003'")
    async with started(address) as store:
        assert [row.incarnation for row in await AlertStore(store).page("run", limit=9)] == [6]
        (schedule,) = await ExportStore(store).schedules("run")
        assert schedule.request == {"destination": "all/{incarnation}/{step}"}


async def test_schedules_by_time_have_ended_and_say_so_and_those_by_steps_go_on(
    address: StoreAddress,
) -> None:
    async with started(address) as store:
        await execute(store, "ALTER TABLE export_schedules ADD COLUMN last_s DOUBLE PRECISION")
        # As 0.1.0 wrote them.
        for name, steps, every_s, deleted_s in (
            ("a", "null", "600.0", "NULL"), ("b", "50", "null", "NULL"), ("c", "null", "5.0", "9"),
        ):  # fmt: skip
            cadence = f'"every_steps": {steps}, "every_s": {every_s}, "keep_last": 2'
            statement = (
                "INSERT INTO export_schedules (id, job, actor, request, cadence, last_step, "
                f"last_s, skipped_count, created_s, deleted_s) VALUES ('{name}', 'run', 'ops', "
                f"""'{{"destination": "all/{name}", "format": "dcp"}}', """
                f"'{{{cadence}, \"keep_every\": null}}', 40, 7.0, 0, 1.0, {deleted_s})"
            )
            # A colon begins a parameter of `text`.
            await execute(store, statement.replace(":", "\\:"))
        await execute(store, "UPDATE alembic_version SET version_num = '0007'")
    async with started(address) as store:
        exports = ExportStore(store)
        (kept,) = await exports.schedules("run")
        assert kept.id == "b"
        assert kept.last_step == 40
        assert cadence_of(kept) == Cadence(every_steps=50, keep_last=2)
        (told,) = await exports.page("run", limit=9)
        assert (told.destination, told.schedule, told.state) == ("all/a", "a", "CANCELLED")
        assert "every 600 s" in told.reason
        assert await exports.unfinished("run") == []


OLD_POINTS = """CREATE TABLE metric_points (series_id BIGINT NOT NULL,
    resolution_s INTEGER NOT NULL, time_ms BIGINT NOT NULL, step BIGINT NOT NULL,
    mean DOUBLE PRECISION, min DOUBLE PRECISION, max DOUBLE PRECISION, count INTEGER NOT NULL,
    nonfinite_count INTEGER NOT NULL,
    CONSTRAINT pk_metric_points PRIMARY KEY (series_id, resolution_s, time_ms))"""


async def _as_of_0005(store: Store) -> None:
    """Make of a new store what paramd had before it kept one list of points for each series."""
    await execute(store, "DROP TABLE metric_points")
    await execute(store, OLD_POINTS)
    for name in ("grid_ms", "newest_ms", "point_count"):
        await execute(store, f"ALTER TABLE metric_series DROP COLUMN {name}")
    await execute(store, "ALTER TABLE export_schedules ADD COLUMN last_s DOUBLE PRECISION")
    await execute(store, "UPDATE alembic_version SET version_num = '0005'")


def _old_points(series_id: int, resolution_s: int, begin_s: int, end_s: int) -> str:
    """Points of the number n at second n, and of one NaN in each that sums up more than one."""
    width_s = max(resolution_s, 1)
    rows = []
    for at_s in range(begin_s, end_s, width_s):
        last_s = at_s + width_s - 1
        rows.append(
            f"({series_id}, {resolution_s}, {at_s * 1000}, {last_s}, {(at_s + last_s) / 2}, "
            f"{at_s}, {last_s}, {width_s}, {int(width_s > 1)})"
        )
    return f"INSERT INTO metric_points VALUES {', '.join(rows)}"


async def test_points_of_three_resolutions_become_one_list_and_the_audit_stays(
    address: StoreAddress,
) -> None:
    short, long = LOSS, replace(LOSS, name="lr")
    async with started(address) as store:
        for n, series in enumerate((short, long), start=1):
            await execute(
                store,
                "INSERT INTO metric_series (id, job, incarnation, rank, name) VALUES "
                f"({n}, 'run', 1, -1, '{series.name}')",
            )
        await Audit(store).event(Action(actor="ops", role="admin", method="m", job="run"))
        before = await Audit(store).page("run", order="oldest", limit=9)
        await _as_of_0005(store)
        # Ten minutes to 6000, minutes to 6600 and samples to 6700; each also as finer ones had it.
        for resolution_s, begin_s, end_s in ((600, 3600, 6600), (60, 5400, 6660), (0, 6570, 6700)):
            await execute(store, _old_points(1, resolution_s, begin_s, end_s))
        await execute(store, _old_points(2, 0, 10_000, 10_000 + 2 * MAX_POINTS + 10))
    async with started(address) as store:
        history = MetricHistory(store)
        points = await history.read(short)
        spans = [(point.time_s, point.span_s) for point in points]
        assert spans[:3] == [(3600, 600), (4200, 600), (4800, 600)]
        assert spans[3:23] == [(5400 + 60 * n, 60) for n in range(20)]
        assert spans[23:] == [(6600 + n, 0.001) for n in range(100)]
        assert (points[0].mean, points[0].min, points[0].max) == (3899.5, 3600, 4199)
        assert (points[0].count, points[0].nonfinite_count, points[0].step) == (600, 1, 4199)
        assert sum(point.count for point in points) == 6700 - 3600
        thinned = await history.read(long)
        assert {point.span_s for point in thinned} == {2.048}
        assert sum(point.count for point in thinned) == 2 * MAX_POINTS + 10
        assert (thinned[0].min, thinned[-1].max) == (10_000, 10_000 + 2 * MAX_POINTS + 9)
        assert [p.mean for p in thinned] == [
            (p.min + p.max) / 2 for p in thinned if p.min and p.max
        ]
        # The series go on where they were: what they had is not taken twice.
        for series, end_s in ((short, 6700), (long, 10_000 + 2 * MAX_POINTS + 10)):
            history.offer(
                Sample(series=series, time_s=float(n), step=n, value=float(n))
                for n in range(end_s - 50, end_s + 50)
            )
            count = sum(point.count for point in await history.read(series))
            await history.flush()
            now = await history.read(series)
            assert sum(point.count for point in now) == count + 50
            assert (now[-1].max, now[-1].step) == (end_s + 49, end_s + 49)
        assert await Audit(store).page("run", order="oldest", limit=9) == before
        assert len(before) == 1


def test_the_newest_migration_is_the_one_the_schema_names() -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    assert ScriptDirectory.from_config(config).get_heads() == [REVISION]


async def test_what_was_written_is_there_after_a_restart(address: StoreAddress) -> None:
    row = TokenRow(name="ci", digest="a" * 64, role="viewer", created_s=1.5, expires_s=2.5)
    async with started(address) as store:
        await TokenStore(store).create(row)
    async with started(address) as store:
        assert await TokenStore(store).get("ci") == row


async def test_two_that_start_at_once_migrate_once(address: StoreAddress) -> None:
    stores = [Store(address) for _ in range(4)]
    try:
        await asyncio.gather(*(store.start() for store in stores))
        for store in stores:
            assert await TokenStore(store).list() == []
    finally:
        for store in stores:
            await store.stop()


async def test_a_store_of_a_newer_paramd_is_refused_and_left_alone(address: StoreAddress) -> None:
    async with started(address) as store:
        await execute(store, "UPDATE alembic_version SET version_num = 'zz99'")
    newer = Store(address)
    try:
        with pytest.raises(ConflictError, match="revision 'zz99', written by a newer paramd"):
            await newer.start()
        with pytest.raises(StoreError, match="not open"):
            await TokenStore(newer).list()
    finally:
        await newer.stop()
    engine = make_engine(address)
    with engine.connect() as connection:
        found = connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one()
    engine.dispose()
    assert found == "zz99"


async def test_tokens_are_found_by_digest_and_revoked_once(address: StoreAddress) -> None:
    async with started(address) as store:
        tokens = TokenStore(store)
        for name in ("b", "a"):
            await tokens.create(TokenRow(name=name, digest=name * 64, role="editor", created_s=1.0))
        assert [row.name for row in await tokens.list()] == ["a", "b"]
        with pytest.raises(ConflictError, match="'a': the name has been used"):
            await tokens.create(TokenRow(name="a", digest="c" * 64, role="admin", created_s=1.0))
        found = await tokens.find("b" * 64)
        assert found is not None
        assert (found.name, found.revoked_s) == ("b", None)
        assert await tokens.find("c" * 64) is None
        assert (await tokens.revoke("b", now_s=7.0)).revoked_s == 7.0
        assert (await tokens.revoke("b", now_s=9.0)).revoked_s == 7.0
        with pytest.raises(NotFoundError, match="'x' does not exist"):
            await tokens.revoke("x", now_s=9.0)


async def test_tokens_that_have_ended_are_those_of_a_time(address: StoreAddress) -> None:
    async with started(address) as store:
        tokens = TokenStore(store)
        rows = {
            "expired": {"expires_s": 50.0},
            "expired-long-ago": {"expires_s": 10.0},
            "revoked": {"expires_s": 45.0, "revoked_s": 40.0},
            "revoked-long-ago": {"expires_s": 55.0, "revoked_s": 5.0},
            "good": {"expires_s": 61.0},
            "for-ever": {},
        }
        for n, (name, times_s) in enumerate(rows.items()):
            row = TokenRow(name=name, digest=str(n) * 64, role="reader", created_s=1.0)
            await tokens.create(replace(row, **times_s))
        found = await tokens.ended(since_s=10.0, now_s=60.0, limit=9)
        assert [(row.name, row.ended_s) for row in found] == [("revoked", 40.0), ("expired", 50.0)]
        found = await tokens.ended(since_s=10.0, now_s=60.0, limit=1)
        assert [row.name for row in found] == ["expired"], "the latest, when there are too many"


async def test_alerts_are_raised_resolved_and_paged(address: StoreAddress) -> None:
    async with started(address) as store:
        alerts = AlertStore(store)
        rows = [
            AlertRow(
                job="run", incarnation=2, rank=n, rule="nan", severity="critical", text="<b>é",
                detail={"fqn": "w", "n": [1, None]}, raised_s=10.0 + n, updated_s=10.0 + n,
            )
            for n in range(3)
        ]  # fmt: skip
        ids = [await alerts.add(row) for row in rows]
        assert ids == sorted(set(ids))
        page = await alerts.page("run", limit=2)
        assert [row.id for row in page] == [ids[2], ids[1]]
        assert page[1].detail == {"fqn": "w", "n": [1, None]}
        assert [row.id for row in await alerts.page("run", limit=9, before_id=ids[1])] == [ids[0]]
        await alerts.replace(
            AlertRow(
                id=ids[1], job="run", incarnation=2, rank=1, rule="nan", severity="critical",
                text="", raised_s=11.0, updated_s=20.0, resolved_s=20.0,
            )
        )  # fmt: skip
        still = await alerts.page("run", limit=9, only_open=True)
        assert [row.id for row in still] == [ids[2], ids[0]]
        assert await alerts.page("other", limit=9) == []
        with pytest.raises(NotFoundError):
            await alerts.replace(replace(still[0], id=10**6))


async def test_an_id_is_found_by_its_first_characters_in_its_job_alone(
    address: StoreAddress,
) -> None:
    def row(edit_id: str, job: str) -> EditRow:
        return EditRow(
            id=edit_id, job=job, incarnation=1, state="APPLIED", actor="a", role="admin",
            created_s=1.0, manifest=b"", digest="",
        )  # fmt: skip

    one, two, other = "3f2a9c01" + "0" * 24, "3f2a9c02" + "0" * 24, "3f2a9c03" + "0" * 24
    async with started(address) as store:
        edits = EditStore(store)
        for made in (row(one, "run"), row(two, "run"), row(other, "elsewhere")):
            await edits.add(made)
        assert await edits.whole_id("run", "3f2a9c01") == one
        assert await edits.whole_id("elsewhere", "3") == other
        with pytest.raises(UsageError, match=f"several ids begin with '3f2a': {one}, {two}; give"):
            await edits.whole_id("run", "3f2a")
        for none in ("3f2a9c03", "3f2a9c0g", "%", "_f2a9c01", "3F2A9C01", "' OR 1=1 --"):
            with pytest.raises(NotFoundError, match="see: paramd edits"):
                await edits.whole_id("run", none)


async def test_a_full_series_is_thinned_and_goes_on_with_a_wider_span(
    address: StoreAddress,
) -> None:
    begin_s, count = 1_000_000.0, 3 * MAX_POINTS
    async with started(address) as store:
        history = MetricHistory(store)
        values = [math.nan if n % 100 == 7 else float(n) for n in range(count)]
        for begin in range(0, count, 500):
            history.offer(
                Sample(series=LOSS, time_s=begin_s + n, step=n, value=values[n])
                for n in range(begin, min(begin + 500, count))
            )
            await history.flush()
            await history.thin()
            assert len(await history.read(LOSS)) <= MAX_POINTS
        points = await history.read(LOSS)
        assert MAX_POINTS / 2 < len(points) <= MAX_POINTS
        assert {point.span_s for point in points} == {4.096}
        assert sum(point.count for point in points) == sum(map(math.isfinite, values))
        assert sum(point.nonfinite_count for point in points) == sum(map(math.isnan, values))
        assert (points[0].min, points[-1].max, points[-1].step) == (0.0, count - 1, count - 1)
        first = points[1]
        within = [
            value
            for n, value in enumerate(values)
            if first.time_s <= begin_s + n < first.time_s + first.span_s
        ]
        finite = [value for value in within if math.isfinite(value)]
        assert first.mean == pytest.approx(sum(finite) / len(finite))
        assert (first.min, first.max) == (min(finite), max(finite))


async def test_a_part_is_read_and_merged_to_as_many_points_as_are_wanted(
    address: StoreAddress,
) -> None:
    async with started(address) as store:
        history = MetricHistory(store)
        history.offer(Sample(series=LOSS, time_s=100.0 + n, value=float(n)) for n in range(50))
        await history.flush()
        some = await history.read(LOSS, begin_s=110.0, end_s=120.0)
        assert [point.mean for point in some] == [float(n) for n in range(10, 20)]
        few = await history.read(LOSS, limit=4)
        assert 1 < len(few) <= 4
        assert sum(point.count for point in few) == 50
        assert await history.read(LOSS, begin_s=200.0) == []
        # Whatever reaches into the time that is asked for.
        wide = few[1]
        narrow = await history.read(LOSS, begin_s=wide.time_s + 1, end_s=wide.time_s + 2)
        assert len(narrow) in (1, 2)
        assert len(await history.read(LOSS)) == 50, "reading changes nothing"


async def test_what_is_told_again_after_a_restart_counts_once(address: StoreAddress) -> None:
    async with started(address) as store:
        told = [Sample(series=LOSS, time_s=100.0 + n, value=1.0) for n in range(3000)]
        for begin, end in ((0, 2900), (0, 3000), (500, 3000)):
            history = MetricHistory(store)
            history.offer(told[begin:end])
            await history.flush()
            await history.thin()
        points = await history.read(LOSS)
        assert len(points) <= MAX_POINTS
        assert sum(point.count for point in points) == 3000


async def test_a_series_goes_a_month_after_its_last_sample_and_may_come_again(
    address: StoreAddress,
) -> None:
    now = [100.0]
    async with started(address) as store:
        history = MetricHistory(store, clock=lambda: now[0])
        other = replace(LOSS, name="lr")
        for series, time_s in ((LOSS, 10.0), (other, 5000.0)):
            history.offer([Sample(series=series, time_s=time_s, value=1.0)])
        await history.flush()
        now[0] = KEEP_S + 5.0
        await history.sweep()
        assert await history.series("run", 1) == [LOSS, other]
        now[0] = KEEP_S + 20.0
        await history.sweep()
        assert await history.series("run", 1) == [other]
        count = "SELECT count(*) FROM metric_points"
        assert await store.read(lambda c: c.execute(text(count)).scalar_one()) == 1
        history.offer([Sample(series=LOSS, time_s=now[0], value=2.0)])
        await history.flush()
        assert [point.mean for point in await history.read(LOSS)] == [2.0]


async def test_a_jump_of_the_clock_drops_nothing(
    address: StoreAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with started(address) as store:
        history, begin_s = MetricHistory(store), now_s() - 60.0
        history.offer([Sample(series=LOSS, time_s=begin_s, value=1.0)])
        await history.flush()
        with monkeypatch.context() as jump:
            jump.setattr(now_s, "_wall", lambda: time.time() + 40 * 86_400)
            await history.sweep()
        # Bound when the class was made: with time.time there nothing above would move it.
        defaults = [MetricHistory.__init__, NormHistory.__init__, Watcher.__init__]
        assert [d.__kwdefaults__["clock"] for d in defaults] == [now_s, now_s, now_s]
        (point,) = await history.read(LOSS, begin_s=begin_s - 1, end_s=begin_s + 1)
        assert point.mean == 1.0


async def test_series_are_apart_and_the_same_moment_counts_once(address: StoreAddress) -> None:
    async with started(address) as store:
        history = MetricHistory(store)
        others = [
            SeriesKey(job="run", incarnation=1, rank=0, name="loss"),
            SeriesKey(job="run", incarnation=2, name="loss"),
            SeriesKey(job="b", incarnation=1, name="loss"),
        ]
        for n, series in enumerate([LOSS, *others]):
            history.offer([Sample(series=series, time_s=50.0, value=float(n))] * 2)
        await history.flush()
        for n, series in enumerate([LOSS, *others]):
            points = await history.read(series, begin_s=0, end_s=100)
            assert [point.mean for point in points] == [float(n)]


async def test_series_are_listed_by_name_and_rank_in_pages(address: StoreAddress) -> None:
    async with started(address) as store:
        history = MetricHistory(store)
        wanted = [
            SeriesKey(job="run", incarnation=2, name="Norm:w"),
            SeriesKey(job="run", incarnation=2, name="norm:layers.0.weight"),
            SeriesKey(job="run", incarnation=2, name="norm:layers_0"),
            SeriesKey(job="run", incarnation=2, name="norm:é%_'"),
            SeriesKey(job="run", incarnation=2, name="step_time_s"),
            *(SeriesKey(job="run", incarnation=2, rank=n, name="step_time_s") for n in (0, 2, 10)),
        ]
        others = [
            SeriesKey(job="run", incarnation=1, name="norm:w"),
            SeriesKey(job="b", incarnation=2, name="norm:w"),
        ]
        assert await history.series("run", 2) == []
        history.offer(
            Sample(series=series, time_s=50.0, value=1.0)
            for series in reversed([*wanted, *others, *wanted])
        )
        await history.flush()
        assert await history.series("run", 2) == wanted
        for size in (1, 3, len(wanted)):
            paged: list[SeriesKey] = []
            after: tuple[str, int] | None = None
            while page := await history.series("run", 2, after=after, limit=size):
                assert len(page) <= size
                paged += page
                after = (page[-1].name, page[-1].rank)
            assert paged == wanted
        assert await history.series("run", 1) == others[:1]
        assert await history.series("none", 2) == []


async def test_a_write_that_fails_leaves_nothing_and_the_next_one_works(
    address: StoreAddress,
) -> None:
    def half(connection: Connection) -> None:
        connection.execute(text("DELETE FROM tokens"))
        raise NotFoundError("after the effect")

    async with started(address) as store:
        tokens = TokenStore(store)
        await tokens.create(TokenRow(name="a", digest="a" * 64, role="x", created_s=1.0))
        with pytest.raises(NotFoundError):
            await store.write(half)
        with pytest.raises(StoreError, match="no_such_table"):
            await execute(store, "DELETE FROM no_such_table")
        assert [row.name for row in await tokens.list()] == ["a"]


async def test_readers_go_on_while_a_write_takes_long(address: StoreAddress) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def slow(connection: Connection) -> None:
        connection.execute(text("DELETE FROM tokens"))
        inside.set()
        assert go_on.wait(20)

    async with started(address) as store:
        tokens = TokenStore(store)
        await tokens.create(TokenRow(name="a", digest="a" * 64, role="x", created_s=1.0))
        writing = asyncio.create_task(store.write(slow))
        assert await asyncio.to_thread(inside.wait, 20)
        try:
            assert [row.name for row in await tokens.list()] == ["a"]
        finally:
            go_on.set()
            await writing
        assert await tokens.list() == []


async def test_too_many_writes_are_refused_and_those_accepted_are_done_at_stop(
    address: StoreAddress,
) -> None:
    store = Store(address, max_waiting=3)
    go_on = threading.Event()
    await store.start()
    try:
        inside = threading.Event()
        first = store.submit(lambda _: (inside.set(), go_on.wait(20)))
        assert await asyncio.to_thread(inside.wait, 20)
        rows = [TokenRow(name=n, digest=n * 64, role="x", created_s=1.0) for n in "abc"]
        waiting = [asyncio.create_task(TokenStore(store).create(row)) for row in rows]
        await asyncio.sleep(0)
        assert store.waiting_count == 3
        with pytest.raises(StoreError, match="3 writes are queued"):
            store.submit(lambda _: None)
        stopping = asyncio.create_task(store.stop())
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.gather(stopping, *waiting)
        first.result(0)
    finally:
        go_on.set()
        await store.stop()
    with pytest.raises(StoreError, match="not running"):
        await TokenStore(store).list()
    async with started(address) as again:
        assert [row.name for row in await TokenStore(again).list()] == ["a", "b", "c"]


@pytest.mark.parametrize("server", ["postgres"], indirect=True)
async def test_connections_that_the_server_ended_cost_no_failed_write(
    server: Postgres, address: StoreAddress
) -> None:
    async with started(address) as store:
        tokens = TokenStore(store)
        assert await tokens.list() == []
        with psycopg.connect(server.url(), autocommit=True) as other:
            ended = other.execute(
                "SELECT count(pg_terminate_backend(pid, 10000)) FROM pg_stat_activity "
                "WHERE datname = %s",
                [address.url.database],
            ).fetchone()
        assert ended is not None
        assert ended[0] >= 1
        await tokens.create(TokenRow(name="a", digest="a" * 64, role="x", created_s=1.0))
        assert [row.name for row in await tokens.list()] == ["a"]


@pytest.mark.parametrize("server", ["postgres"], indirect=True)
async def test_no_log_and_no_error_holds_the_password(
    server: Postgres, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with started(parse_store(server.url(), directory=tmp_path)) as store:
        with pytest.raises(StoreError) as failed:
            await execute(store, "SELECT 1/0")
    wrong = Store(parse_store(server.url().replace("secret", "wrong"), directory=tmp_path))
    try:
        with pytest.raises(StoreError, match="password authentication failed") as refused:
            await wrong.start()
    finally:
        await wrong.stop()
    texts = [caplog.text, str(failed.value), str(refused.value), repr(store.address)]
    for shown in (PASSWORD, "secret:of", "wrong%3A", "%3Aof"):
        assert not [told for told in texts if shown in told]


async def test_a_store_that_is_away_costs_only_what_needs_it_and_is_found_when_it_is_back(
    tmp_path: Path,
) -> None:
    """SQLite alone: a directory stands where the file belongs."""
    address = parse_store("", directory=tmp_path)
    assert address.path is not None
    address.path.mkdir()
    store = Store(address)
    try:
        with pytest.raises(StoreError, match=r"control.sqlite cannot be used"):
            await store.start()
        with pytest.raises(StoreError):
            await TokenStore(store).list()
        address.path.rmdir()
        await TokenStore(store).create(TokenRow(name="a", digest="a" * 64, role="x", created_s=1.0))
        assert len(await TokenStore(store).list()) == 1
    finally:
        await store.stop()


async def test_the_file_is_ours_alone_in_wal_mode_and_synced_in_full(tmp_path: Path) -> None:
    address = parse_store("", directory=tmp_path)
    async with started(address) as store:
        await execute(store, "DELETE FROM tokens")
        modes = {name: stat.S_IMODE(os.stat(tmp_path / name).st_mode) for name in FILES}
        assert set(modes.values()) == {0o600}, modes
        mode = await store.read(lambda c: c.exec_driver_sql("PRAGMA journal_mode").scalar_one())
        level = await store.read(lambda c: c.exec_driver_sql("PRAGMA synchronous").scalar_one())
        assert (mode, level) == ("wal", 2)


def test_what_was_acknowledged_survives_a_kill(tmp_path: Path) -> None:
    """A process that writes and says so is killed; what it said is in the file."""
    script = """
import asyncio, itertools, pathlib, sys
from paramd_service.control.store.edits import EditRow, EditStore
from paramd_service.control.store.engine import parse_store
from paramd_service.control.store.store import Store
from paramd_service.control.store.tokens import TokenRow, TokenStore
async def main():
    store = Store(parse_store("", directory=pathlib.Path(sys.argv[1])))
    await store.start()
    for n in itertools.count():
        row = TokenRow(name=str(n), digest=f"{n:064d}", role="x", created_s=1.0)
        await TokenStore(store).create(row)
        print(n, flush=True)
asyncio.run(main())
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            if int(line) >= 20:
                process.kill()
                break
        said = [int(line) for line in process.stdout if line.endswith("\n")]
    process.wait(20)
    last = max([20, *said])
    with sqlite3.connect(tmp_path / "control.sqlite") as connection:
        count = connection.execute("SELECT count(*) FROM tokens").fetchone()[0]
    connection.close()
    assert count >= last + 1
