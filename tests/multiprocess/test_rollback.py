"""A running training is put back to an earlier state and computes the same bits from there."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import httpx2
import psutil
import pytest
import torch

from paramd import places
from paramd.errors import ConflictError, ExistsError, NotFoundError, ParamdError, UsageError
from paramd.layout.edits.ops import EditState
from paramd.mesh.insight.reports import Alert
from paramd.mesh.mesh import Mesh
from tests.launch import Ranks, run_ranks, start_ranks
from tests.longer import sample, share
from tests.multiprocess.striking import arm, helper, is_down
from tests.multiprocess.test_resume import KINDS, kill
from tests.multiprocess.truth import connect_to

WORKER = "tests.multiprocess.workers.rewinding"
DEADLINE_S = 90.0


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def begun(stack: ExitStack, folder: Path, kind: str, *options: str) -> tuple[Ranks, Mesh]:
    """A training that can be put back, and a client of it. Sidecars live until the test ends."""
    life, faults = folder / "life", folder / "faults"
    for made in (life, faults):
        made.mkdir(exist_ok=True)
    world_size, optimizer = KINDS[kind]
    args = [str(life), "--kind", kind, "--optimizer", optimizer, "--pause-s", "0.02", *options]
    environment = {
        "PARAMD_FAULTS_DIR": str(faults),
        "PARAMD_TRAINER_FAULTS_DIR": str(faults),
        "PARAMD_ALERTS": '{"watch": false, "numbers": ["loss > 1000"], "pause": ["logged-number"]}',
    }
    state_dir = folder / "state"
    ranks = stack.enter_context(
        start_ranks(WORKER, world_size, args=args, env=environment, state_dir=state_dir)
    )
    for rank in range(world_size):
        ranks.wait_for_text("attached", rank=rank)
    return ranks, stack.enter_context(connect_to(state_dir, "rewinding"))


def wait_for(condition: Callable[[], bool], ranks: Ranks) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, ranks.outputs()
        assert all(rank.process.poll() is None for rank in ranks), ranks.outputs()
        time.sleep(0.005)


def at(folder: Path, rank: int = 0) -> int:
    path = folder / "life" / f"at-{rank}"
    return int(path.read_text()) if path.exists() else -1


def ended(folder: Path, ranks: Ranks, steps: int = 60) -> int:
    """Let the training end some steps from now; return at which."""
    (folder / "life" / "end").write_text(str(at(folder) + steps))
    ranks.end_well(DEADLINE_S)
    (last,) = {at(folder, rank.rank) for rank in ranks}
    return last


def reached(folder: Path, step: int) -> bool:
    return at(folder) >= step


def left(folder: Path, rank: int) -> list[tuple[int, int]]:
    """From which step to which a rank was put back, in order."""
    path = folder / "life" / f"steps-{rank}"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(line.split()[1]), int(line.split()[3])) for line in lines]


def final(folder: Path, world_size: int) -> list[dict[str, str]]:
    return [json.loads((folder / f"final-{rank}").read_text()) for rank in range(world_size)]


def undisturbed(folder: Path, kind: str, last: int) -> list[dict[str, str]]:
    """The digests of a training without paramd's keeping that ends at that step."""
    world_size, optimizer = KINDS[kind]
    calm = folder / "calm"
    calm.mkdir()
    (calm / "end").write_text(str(last))
    args = [str(calm), "--kind", kind, "--optimizer", optimizer, "--resume", "never"]
    run_ranks(WORKER, world_size, args=args, timeout_s=DEADLINE_S)
    return final(calm, world_size)


@pytest.mark.timeout(300)
def test_a_rollback_is_undone_to_the_state_that_was_left(tmp_path: Path, stack: ExitStack) -> None:
    """And what cannot be done is refused with its cure, on all ranks."""
    ranks, mesh = begun(stack, tmp_path, "ddp")
    wait_for(lambda: at(tmp_path) >= 3, ranks)
    first = mesh.mark("first")
    assert [(one.name, one.whole) for one in mesh.marks() if one.name] == [("first", True)]
    with pytest.raises(ExistsError, match="'first' exists already"):
        mesh.mark("first")
    for name in ("a/b", ".hidden", "12", " "):
        with pytest.raises(UsageError, match="mark: "):
            mesh.mark(name)
    with pytest.raises(
        NotFoundError, match=r"restore point 'second' is not kept; there is .*'first'"
    ):
        mesh.rollback("second")
    wait_for(lambda: at(tmp_path) >= first.step + 20, ranks)
    followed_over_a_rollback(tmp_path, ranks, mesh, "first")
    wait_for(lambda: at(tmp_path) >= first.step + 20, ranks)
    with mesh_held(mesh):
        before = mesh.summon("*", buffers=False)
        there = mesh.rollback(first.step)
        back = mesh.summon("*")
        assert (back.step, there.step) == (first.step, before.step)
        mesh.undo(there.id)
        again = mesh.summon("*")
        assert again.step == before.step
        for name, tensor in before.items():
            assert torch.equal(tensor, again[name])
            assert not torch.equal(tensor, back[name]) or name.startswith("frozen")
    # What came after it would be lost, so its undo has to be wanted.
    second = mesh.rollback("first")
    mesh.edit("*", mul=1.0)
    with pytest.raises(ConflictError, match="later changed some of the same"):
        mesh.undo(second.id)
    mesh.undo(second.id, force=True)
    (tmp_path / "life" / "diverges").touch()
    wait_for(lambda: mesh.pause_state().holder.startswith("alert logged-number/"), ranks)
    (tmp_path / "life" / "diverges").unlink()
    wait_for(lambda: mesh.pause_state().paused, ranks)
    third = mesh.rollback("first")
    assert mesh.pause_state().paused
    mesh.resume()
    mesh.unmark("first")
    assert [one.name for one in mesh.marks() if one.name] == []
    last = ended(tmp_path, ranks)
    steps = left(tmp_path, 0)
    assert steps == left(tmp_path, 1)
    assert (second.step, first.step) in steps
    assert steps[-2:] == [(steps[-2][0], second.step), (third.step, first.step)]
    assert final(tmp_path / "life", 2) == undisturbed(tmp_path, "ddp", last)


