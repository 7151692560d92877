"""What is another team's, asked by name: each operation that takes a key, a path, an id, a prefix,
a mark, a series or a destination, asked with a token for some jobs about things of another job.

A site with two real trainings, team-a-run and team-b-run. `TABLE` says of each operation and object
who may use it, and its probe (or the test named there) shows it.
"""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from paramd_service.control.access.roles import OPERATIONS, PERMITTED, UserRole
from tests.integration.control_process import Control, site_plane, site_token
from tests.integration.test_site_attach import trainer
from tests.longer import wait_until

pytestmark = pytest.mark.usefixtures("grpc_is_up")

OURS, THEIRS = "team-a-run", "team-b-run"
EXPORT = {"include": ["parameters"]}
MANIFEST = "paramd-export.json"


@dataclass
class Two:
    """A site with both jobs, and what the other team has there."""

    control: Control
    folder: Path
    """Root of the destination "checkpoints"."""
    tokens: dict[UserRole, str] = field(default_factory=dict)
    """Tokens for team-a-* alone, by role."""
    theirs: dict[str, Any] = field(default_factory=dict)
    """Ids and names of what the other team has, by kind."""

    def owner(self, method: str, path: str, **given: Any) -> Any:
        """What the owner of the site gets about the other team's job."""
        answer = self.control.ask(method, f"/jobs/{THEIRS}{path}", **given)
        assert answer.status_code < 300, answer.text
        return answer.json() if answer.content else None

    def ask(self, operation: str, method: str, path: str, **given: Any) -> httpx2.Response:
        """An operation on our own job, with a token for our jobs whose role permits it."""
        action = OPERATIONS[operation]
        role = next((role for role in self.tokens if action in PERMITTED[role]), UserRole.EDITOR)
        where = f"/jobs/{OURS}{path}" if not path.startswith("//") else path[1:]
        return self.control.ask(method, where, self.tokens[role], **given)

    def export(self, job: str, token: str, **body: object) -> dict[str, Any]:
        """An export, once it has ended."""
        made = self.control.ask("POST", f"/jobs/{job}/exports", token, json={**EXPORT, **body})
        assert made.status_code == 202, made.text
        at = f"/jobs/{job}/exports/{made.json()['id']}"
        found: dict[str, Any] = {}

        def ended() -> bool:
            found.update(self.control.ask("GET", at, token).json())
            return found["state"] in ("DONE", "FAILED", "CANCELLED")

        wait_until(ended, "the export ends")
        return found

    def manifest(self, key: str) -> dict[str, Any]:
        found = json.loads((self.folder / key / MANIFEST).read_text())
        assert isinstance(found, dict)
        return found


@pytest.fixture
def two(shared: Two, monkeypatch: pytest.MonkeyPatch) -> Two:
    monkeypatch.setenv("PARAMD_STATE_DIR", str(shared.folder.parent / "state"))
    return shared


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    folder = tmp_path_factory.mktemp("others")
    (folder / "checkpoints").mkdir()
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("PARAMD_STATE_DIR", str(folder / "state"))
        (folder / "state").mkdir(mode=0o700)
        table = {"checkpoints": str(folder / "checkpoints")}
        patch.setenv("PARAMD_DESTINATIONS", json.dumps(table))
        control = stack.enter_context(site_plane())
        found = Two(control, folder / "checkpoints")
        trainers = [trainer(control, job, folder / job, "auto") for job in (OURS, THEIRS)]
        with ThreadPoolExecutor() as pool:
            list(pool.map(stack.enter_context, trainers))
        for role in (UserRole.EDITOR, UserRole.EXPORTER, UserRole.TRAINER):
            found.tokens[role] = control.new_token(role.value, jobs="team-a-*")
        _fill(found)
        yield found


