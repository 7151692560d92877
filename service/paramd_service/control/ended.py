"""`python -m paramd_service.control.ended`: the store's data about a job that has ended.

Prints one JSON document with the shapes of REST, for the command line, which uses no database.
Only reads: no server is started, nothing is created or migrated, and the job's directory must
belong to the caller.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter
from sqlalchemy import Connection, func, select

from paramd import places
from paramd.errors import NotFoundError, ParamdError, codes_of
from paramd.mesh.edits.calls import Edit
from paramd_service.control.api.routes.audit import record_of
from paramd_service.control.api.routes.edits import document_of
from paramd_service.control.base.site import directory_of
from paramd_service.control.records.audit import links
from paramd_service.control.store.edits import chosen_edits, edit_of
from paramd_service.control.store.engine import make_engine, parse_store, store_errors
from paramd_service.control.store.migrate import check_current
from paramd_service.control.store.schema import metric_points, metric_series

NO_UNDO = "the job has ended"


def main(arguments: Sequence[str]) -> int:
    """Read, print, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m paramd_service.control.ended", allow_abbrev=False
    )
    parser.add_argument("what", choices=("step", "edits", "audit"))
    parser.add_argument("--job", required=True, help="name of the job")
    parser.add_argument("--limit", type=int, default=1000, help="most rows")
    parser.add_argument("--state", default=None, help="of edits: only in this state")
    parser.add_argument("--id", default=None, help="of edits: only ids that begin so")
    parser.add_argument("--oldest", action="store_true", help="of the audit: oldest first")
    given = parser.parse_args(arguments)
    try:
        found = read(given)
    except ParamdError as error:
        print(error, file=sys.stderr)
        return codes_of(error).exit
    json.dump(found, sys.stdout)
    return 0


def read(given: argparse.Namespace) -> dict[str, Any]:
    """The requested document.

    Raises:
        NotFoundError: No such job, or no store of it here.
        ConflictError: The directory is not private, or the store is another version's.
        StoreError: It cannot be read.
    """
    directory = directory_of(places.check_job_name(given.job))
    address = parse_store(os.environ.get("PARAMD_STORE_URL", ""), directory=directory)
    if address.path is not None and not address.path.exists():
        raise NotFoundError(f"no records of job {given.job!r} in {directory}")
    engine = make_engine(address)
    try:
        with store_errors(address), engine.connect() as connection:
            if address.path is not None:
                # For any request below: this connection cannot write.
                connection.exec_driver_sql("PRAGMA query_only=ON")
            check_current(connection, address)
            return _READ[given.what](connection, given)
    finally:
        engine.dispose()


def _step(connection: Connection, given: argparse.Namespace) -> dict[str, Any]:
    """The last step in the metric history: the only trace when the end was not recorded."""
    steps = (
        select(func.max(metric_points.c.step))
        .join(metric_series, metric_series.c.id == metric_points.c.series_id)
        .where(metric_series.c.job == given.job)
    )
    step = connection.execute(steps).scalar()
    return {"step": int(step) if step is not None else -1}


def _edits(connection: Connection, given: argparse.Namespace) -> dict[str, Any]:
    chosen = chosen_edits(given.job, state=given.state, id_prefix=given.id).limit(given.limit)
    rows = [edit_of(row) for row in connection.execute(chosen)]
    return {"edits": [_EDIT.dump_python(document_of(row, NO_UNDO), mode="json") for row in rows]}


def _audit(connection: Connection, given: argparse.Namespace) -> dict[str, Any]:
    order = "oldest" if given.oldest else "newest"
    found = links(connection, given.job, order=order, beyond_seq=None, limit=given.limit)
    return {
        "job": given.job,
        "records": [record_of(link).model_dump(mode="json") for link in found],
        "next_page_token": "",
    }


_EDIT = TypeAdapter(Edit)
_READ = {"step": _step, "edits": _edits, "audit": _audit}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
