"""The hash chain: every change of a record, and every cut, is found and named."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from paramd.chain import GENESIS, ChainCheck, Link, canonical, link_hash

JOB = "run"


def chain(count: int, job: str = JOB) -> list[Link]:
    links: list[Link] = []
    for seq in range(1, count + 1):
        before = links[-1].hash if links else GENESIS
        body = canonical({"job": job, "seq": seq, "prev": before, "method": f"m{seq}", "é": "ü"})
        links.append(Link(seq, body, link_hash(before, body)))
    return links


def check(links: list[Link], job: str = JOB) -> ChainCheck:
    checking = ChainCheck(job)
    for link in links:
        checking.take(link)
    return checking


def test_a_whole_chain_is_good_and_tells_its_last_hash() -> None:
    links = chain(5)
    verdict = check(links)
    assert (verdict.count, verdict.hash, verdict.reason) == (5, links[4].hash, "")
    assert verdict.good


def test_an_empty_chain_is_good() -> None:
    verdict = check([])
    assert (verdict.good, verdict.count, verdict.hash) == (True, 0, GENESIS)


def test_the_hash_is_sha256_of_the_hash_before_and_the_body() -> None:
    """Known answer, so that other programs can rely on it."""
    assert link_hash(GENESIS, '{"a":1}') == (
        "b06a229070741292512e8760f470dd7a4c46ccfdf253df781d88dabe58c1ccb1"
    )


@pytest.mark.parametrize("seq", [1, 3, 5])
def test_a_changed_body_is_named(seq: int) -> None:
    links = chain(5)
    links[seq - 1] = replace(links[seq - 1], body=links[seq - 1].body.replace("m", "n"))
    verdict = check(links)
    assert verdict.bad_seq == seq
    assert verdict.count == seq - 1


@pytest.mark.parametrize("seq", [1, 3, 4])
def test_a_record_rewritten_with_its_hash_is_named_by_the_one_after_it(seq: int) -> None:
    links = chain(5)
    body = links[seq - 1].body.replace('"m', '"n')
    before = links[seq - 2].hash if seq > 1 else GENESIS
    links[seq - 1] = Link(seq, body, link_hash(before, body))
    assert check(links).bad_seq == seq


def test_a_removed_record_is_named() -> None:
    links = chain(5)
    verdict = check(links[:2] + links[3:])
    assert verdict.bad_seq == 3
    assert verdict.reason == "record 3 is missing; 4 stands in its place"


def test_two_records_in_each_others_place_are_found() -> None:
    links = chain(5)
    links[1], links[2] = links[2], links[1]
    assert check(links).bad_seq == 2


def test_a_last_record_rewritten_or_cut_off_shows_in_the_last_hash_alone() -> None:
    links = chain(5)
    body = links[4].body.replace('"m', '"n')
    rewritten = check([*links[:4], Link(5, body, link_hash(links[3].hash, body))])
    for verdict in (rewritten, check(links[:4])):
        assert verdict.good
        assert verdict.hash != links[4].hash


def test_another_jobs_chain_is_not_taken_for_this_one() -> None:
    assert check(chain(3, job="other")).bad_seq == 1


@pytest.mark.parametrize(
    "body", ["", "[]", "null", '{"job":"run","seq":1}', "[" * 10_000, '{"seq":"1"}']
)
def test_what_is_no_record_is_named_and_nothing_breaks(body: str) -> None:
    assert check([Link(1, body, link_hash(GENESIS, body))]).bad_seq == 1


def test_a_hash_before_that_is_no_hash_is_refused() -> None:
    body = json.dumps({"job": JOB, "seq": 1, "prev": "zz"})
    assert check([Link(1, body, GENESIS)]).bad_seq == 1


def test_numbers_that_json_lacks_are_refused() -> None:
    with pytest.raises(ValueError, match="Out of range"):
        canonical({"x": float("nan")})
