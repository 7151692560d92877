"""Log lines: their shape, what they take along, and what never gets into them."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from paramd.errors import metadata, request_id
from paramd.security.tickets import Role, Signer, new_token
from paramd_service import logs
from paramd_service.sidecar.log import Log


@contextmanager
def written() -> Iterator[tuple[io.StringIO, logs.JsonFormatter]]:
    root = logging.getLogger()
    before = root.handlers, root.level, {n: logging.getLogger(n).level for n in logs.QUIET}
    stream = io.StringIO()
    try:
        yield stream, logs.configure(level="INFO", stream=stream)
    finally:
        root.handlers, root.level = before[0], before[1]
        for name, level in before[2].items():
            logging.getLogger(name).setLevel(level)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_has_what_the_call_and_the_request_give() -> None:
    log = logging.getLogger("paramd.control")
    with written() as (stream, _):
        log.info("rank %d is well", 3, extra={"job": "run", "incarnation": 2, "rank": 3, "step": 9})
        token = request_id.set("abc")
        log.warning("one\ntwo")
        assert metadata() == (("x-request-id", "abc"),)
        request_id.reset(token)
        assert metadata() == ()
        log.debug("never written")
    first, second = lines(stream)
    assert first.pop("time").endswith("Z")
    assert first == {
        "level": "info",
        "logger": "paramd.control",
        "event": "rank 3 is well",
        "job": "run",
        "incarnation": 2,
        "rank": 3,
        "step": 9,
    }
    assert (second["event"], second["request_id"]) == ("one\ntwo", "abc")


def test_no_secret_gets_into_a_line() -> None:
    signer = Signer(bytes(range(32)))
    ticket = signer.mint(job="run", incarnation=1, role=Role.READER, ttl_s=60.0)
    secrets = [new_token(), ticket, "the-token-of-the-parent", bytes(range(32)).hex()]
    with written() as (stream, formatter):
        formatter.hide("the-token-of-the-parent", bytes(range(32)).hex())
        log = logging.getLogger("paramd.control")
        for secret in secrets:
            log.info("offered was %s", secret)
            log.info("header 'authorization: Bearer %s'", secret)
            try:
                raise ValueError(f"bad {secret}")
            except ValueError:
                log.exception("it failed")
        log.info("store postgresql://user:hunter22@host/db is away")
        log.info("Bearer some-unknown-text here")
    text = stream.getvalue()
    assert len(lines(stream)) == 3 * len(secrets) + 2
    for secret in [*secrets, "hunter22", "some-unknown-text"]:
        assert secret not in text
    assert "Bearer (hidden) here" in text


@pytest.mark.parametrize("name", logs.QUIET)
def test_libraries_that_log_urls_are_quiet(name: str) -> None:
    with written() as (stream, _):
        logging.getLogger(name).info("HTTP Request: POST https://hooks.example.com/secret")
        logging.getLogger(name).warning("loud")
    assert [line["event"] for line in lines(stream)] == ["loud"]


def test_a_sidecar_s_line_has_what_changes_and_what_the_call_says() -> None:
    stream = io.StringIO()
    step = 4
    log = Log(fields={"job": "run", "rank": 1}, live=lambda: {"step": step}, stream=stream)
    log("attached", incarnation=2)
    step = 5
    log("left", step=-1)
    first, second = lines(stream)
    assert (first["event"], first["job"], first["rank"], first["incarnation"], first["step"]) == (
        "attached",
        "run",
        1,
        2,
        4,
    )
    assert second["step"] == -1
