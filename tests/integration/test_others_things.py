"""What is another team's, asked by name: each operation that takes a key, a path, an id, a prefix,
a mark, a series or a destination, asked with a token for some jobs about things of another job.

A site with two real trainings, team-a-run and team-b-run. `TABLE` says of each operation of REST
and object who may use it, `RPC_TABLE` of each method of gRPC and name in its request, and a probe
(or the test named there) shows it.
"""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from google.protobuf.descriptor import Descriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from paramd.security.tickets import handed, shown_of
from paramd.v1 import control_pb2, sidecar_pb2, sidecar_pb2_grpc
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
    **{
        ("get_other_history", name): Row(
            "the owner",
            no_admin("GET", f"/other-jobs/{OURS}/history?incarnation=1&metric=step&subject=0"),
        )
        for name in ("metric", "subject", "incarnation")
    },
    ("list_other_series", "incarnation"): Row(
        "the owner", no_admin("GET", f"/other-jobs/{OURS}/series?incarnation=1")
    ),
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
    "allow_nonfinite", "on",
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
    named = {row.shown_by for row in TABLE.values() if isinstance(row.shown_by, str)}
    for shown_by in named | {row.shown_by for row in RPC_TABLE.values() if row.shown_by}:
        file, _, name = shown_by.partition("::")
        assert f"def {name}(" in (Path(__file__).parents[1] / file).read_text(), shown_by


@dataclass
class Rpc:
    """Both jobs' sidecars and the control plane over gRPC, with the tickets of our token."""

    two: Two
    channels: dict[str, grpc.Channel]
    """By job; the control plane's is nameless."""
    ours: dict[str, str]
    """What our token's ticket is at a sidecar ("rank") and at the control plane ("control")."""
    owner: str
    """What the owner's ticket for their job is at their sidecar."""
    named: dict[str, str]
    """Ids and names of theirs, by field."""

    def ask(self, at: str, method: str, request: Message, ticket: str) -> grpc.StatusCode:
        """The status of a call of raw bytes."""
        service = "SidecarService" if at else "ControlService"
        call = self.channels[at].stream_stream(f"/paramd.v1.{service}/{method}")(
            iter([request.SerializeToString()]),
            timeout=60,
            metadata=[("authorization", f"Bearer {ticket}")] if ticket else [],
        )
        with suppress(grpc.RpcError):
            list(call)
        found: grpc.StatusCode = call.code()
        return found


@contextmanager
def rpc_of(two: Two) -> Iterator[Rpc]:
    """The other team has a snapshot over gRPC, an edit, an export and a mark."""
    with ExitStack() as stack:
        theirs = two.owner("GET", "?rank=0")
        ours = two.ask("get_job", "GET", "").json()
        both = handed(ours["ticket"], ours["ticket_seed"])
        addresses = {
            OURS: ours["peers"][0]["address"],
            THEIRS: theirs["peers"][0]["address"],
            "": two.control.grpc_address,
        }
        channels = {
            job: stack.enter_context(
                grpc.insecure_channel(where, [("grpc.use_local_subchannel_pool", 1)])
            )
            for job, where in addresses.items()
        }
        shown = {"rank": shown_of(both, 0, 1), "control": shown_of(both, None, 1)}
        stub: Any = sidecar_pb2_grpc.SidecarServiceStub(channels[THEIRS])
        bearer = [("authorization", f"Bearer {theirs['ticket']}")]
        header = stub.GetState(sidecar_pb2.GetStateRequest(), metadata=bearer, timeout=60).header
        pinned = stub.PinSnapshot(
            sidecar_pb2.PinSnapshotRequest(
                incarnation=header.incarnation,
                layout_digest=header.layout_digest,
                spans=[sidecar_pb2.Span(begin=0, end=8)],
                lease_ms=300_000,
            ),
            metadata=bearer,
            timeout=60,
        )
        snapshot = pinned.snapshot_id
        named = dict.fromkeys(_SNAPSHOTS, snapshot) | {
            "edit_id": two.theirs["edit"].replace("-", ""), "undo_of": two.theirs["edit"],
            "mark": "their-mark", "export_id": two.theirs["export"], "key": f"{THEIRS}/best",
            "destination": "checkpoints", "root": str(two.folder), "job": THEIRS, "jobs": "*",
            "name": MANIFEST, "names": MANIFEST, "fqn": "weight", "pattern": "*", "patterns": "*",
        }  # fmt: skip
        yield Rpc(two, channels, shown, theirs["ticket"], named)
        renewed = sidecar_pb2.RenewSnapshotRequest(snapshot_id=snapshot, lease_ms=300_000)
        stub.RenewSnapshot(renewed, metadata=bearer, timeout=60)
        released = sidecar_pb2.ReleaseSnapshotRequest(snapshot_id=snapshot)
        stub.ReleaseSnapshot(released, metadata=bearer, timeout=60)


