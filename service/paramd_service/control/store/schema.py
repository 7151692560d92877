"""The current tables. A change here needs a revision in `migrations/versions`."""

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)

REVISION = "0010"
"""The newest revision; a test checks it against the migrations."""

MAX_JOB_CHARS = 64
MAX_NAME_CHARS = 64

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "ix": "ix_%(table_name)s_%(column_0_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
    }
)

# SQLite autoincrements only a column of type INTEGER.
_Id = BigInteger().with_variant(Integer(), "sqlite")

audit = Table(
    "audit",
    metadata,
    Column("job", String(MAX_JOB_CHARS), primary_key=True, comment="empty: the site's own chain"),
    Column("seq", BigInteger, primary_key=True, autoincrement=False, comment="1 and up, no gaps"),
    Column("body", Text, nullable=False, comment="canonical JSON, as it was hashed"),
    Column("hash", String(64), nullable=False, comment="sha256(hash before || body)"),
    sqlite_with_rowid=False,
    comment="append-only; paramd/chain.py says how records are linked",
)

tokens = Table(
    "tokens",
    metadata,
    Column("name", String(MAX_NAME_CHARS), primary_key=True),
    Column("digest", String(64), nullable=False, unique=True, comment="sha256 of the token"),
    Column("role", String(16), nullable=False),
    Column("created_s", Double, nullable=False, comment="seconds since the Unix epoch"),
    Column("expires_s", Double, comment="null: never"),
    Column("revoked_s", Double, comment="null: not revoked"),
    Column("jobs", Text, comment="patterns of the jobs that it is for; null: all"),
    comment="users of the REST side; the tokens themselves are nowhere",
)

alerts = Table(
    "alerts",
    metadata,
    Column("number", _Id, Identity(), primary_key=True, comment="rises with every new alert"),
    Column("id", Text, nullable=False, unique=True),
    Column("job", String(MAX_JOB_CHARS), nullable=False),
    Column("incarnation", BigInteger, nullable=False),
    Column("resolved_s", Double, comment="seconds since the Unix epoch; null: still true"),
    Column("body", Text, nullable=False, comment="the alert, as JSON"),
    Index("ix_alerts_job", "job", "number"),
    comment="never removed",
)

metric_series = Table(
    "metric_series",
    metadata,
    Column("id", _Id, Identity(), primary_key=True),
    Column("job", String(MAX_JOB_CHARS), nullable=False),
    Column("incarnation", BigInteger, nullable=False),
    Column("rank", Integer, nullable=False, comment="-1: the mesh as a whole"),
    Column("name", String(MAX_NAME_CHARS), nullable=False),
    Column("grid_ms", BigInteger, nullable=False, server_default=text("1"), comment="of new ones"),
    Column("newest_ms", BigInteger, nullable=False, server_default=text("0"), comment="of samples"),
    Column("point_count", Integer, nullable=False, server_default=text("0")),
    UniqueConstraint("job", "incarnation", "rank", "name"),
    comment="what a number is about; its points hold only the id",
)

metric_points = Table(
    "metric_points",
    metadata,
    Column(
        "series_id",
        _Id,
        ForeignKey("metric_series.id", ondelete="CASCADE"),
        primary_key=True,
        autoincrement=False,
    ),
    Column("time_ms", BigInteger, primary_key=True, autoincrement=False, comment="begin of span"),
    Column("span_ms", BigInteger, nullable=False, comment="1: one moment"),
    Column("step", BigInteger, nullable=False, comment="the highest within; -1: not known"),
    Column("mean", Double, comment="of finite values; null: there was none"),
    Column("min", Double),
    Column("max", Double),
    Column("count", Integer, nullable=False, comment="finite values"),
    Column("nonfinite_count", Integer, nullable=False, comment="NaN and infinities"),
    sqlite_with_rowid=False,
)

