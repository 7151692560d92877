"""What a sidecar writes into the page so that its trainer is quicker; nothing depends on it."""

from __future__ import annotations

import time

from paramd.memory.control_page import Word, Words

EXPECTED_NS = 1_000_000_000
"""After data of an edit came, its request is expected for so long."""


def expect_request(words: Words) -> None:
    """Has the trainers look for requests more often: one is about to come."""
    words[Word.EXPECTED_NS] = time.monotonic_ns() + EXPECTED_NS


def count_hole(words: Words) -> None:
    """Before pages of edits are given back: the trainer's page tables of them go, too."""
    words[Word.EDIT_HOLES] += 1
