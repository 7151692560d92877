"""REST over real sidecars: its numbers are those of the tensors that lie in the arenas."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import httpx2
import pytest
import torch

from paramd.layout.types import Box, Layout, Piece, TensorKind, TensorLayout
from paramd.memory.control_page import Word
from paramd_service.control.access.roles import ELEMENTS_OF_BIN, SMALL_NUMEL
from paramd_service.control.mesh.statistics import MAX_HELD
from tests.integration.client_job import Job, running_job, wait_for
from tests.integration.test_client import layout, write_arenas

WHOLE = ("rows", "columns", "flat", "both", "turned")


class Rest:
    """GETs and POSTs to a job's control plane, checked for their status."""

    def __init__(self, job: Job, token: str = "") -> None:
        self.job = job
        self.token = token or job.token

    def another(self, role: str) -> Rest:
        """The same with a new token of that role."""
        with self.client() as client:
            answer = client.post(f"{self.job.url}/api/v1/tokens", json={"role": role})
        assert answer.status_code == 201, answer.text
        return Rest(self.job, answer.json()["token"])

    def client(self) -> httpx2.Client:
        """A client of its own: no connection outlives the request that it was made for."""
        return httpx2.Client(
            base_url=f"{self.job.url}/api/v1/jobs/client-test",
            headers={"authorization": f"Bearer {self.token}"},
            trust_env=False,
            timeout=40.0,
        )

    def joined_count(self) -> int:
        with self.client() as client:
            found = client.get(f"{self.job.url}/api/v1/jobs/client-test").json()
        return int(found["joined_count"])

    def get(self, path: str, status: int = 200, **query: Any) -> Any:
        return self.ask("GET", path, status, params=query).json()

    def ask(self, method: str, path: str, status: int, **given: Any) -> httpx2.Response:
        with self.client() as client:
            answer = client.request(method, path, **given)
        assert answer.status_code == status, answer.text
        return answer


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Rest, dict[str, Any]]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARAMD_STATE_DIR", str(tmp_path_factory.mktemp("state")))
        with running_job(with_large(layout())) as job:
            whole = write_arenas(job)
            job.update(lambda rank, step: None)
            asked = Rest(job)
            wait_for(lambda: asked.joined_count() == 2, "both ranks join")
            asked.get("/params/values", name="both")
            yield asked, whole


def with_large(small: Layout) -> Layout:
    """The same with a tensor of which viewers may have statistics."""
    piece = Piece(0, 640, Box((0, 0), (16, 4)))
    large = TensorLayout("large", "float32", (16, 4), TensorKind.PARAMETER, (piece,))
    return replace(small, tensors=(*small.tensors, large))


Ready = tuple[Rest, dict[str, Any]]


def test_filters_choose_by_name_fact_and_statistic(rest: Ready) -> None:
    asked, whole = rest
    names = [one["name"] for one in asked.get("/params")["params"]]
    assert names == [tensor.fqn for tensor in asked.job.layout.tensors]
    found = asked.get("/params", filter="numel>=20 dtype=float32 kind=parameter")
    assert [one["name"] for one in found["params"]] == ["rows", "columns", "turned", "large"]
    assert (found["step"], found["partial"]) == (-1, False)
    norms = {name: float(whole[name].double().norm()) for name in WHOLE}
    bound = sorted(norms.values())[2] + 1e-3
    found = asked.get("/params", filter=f"{' '.join(WHOLE)} norm>{bound}")
    assert {one["name"] for one in found["params"]} == {n for n, v in norms.items() if v > bound}
    assert found["step"] == 1
    stats = asked.get("/params/stats", filter=f"{' '.join(WHOLE)} norm>{bound}")
    assert {one["name"]: one["norm"] for one in stats["stats"]} == {
        n: pytest.approx(v) for n, v in norms.items() if v > bound
    }


def test_pages_join_up(rest: Ready) -> None:
    asked, _ = rest
    queries: list[dict[str, Any]] = [{}, {"filter": "* nan=0"}, {"sort": "-norm"}]
    for wanted in queries:
        whole = asked.get("/params", **wanted)
        names, token, steps = [], "", set()
        while True:
            page = asked.get("/params", **wanted, limit=2, page_token=token)
            assert page["total_count"] == whole["total_count"]
            names += [one["name"] for one in page["params"]]
            steps.add(page["step"])
            token = page["next_page_token"]
            if not token:
                break
        assert names == [one["name"] for one in whole["params"]]
        assert len(steps) == 1
    for token in ("!", "AAAA", "MTo=", "LTE6eA=="):
        problem = asked.get("/params", page_token=token, status=422 if token != "MTo=" else 200)
        assert token == "MTo=" or problem["type"] == "urn:paramd:error:usage"


