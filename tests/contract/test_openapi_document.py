"""What the dashboard's types are made of is the document of the code as it is."""

from tests.contract.openapi_document import COMMAND, FROZEN, document


def test_the_checked_in_openapi_document_is_current() -> None:
    assert document() == FROZEN.read_text(), f"run `{COMMAND}` and look at what changed"
