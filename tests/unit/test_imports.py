"""The check of imports sees what is missing, and takes nothing for missing that is there."""

from collections.abc import Iterator

import pytest

from tests import imports

MISSING = {
    "import paramd.nowhere": "there is no module paramd.nowhere",
    "from tests.nowhere import seconds": "there is no module tests.nowhere",
    "from tests.longer import second": "tests.longer has no second",
    "def late():\n    from paramd_service.sidecar import nowhere": (
        "paramd_service.sidecar has no nowhere"
    ),
    "from tests import longer\nlonger.second(1)": "tests.longer has no second",
    "import tests.longer as how\nhow.second(1)": "tests.longer has no second",
    'start("tests.multiprocess.workers.nobody", 2)': "tests.multiprocess.workers has no nobody",
    "from paramd import Nothing": "paramd has no Nothing",
    "from paramd.v1 import sidecar_pb2\nsidecar_pb2.Nothing()": (
        "paramd.v1.sidecar_pb2 has no Nothing"
    ),
}

THERE = (
    "import torch.nowhere",
    "from paramd import connect, errors",
    "from paramd.v1.sidecar_pb2 import GetLayoutRequest",
    "from tests.longer import *",
    "from tests import longer\nlonger.seconds(1, 2)",
    # Whatever `longer` is there, it is not the module alone.
    "from tests import longer\ndef run(longer):\n    longer.second(1)",
    "import tests.longer\ntests.longer.seconds(1, 2)",
    'start("tests.multiprocess.workers.resuming", 2)',
    'start("tests.nowhere and more words")',
)


def reasons(source: str) -> Iterator[str]:
    return filter(None, map(imports.why_not, imports.taken_by(source)))


@pytest.mark.parametrize("source", MISSING)
def test_what_is_missing_is_named(source: str) -> None:
    assert list(reasons(source)) == [MISSING[source]]


@pytest.mark.parametrize("source", THERE)
def test_what_is_there_is_no_matter(source: str) -> None:
    assert list(reasons(source)) == []


def test_names_within_statements_count_as_those_of_their_module() -> None:
    names = imports.names_in("tests.imports")
    assert {"READ", "Taken", "ast", "main", "names_in"} <= names
    assert not names & {"paths", "line", "module"}


def test_blocks_of_a_page_are_read_where_they_can_be() -> None:
    page = "# A page\n\n```python\nimport paramd.nowhere\n```\n\n```python\nfor each:\n```\n"
    assert list(imports.blocks(page)) == [(4, "import paramd.nowhere\n")]
