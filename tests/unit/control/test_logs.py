"""Log lines: their shape, what they take along, and what never gets into them."""

import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paramd.security.tickets import Role, Signer, new_token
from paramd_service import logs
from tests.orders import bound


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


def test_no_secret_gets_into_a_line() -> None:
    signer = Signer(bytes(range(32)))
    ticket = bound(signer, Role.READER, job="run")
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