_SNAPSHOTS = (
    "snapshot_id", "snapshot_ids", "before_snapshot_id", "after_snapshot_id",
    "gradients_snapshot_id", "facts_snapshot_id",
)  # fmt: skip


def texts_of(kind: Descriptor, within: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The paths of all fields of a message, and of its parts, that have text."""
    for one in kind.fields:
        if one.message_type is not None:
            is_map = one.message_type.GetOptions().map_entry
            if not is_map and one.message_type.full_name not in OF_REPORTS:
                yield from texts_of(one.message_type, (*within, one.name))
        elif one.type == one.TYPE_STRING:
            yield *within, one.name


def saying(message: Message, path: tuple[str, ...], text: str) -> Message:
    """The message with a text at the path."""
    part: Any = message
    for name in path[:-1]:
        repeated = part.DESCRIPTOR.fields_by_name[name].is_repeated
        part = getattr(part, name).add() if repeated else getattr(part, name)
    if part.DESCRIPTOR.fields_by_name[path[-1]].is_repeated:
        getattr(part, path[-1]).append(text)
    else:
        setattr(part, path[-1], text)
    return message


RPC_PLAIN = {
    # Forms, kinds, options and words of a person.
    "dtype", "state_key", "values_json", "by", "adapter", "weights_from", "address",
    # Of the layout that the sidecar has, and of names in the files of an export.
    "layout_digest", "source", "target", "missing", "replicas_differ",
}  # fmt: skip
OF_REPORTS = {"paramd.v1.RankState", "paramd.v1.Peer", "paramd.v1.Header"}
"""What ranks say of themselves."""

SERVICES: dict[str, ServiceDescriptor] = {
    "SidecarService": sidecar_pb2.DESCRIPTOR.services_by_name["SidecarService"],
    "ControlService": control_pb2.DESCRIPTOR.services_by_name["ControlService"],
}

_C = grpc.StatusCode
_OF_JOB = "tickets of the sidecar's job"
_PINNED = "tickets of the sidecar's job, with an id that only who pinned has"
_READS = "tickets of the sidecar's job, with one that reads its other ranks"
_ORDER = "the control plane of the job, by an order for this very call"
_NOT_THERE = (_C.NOT_FOUND, _C.INVALID_ARGUMENT)
_REFUSED = (_C.PERMISSION_DENIED,)
_NOT_SO = (*_NOT_THERE, _C.FAILED_PRECONDITION)
_STAGES = (
    "integration/test_sidecar_edits.py::test_only_the_token_that_stages_an_edit_adds_data_to_it"
)


@dataclass(frozen=True)
class RpcRow:
    """Who may name a thing to a method, and how ours are answered who name theirs."""

    who: str
    codes: tuple[grpc.StatusCode, ...]
    """At our own sidecar, or the control plane; at theirs always UNAUTHENTICATED."""
    shown_by: str = ""
    """A test that shows more, from tests/."""


RPC_TABLE: dict[tuple[str, str], RpcRow] = {
    ("PinSnapshot", "mark"): RpcRow(_OF_JOB, _NOT_SO),
    ("StageEdit", "edit_id"): RpcRow("tickets of the token that staged it", _NOT_SO, _STAGES),
    ("StageEdit", "undo_of"): RpcRow(_OF_JOB, _NOT_SO),
    ("StageEdit", "mark"): RpcRow(_OF_JOB, _NOT_SO),
    ("StageEdit", "fqn"): RpcRow(_OF_JOB, _NOT_SO),
    ("GetEdit", "edit_id"): RpcRow(_OF_JOB, _NOT_THERE),
    ("PreviewEdit", "edit_id"): RpcRow(_OF_JOB, _NOT_THERE),
    ("GrantStream", "edit_id"): RpcRow("tickets of the token that staged it", _NOT_THERE),
    ("StreamGradients", "pattern"): RpcRow(_READS, _REFUSED),
    ("Summon", "pattern"): RpcRow(_READS, _REFUSED),
    ("ReleaseSnapshot", "snapshot_id"): RpcRow(f"{_PINNED}; idempotent", (_C.OK,)),
    **{
        (method, name): RpcRow(_PINNED, _NOT_THERE)
        for method, names in {
            "ReadSnapshot": ("snapshot_id",),
            "GrantStream": ("snapshot_id",),
            "RenewSnapshot": ("snapshot_id",),
            "ComputeStats": ("snapshot_id", "before_snapshot_id"),
            "PoolSnapshot": ("snapshot_id",),
            "ProfileSnapshot": ("snapshot_id",),
            "MultiplySnapshot": ("snapshot_id",),
            "DigestSnapshot": ("snapshot_id",),
            "DeltaSnapshot": ("snapshot_id",),
            "ReplayUpdate": _SNAPSHOTS[2:],
        }.items()
        for name in names
    },
    **{
        (method, name): RpcRow(_ORDER, _REFUSED)
        for method, names in {
            "ReachBoundary": ("edit_id", "snapshot_ids"),
            "DropEdit": ("edit_id",),
            "MakeMark": ("mark",),
            "DropMark": ("mark",),
            **dict.fromkeys(
                ("StoreExportFile", "VerifyExportFile", "ReadExportFile"), ("name",)
            ),
            "DropExport": ("names",),
            "WriteExportFile": ("patterns", "snapshot_id"),
            "FinishExport": ("name", "patterns", "snapshot_id"),
        }.items()
        for name in names
    },
    **{
        (f"{method}", name): RpcRow(_ORDER, _REFUSED)
        for method in (
            "BeginExport", "WriteExportFile", "StoreExportFile", "VerifyExportFile",
            "ReadExportFile", "FinishExport", "DropExport",
        )
        for name in ("destination", "export_id", "job", "jobs", "key", "root")
    },
    ("ProveControl", "job"): RpcRow("anybody: it is told who answers", _NOT_THERE),
    ("ScheduleBoundary", "job"): RpcRow("tickets of that job", (_C.FAILED_PRECONDITION,)),
    ("ScheduleBoundary", "snapshot_id"): RpcRow(_PINNED, (_C.FAILED_PRECONDITION,)),
}  # fmt: skip


def test_the_table_has_every_method_that_takes_a_name_of_something() -> None:
    found = {
        (method.name, path[-1])
        for service in SERVICES.values()
        for method in service.methods
        for path in texts_of(method.input_type)
        if path[-1] not in RPC_PLAIN and method.name != "Join"  # what a rank says of itself
    }
    assert found == set(RPC_TABLE)


def test_over_grpc_a_token_for_some_jobs_gets_at_nothing_of_another(two: Two) -> None:
    """Every name of every method: at their sidecar the ticket is none, whatever is asked; at ours
    their ids are unknown, or it takes an order of the control plane."""
    wrong = []
    with rpc_of(two) as rpc:
        for service, described in SERVICES.items():
            at_control = service == "ControlService"
            for method in described.methods:
                kind = GetMessageClass(method.input_type)
                for path in texts_of(method.input_type):
                    row = RPC_TABLE.get((method.name, path[-1]))
                    if row is None:
                        continue
                    asked = saying(kind(), path, rpc.named[path[-1]])
                    if at_control:
                        code = rpc.ask("", method.name, asked, rpc.ours["control"])
                    else:
                        code = rpc.ask(THEIRS, method.name, asked, rpc.ours["rank"])
                        if code is not _C.UNAUTHENTICATED:
                            wrong.append((method.name, path, "theirs", code))
                        code = rpc.ask(OURS, method.name, asked, rpc.ours["rank"])
                    if code not in row.codes:
                        wrong.append((method.name, path, "ours", code))
                if not at_control:
                    code = rpc.ask(THEIRS, method.name, kind(), rpc.ours["rank"])
                    is_open = method.name == "FindControl"
                    assert code is (_C.OK if is_open else _C.UNAUTHENTICATED), method.name
        join = control_pb2.JoinRequest(world_size=1)
        join.header.job, join.header.incarnation = THEIRS, 1
        assert rpc.ask("", "Join", join, rpc.ours["control"]) is _C.PERMISSION_DENIED
        assert rpc.ask("", "Join", join, "") is _C.UNAUTHENTICATED
    assert not wrong
    job_of_their_edit_stands(two)
    assert two.manifest(f"{THEIRS}/best")["job"] == THEIRS


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
