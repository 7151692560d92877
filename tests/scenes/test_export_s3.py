"""Exports into an object store: a real S3 protocol server, real multipart uploads."""

from __future__ import annotations

import json
import secrets
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import boto3
import grpc
import pytest
import torch
from safetensors.torch import load

from paramd import bounds
from paramd.errors import ConflictError, DataLossError, DeniedError, NotFoundError, ParamdError
from paramd.layout.exports.settings import ExportSettings
from paramd.mesh.exports.calls import ExportState
from paramd.v1.export_pb2 import ExportTarget
from paramd_service.destinations import object_store
from paramd_service.destinations.destinations import MANIFEST
from paramd_service.destinations.object_store import ObjectPlace
from paramd_service.destinations.open import open_place
from tests.integration.export_job import ExportingJob, exporting_job, until
from tests.integration.export_mesh import raw, still_mesh
from tests.integration.test_exports_faults import all_joined, ended, killed_in_the_middle

BUCKET = "checkpoints"
_SERVER = """
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
import threading
threading.Event().wait()
"""
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}


class Store:
    """The server, and what is in it."""

    def __init__(self, port: int) -> None:
        address = f"http://127.0.0.1:{port}"
        self.options = {"endpoint": address, "region": "us-east-1", "allow_http": "true"}
        self.s3 = boto3.client("s3", endpoint_url=self.options["endpoint"], region_name="us-east-1")
        self.s3.create_bucket(Bucket=BUCKET)

    def names(self) -> set[str]:
        found = self.s3.list_objects_v2(Bucket=BUCKET)
        return {item["Key"] for item in found.get("Contents", [])}

    def uploads(self) -> int:
        return len(self.s3.list_multipart_uploads(Bucket=BUCKET).get("Uploads", []))

    def end_uploads(self) -> None:
        """Removes parts of uploads that nobody goes on with, as a bucket's lifecycle rule does."""
        found = self.s3.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
        for one in found:
            self.s3.abort_multipart_upload(Bucket=BUCKET, Key=one["Key"], UploadId=one["UploadId"])

    def target(self, root: str, **fields: Any) -> ExportTarget:
        return ExportTarget(destination="cloud", root=root, options=self.options, **fields)

    def place(self, key: str, **fields: object) -> ObjectPlace:
        fields = {"export_id": secrets.token_hex(16), "overwrite": False, **fields}
        found = open_place(self.target(f"s3://{BUCKET}/pre", key=key, **fields))
        assert isinstance(found, ObjectPlace)
        return found


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> None:
    """Not looked at here: the store's client keeps its connections as long as the process."""


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    command = [sys.executable, "-c", _SERVER]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as server,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in KEYS.items():
            patch.setenv(name, value)
        assert server.stdout is not None
        try:
            found = Store(int(server.stdout.readline()))
            yield found
            found.s3.close()
        finally:
            server.kill()


def nothing(_: str) -> None:
    pass