exports = Table(
    "exports",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("job", String(MAX_JOB_CHARS), nullable=False),
    Column("destination", Text, nullable=False, comment="name/key"),
    Column("format", String(16), nullable=False),
    Column("actor", String(MAX_NAME_CHARS), nullable=False),
    Column("schedule", String(32), nullable=False, comment="empty: somebody asked for it"),
    Column("request", Text, nullable=False, comment="JSON object"),
    Column("state", String(16), nullable=False),
    Column("reason", Text, nullable=False),
    Column("incarnation", BigInteger, nullable=False, comment="0: nothing is pinned"),
    Column("step", BigInteger, nullable=False, comment="-1: nothing is pinned"),
    Column("plan", LargeBinary, nullable=False, comment="paramd.v1.ExportPlan"),
    Column("generation", BigInteger, nullable=False, comment="of who runs it"),
    Column("drop_owed", Boolean(create_constraint=False), nullable=False),
    Column("removed", Boolean(create_constraint=False), nullable=False),
    Column("created_s", Double, nullable=False, comment="seconds since the Unix epoch"),
    Column("ended_s", Double, comment="null: it goes on"),
    Column("jobs", Text, comment="as in tokens, of who asked for it"),
    Index("ix_exports_job", "job", "created_s"),
    Index("ix_exports_schedule", "schedule"),
)

export_files = Table(
    "export_files",
    metadata,
    Column("export_id", String(32), ForeignKey("exports.id", ondelete="CASCADE"), primary_key=True),
    Column("name", String(255), primary_key=True),
    Column("number", Integer, nullable=False, comment="place in the plan"),
    Column("size_bytes", BigInteger, nullable=False),
    Column("written_bytes", BigInteger, nullable=False),
    Column("rank", Integer, nullable=False, comment="-1: given to none"),
    Column("checksum", String(32), nullable=False, comment="XXH3, 128 bit; empty: not whole"),
    Column("state", String(16), nullable=False),
)

export_schedules = Table(
    "export_schedules",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("job", String(MAX_JOB_CHARS), nullable=False),
    Column("actor", String(MAX_NAME_CHARS), nullable=False),
    Column("request", Text, nullable=False, comment="JSON object"),
    Column("cadence", Text, nullable=False, comment="JSON object"),
    Column("last_step", BigInteger, nullable=False, comment="of the last occasion"),
    Column("skipped_count", Integer, nullable=False),
    Column("created_s", Double, nullable=False, comment="seconds since the Unix epoch"),
    Column("deleted_s", Double, comment="null: in force"),
    Column("jobs", Text, comment="as in tokens, of who made it"),
    Index("ix_export_schedules_job", "job"),
)

edits = Table(
    "edits",
    metadata,
    Column("number", _Id, Identity(), primary_key=True, comment="rises with every new edit"),
    Column("id", String(32), nullable=False, unique=True),
    Column("job", String(MAX_JOB_CHARS), nullable=False),
    Column("incarnation", BigInteger, nullable=False),
    Column("state", String(16), nullable=False),
    Column("reason", Text, nullable=False),
    Column("actor", String(MAX_NAME_CHARS), nullable=False),
    Column("role", String(16), nullable=False),
    Column("note", Text, nullable=False),
    Column("created_s", Double, nullable=False, comment="seconds since the Unix epoch"),
    Column("ended_s", Double, comment="null: it goes on"),
    Column("boundary", BigInteger, nullable=False, comment="0: never committed"),
    Column("token", BigInteger, nullable=False),
    Column("step", BigInteger, nullable=False, comment="-1: not applied"),
    Column(
        "edits",
        BigInteger,
        nullable=False,
        comment="of the incarnation, when it was applied; or -1",
    ),
    Column("stop_ns", BigInteger, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("manifest", LargeBinary, nullable=False, comment="paramd.v1.EditManifest, zlib"),
    Column("digest", String(32), nullable=False, comment="XXH3-128 of the manifest"),
    Column("detail", Text, nullable=False, comment="JSON object"),
    Column("undo_of", String(32), nullable=False, comment="empty: it undoes none"),
    Column("undone_by", String(32), nullable=False, comment="empty: not undone"),
    Index("ix_edits_job", "job", "number"),
    comment="never removed",
)
