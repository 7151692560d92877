"""What paramd says of a training that hangs, and how two states of it differ, in real processes."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import paramd
from paramd.cli.main import main
from paramd.errors import ConflictError, DeadlineError, DeniedError, NotFoundError, UsageError
from paramd.mesh.insight.reports import RankActivity, Why
from paramd.mesh.mesh import Mesh
from tests.launch import start_ranks
from tests.multiprocess.truth import connect_to, step_of, wait_until

WORKER = "tests.multiprocess.workers.stuck"
NAMES = {"weight", "bias"}


def until(mesh: Mesh, found: Callable[[Why], bool], what: str) -> Why:
    seen: list[Why] = []

    def look() -> bool:
        seen[:] = [mesh.why()]
        return found(seen[0])

    try:
        wait_until(look, what, timeout_s=40.0)
    except AssertionError:
        print(seen[0], seen[0].verdict)
        raise
    return seen[0]


def functions(row: RankActivity) -> list[str]:
    training = next(thread for thread in row.threads if thread.training)
    return [frame.function for frame in training.frames]


@pytest.mark.in_turns
@pytest.mark.timeout(240)
def test_states_are_compared_and_a_hanging_rank_is_named_with_its_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    state_dir = tmp_path / "state"
    env = {"PARAMD_ALERTS": json.dumps({"watch": False, "look": False, "numbers": ["lr > 0"]})}
    with start_ranks(WORKER, 3, args=[str(tmp_path)], env=env, state_dir=state_dir) as ranks:
        try:
            for rank in range(3):
                ranks.wait_for_text("trains", rank=rank)
            with connect_to(state_dir, "stuck") as mesh:
                going = until(mesh, lambda why: all(row.step > 3 for row in why), "it trains")
                assert going.verdict.startswith("Nothing is stuck"), going.verdict
                assert [row.source for row in going] == ["trainer"] * 3
                assert not any(row.collectives for row in going)
                with pytest.raises(NotFoundError, match="world size"):
                    mesh.why(7)
                numbers_are_kept(mesh)
                logs_are_told(mesh, state_dir)
                steps_to_come(mesh)
                disk_and_memory(mesh, tmp_path)
                slow_in_data(mesh, tmp_path)
                hung_in_data(mesh, tmp_path)
                hung_with_the_gil(mesh, tmp_path)
                stopped(mesh, ranks[0].process.send_signal)
                until(mesh, lambda why: why.verdict.startswith("Nothing is stuck"), "it goes on")
            (tmp_path / "end").touch()
            results = ranks.wait(timeout_s=40.0)
            assert [one.returncode for one in results] == [0, 0, 0]
            logs_are_left(state_dir, monkeypatch, capsys)
        except BaseException:
            print(ranks.outputs())
            raise


def numbers_are_kept(mesh: Mesh) -> None:
    """What the script logs is in the history, rank by rank, and rules apply to it."""

    def points(name: str, rank: int) -> list[dict[str, Any]]:
        path = f"/jobs/stuck/history?metric=log:{name}&subject={rank}"
        found: list[dict[str, Any]] = mesh._run(mesh._mesh._host.rest.send("GET", path))["points"]
        return found

    wait_until(lambda: len(points("loss", 1)) > 1, "the history has the loss")
    assert all(point["step"] > 0 and point["mean"] > 0 for point in points("loss", 1))
    assert points("lr", 2)[-1]["mean"] == pytest.approx(1e-4)

    def fired() -> set[str]:
        return {alert.subject for alert in mesh.alerts() if alert.rule == "logged-number"}

    wait_until(lambda: len(fired()) == 3, "the rule fires for each rank")
    assert fired() == {f"lr of rank {rank}: lr > 0" for rank in range(3)}


def slow_in_data(mesh: Mesh, folder: Path) -> None:
    """All step times are those of the slow rank; what the ranks are doing tells them apart."""
    (folder / "slow.2").touch()
    told = "rank 2 was in DataLoader.next while ranks 0 and 1 waited for it: it slows the others"
    until(mesh, lambda why: told in why.verdict, "the slow rank is named")
    (folder / "slow.2").unlink()


def logs_are_told(mesh: Mesh, state_dir: Path) -> None:
    """The sidecar's lines and the trainer's, to those alone who may see what a script prints."""
    found = mesh.logs(1, lines=5)
    assert (found.rank, found.error) == (1, "")
    sidecar, *trainer = found.logs
    assert sidecar.source == "sidecar"
    assert any('"event": "serving"' in line and '"rank": 1' in line for line in sidecar.lines)
    assert any("rank 1 trains" in line for one in trainer for line in one.lines), trainer
    assert all(len(one.lines) <= 5 for one in found.logs)
    assert "==> rank 1, sidecar <==" in str(found)
    for role, sees in (("viewer", False), ("reader", False), ("editor", True)):
        made = mesh._run(mesh._mesh._host.rest.send("POST", "/tokens", {"role": role}))
        with paramd.connect(mesh.url, token=made["token"], job="stuck") as other:
            if sees:
                assert other.logs(0).logs[0].lines
            else:
                with pytest.raises(DeniedError):
                    other.logs(0)
            if role != "viewer":
                rows = list(other.why())
                assert all(bool(row.log_lines) is sees for row in rows)
                assert all(bool("editors" in row.log_missing) is not sees for row in rows)


def logs_are_left(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a job that has ended, the shell tells what its sidecars have left."""
    monkeypatch.setenv("PARAMD_STATE_DIR", str(state_dir))

    def ended() -> bool:
        capsys.readouterr()
        return main(["logs", "2", "--job", "stuck", "-o", "json"]) == 0

    wait_until(ended, "the job has ended")
    capsys.readouterr()
    assert main(["logs", "2", "-n", "3", "--job", "stuck", "-o", "json"]) == 0
    shown = capsys.readouterr()
    (tail,) = json.loads(shown.out)["logs"]
    assert tail["source"] == "sidecar"
    assert 0 < len(tail["lines"]) <= 3
    assert '"event": "drain"' in tail["lines"][-1]
    assert "ended" in shown.err
    assert main(["logs", "9", "--job", "stuck"]) == 4
    assert "no log of rank 9" in capsys.readouterr().err