def _fill(two: Two) -> None:
    """Give the other team one of each."""
    export = two.export(THEIRS, site_token(), destination=f"checkpoints/{THEIRS}/best")
    assert export["state"] == "DONE", export
    schedule = {**EXPORT, "destination": f"checkpoints/{THEIRS}/run", "every_steps": 1 << 40}
    edit = {"ops": [{"op": "add", "pattern": "weight", "value": 1.0}], "wait_s": 60}
    made = two.owner("POST", "/edits", json=edit)
    assert made["state"] == "APPLIED", made
    two.theirs = {
        "export": export["id"],
        "schedule": two.owner("POST", "/export-schedules", json=schedule)["id"],
        "edit": made["id"],
        "snapshot": two.owner("POST", "/snapshots", json={"filter": "*", "lease_s": 300})["id"],
    }
    two.owner("POST", "/marks", json={"name": "their-mark"})


Probe = Callable[[Two], None]


@dataclass(frozen=True)
class Row:
    """Who may use an object with an operation, and what shows it."""

    who: str
    shown_by: Probe | str
    """A probe; or the test that shows it, from tests/."""


def refused(
    operation: str, method: str, path: str, *statuses: int, **given: Any
) -> Callable[[Two], None]:
    """A probe: asked about our job with an id of theirs (`{export}`, `{edit}` ...), or a prefix of
    it, it is refused with one of `statuses`, and nothing of theirs is told."""

    def filled(value: Any, theirs: dict[str, Any]) -> Any:
        text = json.dumps(value)
        for kind, name in theirs.items():
            text = text.replace(f"<{kind}>", name)
        return json.loads(text)

    def probe(two: Two) -> None:
        whole = two.theirs
        for theirs in (whole, {kind: name[:8] for kind, name in whole.items()}):
            wanted = filled({"path": path, **given}, theirs)
            answer = two.ask(operation, method, wanted.pop("path"), **wanted)
            # A part of an id is no id where a whole one is needed.
            allowed = statuses if theirs is whole else (*statuses, 422)
            assert answer.status_code in allowed, (operation, answer.status_code, answer.text)
            assert THEIRS not in answer.text.replace(json.dumps(wanted), ""), answer.text

    return probe


def job_of_their_edit_stands(two: Two) -> None:
    found = two.owner("GET", f"/edits/{two.theirs['edit']}")
    assert (found["state"], bool(found["undone_by"])) == ("APPLIED", False)


ADD = {"ops": [{"op": "add", "pattern": "weight", "value": 1.0}]}
HYPER = {"optimizer": 0, "group": 0, "values": {"lr": 0.01}}


def no_key_of_theirs(two: Two) -> None:
    """Their key is refused alike whether something is there, with overwrite and without."""
    told = set()
    for key in (f"{THEIRS}/best", f"{THEIRS}/nothing", "nobody/x", "best"):
        for overwrite in (False, True):
            body = {**EXPORT, "destination": f"checkpoints/{key}", "overwrite": overwrite}
            answer = two.ask("create_export", "POST", "/exports", json=body)
            assert answer.status_code == 403, answer.text
            told.add(answer.json()["detail"].replace(key, "KEY"))
        body = {**EXPORT, "destination": f"checkpoints/{key}", "every_steps": 1}
        answer = two.ask("create_schedule", "POST", "/export-schedules", json=body)
        assert answer.status_code == 403, answer.text
        told.add(answer.json()["detail"].replace(f"{key}/step-{{step}}", "KEY"))
    assert len(told) == 1, told
    assert two.manifest(f"{THEIRS}/best")["job"] == THEIRS
    assert sorted(path.name for path in (two.folder / THEIRS).iterdir()) == ["best"]


def nothing_of_theirs_below_our_key(two: Two) -> None:
    """What a token for all jobs wrote below our folder is theirs still."""
    key, token = f"{OURS}/theirs", two.tokens[UserRole.EXPORTER]
    assert two.export(THEIRS, site_token(), destination=f"checkpoints/{key}")["state"] == "DONE"
    for overwrite in (False, True):
        found = two.export(OURS, token, destination=f"checkpoints/{key}", overwrite=overwrite)
        assert (found["state"], "exists" in found["reason"]) == ("FAILED", True), found
    assert two.manifest(key)["job"] == THEIRS
    ours = f"checkpoints/{OURS}/best"
    first = two.export(OURS, token, destination=ours)
    second = two.export(OURS, token, destination=ours, overwrite=True)
    assert (first["state"], second["state"]) == ("DONE", "DONE")
    assert two.manifest(f"{OURS}/best")["export_id"] == second["id"]
    # The first one's place is taken: its id does not open what lies there now.
    answer = two.ask("get_diff", "GET", f"/diff?a=export:{first['id']}")
    assert (answer.status_code, "was replaced" in answer.text) == (409, True), answer.text


