"""A revoked token, with real processes: its tickets are refused and what runs with them ends."""

import base64
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import httpx2
import pytest
import torch

import paramd
from paramd.cli.main import main
from paramd.errors import DeniedError
from paramd.memory import handover
from paramd.mesh.mesh import Mesh
from paramd.places import job_dir
from paramd.security.tickets import handed, shown_of
from paramd.v1 import sidecar_pb2 as pb
from paramd.v1 import sidecar_pb2_grpc
from tests.integration.client_job import JOB, Job, running_job, wait_for
from tests.integration.test_client import layout, write_arenas

WITHIN_S = 2.0
FAR_STEP = 1_000_000
RUNNING_S = 60.0
REVOKED = "has been revoked or has expired"


@pytest.fixture
def job() -> Iterator[Job]:
    with running_job(layout()) as job:
        yield job


class User:
    """Somebody with a token: a mesh, and calls and streams that go on."""

    def __init__(self, job: Job, name: str, stack: ExitStack, *, ttl_s: float = 3600.0) -> None:
        self.job, self.name = job, name
        self.url = job.url
        body = {"role": "editor", "ttl_s": ttl_s, "name": name}
        made = httpx2.post(f"{job.url}/api/v1/tokens", json=body, headers=_bearer(job.token))
        self.token = made.json()["token"]
        document = self.document().json()
        self.ticket, self.expires_s = document["ticket"], document["ticket_expires_s"]
        self.seed = document["ticket_seed"]
        self.mesh = stack.enter_context(paramd.connect(job.url, self.token))
        self.ended: dict[str, float] = {}
        self._stack = stack

    def document(self) -> httpx2.Response:
        return httpx2.get(f"{self.url}/api/v1/jobs/{JOB}", headers=_bearer(self.token))

    def shown(self, rank: int) -> str:
        """What that rank is shown of the ticket."""
        return shown_of(handed(self.ticket, self.seed), rank, self.job.layout.world_size)

    def call(self, rank: int, method: str, request: Any, *, timeout_s: float = 10.0) -> Any:
        """A future of a call with the ticket that was given before anything was revoked."""
        channel = self._stack.enter_context(grpc.insecure_channel(self.job.ranks[rank].address))
        stub = sidecar_pb2_grpc.SidecarServiceStub(channel)
        metadata = (("authorization", f"Bearer {self.shown(rank)}"),)
        return getattr(stub, method).future(request, timeout=timeout_s, metadata=metadata)

    def status(self, rank: int) -> tuple[grpc.StatusCode, str]:
        call = self.call(rank, "GetState", pb.GetStateRequest())
        return call.code(), call.details()

    def pin(self, *, at_step: int | None = None) -> pb.PinSnapshotRequest:
        digest = self.call(0, "GetState", pb.GetStateRequest()).result().header.layout_digest
        wanted = pb.PinSnapshotRequest(
            incarnation=self.job.incarnation, layout_digest=digest, spans=[pb.Span(begin=0, end=64)]
        )
        if at_step is not None:
            wanted.at_step = at_step
        return wanted

    def run_everything(self) -> None:
        """A waiting call, a follower of events, and a map over the Unix socket."""
        self.waiting = self.call(1, "PinSnapshot", self.pin(at_step=FAR_STEP), timeout_s=RUNNING_S)
        self.waiting.add_done_callback(lambda _: self._note("call"))
        pinned = self.call(0, "PinSnapshot", self.pin()).result()
        self.socket = handover.connect(self.job.ranks[0].socket_path)
        self._stack.callback(self.socket.close)
        mapping = {"op": "map", "ticket": self.shown(0), "snapshot_id": pinned.snapshot_id}
        handover.send(self.socket, mapping)
        self.socket.settimeout(RUNNING_S)
        self._stack.callback(_close, handover.receive(self.socket)[1])
        self._threads = [threading.Thread(target=work) for work in (self._events, self._map)]
        self._begun = threading.Semaphore(0)
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            assert self._begun.acquire(timeout=RUNNING_S)

    def wait_until_ended(self) -> None:
        for thread in self._threads:
            thread.join(RUNNING_S)
            assert not thread.is_alive()

    def _events(self) -> None:
        path = f"{self.url}/api/v1/jobs/{JOB}/events"
        headers = _bearer(self.token)
        with httpx2.stream("GET", path, headers=headers, timeout=RUNNING_S) as answer:
            assert answer.status_code == 200
            lines = answer.iter_lines()
            next(lines)
            self._begun.release()
            for _ in lines:
                pass
        self._note("events")

    def _map(self) -> None:
        self._begun.release()
        try:
            handover.receive(self.socket)
        except (EOFError, OSError):
            self._note("map")

    def _note(self, what: str) -> None:
        self.ended[what] = time.monotonic()


def _bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _claims(ticket: str) -> dict[str, Any]:
    payload = ticket.split(".")[1]
    found: dict[str, Any] = json.loads(
        base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4))
    )
    return found


def _refused_within(mesh: Mesh, deadline_s: float) -> None:
    while time.monotonic() < deadline_s:
        try:
            mesh.summon("rows")
        except DeniedError:
            return
    raise AssertionError("the mesh of a revoked token is still served")


