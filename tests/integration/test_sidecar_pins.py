"""Pins against a real sidecar: one step always, shared, leased, bounded."""

import time
from contextlib import closing
from itertools import count

import grpc
import pytest

from paramd.memory.control_page import STRAYS_KEPT, Word, note_stray
from paramd.security.tickets import Role
from paramd.v1 import sidecar_pb2 as pb
from tests.integration.fake_trainer import FakeTrainer
from tests.integration.sidecar_process import Client, client_of, values_of
from tests.integration.test_sidecar_streams import Stream, granted


def capture(
    client: Client, number: int, *snapshot_ids: str, timeout_s: float = 5.0, **fields: int
) -> pb.ReachBoundaryResponse:
    request = pb.ReachBoundaryRequest(
        incarnation=client.incarnation, boundary=number, token=number, snapshot_ids=snapshot_ids,
        **fields,
    )  # fmt: skip
    answer = client.call("ReachBoundary", request, timeout_s)
    assert isinstance(answer, pb.ReachBoundaryResponse)
    return answer


DEADLINES_S = (1.0, *[2.5] * 10)
"""Deadlines of a call that cannot succeed, tried in turn: its reason comes a tenth of it before,
which may be too little for a busy machine."""


def over_time(error: grpc.RpcError) -> bool:
    return error.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_stray_state_is_void_however_many_stray_later(
    trainer: FakeTrainer, client: Client
) -> None:
    """Two in a row, of which only the last would be told, and then more than are kept."""
    words = trainer.page.words
    trainer.update()
    good = client.pin()
    trainer.update()
    assert values_of(client.read(good.snapshot_id)) == {1}, "found true once its state was over"
    stray = client.pin()
    note_stray(words, words[Word.SEQ])
    trainer.update()
    note_stray(words, words[Word.SEQ])
    trainer.update()
    unseen = client.pin()
    for _ in range(STRAYS_KEPT + 1):
        with pytest.raises(grpc.RpcError) as refused:
            client.read(stray.snapshot_id)
        assert refused.value.code() is grpc.StatusCode.ABORTED
        trainer.update()
        note_stray(words, words[Word.SEQ])
    with pytest.raises(grpc.RpcError) as refused:
        client.read(unseen.snapshot_id)
    assert refused.value.code() is grpc.StatusCode.ABORTED, "it is too long ago to tell"
    assert values_of(client.read(good.snapshot_id)) == {1}


def test_a_pin_that_never_finds_a_boundary_is_aborted_with_the_reason(
    trainer: FakeTrainer, client: Client
) -> None:
    trainer.begin_update()
    for timeout_s in DEADLINES_S:
        with pytest.raises(grpc.RpcError) as refused:
            client.pin(timeout_s=timeout_s)
        if not over_time(refused.value):
            break
    trainer.end_update()
    assert refused.value.code() is grpc.StatusCode.ABORTED
    assert "is inside an update" in refused.value.details()


NEVER_AGREED = pytest.mark.parametrize(
    ("words", "why"),
    [({Word.AGREEMENT_STATE: 2}, "gave up agreeing"), ({Word.APART_HIGH: 6}, "DDP.join")],
    ids=["a round was lost", "uneven inputs"],
)
"""Words of the control page that say so, and what readers are told."""


def start_never_agreeing(trainer: FakeTrainer, words: dict[Word, int]) -> None:
    trainer.settings.agrees = False
    for word, value in words.items():
        trainer.page[word] = value
    trainer.start()


def test_a_request_that_is_not_agreed_is_withdrawn(trainer: FakeTrainer) -> None:
    trainer.settings.agrees = False
    trainer.start()
    with client_of(trainer, Role.CONTROL) as client:
        prepared = client.pin(at_boundary=True)
        for number, timeout_s in enumerate(DEADLINES_S, 7):
            try:
                answer = capture(client, number, prepared.snapshot_id, timeout_s=timeout_s)
            except grpc.RpcError as error:
                if not over_time(error):
                    raise
            else:
                break
        assert not answer.captured
        assert f"did not agree on boundary {number}" in answer.reason
        assert trainer.page[Word.READY] == trainer.page[Word.AGREED] == 0
        trainer.settings.agrees = True
        # On a busy machine an update may begin before the copy.
        later = range(number + 1, number + 11)
        assert any(capture(client, again, prepared.snapshot_id).captured for again in later)
    trainer.finish()


def test_a_snapshot_is_not_filled_again_between_a_grant_and_its_stream(
    trainer: FakeTrainer,
) -> None:
    """The grant tells of one boundary; a second filling would send the bytes of another."""
    trainer.settings.constant_s = 0.2
    trainer.start()
    with client_of(trainer, Role.CONTROL) as client:
        numbers, until_s = count(1), time.monotonic() + 60

        def filled(snapshot_id: str) -> None:
            # A busy host may be late for a boundary.
            while not capture(client, next(numbers), snapshot_id).captured:
                assert time.monotonic() < until_s

        snapshot_id = client.pin(at_boundary=True).snapshot_id
        filled(snapshot_id)
        grant = granted(client, snapshot_id)
        refused = ""
        try:
            filled(snapshot_id)
        except grpc.RpcError as error:
            refused = error.details()
        with closing(Stream(grant, 0, trainer.settings.arena_bytes)) as stream:
            assert values_of(stream.accepted().read()) == {grant.header.step}
        assert "in use by another request" in refused
    trainer.finish()


@NEVER_AGREED
def test_a_request_that_can_never_be_agreed_ends_at_once(
    trainer: FakeTrainer, words: dict[Word, int], why: str
) -> None:
    start_never_agreeing(trainer, words)
    with client_of(trainer, Role.CONTROL) as client:
        prepared = client.pin(at_boundary=True)
        # Longer than this test may take.
        answer = capture(client, 7, prepared.snapshot_id, timeout_s=600.0)
        assert (answer.captured, why in answer.reason) == (False, True), answer.reason
        assert trainer.page[Word.READY] == 0
    trainer.finish()


@NEVER_AGREED
def test_what_only_a_boundary_copies_is_refused_once_no_boundary_will_be_agreed_on(
    trainer: FakeTrainer, words: dict[Word, int], why: str
) -> None:
    """Not answered as missed, after which readers try again until their time is over."""
    start_never_agreeing(trainer, words)
    with client_of(trainer, Role.CONTROL) as client:
        # The first one is the first to see the ranks apart: they may meet within some rounds.
        if Word.APART_HIGH in words:
            first = client.pin(at_boundary=True, with_buffers=True)
            assert not capture(client, 7, first.snapshot_id, timeout_s=600.0).captured
            trainer.page[Word.ROUNDS_COLLECTED] += 100
        prepared = client.pin(at_boundary=True, with_buffers=True)
        with pytest.raises(grpc.RpcError, match=why) as refused:
            capture(client, 8, prepared.snapshot_id, timeout_s=600.0)
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    trainer.finish()


def test_a_sidecar_obeys_no_lower_generation_than_it_has_met(trainer: FakeTrainer) -> None:
    trainer.start()
    with client_of(trainer, Role.CONTROL) as client:
        assert capture(client, 1, generation=5).captured
        behind = r"generation 5 has taken over.*clock is 0 s behind"
        with pytest.raises(grpc.RpcError, match=behind) as refused:
            capture(client, 2, generation=4)
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert capture(client, 2, generation=6).captured
    trainer.finish()