def no_file_of_theirs(two: Two) -> None:
    told = set()
    for key in (f"{THEIRS}/best", THEIRS, f"{THEIRS}/nothing", "nobody/x"):
        for name in (MANIFEST, "model.safetensors", "nothing"):
            path = f"/export-file?destination=checkpoints/{key}&name={name}"
            answer = two.ask("read_export_file", "GET", path)
            assert answer.status_code == 404, answer.text
            told.add(answer.json()["detail"].replace(key, "KEY"))
    assert len(told) == 1, told


def their_mark_is_theirs(two: Two) -> None:
    assert two.ask("delete_mark", "DELETE", "/marks/their-mark").json() == {"dropped": False}
    body = {"mark": "their-mark"}
    assert two.ask("create_rollback", "POST", "/rollback", json=body).status_code == 404
    assert two.ask("create_mark", "POST", "/marks", json={"name": "their-mark"}).status_code == 201
    assert two.ask("delete_mark", "DELETE", "/marks/their-mark").json() == {"dropped": True}
    assert "their-mark" in json.dumps(two.owner("GET", "/marks"))


def their_lease_is_theirs(two: Two) -> None:
    at = f"/snapshots/{two.theirs['snapshot']}"
    assert two.ask("get_snapshot", "GET", at).status_code == 404
    answer = two.ask("renew_snapshot", "POST", f"{at}/renew", json={"lease_s": 1})
    assert answer.status_code == 404
    assert two.ask("release_snapshot", "DELETE", at).status_code == 204, "it is idempotent"
    assert two.owner("GET", at)["lease_left_s"] > 30


def their_pause_is_theirs(two: Two) -> None:
    begun = two.owner("POST", "/pause", json={"lease_s": 60, "id": "theirs"})
    holder, lease = begun["holder"], {"lease_s": 1, "holder": begun["holder"], "id": "theirs"}
    assert two.ask("renew_pause", "POST", "/pause/renew", json=lease).status_code == 409
    answer = two.ask("step_pause", "POST", "/pause/step", json={"steps": 1, "holder": holder})
    assert answer.status_code == 409
    two.ask("end_pause", "DELETE", f"/pause?holder={holder}")
    two.ask("end_pause", "DELETE", "/pause?id=theirs")
    assert two.ask("get_pause", "GET", "/pause").json()["state"] == "running"
    assert two.owner("GET", "/pause")["state"] == "paused"
    two.owner("DELETE", f"/pause?holder={holder}")


def pages_are_of_one_job(two: Two) -> None:
    """A page of theirs continues no list of ours; numbers of rows are no ids of others."""
    pages = ("/exports?limit=1", "/edits?limit=1", "/params?limit=1&sort=norm", "/alerts?limit=1")
    for path in (*pages, "/history/series?limit=1", "/snapshots?limit=1"):
        name = path.partition("?")[0]
        token = two.owner("GET", path)["next_page_token"]
        answer = two.ask("list_exports", "GET", f"{name}?page_token={token}")
        assert answer.status_code in (200, 409), answer.text
        for theirs in (THEIRS, *two.theirs.values()):
            assert theirs not in answer.text, path
        if name == "/params" and token:
            assert answer.status_code == 409, "values of small tensors order it"


