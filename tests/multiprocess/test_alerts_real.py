"""One flipped bit in one replica of a real training is named; so is NaN, until it is mended."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.launch import Ranks, start_ranks

WORKER = "tests.multiprocess.workers.corrupt"
EVERY_S = 0.5
PATIENCE_S = 40.0


class Door:
    """The embedded control plane's REST side."""

    def __init__(self, ranks: Ranks) -> None:
        endpoint = json.loads((ranks.state_dir / "corrupt" / "endpoint.json").read_text())
        self._client = httpx2.Client(
            base_url=endpoint["url"],
            headers={"authorization": f"Bearer {endpoint['token']}"},
            trust_env=False,
        )

    def alerts(self, rule: str, state: str = "firing") -> list[dict[str, Any]]:
        answer = self._client.get("/api/v1/jobs/corrupt/alerts", params={"state": state})
        answer.raise_for_status()
        return [alert for alert in answer.json()["alerts"] if alert["rule"] == rule]

    def rounds(self, kind: str) -> int:
        text = self._client.get("/metrics").text
        wanted = f'paramd_watch_rounds_total{{job="corrupt",kind="{kind}",ok="true"}} '
        (line,) = [line for line in text.splitlines() if line.startswith(wanted)]
        return int(float(line.removeprefix(wanted)))

    def close(self) -> None:
        self._client.close()


@contextmanager
def training(tmp_path: Path, kind: str, world_size: int, **alerts: float) -> Iterator[Door]:
    """A training that is watched as `alerts` say; it must end well by itself."""
    stop = tmp_path / "stop"
    env = {"PARAMD_ALERTS": json.dumps({"watch": True, **alerts})}
    arguments = ["--kind", kind, "--stop", str(stop)]
    with start_ranks(WORKER, world_size, args=arguments, env=env) as ranks:
        ranks.wait_for_text("attached", rank=0)
        door = Door(ranks)
        try:
            yield door
        finally:
            door.close()
            stop.touch()
        for result in ranks.wait(timeout_s=60):
            assert result.returncode == 0, ranks.outputs()


def wait_for(what: str, condition: Callable[[], Any], timeout_s: float = PATIENCE_S) -> Any:
    deadline_s = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline_s, f"{what} did not happen"
        time.sleep(0.05)
    return found


def tell(tmp_path: Path, name: str, **told: object) -> None:
    """Complete when it appears."""
    part = tmp_path / f"{name}.part"
    part.write_text(json.dumps(told))
    part.rename(tmp_path / name)


def after_rounds(door: Door, kind: str, count: int) -> None:
    begun = door.rounds(kind)
    wait_for(f"{count} rounds of {kind}", lambda: door.rounds(kind) >= begun + count)


@pytest.mark.timeout(180)
def test_in_hybrid_sharding_both_replicas_of_the_shard_are_named(
    tmp_path: Path,
) -> None:
    with training(tmp_path, "hsdp", 4, digests_every_s=EVERY_S) as door:
        after_rounds(door, "digests", 2)
        assert door.alerts("replica-drift", "all") == []
        tell(tmp_path, "flip-3", fqn="module.weight", element=2, bit=30)
        wait_for("the flip", (tmp_path / "flip-3.done-3").exists)
        after_rounds(door, "digests", 2)
        (drift,) = door.alerts("replica-drift")
        assert (drift["name"], drift["ranks"]) == ("module.weight", [1, 3])
        assert "two cannot show which is wrong" in drift["reason"]
        assert "is bit 30 of element 2 of its piece" in drift["reason"]


@pytest.mark.timeout(180)
def test_nan_is_told_with_its_tensor_until_it_is_mended(tmp_path: Path) -> None:
    with training(tmp_path, "ddp", 2, stats_every_s=EVERY_S) as door:
        after_rounds(door, "stats", 1)
        assert door.alerts("non-finite", "all") == []
        # A bias that nothing trains; whoever is downstream of it gets NaN as well.
        tell(tmp_path, "nan", fqn="module.bias")
        wait_for("NaN", (tmp_path / "nan.done-0").exists)
        after_rounds(door, "stats", 2)
        named = {alert["name"]: alert for alert in door.alerts("non-finite")}
        assert "module.bias" in named
        assert "1 NaN and 0 infinite of 7 elements" in named["module.bias"]["reason"]
        tell(tmp_path, "mend", fqn="module.bias")
        wait_for("the end", lambda: door.alerts("non-finite", "resolved"))
        (over,) = door.alerts("non-finite", "resolved")
        assert over["name"] == "module.bias"
