"""`attachment.refresh`: parameters of other shapes, in the helpers that are there."""

import pytest

from tests.launch import run_ranks
from tests.longer import share


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("kind", "resume"), share([("ddp", "auto"), ("fsdp2", "never")], 2))
def test_a_grown_and_pruned_training_goes_on_in_its_helpers_and_its_reader_too(
    kind: str, resume: str
) -> None:
    run_ranks(
        "tests.multiprocess.workers.refreshing",
        2,
        args=["--kind", kind, "--resume", resume],
        timeout_s=100,
    )