def events_are_of_one_job(two: Two) -> None:
    """With the id of an event of theirs, ours follow, and no other."""
    with ExitStack() as stack:
        client = stack.enter_context(httpx2.Client(trust_env=False, timeout=30.0))

        def first(job: str, token: str, after: str = "") -> list[dict[str, str]]:
            url = f"{two.control.url}/api/v1/jobs/{job}/events"
            given = {"authorization": f"Bearer {token}"}
            given |= {"last-event-id": after} if after else {}
            found: list[dict[str, str]] = []
            with client.stream("GET", url, headers=given) as answer:
                assert answer.status_code == 200
                lines = answer.iter_lines()
                event: dict[str, str] = {}
                while len(found) < 3:
                    name, _, value = next(lines).partition(": ")
                    if name:
                        event[name] = value
                    elif event:
                        found.append(event)
                        event = {}
            return found

        theirs = first(THEIRS, site_token())
        ours = first(OURS, two.tokens[UserRole.EDITOR], theirs[0]["id"])
    assert all(json.loads(one["data"])["job"] in ("", OURS) for one in ours), ours


def series_are_of_one_job(two: Two) -> None:
    """Incarnation, metric and subject are looked up in the job of the path."""
    query = "metric=step&subject=0&incarnation=1"
    answer = two.ask("get_history", "GET", f"/history?{query}")
    assert answer.status_code == 200
    for path in ("/history/series?incarnation=1", "/alerts?incarnation=1"):
        answer = two.ask("list_series", "GET", path)
        assert answer.status_code == 200
        assert THEIRS not in answer.text


def no_admin(method: str, path: str, **given: Any) -> Probe:
    """A probe: for admins of all jobs, which no token for some jobs can be."""

    def probe(two: Two) -> None:
        for token in two.tokens.values():
            assert two.control.ask(method, path, token, **given).status_code == 403, path

    return probe


OWN_IDS = "who has the job, with an id that no other request has"
OF_JOB = "who has the job it is of"
_LOOKED_UP = "who has the job of the path, in which it is looked up"
_JOBS_TEST = "integration/test_site_jobs.py::test_a_token_for_some_jobs_sees_and_registers_no_other"
_ASSETS_TEST = "unit/control/test_exports_settings.py::test_small_files_of_a_job_are_not_anothers"