def followed_over_a_rollback(folder: Path, ranks: Ranks, mesh: Mesh, mark: str) -> None:
    """Each update, those that come again too, is a frame of a subscription or counted by one."""
    found: dict[str, list[tuple[int, int]]] = {"python": [], "sse": []}
    known = len(left(folder, 0))

    def over(step: int) -> bool:
        # Steps after the one that was left have never been before.
        put_back = left(folder, 0)[known:]
        return bool(put_back) and step > put_back[0][0]

    def read() -> None:
        with connect_to(folder / "state", "rewinding") as own:
            for frame in own.grads("*", kind="stats"):
                found["python"].append((frame.step, frame.dropped))
                if over(frame.step):
                    return

    def stream() -> None:
        endpoint = places._load(folder / "state" / "rewinding" / places.ENDPOINT_FILE)
        assert endpoint is not None
        headers = {"Authorization": f"Bearer {endpoint.token}"}
        url = f"{endpoint.url}/api/v1/jobs/rewinding/grads?filter=*"
        with httpx2.stream("GET", url, headers=headers, timeout=DEADLINE_S) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if not line.startswith("data: "):
                    continue
                frame = json.loads(line.removeprefix("data: "))
                found["sse"].append((frame["step"], frame["dropped"]))
                if over(frame["step"]):
                    return

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read), pool.submit(stream)]
        wait_for(lambda: all(found.values()) or any(one.done() for one in readers), ranks)
        mesh.rollback(mark)
        for one in readers:
            one.result(DEADLINE_S)
    ((left_at, put_back_to),) = left(folder, 0)[known:]
    for reader, frames in found.items():
        (begin, _), *after = frames
        updates = left_at - begin + after[-1][0] - put_back_to
        assert sum(1 + dropped for _, dropped in after) == updates, (reader, frames)


@contextmanager
def mesh_held(mesh: Mesh) -> Iterator[None]:
    mesh.pause()
    try:
        yield
    finally:
        mesh.resume()


@pytest.mark.in_turns
@pytest.mark.timeout(300)
def test_a_rank_killed_within_a_rollback_leaves_no_mixture(
    tmp_path: Path, stack: ExitStack
) -> None:
    """Trainers killed at each point of it; each time all ranks resume at one state."""
    last = 0
    points = sample(["agreed", "applying", "applied", "fragile"], {"applying", "fragile"})
    for number, point in enumerate([*points, ""]):
        ranks, mesh = begun(stack, tmp_path, "fsdp2")
        for rank in ranks:
            assert ("attached None" in rank.stdout) == (number == 0), "steps were lost"
        wait_for(lambda: at(tmp_path) >= 3, ranks)
        if not number:
            step = mesh.mark("safe").step
            wait_for(partial(reached, tmp_path, step + 12), ranks)
        assert [one.step for one in mesh.marks() if one.name == "safe"] == [step]
        if not point:
            mesh.rollback("safe")
            last = ended(tmp_path, ranks)
            break
        if point == "fragile":
            broken = tmp_path / "life" / "break-1"
            broken.touch()
            with pytest.raises(ConflictError):
                mesh.rollback("safe", timeout=30)
            assert ranks[1].process.wait(DEADLINE_S) == 1
            assert "a rollback failed half way on this rank" in ranks[1].stderr
            kill(ranks)
            broken.unlink()
            continue
        (tmp_path / "faults" / "rank-1").write_text(f"{point}:kill")
        with suppress(ParamdError):
            edit = mesh.rollback("safe", timeout=20)
            assert point == "applied", edit
        assert ranks[1].process.wait(DEADLINE_S) == -signal.SIGKILL
        kill(ranks)
        print(ranks.outputs())
    assert final(tmp_path / "life", 2) == undisturbed(tmp_path, "fsdp2", last)


