"""Addresses: loopback only, the next free port, no delay on connections."""

import json
import os
import socket
from contextlib import closing
from dataclasses import asdict, replace

import pytest

from paramd import places
from paramd.errors import ConflictError, UsageError
from paramd_service.control.base.config import Bootstrap, ControlConfig
from paramd_service.control.base.endpoint import (
    Address,
    Claim,
    announce,
    open_listener,
    parse_listen,
    successor,
)


@pytest.mark.parametrize("text", ["", "127.0.0.1", ":8470", "127.0.0.1:", "127.0.0.1:70000", "x:y"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected host:port"):
        parse_listen(text, option="--listen")


def test_a_taken_port_moves_on_to_the_next() -> None:
    first, taken = open_listener(Address("127.0.0.1", 0))
    with closing(first):
        second, found = open_listener(taken)
        with closing(second):
            assert taken.port < found.port < taken.port + 100


def test_a_port_that_was_named_is_taken_or_refused() -> None:
    first, taken = open_listener(Address("127.0.0.1", 0), exact=True)
    with closing(first), pytest.raises(ConflictError, match="never replaced"):
        open_listener(taken, exact=True)


@pytest.mark.parametrize("option", ["listen", "grpc_listen"])
def test_a_site_starts_on_no_other_port_than_its_own(option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        config = ControlConfig(**({"listen": "127.0.0.1:0"} | {option: taken}))
        with pytest.raises(ConflictError, match=f"{taken} is in use"):
            Claim(config, None)


def test_a_job_moves_on_from_a_port_that_nobody_named() -> None:
    job = Bootstrap(job="run", incarnation=1, world_size=1, private_key=bytes(32), token="t" * 32)
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        near = f"127.0.0.1:{taken}"
        with closing(Claim(ControlConfig(job="run", listen_near=near), job)) as claim:
            assert claim.http.port > taken
        with pytest.raises(ConflictError, match="never replaced"):
            Claim(ControlConfig(job="run", listen=near), job)


def announced(incarnation: int) -> places.Endpoint:
    bootstrap = Bootstrap(
        job="run", incarnation=incarnation, world_size=1, private_key=bytes(32), token="t" * 32
    )
    return announce(bootstrap, "http://127.0.0.1:1", "127.0.0.1:2")


def test_a_newer_incarnation_takes_the_endpoint_over_and_an_older_one_cannot() -> None:
    old = announced(1)
    assert places.read_endpoint("run") == old
    assert successor(old) is None
    new = announced(2)
    assert places.read_endpoint("run") == new
    with pytest.raises(ConflictError, match="run 2"):
        announced(1)


def test_a_next_incarnation_that_cannot_be_announced_leaves_the_last_ones_announcement() -> None:
    job = Bootstrap(job="run", incarnation=1, world_size=1, private_key=bytes(32), token="t" * 32)
    with closing(Claim(ControlConfig(job="run", listen_near="127.0.0.1:0"), job)) as claim:
        claim.announce(job)
        kept = claim.endpoint
        announced(3)
        with pytest.raises(ConflictError):
            claim.announce_next(job.succeeded(2))
        assert kept is not None
        assert claim.endpoint == kept


def test_the_successor_is_a_living_process_of_no_older_incarnation() -> None:
    mine, start = announced(2), places.process_start(os.getppid())
    theirs = {"url": "u", "token": "t", "job": "run", "grpc_address": "g"}
    other = places.Endpoint(**theirs, pid=os.getppid(), pid_start=start, incarnation=3)
    places.write_endpoint(other)
    assert successor(mine) == other
    places.write_endpoint(places.Endpoint(**theirs, pid=2**22 + 1, incarnation=4))
    assert successor(mine) is None


def test_no_endpoint_of_another_host_ends_a_control_plane() -> None:
    mine, start = announced(2), places.process_start(os.getppid())
    theirs = replace(mine, pid=os.getppid(), pid_start=start, incarnation=2**62)
    path = places.state_dir() / "run" / places.ENDPOINT_FILE
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        for foreign in (
            replace(theirs, via="other.example"),
            replace(theirs, host_id="another-kernel/1", url=url),
        ):
            path.write_text(json.dumps(asdict(foreign)))
            assert places.read_endpoint("run") == foreign
            assert successor(mine) is None
    path.write_text(json.dumps(asdict(theirs)))
    assert successor(mine) == theirs
