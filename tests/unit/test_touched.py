"""CI runs the scenes that a change touches in turns, of which each scene has one."""

from collections import Counter

import pytest

from tests import touched


def test_shares_have_each_scene_once_and_without_a_turn_there_are_all() -> None:
    counts = Counter(scene for turn in range(touched.SHARES) for scene in touched.in_turn(turn))
    assert counts == dict.fromkeys(touched.SCENES, 1)
    assert touched.in_turn(None) == touched.SCENES


def test_all_eighths_together_have_each_scene_equally_often() -> None:
    counts = Counter(scene for eighth in range(8) for scene in touched.in_turn(eighth))
    assert counts == dict.fromkeys(touched.SCENES, 8 // touched.SHARES)


@pytest.mark.parametrize("eighth", ["0", "5", ""])
def test_what_is_printed_is_touched_and_has_its_turn(
    eighth: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PARAMD_TESTS_EIGHTH", eighth)
    one, other = touched.SCENES[1], touched.SCENES[2]
    monkeypatch.setattr(touched, "changed", lambda: {one, other})
    touched.main()
    printed = capsys.readouterr().out.split()
    assert printed == [
        str(scene.relative_to(touched.ROOT))
        for scene in (one, other)
        if not eighth or scene in touched.in_turn(int(eighth))
    ]
    assert len(printed) == {"0": 0, "5": 1, "": 2}[eighth]
