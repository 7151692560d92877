"""A site's jobs, generations and lists of incarnations, without a server."""

import asyncio
import json
import stat
from pathlib import Path

import pytest

from paramd import places
from paramd.errors import (
    ConflictError,
    DeniedError,
    ExhaustedError,
    NotFoundError,
    UnreachableError,
    UsageError,
)
from paramd.places import HISTORY_FILE, IncarnationRecord
from paramd.security.tickets import GENERATION_STEP, Role, Signer
from paramd.v1 import common_pb2
from paramd_service.control.base.site import IncarnationNotes, Site, next_generation, open_site
from paramd_service.control.mesh import jobs as jobs_module
from paramd_service.control.mesh.jobs import ControlIdentity, Jobs
from paramd_service.control.mesh.origin import Origin
from tests.orders import bound
from tests.unit.control.reports import join_request, report, view

TERMS = ControlIdentity(generation=5)
SITE = Site(bytes(32), "t" * 32)

HERE = Origin("127.0.0.1")


async def test_a_sidecar_brings_its_incarnation_back_but_no_past_one() -> None:
    jobs = Jobs(TERMS, site=SITE)
    assert (await jobs.admit("run", 4, 2)).bootstrap.world_size == 2
    assert places.last_incarnation("run") == 4
    with pytest.raises(ConflictError, match="run 4"):
        await jobs.admit("run", 3, 2)
    with pytest.raises(UsageError, match="world_size"):
        await jobs.admit("other", 1, 0)
    await asyncio.to_thread(places.last_incarnation, "late", at_least=9)
    with pytest.raises(ConflictError, match="past run 8"):
        await jobs.admit("late", 8, 1)
    await jobs.close()


async def test_a_job_is_its_tokens_and_a_token_has_a_share_of_all_jobs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: set[str | None] = set()

    async def has_ended(token_id: str | None) -> bool:
        return token_id in ended

    jobs = Jobs(TERMS, site=SITE, has_ended=has_ended)
    # As its ranks' tickets name it, too: they bring its incarnation back after our restart.
    await jobs.admit("run", 4, 2, owner="a")
    for owner in ("b", "c"):
        with pytest.raises(DeniedError, match="registered with another token"):
            await jobs.register("run", world_size=1, owner=owner)
    assert (await jobs.register("run", world_size=1, owner="a")).number == 5
    ended.add("a")
    assert (await jobs.register("run", world_size=1, owner="b")).owner == "b"
    assert (await jobs.register("run", world_size=1)).owner is None
    evicted: list[str] = []
    jobs.on_evict.append(evicted.append)
    monkeypatch.setattr(jobs_module, "JOBS_OF_TOKEN", 2)
    monkeypatch.setattr(jobs_module, "MAX_JOBS", 4)
    for number in range(5):
        await jobs.register(f"b{number}", world_size=1, owner="b")
    assert [mesh.job for mesh in jobs.all()] == ["b3", "b4", "run"], "it evicts only its own"
    assert evicted == ["b0", "b1", "b2"]
    for number in (3, 4):
        request = join_request(0, incarnation=1, world_size=1)
        request.header.job = f"b{number}"
        jobs.get(f"b{number}").registry.join(request, HERE)
    with pytest.raises(ExhaustedError, match="2 with 65,536 ranks of one token"):
        await jobs.register("b5", world_size=1, owner="b")
    await jobs.register("c", world_size=1, owner="c")
    request.leaving = True  # that of b4
    left = jobs.get("b4")
    left.registry.join(request, HERE)
    assert (await jobs.register("b4", world_size=1, owner="b")).number == 2
    assert "all 1 ranks have detached" in str(left.over), "why, though no tick came between"
    await jobs.close()


async def test_a_job_that_went_on_is_awaited_after_our_restart_and_then_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notes = IncarnationNotes()
    notes.start()
    notes.note("run", IncarnationRecord(incarnation=1, world_size=1, began_s=1.0))
    notes.note("over", IncarnationRecord(incarnation=1, world_size=1, began_s=1.0, ended_s=2.0))
    await notes.close()
    jobs = Jobs(TERMS, site=SITE)
    with pytest.raises(UnreachableError, match="has rejoined"):
        jobs.get("run")
    for unknown in ("over", "never", "../run"):
        with pytest.raises(NotFoundError):
            jobs.get(unknown)
    monkeypatch.setattr(jobs_module, "RETURN_S", 0.0)
    with pytest.raises(NotFoundError):
        jobs.get("run")
    await jobs.close()


