"""What fuzzing started from, and what once broke a parser, is taken or refused in our words."""

import pytest

from tests.fuzz.corpus import CORPUS
from tests.fuzz.parsers import PARSERS
from tests.fuzz.seeds import SEEDS


@pytest.mark.parametrize("target", PARSERS)
def test_known_inputs_break_nothing(target: str) -> None:
    found = [path.read_bytes() for path in sorted((CORPUS / target).glob("*"))]
    for data in (b"", *SEEDS[target](), *found):
        PARSERS[target](data)
