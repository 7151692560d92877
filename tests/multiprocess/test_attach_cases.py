"""Attaching wrongly is refused on all ranks; updates, detaching and coming back work."""

import pytest

from tests.launch import run_ranks
from tests.longer import share
from tests.multiprocess.workers import attach_cases


@pytest.mark.timeout(300)
def test_cases_around_attach() -> None:
    names = share([case.__name__ for case in attach_cases.CASES], 2)
    worker = "tests.multiprocess.workers.attach_cases"
    results = run_ranks(worker, 2, args=names, timeout_s=270)
    for result in results:
        passed = [line.split()[1] for line in result.stdout.splitlines() if line[:3] == "ok "]
        print(result.stdout)
        assert passed == names