TABLE: dict[tuple[str, str], Row] = {
    ("get_export", "export"): Row(
        OF_JOB, refused("get_export", "GET", "/exports/<export>", 404)
    ),
    ("cancel_export", "export"): Row(
        OF_JOB, refused("cancel_export", "DELETE", "/exports/<export>", 404)
    ),
    ("load_export", "export"): Row(
        OF_JOB, refused("load_export", "POST", "/exports/<export>/load", 404, json={})
    ),
    ("load_export", "id"): Row(
        OF_JOB, refused("load_export", "POST", "/exports/<export>/load", 404, json={"id": "<edit>"})
    ),
    ("delete_schedule", "schedule"): Row(
        OF_JOB, refused("delete_schedule", "DELETE", "/export-schedules/<schedule>", 404)
    ),
    ("get_edit", "edit"): Row(OF_JOB, refused("get_edit", "GET", "/edits/<edit>", 404)),
    ("abort_edit", "edit"): Row(OF_JOB, refused("abort_edit", "DELETE", "/edits/<edit>", 404)),
    ("commit_edit", "edit"): Row(
        OF_JOB, refused("commit_edit", "POST", "/edits/<edit>/commit", 404, json={})
    ),
    ("preview_edit", "edit"): Row(
        OF_JOB, refused("preview_edit", "POST", "/edits/<edit>/preview", 404)
    ),
    ("undo_edit", "edit"): Row(
        OF_JOB, refused("undo_edit", "POST", "/edits/<edit>/undo", 404, json={})
    ),
    ("undo_edit", "id"): Row(OWN_IDS, job_of_their_edit_stands),
    ("create_edit", "id"): Row(
        OWN_IDS, refused("create_edit", "POST", "/edits", 409, json={**ADD, "id": "<edit>"})
    ),
    ("set_hyperparameters", "id"): Row(
        OWN_IDS,
        refused("create_edit", "POST", "/hyperparameters", 409, json={**HYPER, "id": "<edit>"}),
    ),
    ("create_rollback", "id"): Row(OWN_IDS, their_mark_is_theirs),
    ("create_rollback", "mark"): Row(_LOOKED_UP, their_mark_is_theirs),
    ("create_mark", "name"): Row(_LOOKED_UP, their_mark_is_theirs),
    ("delete_mark", "mark"): Row(_LOOKED_UP, their_mark_is_theirs),
    ("create_export", "id"): Row(
        OWN_IDS,
        refused(
            "create_export", "POST", "/exports", 409,
            json={**EXPORT, "destination": f"checkpoints/{OURS}/id", "id": "<export>"},
        ),
    ),
    ("create_schedule", "id"): Row(
        OWN_IDS,
        refused(
            "create_schedule", "POST", "/export-schedules", 409,
            json={
                **EXPORT, "destination": f"checkpoints/{OURS}/id", "every_steps": 1 << 40,
                "id": "<schedule>",
            },
        ),
    ),
    ("create_export", "destination"): Row(
        "below NAME/JOB of a job of the token; replaced: exports of such jobs", no_key_of_theirs
    ),
    ("create_export", "overwrite"): Row(
        "exports whose manifest names a job of the token", nothing_of_theirs_below_our_key
    ),
    ("create_schedule", "destination"): Row(
        "below NAME/JOB of a job of the token", no_key_of_theirs
    ),
    ("read_export_file", "destination"): Row(
        "exports whose manifest names a job of the token", no_file_of_theirs
    ),
    ("read_export_file", "name"): Row("files that such a manifest lists", no_file_of_theirs),
    ("create_export", "assets"): Row("files stored for the same id and job", _ASSETS_TEST),
    ("create_schedule", "assets"): Row("files stored for the same id and job", _ASSETS_TEST),
    ("store_export_asset", "owner"): Row("its own job's copy, whatever the id", _ASSETS_TEST),
    ("store_export_asset", "name"): Row("its own job's copy, whatever the name", _ASSETS_TEST),
    ("get_snapshot", "snapshot"): Row(OF_JOB, their_lease_is_theirs),
    ("renew_snapshot", "snapshot"): Row(f"{OF_JOB}, with its token", their_lease_is_theirs),
    ("release_snapshot", "snapshot"): Row(f"{OF_JOB}, with its token", their_lease_is_theirs),
    ("begin_pause", "holder"): Row(OF_JOB, their_pause_is_theirs),
    ("begin_pause", "id"): Row(OF_JOB, their_pause_is_theirs),
    ("renew_pause", "holder"): Row(OF_JOB, their_pause_is_theirs),
    ("renew_pause", "id"): Row(OF_JOB, their_pause_is_theirs),
    ("step_pause", "holder"): Row(OF_JOB, their_pause_is_theirs),
    ("end_pause", "holder"): Row(OF_JOB, their_pause_is_theirs),
    ("end_pause", "id"): Row(OF_JOB, their_pause_is_theirs),
    ("get_diff", "a"): Row(OF_JOB, refused("get_diff", "GET", "/diff?a=export:<export>", 404)),
    ("get_diff", "b"): Row(
        f"{OF_JOB}, or job:NAME of the token",
        refused("get_diff", "GET", "/diff?a=now&b=export:<export>", 404),
    ),
    ("follow_events", "Last-Event-ID"): Row(OF_JOB, events_are_of_one_job),
    ("get_history", "metric"): Row(_LOOKED_UP, series_are_of_one_job),
    ("get_history", "subject"): Row(_LOOKED_UP, series_are_of_one_job),
    ("get_history", "incarnation"): Row(_LOOKED_UP, series_are_of_one_job),
    ("list_series", "incarnation"): Row(_LOOKED_UP, series_are_of_one_job),
    ("list_alerts", "incarnation"): Row(_LOOKED_UP, series_are_of_one_job),
    **{
        (operation, "page_token"): Row(OF_JOB, pages_are_of_one_job)
        for operation in (
            "list_exports", "list_edits", "list_params", "list_alerts", "list_series",
            "list_snapshots",
        )
    },
    ("list_audit", "page_token"): Row("admins", no_admin("GET", f"/jobs/{OURS}/audit")),
    ("list_own_audit", "page_token"): Row("admins", no_admin("GET", "/audit")),
    ("register_job", "job"): Row("a trainer, of a job of the token", _JOBS_TEST),
    ("add_destination", "name"): Row(
        "admins", no_admin("POST", "/destinations", json={"name": "x", "root": "/tmp"})
    ),
    ("add_destination", "root"): Row(
        "admins", no_admin("POST", "/destinations", json={"name": "x", "root": "/tmp"})
    ),
    ("create_token", "name"): Row("admins", no_admin("POST", "/tokens", json={"role": "viewer"})),
    ("create_token", "jobs"): Row("admins", no_admin("POST", "/tokens", json={"role": "viewer"})),
    ("revoke_token", "name"): Row("admins", no_admin("DELETE", "/tokens/owner")),
}  # fmt: skip

