"""Verify a job's chain directly in its store, without a control plane."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from sqlalchemy import Connection

from paramd import places
from paramd.chain import ChainCheck, Head, Verdict
from paramd.errors import DataLossError, NotFoundError, ParamdError, UsageError, codes_of
from paramd_service.control.base.site import SITE_DIRECTORY
from paramd_service.control.records.audit import audit
from paramd_service.control.records.audit.audit import HeadFiles
from paramd_service.control.store.engine import StoreAddress, make_engine, parse_store, store_errors

PAGE = 1000


def main(arguments: Sequence[str]) -> int:
    """Run the check, print the verdict and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="paramd audit verify --offline",
        description="Checks the audit in the store itself. PARAMD_STORE_URL names the store; by "
        "default it lies in the job's directory of the state dir.",
        allow_abbrev=False,
    )
    parser.add_argument("--job", default="", help="name of the job")
    parser.add_argument(
        "--site", action="store_true", help="verify a site's store; without --job its own chain"
    )
    parser.add_argument("--head", action="append", default=[], help="SEQ:HASH, from the log")
    given = parser.parse_args(arguments)
    try:
        heads = [_head(text) for text in given.head]
        verdict = check_job(given.job, heads, site=given.site)
        if not verdict.good:
            raise DataLossError(f"audit: {verdict.reason}; first bad record: {verdict.bad_seq}")
    except ParamdError as error:
        print(f"paramd: {error}", file=sys.stderr)
        return codes_of(error).exit
    print(f"{verdict.count} records are whole; head {verdict.head}")
    return 0


def check_job(job: str, heads: Sequence[Head], *, site: bool) -> Verdict:
    """Check a job's audit in the store that the settings name.

    Raises:
        UsageError, NotFoundError, StoreError: it cannot be checked.
    """
    if not job and not site:
        raise UsageError("--job: name the job, or pass --site for a site's own audit")
    name = places.check_job_name(job) if job else ""
    directory = places.state_dir() / (SITE_DIRECTORY if site else name)
    address = parse_store(os.environ.get("PARAMD_STORE_URL", ""), directory=directory)
    return check(address, directory, job, heads)


def check(address: StoreAddress, directory: Path, job: str, heads: Sequence[Head]) -> Verdict:
    """Check one chain against the given heads and the one kept in `directory`.

    Raises:
        NotFoundError: the store does not exist; it is not created.
        StoreError: it cannot be read.
    """
    if address.path is not None and not address.path.exists():
        raise NotFoundError(f"there is no store at {address}; name another --job")
    with store_errors(address):
        kept = HeadFiles(directory).read(job)
    checking = ChainCheck(job, [*heads, *([kept] if kept is not None else [])])
    engine = make_engine(address)
    try:
        with store_errors(address), engine.begin() as connection:
            _feed(checking, connection, job)
    finally:
        engine.dispose()
    return checking.finish()


def _feed(checking: ChainCheck, connection: Connection, job: str) -> None:
    seq = 0
    while page := audit.links(connection, job, after_seq=seq, limit=PAGE):
        for link in page:
            if not checking.take(link):
                return
        seq = page[-1].seq


def _head(text: str) -> Head:
    try:
        return Head.parse(text)
    except ValueError as error:
        raise UsageError(f"--head: {error}") from None
