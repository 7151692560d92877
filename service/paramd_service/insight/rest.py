"""Diagnosis of a run: what its ranks are doing, with a verdict, and what an update changes."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel, Field

from paramd.documents import Finite
from paramd.errors import ParamdError
from paramd.mesh.insight.reports import RankActivity, RankLog, StackFrame, ThreadStack
from paramd.mesh.insight.spectrum import Spectrum
from paramd.mesh.insight.updates import UpdateRow
from paramd.mesh.peers.grpc import PHASE_NAMES
from paramd.mesh.peers.waits import Awaited, with_waits
from paramd.v1 import common_pb2
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.control.access.doorway import check_job, may_see_logs, principal_of
from paramd_service.control.api.choice import choose_one
from paramd_service.control.api.routes.jobs import job_document
from paramd_service.control.api.routes.params import Name
from paramd_service.control.mesh.evidence import verdict_of
from paramd_service.control.mesh.registry import awaited_now
from paramd_service.control.parts import ControlHost
from paramd_service.insight.diff import Comparisons, state_of
from paramd_service.insight.why import (
    Found,
    chosen,
    collectives_of,
    evidence_of,
    inspect,
    looks,
    tails_of,
)
from paramd_service.logs import without_secrets

NO_LOG = "what the training prints is for editors and admins"

Ranks = Annotated[
    list[int] | None,
    Query(
        alias="rank",
        max_length=64,
        description="Ranks to ask; default: all, or the 64 that look worst",
    ),
]
LogLines = Annotated[
    int,
    Query(
        ge=0,
        le=100,
        description="Last lines of each trainer's output; none without the permission `logs`",
    ),
]
Lines = Annotated[int, Query(ge=1, le=1000, description="Most last lines of each log")]

Steps = Annotated[int, Query(ge=1, le=100_000, description="Number of updates, taken together")]
Values = Annotated[int, Query(ge=1, le=32, description="How many singular values")]

State = Annotated[
    str,
    Query(
        max_length=200,
        description="now, +N (N steps from now), mark:NAME, mark:STEP (the standing snapshot of "
        "that step), export:ID (or the first characters of its id) or job:NAME",
    ),
]

Patterns = Annotated[
    list[str] | None, Query(max_length=64, description="Globs over names; default: all")
]


class UpdateList(BaseModel):
    """One update of each parameter."""

    job: str
    incarnation: int
    updates: list[UpdateRow] = Field(description="The largest ratio first")
    moments_missing: str = Field(description="Why there are no second moments, if there are none")


class LargestRow(BaseModel):
    """A row of a tensor, and its distance from the same row of the other state."""

    row: int
    norm: Finite


class DiffDocument(BaseModel):
    """How a tensor in b differs from the same tensor in a; null without finite numbers."""

    name: str
    shape: list[int]
    dtype: str
    norm: Finite = Field(description="Of b - a")
    relative: Finite = Field(description="That divided by the norm of a")
    norm_a: Finite
    norm_b: Finite
    cosine: Finite
    max_abs: Finite
    changed: int = Field(description="Elements that differ")
    numel: int
    largest_rows: list[LargestRow]
    problem: str = Field(description="Why it was not compared; empty when it was")
    cells: list[list[Finite]] = Field(
        description="With `heat`: mean of b - a in each cell of a grid over the tensor"
    )


class DiffList(BaseModel):
    """Two states compared."""

    job: str
    incarnation: int
    a: str = Field(description="The states in words, with their steps")
    b: str
    tensors: list[DiffDocument] = Field(description="The largest relative difference first")


class WhyDocument(BaseModel):
    """What is wrong with a run."""

    job: str
    incarnation: int
    verdict: str
    world_size: int
    ranks: list[RankActivity] = Field(description="Those that were asked, by rank")


def router(host: ControlHost) -> APIRouter:
    routes = APIRouter(tags=["insight"])
    comparisons = Comparisons()

    @routes.get("/jobs/{job}/why")
    async def get_why(
        job: str, request: Request, rank: Ranks = None, log_lines: LogLines = 10
    ) -> WhyDocument:
        """What every rank is doing now, and which one keeps the others waiting.

        Works while the training hangs, and neither stops nor slows it. Stacks name files and
        functions, never values. The trainers' last lines may contain anything the script prints,
        so only callers that may see logs get them.
        """
        mesh = host.jobs.get(job)
        ranks = chosen(mesh.registry.view().ranks, rank or ())
        sees_logs = may_see_logs(request)
        before = await looks(mesh.calls, ranks)
        awaited = awaited_now(mesh.registry.view().joined)
        found = await inspect(mesh.calls, ranks, log_lines=log_lines if sees_logs else 0)
        return WhyDocument(
            job=mesh.job,
            incarnation=mesh.number,
            verdict=verdict_of([evidence_of(one) for one in found], before),
            world_size=mesh.bootstrap.world_size,
            ranks=[_row(one, awaited, no_log="" if sees_logs else NO_LOG) for one in found],
        )

    @routes.get("/jobs/{job}/ranks/{rank}/log")
    async def get_rank_log(
        job: str, rank: Annotated[int, Path(ge=0, lt=2**31)], lines: Lines = 100
    ) -> RankLog:
        """The last lines of a rank's sidecar, and of its trainer if that writes to a file.

        Also after the trainer has died, while its sidecar lingers; after that, only the sidecar's,
        if it ran on the control plane's host. A sidecar's log covers all runs, which its
        lines name. Tokens and credentials in URLs are hidden; other secrets that a script prints
        are not.
        """
        mesh = host.jobs.get(job)
        (asked,) = chosen(mesh.registry.view().ranks, [rank])
        logs, error = await tails_of(mesh.calls, mesh.job, asked, count=lines)
        return RankLog(
            job=mesh.job, incarnation=mesh.number, rank=rank, error=error, logs=tuple(logs)
        )

    @routes.get("/jobs/{job}/updates")
    async def get_updates(job: str, filter: Patterns = None, steps: Steps = 1) -> UpdateList:
        """What the next updates change in each matching parameter: the norm of the change and its
        ratio to the weight. The sidecars compute both from two steps, which must come within 30 s;
        training continues.
        """
        mesh = host.jobs.get(job)
        found = await mesh.statistics.updates(filter or ["*"], steps)
        return UpdateList(
            job=found.job,
            incarnation=found.incarnation,
            updates=list(found),
            moments_missing=found.moments_missing,
        )

    @routes.get("/jobs/{job}/diff")
    async def get_diff(
        job: str,
        request: Request,
        a: State,
        b: State = "now",
        filter: Patterns = None,
        heat: Annotated[bool, Query(description="Also a heat map of each tensor")] = False,
    ) -> DiffList:
        """How two states of the weights differ, tensor by tensor. A separate process on the control
        plane's host reads both, with the caller's rights; training continues. An export is read
        from that host's disk. Both states must be available within 30 s.
        """
        mesh, who = host.jobs.get(job), principal_of(request)
        jobs = {job: await job_document(host, mesh, who)}

        async def resolved(text: str) -> dict[str, str]:
            kind, rest = state_of(text)
            if kind == "export":
                path, destination, export_id = await host.parts.exported(job, rest)
                return {"path": path, "label": f"export {destination}", "export": export_id}
            if kind == "job":
                check_job(who, rest)  # first: whether another's job exists is nobody's business
                jobs[rest] = await job_document(host, host.jobs.get(rest), who)
            return {kind: rest}

        one, other = await resolved(a), await resolved(b)
        documents = {name: found.model_dump(mode="json") for name, found in jobs.items()}
        found = await comparisons.compare(
            job, one, other, filter or ["*"], jobs=documents, heat=heat
        )
        for row in found["rows"]:
            row["largest_rows"] = [{"row": at, "norm": norm} for at, norm in row["largest_rows"]]
        return DiffList(
            job=job,
            incarnation=mesh.number,
            a=one.get("label", found["a"]),
            b=other.get("label", found["b"]),
            tensors=[DiffDocument(**row) for row in found["rows"]],
        )

    @routes.get("/jobs/{job}/params/spectrum")
    async def get_spectrum(job: str, name: Name, k: Values = 8) -> Spectrum:
        """The largest singular values of one weight or a slice of it, its condition number, and
        its dead and equal rows. The sidecars multiply their shards with narrow matrices."""
        mesh = host.jobs.get(job)
        _, index = await mesh.layouts.get(mesh.registry.view())
        item = choose_one(index, name)
        return await mesh.statistics.spectrum(item.pattern, k)

    return routes


def _row(found: Found, awaited: Awaited, *, no_log: str) -> RankActivity:
    rank, answer = found
    error = ""
    if answer is None or isinstance(answer, ParamdError):
        error = str(answer) if answer is not None else rank.reason or "its sidecar has not joined"
        state = rank.report.state if rank.report is not None else common_pb2.RankState()
        answer = _unknown(state)
    state = with_waits(answer.state, awaited)
    return RankActivity(
        rank=rank.rank,
        error=error,
        step=state.step,
        phase=PHASE_NAMES.get(state.phase, "unspecified").upper(),
        phase_reason=state.phase_reason,
        boundary_age_s=_known(state.boundary_age_ns, 1e9),
        activity=answer.activity_kind,
        doing=answer.activity,
        where=answer.activity_where,
        seen_for_s=_known(answer.age_ms, 1e3),
        threads=tuple(map(_thread, answer.threads)),
        collectives=collectives_of(answer),
        overdue=answer.overdue,
        source=answer.source,
        missing=answer.missing,
        collectives_missing=answer.collectives_missing,
        process_state=answer.process_state,
        rss_bytes=_counted(answer.rss_bytes),
        peak_rss_bytes=_counted(answer.peak_rss_bytes),
        device_bytes=_counted(answer.device_bytes),
        thread_count=_counted(answer.thread_count),
        open_file_count=_counted(answer.open_file_count),
        open_file_limit=_counted(answer.open_file_limit),
        host_available_bytes=_counted(answer.host_available_bytes),
        log_lines=tuple(map(without_secrets, answer.log_lines)),
        log_missing=no_log or answer.log_missing,
    )


def _thread(told: pb.TrainerThread) -> ThreadStack:
    return ThreadStack(
        name=told.name,
        native_id=told.native_id,
        training=told.training,
        frames=tuple(StackFrame(one.file, one.line, one.function) for one in told.frames),
    )


def _unknown(state: common_pb2.RankState) -> pb.InspectTrainerResponse:
    """The answer of a rank that gives none: unknown is -1."""
    return pb.InspectTrainerResponse(
        state=state,
        age_ms=-1,
        rss_bytes=-1,
        peak_rss_bytes=-1,
        device_bytes=-1,
        thread_count=-1,
        open_file_count=-1,
        open_file_limit=-1,
        host_available_bytes=-1,
    )


def _counted(value: int) -> int | None:
    return value if value >= 0 else None


def _known(value: int, units: float) -> float | None:
    return value / units if value >= 0 else None