def hung_in_data(mesh: Mesh, folder: Path) -> None:
    (folder / "hang.2").touch()
    why = until(
        mesh, lambda found: "2, which is in DataLoader" in found.verdict, "the hang is told"
    )
    assert why.verdict.startswith("Ranks 0 and 1 wait in all_reduce #"), why.verdict
    assert " for rank 2, which is in DataLoader.next (stuck.py:" in why.verdict
    assert "Rows.read" in functions(why[2])
    assert why[2].where.endswith("in Rows.read")
    assert any(not made.done and made.name == "gloo:all_reduce" for made in why[0].collectives)
    assert why[0].rss_bytes is not None
    assert why[0].open_file_count is not None
    assert why[1].open_file_limit is not None
    assert any("rank 1 trains" in line for line in why[1].log_lines), why[1].log_missing
    again = until(mesh, lambda found: (found[2].seen_for_s or 0) > 1, "it is seen for a while")
    assert "since at least" in again.verdict
    (folder / "hang.2").unlink()


def hung_with_the_gil(mesh: Mesh, folder: Path) -> None:
    until(mesh, lambda found: not any(row.overdue for row in found), "it trains again")
    (folder / "keep-gil.1").touch()
    why = until(mesh, lambda found: found[1].source == "faulthandler", "stacks without the GIL")
    (folder / "keep-gil.1").unlink()
    assert "read" in functions(why[1])
    assert why[1].doing == "in DataLoader.next, keeping the GIL"


def stopped(mesh: Mesh, send: Callable[[int], None]) -> None:
    until(mesh, lambda found: not any(row.overdue for row in found), "it trains again")
    send(signal.SIGSTOP)
    try:
        # Stacks of just before the stop are shown for a moment.
        why = until(mesh, lambda found: "kill -CONT" in found[0].missing, "the stop is told")
        assert "rank 0, which is stopped by a signal" in why.verdict.replace("R", "r")
    finally:
        send(signal.SIGCONT)


def steps_to_come(mesh: Mesh) -> None:
    ahead = mesh.diff("+1", "+40", "we*", cells=2)
    first, last = (int(label.split()[1]) for label in (ahead.a, ahead.b))
    assert (last - first, len(ahead)) == (39, 1)
    assert len(ahead[0].cells) == 2
    for wrong in (("+4", "+4"), ("mark:", "now")):
        with pytest.raises(UsageError):
            mesh.diff(*wrong)
    with pytest.raises(ConflictError, match="keeps none of that name, or no longer; paramd marks"):
        mesh.diff("mark:nobody")
    with pytest.raises(ConflictError, match=r"step 1 is past.*checkpoint"):
        mesh.diff(1)
    with pytest.raises(DeadlineError, match=r"did not come within .* the ranks are at step"):
        mesh.diff("now", step_of(mesh) + 10**6, timeout=3.0)


def disk_and_memory(mesh: Mesh, folder: Path) -> None:
    path = "/jobs/stuck/updates?filter=we*"
    rest = mesh._run(mesh._mesh._host.rest.send("GET", path, timeout_s=40))
    assert [(row["name"], row["numel"]) for row in rest["updates"]] == [("weight", 16)]
    mesh.pause()
    held = mesh.summon("*")
    changed = {name: tensor.clone() for name, tensor in held.items()}
    changed["weight"][2] += 0.5
    changed["extra"] = torch.ones(3)
    save_file(changed, folder / "model.safetensors")
    found = {row.name: row for row in mesh.diff(str(folder / "model.safetensors"), held)}
    assert found["bias"].changed == 0
    assert found["weight"].changed == 4
    assert found["weight"].norm == pytest.approx(1.0, abs=1e-5)
    assert [row for row, _ in found["weight"].largest_rows] == [2]
    assert found["extra"].problem.startswith("only ")
    assert [row.name for row in mesh.diff(folder / "model.safetensors", "now", "we*")] == ["weight"]
    assert [row.changed for row in mesh.diff(mesh)] == [0, 0]
    with pytest.raises(NotFoundError):
        mesh.diff(folder / "gone")
    mesh.resume()
