"""Edits and holds at a real control plane, whose sidecars and trainers the test plays."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import httpx2
import pytest

from tests.integration.control_process import JOB, TOKEN, Control, control_plane, joined, until
from tests.integration.editing_mesh import EditingSidecar, both_joined, editing_ranks

pytestmark = pytest.mark.usefixtures("grpc_is_up")

HALVE = {"pattern": "layers.*.weight", "op": "mul", "value": 0.5}
ID = "0123456789abcdef" * 2


@pytest.fixture
async def ranks() -> AsyncIterator[list[EditingSidecar]]:
    async with editing_ranks() as found:
        yield found


@pytest.fixture
async def control(ranks: list[EditingSidecar]) -> AsyncIterator[Control]:
    with control_plane() as started:
        async with both_joined(started, ranks):
            yield started


async def call(
    control: Control, method: str, path: str, body: Any = None, token: str = TOKEN
) -> httpx2.Response:
    # On a thread: the fake sidecars answer on this loop.
    asking = partial(control.ask, method, f"/jobs/{JOB}{path}", token, json=body)
    return await asyncio.to_thread(asking)


async def make(control: Control, *ops: dict[str, Any], **fields: Any) -> Any:
    answer = await call(control, "POST", "/edits", {"ops": list(ops) or [HALVE], **fields})
    assert answer.status_code == 201, answer.text
    return answer.json()


async def test_an_edit_is_applied_undone_listed_and_audited(control: Control) -> None:
    found = await make(control, id=ID, note="too hot", reset_moments=True)
    assert (found["state"], found["step"], found["stop_ms"]) == ("APPLIED", 11, 0.5)
    assert found["ops"][0]["name_count"] == 5
    assert found["size_bytes"] == 5 * 8 * 4
    assert found["before"]["min"] == -2.0
    assert found["undo"] == {"possible": True, "reason": ""}
    # One element's range is its value, and so is what it was filled with: no viewer has it.
    viewer = control.new_token("viewer", name="vera")
    listed = (await call(control, "GET", "/edits", token=viewer)).json()["edits"]
    for seen in (listed[0], (await call(control, "GET", f"/edits/{ID}", token=viewer)).json()):
        untold = [{**found["ops"][0], "value": None}]
        assert seen == {**found, "before": None, "after": None, "ops": untold}
    assert await make(control, id=ID, note="too hot", reset_moments=True) == found
    other = {"ops": [{**HALVE, "value": 2.0}], "id": ID}
    assert (await call(control, "POST", "/edits", other)).status_code == 409

    tried = (await call(control, "POST", f"/edits/{ID}/undo", {"dry_run": True})).json()
    assert (tried["state"], tried["dry_run"], tried["undo_of"]) == ("ABORTED", True, ID)
    assert tried["reason"].startswith("DRY RUN:")
    assert tried["after"] is not None
    assert (await call(control, "GET", f"/edits/{ID}")).json()["undone_by"] is None

    over = await make(control, {"pattern": "layers.1.weight", "op": "fill", "value": 0.0})
    refused = await call(control, "POST", f"/edits/{ID}/undo", {})
    assert refused.status_code == 409
    assert over["id"] in refused.json()["detail"]
    forced = await call(control, "POST", f"/edits/{ID}/undo", {"force": True})
    assert (forced.status_code, forced.json()["undo_of"]) == (201, ID), forced.text
    assert forced.json()["state"] == "APPLIED"
    assert forced.json()["note"] == f"optimizer state that edit {ID[:8]} zeroed stays zero"
    undone = (await call(control, "GET", f"/edits/{ID}")).json()
    assert undone["undone_by"] == forced.json()["id"]
    assert not undone["undo"]["possible"]
    assert (await call(control, "POST", f"/edits/{ID}/undo", {})).status_code == 409

    page = (await call(control, "GET", "/edits?limit=2")).json()
    rest = await call(control, "GET", f"/edits?page_token={page['next_page_token']}")
    ids = [one["id"] for one in [*page["edits"], *rest.json()["edits"]]]
    assert ids == [forced.json()["id"], over["id"], tried["id"], ID]
    assert (await call(control, "GET", "/edits?state=LOST")).json()["edits"] == []
    audit = (await call(control, "GET", "/audit")).json()["records"]
    text = str(audit)
    assert "edit.commit" in text
    assert "edit.undo" in text
    assert "'too hot'" in text
    metrics = control.get("/metrics").text
    assert f'paramd_edits_total{{job="{JOB}",state="APPLIED"}} 3.0' in metrics


def token_id_in(ticket: str) -> str:
    """The id of the token that a ticket was given for."""
    payload = ticket.split(".")[1]
    return str(json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))["token"])


async def recorded(control: Control, edit_id: str = "") -> list[tuple[str, str, str, str | None]]:
    """What the audit says of an edit (or of all there is): kind, method, actor, result."""
    found = (await call(control, "GET", "/audit?order=oldest&limit=1000")).json()["records"]
    seqs = {one["seq"] for one in found if edit_id in (one["detail"].get("id") or "")}
    return [
        (one["kind"], one["method"], one["actor"], one["result"])
        for one in found
        if one["seq"] in seqs or one["of"] in seqs
    ]


async def test_an_edit_is_its_authors_or_an_admins_and_the_audit_names_both(
    control: Control,
) -> None:
    op = {"pattern": "layers.0.weight", "op": "set", "data": True}
    ann, bob = control.new_token("editor", name="ann"), control.new_token("editor", name="bob")
    theirs = await make(control, op, id=ID, allow_nonfinite=True, note="see #1")
    mine = (await call(control, "POST", "/edits", {"ops": [op]}, ann)).json()
    for edit_id in (ID, mine["id"]):
        for method, path in (("POST", "/commit"), ("DELETE", "")):
            body = {} if path else None
            denied = await call(control, method, f"/edits/{edit_id}{path}", body, bob)
            assert denied.status_code == 403, denied.text
            assert "was created by" in denied.json()["detail"]
            state = (await call(control, "GET", f"/edits/{edit_id}")).json()["state"]
            assert state == theirs["state"] == "STAGING"
    aborted = await call(control, "DELETE", f"/edits/{ID}", token=TOKEN)
    assert aborted.json()["state"] == "ABORTED"
    done = (await call(control, "POST", f"/edits/{mine['id']}/commit", {})).json()
    assert (done["state"], done["actor"], done["committed_by"]) == ("APPLIED", "ann", "owner")
    undone = await call(control, "POST", f"/edits/{mine['id']}/undo", {}, bob)
    assert (undone.json()["state"], undone.json()["actor"]) == ("APPLIED", "bob")
    assert await recorded(control, ID) == [
        ("intent", "edit.create", "owner", None),
        ("outcome", "edit.create", "owner", "done"),
        ("intent", "edit.abort", "owner", None),
        ("outcome", "edit.abort", "owner", "aborted"),
    ]
    assert await recorded(control, mine["id"]) == [
        ("intent", "edit.create", "ann", None),
        ("outcome", "edit.create", "ann", "done"),
        ("intent", "edit.commit", "owner", None),
        ("outcome", "edit.commit", "owner", "applied"),
    ]
    assert await recorded(control, undone.json()["id"]) == [
        ("intent", "edit.undo", "bob", None),
        ("outcome", "edit.undo", "bob", "applied"),
    ]


async def test_data_of_another_token_than_its_authors_is_not_committed(
    control: Control, ranks: list[EditingSidecar]
) -> None:
    op = {"pattern": "layers.0.weight", "op": "set", "data": True}
    ann = control.new_token("editor", name="ann")
    mine = (await call(control, "POST", "/edits", {"ops": [op]}, ann)).json()["id"]
    found = await call(control, "POST", f"/edits/{mine}/preview", {})
    assert found.status_code == 200, found.text
    # Nobody's token staged it on rank 1, and the owner, who asks, may commit all edits.
    ranks[1].staged[mine].size_bytes = 64
    for ask in ("preview", "commit"):
        refused = await call(control, "POST", f"/edits/{mine}/{ask}", {})
        assert refused.status_code == 409, refused.text
        assert "ranks 1 was uploaded with another token" in refused.json()["detail"]
    assert (await call(control, "GET", f"/edits/{mine}")).json()["state"] == "STAGED"
    job = (await call(control, "GET", "", token=ann)).json()
    ranks[1].staged[mine].author = token_id_in(job["ticket"])
    done = await call(control, "POST", f"/edits/{mine}/commit", {})
    assert done.json()["state"] == "APPLIED", done.text


async def test_only_an_admin_brings_nonfinite_values_back_by_undoing_their_undo(
    control: Control,
) -> None:
    ann = control.new_token("editor", name="ann")
    await make(control, id=ID, allow_nonfinite=True)
    last = ID
    # Taking it back is an editor's, doing it again is not, taking that back is.
    for denied in (False, True, False):
        answer = await call(control, "POST", f"/edits/{last}/undo", {}, ann)
        assert answer.status_code == (403 if denied else 201), answer.text
        if denied:
            assert "only an admin" in answer.json()["detail"]
            answer = await call(control, "POST", f"/edits/{last}/undo", {})
        assert answer.json()["state"] == "APPLIED"
        last = answer.json()["id"]


async def test_an_undo_that_waits_behind_an_overlapping_edit_does_not_overwrite_it(
    control: Control, ranks: list[EditingSidecar]
) -> None:
    trainers = ranks[0].trainers
    await make(control, id=ID)
    trainers.agree.clear()
    later = await make(
        control, {"pattern": "layers.2.weight", "op": "fill", "value": 1.0}, wait_s=0
    )
    await until(lambda: len(trainers.ready) == 2)
    waiting, forced = [
        (await call(control, "POST", f"/edits/{ID}/undo", body)).json()
        for body in ({"wait_s": 0}, {"wait_s": 0, "force": True})
    ]
    trainers.agree.set()
    answer = await call(control, "GET", f"/edits/{waiting['id']}?wait_s=10")
    assert answer.json()["state"] == "ABORTED", answer.text
    assert later["id"] in answer.json()["reason"]
    assert "force" in answer.json()["reason"]
    answer = await call(control, "GET", f"/edits/{forced['id']}?wait_s=10")
    assert answer.json()["state"] == "APPLIED", answer.text


async def test_a_hold_has_one_holder_steps_renews_and_ends(
    control: Control, ranks: list[EditingSidecar]
) -> None:
    assert (await call(control, "GET", "/pause")).json()["state"] == "running"
    assert (await call(control, "POST", "/pause/renew", {})).status_code == 409
    held = (await call(control, "POST", "/pause", {"lease_s": 20, "id": "a1"})).json()
    assert held["state"] == "paused"
    assert held["holder"].startswith("owner/")
    assert held["lease_left_s"] == 20.0
    again = await call(control, "POST", "/pause", {"lease_s": 20})
    assert again.status_code == 409
    assert held["holder"] in again.json()["detail"]
    same = await call(control, "POST", "/pause", {"holder": held["holder"]})
    assert same.json()["state"] == "paused", same.text
    assert same.json()["lease_left_s"] == 30.0
    edited = await make(control, if_step=11)
    assert (edited["state"], edited["step"]) == ("APPLIED", 11)
    stepped = await call(control, "POST", "/pause/step", {"steps": 3})
    assert (stepped.json()["state"], stepped.json()["steps_left"]) == ("stepping", 3)
    # Held again, or not begun: only the step tells.
    ranks[0].trainers.steps_left = 0
    assert (await call(control, "GET", "/pause")).json()["state"] == "stepping"
    ranks[0].trainers.step = 14
    again = (await call(control, "GET", "/pause")).json()
    assert (again["state"], again["steps_left"], again["step"]) == ("paused", 0, 14)
    for query, state in (("?id=b2", "paused"), ("?id=a1", "running"), ("", "running")):
        ended = await call(control, "DELETE", f"/pause{query}")
        assert ended.json()["state"] == state, ended.text
    assert not ranks[0].trainers.held
    told = [one for one in await recorded(control) if one[1].startswith("pause.")]
    assert told == [
        ("intent", "pause.begin", "owner", None),
        ("outcome", "pause.begin", "owner", "done"),
        ("intent", "pause.step", "owner", None),
        ("outcome", "pause.step", "owner", "done"),
        ("event", "pause.end", "owner", None),
    ]


async def test_a_hold_whose_sidecar_is_lost_meanwhile_is_an_outage(
    ranks: list[EditingSidecar],
) -> None:
    """Its channel is closed under the call, which must not look like a cancelled request."""
    ranks[0].trainers.agree.clear()
    with control_plane() as control:
        async with joined(control, ranks[0]), AsyncExitStack() as leaving:
            await leaving.enter_async_context(joined(control, ranks[1]))
            await until(lambda: control.job()["joined_count"] == 2)
            asking = asyncio.create_task(call(control, "POST", "/pause", {}))
            await until(lambda: len(ranks[0].trainers.ready) == 2)
            await leaving.aclose()
            refused = await asking
            assert refused.status_code == 503, refused.text
            assert "rank 1" in refused.json()["detail"]
            assert "CancelledError" not in control.log.read_text()


async def test_a_hold_that_nobody_agrees_on_is_withdrawn(
    ranks: list[EditingSidecar], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARAMD_EDITS", '{"agree_s": 0.5, "max_per_minute": 1, "max_share": 0.5}')
    ranks[0].trainers.agree.clear()
    with control_plane() as control:
        async with both_joined(control, ranks):
            for body in ({}, {"timeout_s": 0.25}):
                refused = await call(control, "POST", "/pause", body)
                assert refused.status_code in (409, 504), refused.text
                assert "waiting for rank 0 " in refused.text
            assert not ranks[0].trainers.ready
            assert (await call(control, "GET", "/pause")).json()["state"] == "running"
            share = await call(control, "POST", "/edits", {"ops": [HALVE]})
            assert (share.status_code, "max_share" in share.text) == (409, True)
            one = {**HALVE, "pattern": "layers.0.weight"}
            late = await make(control, one)
            assert late["state"] == "ABORTED"
            many = await call(control, "POST", "/edits", {"ops": [one]})
            assert (many.status_code, "max_per_minute" in many.text) == (429, True)
            await asyncio.sleep(0)
