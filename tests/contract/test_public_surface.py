"""What others rely on changes only on purpose."""

import difflib

from tests.contract.surface import COMMAND, FROZEN, surface


def test_the_surface_is_the_frozen_one() -> None:
    frozen, now = FROZEN.read_text(), surface()
    change = difflib.unified_diff(frozen.splitlines(), now.splitlines(), "frozen", "now", n=0)
    assert now == frozen, f"run `{COMMAND}` if this is wanted:\n" + "\n".join(change)