def lost_marks(mesh: Mesh) -> list[Alert]:
    return [one for one in mesh.alerts(state="firing") if one.rule == "lost-mark"]


@pytest.mark.in_turns
@pytest.mark.timeout(300)
def test_helpers_killed_within_a_rollback_leave_it_everywhere_or_nowhere(
    tmp_path: Path, stack: ExitStack
) -> None:
    ranks, mesh = begun(stack, tmp_path, "ddp")
    wait_for(lambda: at(tmp_path) >= 3, ranks)
    for point in share(["edit-ready", "edit-applied"], 2):
        known = len(left(tmp_path, 0))
        mark = mesh.mark(point)
        wait_for(partial(reached, tmp_path, mark.step + 5), ranks)
        sidecar = helper(ranks, "sidecar", 1)
        arm(tmp_path / "faults", 1, f"{point}:kill")
        with suppress(ParamdError):
            mesh.rollback(point, timeout=30)
        wait_for(lambda: is_down(sidecar), ranks)  # noqa: B023
        wait_for(lambda: both_answer(mesh), ranks)
        (edit,) = mesh.edits(limit=1)
        assert edit.ended, edit
        # Nothing but the first boundary after it shows whether the script was put back.
        before = at(tmp_path)
        wait_for(partial(moved_on, tmp_path, before), ranks)
        put_back = [(edit.step, mark.step)] if edit.state is EditState.APPLIED else []
        assert left(tmp_path, 0)[known:] == left(tmp_path, 1)[known:] == put_back
        (lost,) = [one for one in mesh.marks() if one.name == point]
        assert lost.reason == "ranks 1 do not have it (their sidecars were restarted)"
        with pytest.raises(ConflictError, match="do not have it"):
            mesh.rollback(point)
        wait_for(lambda: [lost.reason in one.reason for one in lost_marks(mesh)] == [True], ranks)  # noqa: B023
        mesh.unmark(point)
        wait_for(lambda: not lost_marks(mesh), ranks)
    step = mesh.mark("third").step
    wait_for(partial(reached, tmp_path, step + 5), ranks)
    (tmp_path / "faults" / "rank-1").write_text("agreed:stop")
    edit = mesh.rollback("third", wait=False)
    stopped = psutil.Process(ranks[1].process.pid)
    wait_for(lambda: stopped.status() == psutil.STATUS_STOPPED, ranks)
    helper(ranks, "control").kill()
    stopped.resume()
    wait_for(lambda: applied(tmp_path, edit.id), ranks)
    wait_for(
        lambda: (
            left(tmp_path, 0)[-1:]
            == left(tmp_path, 1)[-1:]
            == [(edit_step(tmp_path, edit.id), step)]
        ),
        ranks,
    )
    last = ended(tmp_path, ranks)
    assert final(tmp_path / "life", 2) == undisturbed(tmp_path, "ddp", last)


def both_answer(mesh: Mesh) -> bool:
    try:
        return all(
            rank.phase not in ("STALE", "WAITING", "ABSENT") for rank in mesh.status()
        ) and bool(mesh.summon("*"))
    except ParamdError:
        return False


def moved_on(folder: Path, step: int) -> bool:
    return at(folder) != step


def applied(folder: Path, edit_id: str) -> bool:
    """Whether the control plane, or its successor, says so."""
    return edit_step(folder, edit_id) >= 0


def edit_step(folder: Path, edit_id: str) -> int:
    try:
        with connect_to(folder / "state", "rewinding") as mesh:
            edit = mesh.get_edit(edit_id)
    except ParamdError:
        return -1
    assert edit.state in (EditState.COMMITTED, EditState.APPLIED), edit
    return edit.step if edit.state is EditState.APPLIED else -1


@pytest.mark.in_turns
@pytest.mark.timeout(300)
def test_a_training_that_cannot_be_put_back_says_why_up_front(
    tmp_path: Path, stack: ExitStack
) -> None:
    ranks, mesh = begun(stack, tmp_path, "plain", "--no-block")
    wait_for(lambda: at(tmp_path) >= 3, ranks)
    mesh.mark("safe")
    with pytest.raises(ConflictError, match=r"not in a block of attachment.rollback_scope\(\)"):
        mesh.rollback("safe")
    assert mesh.pause_state().state == "running"
    kill(ranks)
    ranks.kill()
    ranks, mesh = begun(stack, tmp_path, "plain", "--resume", "never")
    with pytest.raises(ConflictError, match="attach it with resume='auto'"):
        mesh.mark("safe")
    with pytest.raises(
        NotFoundError, match=r"step 3 is not kept; there are no restore points: mesh\.mark"
    ):
        mesh.rollback(3)
    changed = mesh.set_hyperparameters(lr=0.25)
    assert dict(changed.hyperparameters) == {"optimizer": 0, "group": 0, "values": {"lr": 0.25}}
    ended(tmp_path, ranks, 10)
