"""What is watched without a setting, in a real training, and what the verdict says meanwhile.

Other tests turn samples off (tests/conftest.py); here they are as users have them.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launch import start_ranks
from tests.multiprocess.test_troubles import WORKER
from tests.web.door import Door, wait_for
from tests.web.training import JOB

WATCHED = ["values", "gradients", "slow ranks"]


def verdict(door: Door) -> dict[str, Any]:
    (job,) = door.get("/jobs")["jobs"]
    found: dict[str, Any] = job["verdict"]
    return found


@pytest.mark.in_turns
@pytest.mark.parametrize("arena", ["auto", "mirror"])
def test_without_a_setting_values_are_looked_at_and_a_nan_is_the_first_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arena: str
) -> None:
    monkeypatch.setenv("PARAMD_ARENA", arena)
    env = {"PARAMD_ALERTS": json.dumps({})}
    with start_ranks(WORKER, 2, args=[str(tmp_path)], env=env) as ranks:
        ranks.wait_for_text("attached", rank=0)
        door = Door(ranks, tmp_path)
        said = [verdict(door)]

        def is_ok() -> bool:
            said.append(verdict(door))
            return said[-1]["word"] == "ok"

        wait_for("all is looked at", is_ok)
        assert [one["what"] for one in said[-1]["watches"]] == WATCHED
        # Before everything was looked at nothing was green.
        assert {one["level"] for one in said[:-1]} <= {"info"}, said
        # Where ranks no longer update, mirrored parameters are not read: the loss tells of it.
        if arena == "auto":
            (tmp_path / "nan").touch()
            wait_for("the NaN is told", lambda: verdict(door)["names"] == ["layers.1.weight"])
            told = verdict(door)
            assert (told["level"], told["word"]) == ("critical", "critical")
            assert "layers.1.weight" in told["line"]
            (tmp_path / "nan").unlink()
            wait_for("it is over", is_ok)
        door.post(f"/jobs/{JOB}/watch", {"on": False})
        off = verdict(door)
        assert (off["level"], off["word"]) == ("info", "running")
        assert "values are not watched" in off["line"]
        assert "paramd watch on" in off["line"]
