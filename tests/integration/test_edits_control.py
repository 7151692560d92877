"""Edits and holds at a real control plane, whose sidecars and trainers the test plays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx2
import pytest

from tests.integration.control_process import (
    JOB,
    TOKEN,
    Control,
    control_plane,
    first_grpc_use,
    until,
)
from tests.integration.editing_mesh import EditingSidecar, both_joined, editing_ranks

HALVE = {"pattern": "layers.*.weight", "op": "mul", "value": 0.5}
ID = "0123456789abcdef" * 2


@pytest.fixture(scope="module", autouse=True)
def grpc_is_up() -> Iterator[None]:
    with first_grpc_use():
        yield


@pytest.fixture
async def ranks() -> AsyncIterator[list[EditingSidecar]]:
    async with editing_ranks() as found:
        yield found


async def call(
    control: Control, method: str, path: str, body: Any = None, token: str = TOKEN
) -> httpx2.Response:
    headers = {"authorization": f"Bearer {token}"}
    async with httpx2.AsyncClient(trust_env=False, base_url=control.url, timeout=30) as client:
        return await client.request(method, f"/api/v1/jobs/{JOB}{path}", json=body, headers=headers)


async def make(control: Control, *ops: dict[str, Any], **fields: Any) -> Any:
    answer = await call(control, "POST", "/edits", {"ops": list(ops) or [HALVE], **fields})
    assert answer.status_code == 201, answer.text
    return answer.json()


async def test_an_edit_is_applied_undone_listed_and_audited(ranks: list[EditingSidecar]) -> None:
    with control_plane() as control:
        async with both_joined(control, ranks):
            found = await make(control, id=ID, note="too hot")
            assert (found["state"], found["step"], found["stop_ms"]) == ("APPLIED", 11, 0.5)
            assert found["ops"][0]["name_count"] == 5
            assert found["size_bytes"] == 5 * 8 * 4
            assert found["before"]["min"] == -2.0
            assert found["undo"] == {"possible": True, "reason": ""}
            assert await make(control, id=ID, note="too hot") == found
            other = {"ops": [{**HALVE, "value": 2.0}], "id": ID}
            assert (await call(control, "POST", "/edits", other)).status_code == 409

            over = await make(control, {"pattern": "layers.1.weight", "op": "fill", "value": 0.0})
            refused = await call(control, "POST", f"/edits/{ID}/undo", {})
            assert refused.status_code == 409
            assert over["id"] in refused.json()["detail"]
            forced = await call(control, "POST", f"/edits/{ID}/undo", {"force": True})
            assert (forced.status_code, forced.json()["undo_of"]) == (201, ID), forced.text
            assert forced.json()["state"] == "APPLIED"
            undone = (await call(control, "GET", f"/edits/{ID}")).json()
            assert undone["undone_by"] == forced.json()["id"]
            assert not undone["undo"]["possible"]
            assert (await call(control, "POST", f"/edits/{ID}/undo", {})).status_code == 409

            page = (await call(control, "GET", "/edits?limit=2")).json()
            rest = await call(control, "GET", f"/edits?page_token={page['next_page_token']}")
            ids = [one["id"] for one in [*page["edits"], *rest.json()["edits"]]]
            assert ids == [forced.json()["id"], over["id"], ID]
            assert (await call(control, "GET", "/edits?state=LOST")).json()["edits"] == []
            audit = (await call(control, "GET", "/audit")).json()["records"]
            text = str(audit)
            assert "edit.commit" in text
            assert "edit.undo" in text
            assert "'too hot'" in text
            metrics = control.get("/metrics").text
            assert f'paramd_edits_total{{job="{JOB}",state="APPLIED"}} 3.0' in metrics


async def test_what_does_not_fit_or_may_not_be_is_refused(ranks: list[EditingSidecar]) -> None:
    with control_plane() as control:
        async with both_joined(control, ranks):
            for op, status in (
                ({"pattern": "nothing", "op": "fill", "value": 0.0}, 404),
                ({"pattern": "*", "op": "fill"}, 422),
                ({"pattern": "*", "op": "lerp", "weight": 0.5}, 422),
                ({"pattern": "*", "op": "eval", "value": 1.0}, 422),
            ):
                answer = await call(control, "POST", "/edits", {"ops": [op]})
                assert answer.status_code == status, answer.text
            dry = await make(control, dry_run=True)
            assert (dry["state"], dry["reason"]) == (
                "ABORTED",
                "dry run: nothing was changed",
            )
            assert dry["after"]["max"] == 3.0
            assert dry["dry_run"]
            late = await make(control, if_step=9)
            assert late["state"] == "ABORTED"
            assert "if_step is 9" in late["reason"]
            now = await make(control, if_step=10)
            assert (now["state"], now["step"]) == ("APPLIED", 11)


async def test_data_waits_for_its_upload_or_is_called_off(
    ranks: list[EditingSidecar],
) -> None:
    with control_plane() as control:
        async with both_joined(control, ranks):
            op = {"pattern": "layers.0.weight", "op": "set", "data": True}
            found = await make(control, op, id=ID)
            assert found["state"] == "STAGING"
            ended = await call(control, "POST", f"/edits/{ID}/commit", {})
            assert ended.json()["state"] == "APPLIED", ended.text
            aborted = await make(control, op)
            gone = await call(control, "DELETE", f"/edits/{aborted['id']}")
            assert gone.json()["state"] == "ABORTED"
            assert "called off by owner" in gone.json()["reason"]


async def test_one_withdrawal_aborts_and_doubt_is_asked_again(
    ranks: list[EditingSidecar],
) -> None:
    ranks[0].trainers.agree.clear()
    ranks[0].doubts = ranks[1].doubts = 3
    with control_plane() as control:
        async with both_joined(control, ranks):
            found = await make(control, wait_s=0)
            await until(lambda: len(ranks[0].trainers.ready) == 2)
            gone = await call(control, "DELETE", f"/edits/{found['id']}")
            assert gone.json()["state"] == "ABORTED", gone.text
            assert ranks[0].withdrawn + ranks[1].withdrawn > 4
            await until(lambda: not ranks[0].staged and not ranks[1].staged)
            ranks[0].trainers.agree.set()
            assert (await make(control))["state"] == "APPLIED"


async def restarted(
    control: Control, ranks: list[EditingSidecar], edit_id: str, state: str
) -> dict[str, Any]:
    """Kills the control plane, and asks the next one until the edit is in that state."""
    control.process.kill()
    control.wait()
    with control_plane() as second:
        async with both_joined(second, ranks):
            answer = await call(second, "GET", f"/edits/{edit_id}?wait_s=10")
            assert answer.json()["state"] == state, answer.text
            ranks[0].trainers.agree.set()
            ranks[0].trainers.answer.set()
            # Numbers go on above the old one.
            assert (await make(second))["boundary"] > answer.json()["boundary"]
            return dict(answer.json())


async def test_a_killed_control_plane_finds_out_that_it_was_applied(
    ranks: list[EditingSidecar],
) -> None:
    ranks[0].trainers.answer.clear()
    with control_plane() as control:
        async with both_joined(control, ranks):
            found = await make(control, wait_s=0)
            await until(lambda: ranks[0].trainers.edits == 1)
            assert (await call(control, "GET", f"/edits/{found['id']}")).json()[
                "state"
            ] == "COMMITTED"
            ended = await restarted(control, ranks, found["id"], "APPLIED")
    assert ended["step"] == 11
    assert ranks[0].trainers.edits == 2


async def test_a_killed_control_plane_finds_out_that_it_was_not(
    ranks: list[EditingSidecar],
) -> None:
    ranks[0].trainers.agree.clear()
    with control_plane() as control:
        async with both_joined(control, ranks):
            found = await make(control, wait_s=0)
            await until(lambda: len(ranks[0].trainers.ready) == 2)
            ended = await restarted(control, ranks, found["id"], "ABORTED")
    assert "restarted" in ended["reason"]
    assert ranks[0].trainers.edits == 1


async def test_an_epoch_that_ends_loses_what_was_committed(ranks: list[EditingSidecar]) -> None:
    ranks[0].trainers.answer.clear()
    with control_plane() as control:
        async with both_joined(control, ranks):
            found = await make(control, wait_s=0)
            await until(lambda: ranks[0].trainers.edits == 1)
        control.process.kill()
        control.wait()
    with control_plane(epoch=2) as second:

        def state() -> Any:
            path = f"/api/v1/jobs/{JOB}/edits/{found['id']}"
            return second.get(path).json()["state"]

        await until(lambda: state() == "LOST")


async def test_a_hold_has_one_holder_steps_renews_and_ends(ranks: list[EditingSidecar]) -> None:
    with control_plane() as control:
        async with both_joined(control, ranks):
            assert (await call(control, "GET", "/hold")).json()["state"] == "running"
            assert (await call(control, "POST", "/hold/renew", {})).status_code == 409
            held = (await call(control, "POST", "/hold", {"lease_s": 20})).json()
            assert held["state"] == "held"
            assert held["holder"].startswith("owner/")
            assert held["lease_left_s"] == 20.0
            again = await call(control, "POST", "/hold", {"lease_s": 20})
            assert again.status_code == 409
            assert held["holder"] in again.json()["detail"]
            same = await call(control, "POST", "/hold", {"holder": held["holder"]})
            assert same.json()["state"] == "held", same.text
            assert same.json()["lease_left_s"] == 30.0
            edited = await make(control, if_step=11)
            assert (edited["state"], edited["step"]) == ("APPLIED", 11)
            stepped = await call(control, "POST", "/hold/step", {"steps": 3})
            assert (stepped.json()["state"], stepped.json()["steps_left"]) == ("stepping", 3)
            ranks[0].trainers.steps_left = 0
            ended = await call(control, "DELETE", "/hold")
            assert ended.json()["state"] == "running", ended.text
            assert (await call(control, "DELETE", "/hold")).status_code == 200
            assert not ranks[0].trainers.held


async def test_a_hold_that_nobody_agrees_on_is_withdrawn(
    ranks: list[EditingSidecar], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARAMD_EDITS", '{"agree_s": 0.5, "max_per_minute": 1, "max_share": 0.5}')
    ranks[0].trainers.agree.clear()
    with control_plane() as control:
        async with both_joined(control, ranks):
            refused = await call(control, "POST", "/hold", {})
            assert refused.status_code in (409, 504), refused.text
            assert not ranks[0].trainers.ready
            assert (await call(control, "GET", "/hold")).json()["state"] == "running"
            share = await call(control, "POST", "/edits", {"ops": [HALVE]})
            assert (share.status_code, "max_share" in share.text) == (409, True)
            one = {**HALVE, "pattern": "layers.0.weight"}
            late = await make(control, one)
            assert late["state"] == "ABORTED"
            many = await call(control, "POST", "/edits", {"ops": [one]})
            assert (many.status_code, "max_per_minute" in many.text) == (429, True)
            await asyncio.sleep(0)