def test_an_export_goes_there_in_parts_and_its_marker_last(store: Store, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(2)
    shapes = {"a": (1_000, 5_001), "b": (7,)}
    tensors = {name: torch.randn(*one, generator=generator) for name, one in shapes.items()}
    with still_mesh(tmp_path / "m", tensors, "fsdp2", ranks=2, same_host=False) as mesh:
        target = mesh.target(f"s3://{BUCKET}/pre", "run/one")
        for name, value in store.options.items():
            target.options[name] = value
        files = mesh.export(ExportSettings(max_shard_bytes=1_000_000), target)
        assert store.names() == {f"pre/run/one/{file.name}" for file in files}
        found = {}
        for file in files:
            if file.name.endswith(".safetensors"):
                body = store.s3.get_object(Bucket=BUCKET, Key=f"pre/run/one/{file.name}")
                found |= load(body["Body"].read())
        assert {name: raw(tensor) for name, tensor in found.items()} == {
            name: raw(tensor) for name, tensor in tensors.items()
        }
        again = mesh.target(f"s3://{BUCKET}/pre", "run/one")
        again.options.update(store.options)
        with pytest.raises(grpc.RpcError, match="exists"):
            mesh.begin(again)
        for file in files:
            assert mesh.verify(1, target, file.name, finished=True) == file
        mesh.drop(target, finished=True)
        assert store.names() == set()
    assert store.uploads() == 0


def test_a_job_exports_into_a_bucket_whole_or_not_at_all_when_its_writer_is_killed(
    store: Store, tmp_path: Path
) -> None:
    """Through the control plane, as users do: a sidecar or the control plane is killed amid it."""
    cloud = {"root": f"s3://{BUCKET}/jobs", **store.options}
    with exporting_job(tmp_path, cloud=cloud) as site:
        site.job.train(lambda rank, step: None, 0.02)
        with site.connect() as mesh:
            until(lambda: all_joined(site), "a whole mesh")
            for point in ("export-chunk",):
                site.arm(1, f"{point}:kill")
                export = mesh.export(f"cloud/{point}", max_shard_size=200)
                ended_as = mesh.export_ended(export.info, 60)
                assert site.job.ranks[1].process.wait(10) == -signal.SIGKILL, f"passed {point}"
                check_bucket(store, site, f"jobs/{point}/", ended_as.state, ended_as.reason)
                site.disarm()
                site.job.respawn(site.job.ranks[1])
                until(lambda: all_joined(site), "a whole mesh")
        body = {"destination": "cloud/on", "max_shard_size": "200"}
        killed_in_the_middle(site, body, "ab" * 16)
        assert f"jobs/on/{MANIFEST}" not in store.names(), "it is not visible half-way"
        site.restart_control()
        found = ended(site, "ab" * 16)
        check_bucket(store, site, "jobs/on/", ExportState(found["state"]), found["reason"])
        with site.connect() as mesh:
            last = mesh.export("cloud/last").wait(60)
        check_bucket(store, site, "jobs/last/", last.state, "")
        assert last.state is ExportState.DONE
    for name in store.names():
        store.s3.delete_object(Bucket=BUCKET, Key=name)
    store.end_uploads()


def check_bucket(
    store: Store, site: ExportingJob, prefix: str, state: ExportState, reason: str
) -> None:
    """DONE with all bytes right, or FAILED with the cause and no object left there."""
    if state is not ExportState.DONE:
        assert (state, bool(reason)) == (ExportState.FAILED, True)
        until(lambda: not [n for n in store.names() if n.startswith(prefix)], "the removal")
        return
    names = [name for name in store.names() if name.startswith(prefix)]
    assert prefix + MANIFEST in names
    found = {}
    for name in names:
        if name.endswith(".safetensors"):
            found |= load(store.s3.get_object(Bucket=BUCKET, Key=name)["Body"].read())
    assert {name: raw(one) for name, one in found.items()} == {
        name: raw(one) for name, one in site.whole.items()
    }


def test_an_upload_given_up_leaves_no_parts(store: Store) -> None:
    place = store.place("given-up")
    place.begin(0)
    sink = place.create("model.safetensors", 40 << 20)
    for _ in range(3):
        sink.write(memoryview(bytes(8 << 20)))
    sink.abort()
    place.drop(["model.safetensors"], finished=False)
    assert store.names() == set()
    assert store.uploads() == 0


def test_only_one_export_at_a_time_has_a_key(store: Store) -> None:
    one = store.place("key")
    one.begin(0)
    one.begin(0)
    other = store.place("key")
    with pytest.raises(ConflictError, match="in progress"):
        other.begin(0)
    other.drop([], finished=False)
    assert store.names() == {"pre/key/.paramd-export"}
    sink = one.create("a", 3)
    sink.write(memoryview(b"abc"))
    sink.finish()
    small = {MANIFEST: json.dumps({"export_id": one.target.export_id, "files": []}).encode()}
    with pytest.raises(DataLossError):
        one.commit(small, {"a": 4}, nothing)
    assert f"pre/key/{MANIFEST}" not in store.names()
    one.commit(small, {"a": 3}, nothing)
    one.commit(small, {"a": 3}, nothing)
    assert store.names() == {"pre/key/a", f"pre/key/{MANIFEST}"}
    with pytest.raises(ConflictError, match="exists"):
        store.place("key").begin(0)
    store.place("key", overwrite=True).begin(0)
    assert f"pre/key/{MANIFEST}" not in store.names()
    for name in store.names():
        store.s3.delete_object(Bucket=BUCKET, Key=name)


def test_two_that_finish_at_once_do_not_both_win(store: Store) -> None:
    one, other = store.place("race"), store.place("race", overwrite=True)
    one.begin(0)
    other.begin(0)
    marker = {MANIFEST: json.dumps({"export_id": other.target.export_id, "files": []}).encode()}
    with pytest.raises(ConflictError, match="meanwhile"):
        one.commit({MANIFEST: b"{}"}, {}, nothing)
    one.drop([], finished=True)
    other.commit(marker, {}, nothing)
    with pytest.raises(ConflictError, match="meanwhile"):
        one.commit({MANIFEST: b"{}"}, {}, nothing)
    other.drop([], finished=True)
    assert store.names() == set()


@pytest.mark.parametrize("there", [(MANIFEST, "a"), ("a",)])
def test_who_gave_up_or_was_killed_at_its_begin_removes_nothing_of_others(
    store: Store, there: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in there:
        store.s3.put_object(Bucket=BUCKET, Key=f"pre/late/{name}", Body=b"{}")
    late = store.place("late", overwrite=True)

    monkeypatch.setattr(late, "_delete_export", Mock(side_effect=OSError("killed")))
    with pytest.raises(ParamdError):
        late.begin(0)
    late.drop(["a"], finished=True)
    assert store.names() == {f"pre/late/{name}" for name in there}
    for name in there:
        store.s3.delete_object(Bucket=BUCKET, Key=f"pre/late/{name}")


def test_a_bucket_that_is_gone_is_named(store: Store) -> None:
    target = store.target("s3://no-such-bucket/x", key="k", export_id=secrets.token_hex(16))
    with pytest.raises(NotFoundError, match="cloud/k"):
        open_place(target).begin(0)


MINE = "team-a-*"
"""Patterns of a token for some jobs."""


def written(store: Store, key: str, job: str, content: bytes, **fields: object) -> ObjectPlace:
    """A whole export with one file."""
    place = store.place(key, job=job, **fields)
    place.begin(0)
    sink = place.create("a", len(content))
    sink.write(memoryview(content))
    sink.finish()
    told = {"export_id": place.target.export_id, "job": job, "files": [{"name": "a"}]}
    place.commit({MANIFEST: json.dumps(told).encode()}, {"a": len(content)}, nothing)
    return place


@pytest.fixture
def emptied(store: Store) -> Iterator[Store]:
    yield store
    for name in store.names():
        store.s3.delete_object(Bucket=BUCKET, Key=name)


@pytest.mark.parametrize("name", [MANIFEST, object_store.RESERVATION])
def test_what_lies_there_takes_no_more_memory_than_an_export_could(
    emptied: Store, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limits are smaller here; the store says what it likes of the size."""
    monkeypatch.setattr(bounds, "MANIFEST", replace(bounds.MANIFEST, most_bytes=1 << 20))
    emptied.s3.put_object(Bucket=BUCKET, Key=f"pre/best/{name}", Body=bytes(32 << 20))
    place = emptied.place("best", overwrite=True)
    tracemalloc.start()
    try:
        with pytest.raises(DataLossError, match=f"{name} has over .* did not write it"):
            place.begin(0)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_key_under_which_anybody_put_anything_is_listed_so_far(
    emptied: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(25):
        emptied.s3.put_object(Bucket=BUCKET, Key=f"pre/best/{number:02}", Body=b"")
    with pytest.raises(ConflictError, match="exists"):
        emptied.place("best").begin(0)
    monkeypatch.setattr(object_store, "LISTED", 5)
    monkeypatch.setattr(bounds, "LISTED", 20)
    with pytest.raises(DataLossError, match="over 20 objects"):
        emptied.place("best").commit({MANIFEST: b"{}"}, {"99": 0}, nothing)


def test_a_token_for_some_jobs_replaces_and_occupies_nothing_of_others(emptied: Store) -> None:
    written(emptied, "team-a-run/best", "team-b-run", b"theirs")
    mine: dict[str, object] = {"job": "team-a-run", "jobs": MINE, "overwrite": True}
    with pytest.raises(DeniedError, match="writes only below"):
        emptied.place("team-b-run/best", **mine).begin(0)
    for key in ("team-a-run/best", "team-a-run/best/inner"):
        with pytest.raises(ConflictError, match="not an export of your jobs"):
            emptied.place(key, **mine).begin(0)
    assert emptied.names() == {f"pre/team-a-run/best/{name}" for name in ("a", MANIFEST)}
    written(emptied, "team-a-run/ours", "team-a-other", b"first")
    written(emptied, "team-a-run/ours", "team-a-run", b"second", jobs=MINE, overwrite=True)
    body = emptied.s3.get_object(Bucket=BUCKET, Key="pre/team-a-run/ours/a")["Body"].read()
    assert body == b"second"


def test_a_token_for_some_jobs_takes_no_reservation_of_others(
    emptied: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, mine = "team-a-run/next", {"job": "team-a-run", "jobs": MINE, "overwrite": True}
    theirs = emptied.place(key, job="team-b-run")
    theirs.begin(0)
    late = emptied.place(key, **mine)
    with pytest.raises(ConflictError, match="not an export of your jobs"):
        late.begin(0)
    late.drop([], finished=True)
    reservation = f"pre/{key}/.paramd-export"
    assert emptied.names() == {reservation}
    theirs.drop([], finished=False)
    # One of its own jobs is taken over, but not what comes in its place at that moment.
    emptied.place(key, job="team-a-other").begin(0)
    real, came = object_store.covers, []

    def covers(jobs: str, job: str) -> bool:
        if job == "team-a-other":
            came.append(emptied.s3.put_object(Bucket=BUCKET, Key=reservation, Body=b"theirs"))
        return real(jobs, job)

    with monkeypatch.context() as patch:
        patch.setattr(object_store, "covers", covers)
        with pytest.raises(ConflictError, match="at this moment"):
            late.begin(0)
    assert len(came) == 1
    emptied.s3.put_object(Bucket=BUCKET, Key=reservation, Body=f"{'ab' * 16} team-a-x".encode())
    late.begin(0)
    late.drop([], finished=False)
    assert emptied.names() == set()


def test_a_token_for_some_jobs_reads_the_export_whose_manifest_it_was_shown(
    emptied: Store,
) -> None:
    key = "team-a-run/read"
    reading: dict[str, object] = {"jobs": MINE, "export_id": "0" * 32}
    refused = set()
    written(emptied, "team-b-run/best", "team-b-run", b"theirs")
    for other, name in (("team-b-run/best", "a"), ("team-b-run/best", MANIFEST), ("none", "a")):
        with pytest.raises(NotFoundError) as caught:
            emptied.place(other, **reading).open(name, finished=True)
        refused.add(str(caught.value).replace(other, "KEY"))
    assert len(refused) == 1, "it does not tell what is there"
    written(emptied, key, "team-a-run", b"ours")
    source = emptied.place(key, **reading).open("a", finished=True)
    assert source.read(1, 9) == b"urs"
    written(emptied, key, "team-b-run", b"more", overwrite=True)
    with pytest.raises(ParamdError):
        source.read(0, 4)