def test_the_largest_comes_first_and_what_is_not_known_last(rest: Ready) -> None:
    asked, _ = rest
    norms = {one["name"]: one["norm"] for one in asked.get("/params/stats", filter="*")["stats"]}
    for sort, sign in (("-norm", -1), ("norm", 1)):
        found = [norms[one["name"]] for one in asked.get("/params", sort=sort)["params"]]
        known = [norm for norm in found if norm is not None]
        assert known == sorted(known, key=lambda norm: sign * norm)
        assert found[: len(known)] == known
    asked.get("/params", 422, sort="size")


@pytest.mark.parametrize("name", [*WHOLE, "scalar", "empty", "flags"])
def test_values_are_exact(rest: Ready, name: str) -> None:
    asked, whole = rest
    found = asked.get("/params/values", name=name)
    expected = whole[name].flatten().tolist()
    assert found["shape"] == list(whole[name].shape)
    assert [json.loads(text) for text in found["values"]] == expected


@pytest.mark.parametrize("mode", ["mean", "absmax", "min", "max"])
@pytest.mark.parametrize(
    ("name", "rows", "columns"),
    [(n, r, c) for n in ("rows", "columns", "flat", "turned") for r, c in ((2, 2), (3, 1), (9, 9))]
    + [("both", 1, 4), ("columns[1:6, 1:4]", 2, 3)],
)
def test_a_picture_merges_ranks_exactly(
    rest: Ready, mode: str, name: str, rows: int, columns: int
) -> None:
    asked, whole = rest
    found = asked.get("/params/heatmap", name=name, mode=mode, rows=rows, columns=columns)
    matrix = whole[name.partition("[")[0]].double()
    if "[" in name:
        matrix = matrix[1:6, 1:4]
    matrix = matrix.reshape(1, -1) if matrix.ndim == 1 else matrix
    height, width = min(rows, matrix.shape[0]), min(columns, matrix.shape[1])
    assert (found["cell_row_count"], found["cell_col_count"]) == (height, width)
    cells: dict[int, list[float]] = {}
    for r in range(matrix.shape[0]):
        for c in range(matrix.shape[1]):
            at = (r * height // matrix.shape[0]) * width + c * width // matrix.shape[1]
            cells.setdefault(at, []).append(float(matrix[r, c]))
    reduce = {"mean": lambda v: math.fsum(v) / len(v), "absmax": max, "min": min, "max": max}
    expected = [reduce[mode](cells[at]) for at in range(height * width)]
    assert found["values"] == pytest.approx(expected, rel=1e-6)
    assert found["nonfinite"] == []


def test_a_histogram_counts_every_element_once(rest: Ready) -> None:
    asked, whole = rest
    values = whole["columns"].double().flatten()
    found = asked.get("/params/histogram", name="columns", bins=7)
    assert sum(found["counts"]) == values.numel()
    assert (found["below_count"], found["above_count"]) == (0, 0)
    assert found["edges"][0] == float(values.min())
    found = asked.get("/params/histogram", name="columns", bins=4, low=20, high=60)
    edges = [20.0, 30.0, 40.0, 50.0, 60.0]
    assert found["edges"] == edges
    assert found["counts"] == [
        int(((values >= a) & (values < b)).sum()) for a, b in pairwise(edges)
    ]
    assert found["below_count"] == int((values < 20).sum())
    assert found["above_count"] == int((values >= 60).sum())
    assert asked.get("/params/histogram", 422, name="columns", low=3, high=3)
    assert asked.get("/params/histogram", 422, name="empty")


def test_a_snapshot_is_held_renewed_seen_and_released(rest: Ready) -> None:
    asked, _ = rest
    before = asked.get("/snapshots")
    assert (before["held"], before["partial"]) == ([], False)
    assert [rank["rank"] for rank in before["ranks"]] == [0, 1]
    body = {"filter": "rows columns numel>3", "lease_s": 60}
    made = asked.ask("POST", "/snapshots", 201, json=body).json()
    assert (made["step"], len(made["pins"])) == (1, 2)
    path = f"/snapshots/{made['id']}"
    assert asked.get(path)["id"] == made["id"]
    seen = asked.get("/snapshots")
    assert [held["id"] for held in seen["held"]] == [made["id"]]
    for rank, pin in zip(seen["ranks"], made["pins"], strict=True):
        assert pin["snapshot_id"][:8] in {lease["name"] for lease in rank["snapshots"]}
        assert pin["snapshot_id"] not in json.dumps(rank)
    renewed = asked.ask("POST", f"{path}/renew", 200, json={"lease_s": 200}).json()
    assert renewed["lease_left_s"] > 100
    asked.ask("DELETE", path, 204)
    asked.ask("DELETE", path, 204)
    wait_for(
        lambda: not any(rank["lease_count"] for rank in asked.get("/snapshots")["ranks"]),
        "its leases end",
    )
    asked.get(path, 404)
    refused = asked.ask("POST", "/snapshots", 422, json={"filter": "* norm>3"}).json()
    assert "about statistics" in refused["detail"]


def test_a_viewer_has_no_statistics_that_are_values(rest: Ready) -> None:
    admin, _ = rest
    sizes = {t.fqn: t.numel for t in admin.job.layout.tensors}
    small = [name for name in WHOLE if 0 < sizes[name] < SMALL_NUMEL]
    (large,) = [name for name, numel in sizes.items() if numel >= SMALL_NUMEL]
    viewer = admin.another("viewer")
    for name in small:
        for path in ("stats", "histogram"):
            query = {"filter": name} if path == "stats" else {"name": name}
            told = viewer.get(f"/params/{path}", 403, **query)
            assert "reveal values" in told["detail"]
            admin.get(f"/params/{path}", 200, **query)
    viewer.get("/params", 403, filter=f"{small[0]} norm>1")
    viewer.get("/grads", 403, filter=small[0])
    # Nor over time.
    for name in small:
        for metric in ("norm", "grad_norm"):
            refused = viewer.get("/history", 403, metric=metric, subject=name)
            assert "reveal values" in refused["detail"]
            admin.get("/history", metric=metric, subject=name)
    assert viewer.get("/history", metric="norm", subject=large)["points"] == []
    viewer.get("/history", 404, metric="norm", subject="gone")
    viewer.get("/history", metric="grad_norm", subject="total")
    # Nor by what a total has more than its parts.
    both = viewer.get("/params/stats", filter=f"{large} {' '.join(small)}")
    assert [row["name"] for row in both["stats"]] == [large]
    assert both["total"]["count"] == sizes[large]
    assert {one["name"] for one in both["missing"]} == set(small)
    found = viewer.get("/params/histogram", name=large, bins=500)
    assert len(found["counts"]) == sizes[large] // ELEMENTS_OF_BIN
    viewer.get("/params/histogram", 403, name=large, low=0.0)
    assert len(admin.get("/params/histogram", name=large, bins=500, low=0.0)["counts"]) == 500


def test_a_held_snapshot_is_renewed_and_released_by_its_holder_or_an_admin(rest: Ready) -> None:
    admin, _ = rest
    holder, other = admin.another("reader"), admin.another("editor")
    for releasing in (holder, admin):
        made = holder.ask("POST", "/snapshots", 201, json={"filter": "rows"}).json()
        path = f"/snapshots/{made['id']}"
        denied = other.ask("DELETE", path, 403).json()
        assert "another token pinned it" in denied["detail"]
        other.ask("POST", f"{path}/renew", 403, json={"lease_s": 1})
        holder.ask("POST", f"{path}/renew", 200, json={"lease_s": 60})
        releasing.ask("DELETE", path, 204)


def test_snapshots_that_one_token_holds_leave_room_for_others(rest: Ready) -> None:
    admin, _ = rest
    greedy, other = admin.another("reader"), admin.another("reader")
    made = []
    with greedy.client() as client:
        for _ in range(MAX_HELD):
            answer = client.post("/snapshots", json={"filter": "rows", "lease_s": 60})
            if answer.status_code == 429:
                assert "your token has" in answer.json()["detail"]
                break
            made.append(answer.json()["id"])
    assert 0 < len(made) < MAX_HELD // 2
    for one in (other, admin):
        held = one.ask("POST", "/snapshots", 201, json={"filter": "rows"}).json()
        one.ask("DELETE", f"/snapshots/{held['id']}", 204)
    for held_id in made:
        greedy.ask("DELETE", f"/snapshots/{held_id}", 204)


def read_events(asked: Rest, count: int, ready: threading.Event, **headers: str) -> list[Any]:
    found: list[Any] = []
    with asked.client() as client, client.stream("GET", "/events", headers=headers) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        event: dict[str, str] = {}
        for line in answer.iter_lines():
            name, _, value = line.partition(": ")
            if line:
                event[name] = value
                continue
            ready.set()
            if "event" in event:
                found.append((event["event"], event["id"], json.loads(event["data"])))
            event = {}
            if len([kind for kind, *_ in found if kind in ("hello", "gap", "snapshot")]) == count:
                break
    return [one for one in found if one[0] in ("hello", "gap", "snapshot")]


def test_events_are_streamed_and_resumed(rest: Ready) -> None:
    asked, _ = rest
    ready, found = threading.Event(), []
    reader = threading.Thread(target=lambda: found.extend(read_events(asked, 3, ready)))
    reader.start()
    assert ready.wait(10)
    made = asked.ask("POST", "/snapshots", 201, json={"filter": "rows"}).json()
    asked.ask("DELETE", f"/snapshots/{made['id']}", 204)
    reader.join(10)
    assert not reader.is_alive()
    assert [(kind, data.get("state")) for kind, _, data in found] == [
        ("hello", None),
        ("snapshot", "pinned"),
        ("snapshot", "released"),
    ]
    again = read_events(asked, 2, ready, **{"Last-Event-ID": found[1][1]})
    assert [(kind, data.get("state")) for kind, _, data in again] == [
        ("hello", None),
        ("snapshot", "released"),
    ]
    foreign = read_events(asked, 1, ready, **{"Last-Event-ID": "00000000-7"})
    assert foreign[0][0] == "gap"
    assert foreign[0][2]["missed"] == -1
    problem = asked.ask("GET", "/events", 422, headers={"Last-Event-ID": "x"}).json()
    assert problem["type"] == "urn:paramd:error:usage"


def of_each_state(job: Any, asked: Rest) -> None:
    """What is ordered and chosen by statistics is of the present state, however often it is asked;
    in between, all is zero for one state."""

    def clear(rank: Any, _: int) -> None:
        torch.frombuffer(rank.arena.buffer, dtype=torch.uint8).zero_()

    usual = asked.get("/params", filter="* norm>0", sort="-norm")["total_count"]
    for step, write in ((1, None), (2, clear), (3, lambda *_: write_arenas(job))):
        if write is not None:
            job.update(write)
        for sort in ("-norm", "mean"):
            found = asked.get("/params", filter="* norm>0", sort=sort)
            assert (found["step"], found["total_count"]) == (step, usual * (step % 2))
    # At rest the script may still change what has the same name.
    for rank in job.ranks:
        rank.gate.begin_update()
        clear(rank, 4)
        rank.page[Word.REST_SEEN_NS] = 1 << 62
        rank.gate.rest(4, 0, digest=0)
    for count in (0, usual):
        found = asked.get("/params", filter="* norm>0", sort="-norm")
        assert (found["step"], found["total_count"]) == (4, count)
        write_arenas(job)
    job.update()
    found = asked.get("/params", filter="rows[1:3] columns[:, 1:] norm>0", sort="-norm")
    assert [one["name"] for one in found["params"]] == ["columns", "rows"]


def test_a_lost_rank_is_named_and_the_rest_is_answered(private_state_dir: Any) -> None:
    with running_job(layout()) as job:
        whole = write_arenas(job)
        job.update(lambda rank, step: None)
        asked = Rest(job)
        wait_for(lambda: asked.joined_count() == 2, "both ranks join")
        asked.get("/params/stats", filter="rows")
        of_each_state(job, asked)
        job.ranks[1].process.kill()
        wait_for(lambda: asked.joined_count() < 2, "it is missed")
        found = asked.get("/params/stats", filter="rows both flags")
        assert found["partial"]
        assert {one["name"] for one in found["stats"]} == {"both", "flags"}
        (missing,) = found["missing"]
        assert (missing["name"], missing["ranks"]) == ("rows", [1])
        assert "rank 1" in missing["reason"]
        norm = next(one["norm"] for one in found["stats"] if one["name"] == "both")
        assert norm == pytest.approx(float(whole["both"].double().norm()))
        problem = asked.get("/params/stats", 503, filter="rows turned")
        assert problem["type"] == "urn:paramd:error:unreachable"
        asked.get("/params/values", 503, name="turned")
        ranks = asked.get("/snapshots")
        assert ranks["partial"]
        assert [bool(rank["reason"]) for rank in ranks["ranks"]] == [False, True]