def test_a_revoked_token_is_refused_and_cut_off_while_another_goes_on(job: Job) -> None:
    whole = write_arenas(job)
    with ExitStack() as stack:
        doomed, other = User(job, "doomed", stack), User(job, "other", stack)
        for user in (doomed, other):
            assert torch.equal(user.mesh.summon("rows")["rows"], whole["rows"])
            user.run_everything()

        assert main(("token", "revoke", "doomed")) == 0
        revoked_s = time.monotonic()
        _refused_within(doomed.mesh, revoked_s + WITHIN_S)
        doomed.wait_until_ended()
        wait_for(lambda: "call" in doomed.ended, "the waiting call ends")
        late = {what: at_s - revoked_s for what, at_s in doomed.ended.items()}
        assert late.keys() == {"call", "events", "map"}
        assert max(late.values()) < WITHIN_S, late
        code, text = doomed.waiting.code(), doomed.waiting.details()
        assert (code, REVOKED in text) == (grpc.StatusCode.UNAUTHENTICATED, True)
        assert doomed.expires_s > time.time() + 300, "its ticket has not expired"
        for rank in (0, 1):
            code, text = doomed.status(rank)
            assert (code, REVOKED in text) == (grpc.StatusCode.UNAUTHENTICATED, True)

        assert not other.waiting.done()
        assert other.ended == {}
        assert other.status(0)[0] is grpc.StatusCode.OK
        assert torch.equal(other.mesh.summon("rows")["rows"], whole["rows"])
        assert main(("token", "revoke", "other")) == 0
        other.wait_until_ended()


def test_a_sidecar_that_comes_back_alone_takes_no_ticket_before_it_is_told(job: Job) -> None:
    """Revoked while no sidecar ran there, and the control plane is away when it comes back."""
    with ExitStack() as stack:
        doomed, other = User(job, "unheard", stack), User(job, "heard", stack)
        job.ranks[0].process.kill()
        job.ranks[0].process.wait()
        assert main(("token", "revoke", "unheard")) == 0
        job.control.kill()
        job.control.wait()
        job.respawn(job.ranks[0])
        for user in (doomed, other):
            code, text = user.status(0)
            assert (code, "has not told it yet" in text) == (grpc.StatusCode.UNAVAILABLE, True)
        assert doomed.status(1)[0] is grpc.StatusCode.UNAUTHENTICATED
        assert other.status(1)[0] is grpc.StatusCode.OK, "who was told before goes on"


@pytest.mark.parametrize("how", ["token", "session"])
def test_calls_that_wait_and_streams_end_with_their_token_or_session(job: Job, how: str) -> None:
    with ExitStack() as stack:
        user = User(job, f"waits-{how}", stack)
        shown, cookies = _bearer(user.token), httpx2.Cookies()
        url = f"{job.url}/api/v1"
        if how == "session":
            opened = httpx2.post(f"{url}/session", headers=shown)
            shown, cookies = {"x-paramd-session": opened.json()["key"]}, opened.cookies
        client = httpx2.Client(headers=shown, cookies=cookies, timeout=RUNNING_S)
        stack.enter_context(client)
        # With data, it waits for an upload that never comes; so does who waits for its end.
        op = {"op": "set", "pattern": "rows", "data": True}
        made = client.post(f"{url}/jobs/{JOB}/edits", json={"ops": [op]})
        assert made.status_code == 201, made.text
        edit, begun = made.json()["id"], threading.Semaphore(0)
        answers: dict[str, httpx2.Response] = {}

        def wait() -> None:
            begun.release()
            answers["wait"] = client.get(f"{url}/jobs/{JOB}/edits/{edit}?wait_s=50")

        def follow() -> None:
            with client.stream("GET", f"{url}/jobs/{JOB}/events") as answer:
                lines = answer.iter_lines()
                next(lines)
                begun.release()
                for _ in lines:
                    pass
                answers["events"] = answer

        threads = [threading.Thread(target=work) for work in (wait, follow)]
        for thread in threads:
            thread.start()
            assert begun.acquire(timeout=RUNNING_S)
        ended_s = time.monotonic()
        if how == "token":
            assert main(("token", "revoke", user.name)) == 0
        else:
            assert client.delete(f"{url}/session").status_code == 204
        for thread in threads:
            thread.join(RUNNING_S)
            assert not thread.is_alive()
        assert time.monotonic() - ended_s < 30.0, "long before its 50 s"
        assert answers["wait"].status_code in (401, 403), answers["wait"].text
        assert "events" in answers


def test_who_joins_later_is_told_and_who_is_left_alone_remembers(job: Job) -> None:
    with ExitStack() as stack:
        doomed, short = User(job, "gone", stack), User(job, "short", stack, ttl_s=5.0)
        claims = _claims(short.ticket)
        assert claims["exp"] - claims["iat"] <= 5.0, "no ticket outlives its token"
        assert main(("token", "revoke", "gone")) == 0
        job.ranks[0].process.kill()
        job.respawn(job.ranks[0])
        wait_for(lambda: doomed.status(0)[0] is grpc.StatusCode.UNAUTHENTICATED, "rank 0 is told")
        # A busy machine may have been at the respawn for longer than the token lived.
        looked_s = max(short.expires_s, time.time())
        wait_for(lambda: short.status(1)[0] is grpc.StatusCode.UNAUTHENTICATED, "short expires")
        assert time.time() < looked_s + WITHIN_S, "not only after the leeway for clocks"
        assert REVOKED in short.status(1)[1]
        job.control.kill()
        job.control.wait()
        for rank in (0, 1):
            assert doomed.status(rank)[0] is grpc.StatusCode.UNAUTHENTICATED
        log = (job_dir(JOB) / "rank-1.log").read_text()
        assert "tokens-revoked" in log
        assert doomed.token not in log
