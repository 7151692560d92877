"""`python -m paramd_service.control.ended`: the store's data about a job that has ended.

Prints one JSON document with the shapes of REST, for the command line, which uses no database.
Only reads: no server is started, nothing is created or migrated, and the job's directory must
belong to the caller.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sqlalchemy import Connection, func, select

from paramd import parts, places
from paramd.errors import NotFoundError, ParamdError, UsageError, codes_of
from paramd_service.control.base.site import directory_of
from paramd_service.control.parts import ControlPart, ReadStored, StoredRequest, tell_failed
from paramd_service.control.store.engine import make_engine, parse_store, store_errors
from paramd_service.control.store.migrate import check_current
from paramd_service.control.store.schema import metric_points, metric_series
from paramd_service.parts import CONTROL


def main(arguments: Sequence[str]) -> int:
    """Read, print, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m paramd_service.control.ended", allow_abbrev=False
    )
    parser.add_argument("what", help="step, or what a part of the control plane keeps")
    parser.add_argument("--job", required=True, help="name of the job")
    parser.add_argument("--limit", type=int, default=1000, help="most rows")
    parser.add_argument("--state", default=None, help="of edits: only in this state")
    parser.add_argument("--id", default=None, help="of edits: only ids that begin so")
    parser.add_argument("--oldest", action="store_true", help="of the audit: oldest first")
    given = vars(parser.parse_args(arguments))
    try:
        found = read(given.pop("what"), StoredRequest(**given))
    except ParamdError as error:
        print(error, file=sys.stderr)
        return codes_of(error).exit
    json.dump(found, sys.stdout)
    return 0


def read(what: str, given: StoredRequest) -> dict[str, Any]:
    """The requested document.

    Raises:
        UsageError: Nothing reads this.
        NotFoundError: No such job, or no store of it here.
        ConflictError: The directory is not private, or the store is another version's.
        StoreError: It cannot be read.
    """
    read_stored = _reader(what)
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
            return read_stored(connection, given)
    finally:
        engine.dispose()


def _step(connection: Connection, given: StoredRequest) -> dict[str, Any]:
    """The last step in the metric history: the only trace when the end was not recorded."""
    steps = (
        select(func.max(metric_points.c.step))
        .join(metric_series, metric_series.c.id == metric_points.c.series_id)
        .where(metric_series.c.job == given.job)
    )
    step = connection.execute(steps).scalar()
    return {"step": int(step) if step is not None else -1}


_OWN: Final[Mapping[str, ReadStored]] = {"step": _step}


def _reader(word: str) -> ReadStored:
    """What reads it: the kernel's own, or that of a part, which are loaded only then.

    Raises:
        UsageError: Nothing does.
    """
    if word in _OWN:
        return _OWN[word]
    for part in parts.found(CONTROL, "control", ControlPart, tell_failed):
        if (read_stored := part.stored().get(word)) is not None:
            return read_stored
    raise UsageError(
        f"{word} of a job that has ended is not read here: no part of the control plane does so"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
