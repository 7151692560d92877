"""The attacks, as whom each runs, what is expected, and the tests that do it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

TOKEN = "a token for other jobs"
STRANGER = "another local user"
PEER = "a peer that lies"
REVOKED = "a revoked token"

_OTHERS = "unit/exports/test_others_exports.py::"
_LOOPBACK = "integration/test_loopback.py::"
_CONNECT = "integration/test_connect_sockets.py::"
_SETTINGS = "unit/cli/test_settings.py::"
_ANSWERS = "unit/test_answers.py::"
_LYING = "unit/control/test_lying_sidecars.py"
_COPIES = "unit/trainer/test_resume_copies.py::"
_TEXT = "integration/test_terminal_text.py::"
_COMPLETION = "unit/cli/test_completion.py::"
_TOKENS = "unit/control/test_auth_tokens.py::"
_REVOKED = "unit/control/test_revocations.py::"


@dataclass(frozen=True, kw_only=True)
class Attack:
    """One row of the table."""

    what: str
    who: str
    expected: str
    tests: tuple[str, ...]
    """Below `tests/`: "FILE" or "FILE::TEST"."""


ATTACKS: Final = (
    Attack(
        what="replace another job's export, also one that comes meanwhile",
        who=TOKEN,
        expected="refused, nothing changed",
        tests=(
            f"{_OTHERS}test_another_jobs_export_is_not_replaced",
            f"{_OTHERS}test_another_jobs_export_that_comes_meanwhile_is_not_replaced",
        ),
    ),
    Attack(
        what="write outside of its own jobs' folders, or within another's",
        who=TOKEN,
        expected="refused",
        tests=(
            f"{_OTHERS}test_a_token_for_some_jobs_writes_below_their_folders_alone",
            f"{_OTHERS}test_nothing_is_written_within_another_jobs_export",
        ),
    ),
    Attack(
        what="read another job's files, or learn that they are there",
        who=TOKEN,
        expected="not found, as for nothing",
        tests=(
            f"{_OTHERS}test_a_reader_sees_files_of_its_own_jobs_exports_alone_and_learns_of_no_other",
        ),
    ),
    Attack(
        what="take the port of a control plane that died, and answer anything",
        who=STRANGER,
        expected="gets no token",
        tests=(
            f"{_LOOPBACK}test_who_takes_the_port_of_a_dead_control_plane_gets_no_token",
            f"{_LOOPBACK}test_a_client_that_polls_shows_it_to_nobody_when_its_connection_is_made_again",
        ),
    ),
    Attack(
        what="take the session of an open page at the port, and use it at the next port",
        who=STRANGER,
        expected="the session has ended",
        tests=(
            f"{_LOOPBACK}test_a_session_that_an_open_page_shows_a_thief_is_worthless_at_another_port",
        ),
    ),
    Attack(
        what="take the port of an inference engine that ended",
        who=STRANGER,
        expected="gets no key",
        tests=(f"{_LOOPBACK}test_who_takes_the_port_of_an_engine_that_ended_does_not_get_its_key",),
    ),
    Attack(
        what="pass the question for a proof on to the real one",
        who=STRANGER,
        expected="gets no token",
        tests=(f"{_LOOPBACK}test_a_program_in_between_gets_the_proof_of_another_address",),
    ),
    Attack(
        what="be where a training registers, or a tunnel or completion asks",
        who=STRANGER,
        expected="gets no token",
        tests=(
            f"{_LOOPBACK}test_a_training_registers_nowhere_else",
            f"{_LOOPBACK}test_a_tunnel_and_a_completion_show_it_to_nobody_else",
        ),
    ),
    Attack(
        what="keep connections at the port of `paramd connect`",
        who=STRANGER,
        expected="the owner is answered",
        tests=(f"{_CONNECT}test_a_crowd_at_the_port_does_not_keep_the_owner_out",),
    ),
    Attack(
        what="leave a paramd.toml where the owner works",
        who=STRANGER,
        expected="ignored, with a line",
        tests=(
            f"{_SETTINGS}test_a_file_of_another_user_is_ignored_and_says_so",
            f"{_SETTINGS}test_a_file_that_others_may_write_is_ignored_and_says_so",
        ),
    ),
    Attack(
        what="answer without end, a byte at a time, packed, or nested",
        who=PEER,
        expected="an error of that call",
        tests=(
            f"{_ANSWERS}test_an_http_answer_over_its_bound_is_refused",
            f"{_ANSWERS}test_an_http_answer_that_trickles_ends",
            f"{_ANSWERS}test_a_control_plane_that_never_ends_is_no_control_plane",
            f"{_ANSWERS}test_a_document_of_many_parts_or_levels_is_refused",
            f"{_ANSWERS}test_a_command_that_says_too_much_or_nothing_is_ended",
        ),
    ),
    Attack(
        what="answer over gRPC with too much, too many, or nonsense",
        who=PEER,
        expected="an error of that call",
        tests=(f"{_ANSWERS}test_an_answer_over_grpc_that_cannot_be_read_is_an_error_of_the_call",),
    ),
    Attack(
        what="log numbers without end, or series of other jobs",
        who=PEER,
        expected="taken within bounds",
        tests=(_LYING,),
    ),
    Attack(
        what="keep a record that breaks a start",
        who=PEER,
        expected="the next way is taken",
        tests=(
            f"{_COPIES}test_a_sidecar_whose_copies_cannot_be_read_offers_none",
            f"{_COPIES}test_a_copy_with_a_label_that_cannot_be_read_is_damaged_and_the_next_way_is_taken",
        ),
    ),
    Attack(
        what="say what drives a terminal",
        who=PEER,
        expected="shown as text",
        tests=(
            f"{_TEXT}test_a_message_is_cleaned_line_by_line",
            f"{_TEXT}test_a_warning_and_a_traceback_are_cleaned_line_by_line",
        ),
    ),
    Attack(
        what="name a tensor so that the shell runs it once it is completed",
        who=PEER,
        expected="not offered",
        tests=(
            f"{_COMPLETION}test_a_name_that_a_shell_would_interpret_is_not_offered",
            f"{_COMPLETION}test_a_help_text_keeps_its_words_alone",
        ),
    ),
    Attack(
        what="ask for proofs of ids that no token has",
        who=STRANGER,
        expected="one query a second",
        tests=(f"{_TOKENS}test_ids_that_no_token_has_cost_one_look_at_the_store_together",),
    ),
    Attack(
        what="go on with a token, a ticket or a call after its revocation",
        who=REVOKED,
        expected="refused, ended",
        tests=(
            f"{_TOKENS}test_a_revoked_token_is_worthless_at_once",
            f"{_TOKENS}test_a_token_that_has_ended_is_not_proven",
            f"{_REVOKED}test_a_revoked_tokens_tickets_are_refused_for_as_long_as_they_can_be_valid",
            f"{_REVOKED}test_a_call_whose_token_was_revoked_before_its_request_came_does_nothing",
        ),
    ),
)
"""A sample for each part of docs/security.md that is quick; the rest of the tests it names runs in
`make security` and `make test`."""