def test_keys_of_incarnations_and_jobs_differ_and_stay() -> None:
    keys = {SITE.private_key(job, incarnation) for job in ("a", "a1") for incarnation in (1, 11)}
    assert len(keys) == 4
    assert SITE.private_key("a", 11) != SITE.private_key("a1", 1)
    assert Site(bytes(32), "other").private_key("a", 1) == SITE.private_key("a", 1)
    assert "t" * 32 not in repr(SITE)
    verifier = Jobs(TERMS, site=SITE).verifier("a", 1)
    ticket = bound(Signer(SITE.private_key("a", 1)), Role.READER, None, job="a")
    assert verifier.verify(ticket, job="a", incarnation=1).role is Role.READER


def test_generations_rise_whatever_the_clock_and_the_file_say(tmp_path: Path) -> None:
    first = next_generation(tmp_path, now_s=1000.0)
    assert first == 1_000_000
    assert next_generation(tmp_path, now_s=10.0) == first + GENERATION_STEP
    assert next_generation(tmp_path, now_s=2000.0) == 2_000_000
    (tmp_path / "generation").write_text("garbage")
    assert next_generation(tmp_path, now_s=3000.0) == 3_000_000


def test_a_sites_secrets_are_made_once_and_are_ours_alone() -> None:
    site = open_site(None)
    assert open_site(None) == site
    assert open_site("given" * 8).token == "given" * 8
    for path in (places.state_dir() / "_site").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    (places.state_dir() / "_site" / "key").write_text("short")
    with pytest.raises(ConflictError, match="does not contain a key"):
        open_site(None)


DEAD = {
    "phase": common_pb2.PHASE_ORPHANED,
    "phase_reason": "killed by SIGKILL; its last step is still served",
    "trainer_signal": 9,
}


async def test_how_its_first_rank_died_is_kept_whatever_ends_the_run_afterwards() -> None:
    jobs = Jobs(TERMS, site=SITE)
    mesh = await jobs.register("run", world_size=2)
    late = report(0, phase=common_pb2.PHASE_TORN, trainer_ended_ms=900)
    # The report of the rank that was killed comes second, and is believed to be the cause.
    assert mesh.note_death(view(late, report(1)), 101.0)
    assert mesh.note_death(view(late, report(1, trainer_ended_ms=800, **DEAD)), 101.0)
    assert not mesh.note_death(view(late, report(1, trainer_ended_ms=800, **DEAD)), 102.0)
    # Rank 1 has left on request: that makes nobody else the first.
    assert not mesh.note_death(view(late, report(1, leaving=True)), 103.0)
    jobs.end("run", "owner")
    first = "rank 1: killed by SIGKILL, after step 7"
    assert mesh.record().reason == f"{first}; then owner ended it; attach again"
    await jobs.close()


async def test_a_restarted_control_plane_and_the_next_run_keep_the_first_reason() -> None:
    notes = IncarnationNotes()
    notes.start()
    died = IncarnationRecord(
        incarnation=1, world_size=2, began_s=10.0, reason="rank 1: killed", step=7
    )
    notes.note("run", died)
    notes.note("run", IncarnationRecord(incarnation=1, world_size=2, began_s=15.0))
    assert await noted(notes, 2) == [died]
    over = IncarnationRecord(
        incarnation=1, world_size=2, began_s=15.0, ended_s=30.0, reason="owner ended it", step=-1
    )
    notes.note("run", over)
    (first,) = await noted(notes, 3)
    assert (first.reason, first.step) == ("rank 1: killed; then owner ended it", 7)
    other = IncarnationRecord(incarnation=1, world_size=2, began_s=1.0, reason="rank 0: killed")
    notes.note("other", other)
    notes.note("other", IncarnationRecord(incarnation=2, world_size=2, began_s=20.0))
    await notes.close()
    assert places.incarnations("other")[0].reason == "rank 0: killed; then run 2 has begun"


async def noted(notes: IncarnationNotes, lines: int) -> list[IncarnationRecord]:
    path = places.state_dir() / "run" / HISTORY_FILE
    while not path.exists() or len(path.read_text().splitlines()) < lines:
        await asyncio.sleep(0.01)
    return places.incarnations("run")


async def test_the_list_of_incarnations_survives_and_passes_over_what_is_cut() -> None:
    notes = IncarnationNotes()
    notes.start()
    notes.note("run", IncarnationRecord(incarnation=1, world_size=2, began_s=10.0))
    notes.note("run", IncarnationRecord(incarnation=2, world_size=3, began_s=20.0))
    over = IncarnationRecord(
        incarnation=2, world_size=3, began_s=20.0, ended_s=30.0, reason="r", step=7
    )
    notes.note("run", over)
    await notes.close()
    path = places.state_dir() / "run" / HISTORY_FILE
    with path.open("a") as file:
        file.write('null\n[]\n{"incarnation": "x"}\n{"incarnation": 3, "world')
    first, second = places.incarnations("run")
    assert (first.ended_s, first.reason) == (20.0, "run 2 has begun")
    assert second == over
    numbers = [json.loads(line)["incarnation"] for line in path.read_text().splitlines()[:3]]
    assert numbers == [1, 2, 2]
