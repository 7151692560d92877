"""The hash chain: every change of a record, and every cut, is found and named."""

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


def test_the_hash_is_sha256_of_the_hash_before_and_the_body() -> None:
    """Known answer, so that other programs can rely on it."""
    assert link_hash(GENESIS, '{"a":1}') == (
        "b06a229070741292512e8760f470dd7a4c46ccfdf253df781d88dabe58c1ccb1"
    )


def changed(links: list[Link], seq: int) -> list[Link]:
    """With another body, and the hash that it had."""
    one = links[seq - 1]
    return [*links[: seq - 1], replace(one, body=one.body.replace('"m', '"n')), *links[seq:]]


def rewritten(links: list[Link], seq: int) -> list[Link]:
    """With another body, and the hash of it."""
    body = links[seq - 1].body.replace('"m', '"n')
    before = links[seq - 2].hash if seq > 1 else GENESIS
    return [*links[: seq - 1], Link(seq, body, link_hash(before, body)), *links[seq:]]


def garbage(body: str) -> list[Link]:
    return [Link(1, body, link_hash(GENESIS, body))]


WHOLE = chain(5)


@pytest.mark.parametrize(
    ("links", "bad_seq"),
    [
        *((changed(WHOLE, seq), seq) for seq in (1, 3, 5)),
        # Named by the one after it.
        *((rewritten(WHOLE, seq), seq) for seq in (1, 3, 4)),
        (WHOLE[:2] + WHOLE[3:], 3),
        ([WHOLE[0], WHOLE[2], WHOLE[1], *WHOLE[3:]], 2),
        (chain(3, job="other"), 1),
        *((garbage(body), 1) for body in
          ("", "[]", "null", '{"job":"run","seq":1}', "[" * 10_000, '{"seq":"1"}')),
    ],
    ids=range(15),
)  # fmt: skip
def test_the_first_bad_record_is_named(links: list[Link], bad_seq: int) -> None:
    verdict = check(links)
    assert not verdict.good
    assert verdict.bad_seq == bad_seq


def test_a_last_record_rewritten_or_cut_off_shows_in_the_last_hash_alone() -> None:
    for links in (rewritten(WHOLE, 5), WHOLE[:4]):
        verdict = check(links)
        assert verdict.good
        assert verdict.hash != WHOLE[4].hash