PLAIN = {
    # Bounds, orders, forms and times.
    "limit", "order", "state", "offset_bytes", "wait_s", "force", "heat", "gather", "every", "kind",
    "begin_s", "end_s", "max_points", "sort", "mode", "rows", "columns", "row_dims", "bins", "low",
    "high", "k", "buffers", "histogram", "steps", "lines", "log_lines", "lease_s", "timeout_s",
    "ttl_s", "role", "note", "data", "dry_run", "if_step", "preview", "reset_moments",
    "allow_nonfinite",
    "dtype", "every_steps", "format", "include", "keep_every", "keep_last", "max_shard_size",
    "tied", "verify", "merge", "replace", "incarnation_floor", "world_size", "if-none-match",
    # Of the job of the path: its tensors, ranks, steps and groups.
    "filter", "patterns", "name_map", "ops", "rank", "rank_hosts", "replica", "step", "group",
    "optimizer", "values", "adapter", "weights_from", "succeeds",
}  # fmt: skip
_TENSORS = {
    "get_param", "get_heatmap", "get_histogram", "get_spectrum", "get_values", "list_params",
}  # fmt: skip
"""Operations whose `name` is a tensor's."""


def test_the_table_has_every_operation_that_takes_a_name_of_something() -> None:
    document = json.loads((Path(__file__).parents[2] / "client/web/openapi.json").read_text())
    schemas, found = document["components"]["schemas"], set()
    for described in document["paths"].values():
        for operation in described.values():
            name = operation["operationId"]
            inside = {one["name"] for one in operation.get("parameters", ()) if one["in"] != "path"}
            inside |= {one["name"] for one in operation.get("parameters", ())} - {"job"}
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            reference = body.get("schema", {}).get("$ref", "")
            if reference:
                inside |= set(schemas[reference.rpartition("/")[2]]["properties"])
            inside -= PLAIN | ({"name"} if name in _TENSORS else set())
            found |= {(name, one) for one in inside}
    assert found == set(TABLE)


def test_tests_that_the_table_names_are_there() -> None:
    for shown_by in {row.shown_by for row in TABLE.values() if isinstance(row.shown_by, str)}:
        file, _, name = shown_by.partition("::")
        assert f"def {name}(" in (Path(__file__).parents[1] / file).read_text(), shown_by


PROBES = {
    row.shown_by: "-".join(key) for key, row in TABLE.items() if not isinstance(row.shown_by, str)
}
"""Each probe once, with the last row that it shows."""


@pytest.mark.parametrize("probe", PROBES, ids=PROBES.values())
def test_a_token_for_some_jobs_gets_at_nothing_of_another(probe: Probe, two: Two) -> None:
    probe(two)
    job_of_their_edit_stands(two)
    names = [one["id"] for one in two.owner("GET", "/export-schedules")["schedules"]]
    assert names == [two.theirs["schedule"]]
    assert two.owner("GET", f"/exports/{two.theirs['export']}")["state"] == "DONE"
