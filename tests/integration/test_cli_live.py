"""The command line as a user meets it: another process, and a training that goes on."""

import io
import json
import os
import pickle
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import paramd
from paramd.cli.main import main
from paramd.errors import ConflictError, NotFoundError
from paramd.mesh.exports.calls import ExportState
from tests.integration.client_job import demo_training, wait_for

JOB = "live"
INTERRUPTED = 130


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with demo_training(tmp_path_factory.mktemp("live"), JOB) as found:
        yield found


@pytest.fixture(autouse=True)
def the_live_job(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARAMD_STATE_DIR", str(state))
    monkeypatch.delenv("COLUMNS", raising=False)


def begun(*arguments: str, program: Sequence[str] = ("-m", "paramd.cli")) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *program, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ran(*arguments: str, code: int = 0) -> tuple[str, str]:
    """What a command printed to stdout and stderr, once it has ended with `code`."""
    with begun(*arguments) as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    return out, err


def interrupted(process: subprocess.Popen[str], *, twice: bool = False) -> str:
    """What a command says on Ctrl-C; `twice` as when the whole foreground group gets it, too."""
    with process:
        process.send_signal(signal.SIGINT)
        if twice:
            process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == INTERRUPTED, err
    assert "bug" not in err
    assert "Traceback" not in err
    return err


def read_line(process: subprocess.Popen[str]) -> str:
    """The next line of stdout, within a deadline."""
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], 60)[0]
    return process.stdout.readline()


def test_the_ids_that_are_printed_are_taken_everywhere() -> None:
    listed = ran("edit", "layers.0.up.bias", "--add", "0.25")[0].splitlines()
    short = listed[1].split()[0]
    assert len(short) == 8
    (edit,) = json.loads(ran("edits", short, "-o", "json")[0])["edits"]
    assert edit["id"].startswith(short)
    with paramd.connect(job=JOB) as mesh:
        assert mesh.get_edit(short).id == edit["id"]
        assert short in repr(mesh.get_edit(short))
        with pytest.raises(NotFoundError, match="no id begins with 'xyz'; see: paramd edits"):
            mesh.get_edit("xyz")
        with pytest.raises(NotFoundError, match="paramd exports"):
            mesh.get_export("ffffffff")
        url = mesh.url
    token = ran("token", "create", "--role", "editor", "--name", "bob")[0].split()[-1]
    mine = f"no applied edit of 'bob.*' is .* others: {short} by owner, add 0.25"
    with paramd.connect(url, token, job=JOB) as mesh, pytest.raises(ConflictError, match=mine):
        mesh.undo("last")
    out, _ = ran("undo", "last")
    assert f"undo {short}" in out
    with paramd.connect(job=JOB) as mesh:
        redo = mesh.undo(mesh.edits(limit=1)[0])
        assert mesh.undo("last").undo_of == redo.id
    assert "no id begins with" in ran("undo", "0123456789", code=4)[1]


@pytest.mark.parametrize("twice", [False, True])
def test_ctrl_c_ends_grads_without_a_word(twice: bool) -> None:
    process = begun("grads", "*", "-o", "jsonl")
    assert json.loads(read_line(process))["job"] == JOB
    assert interrupted(process, twice=twice) == ""


def the_sidecar() -> psutil.Process:
    """The training's only one; what it stands still for cannot end before an interrupt."""
    return next(
        process
        for process in psutil.Process().children(recursive=True)
        if "paramd_service.sidecar" in process.cmdline()
    )


def test_ctrl_c_while_waiting_for_an_export_says_that_it_goes_on() -> None:
    sidecar = the_sidecar()
    with paramd.connect(job=JOB) as mesh:
        sidecar.suspend()
        try:
            process = begun("export", "checkpoints/interrupted", "--wait")
            wait_for(lambda: bool(mesh.exports()), "the export's begin")
            time.sleep(0.5)  # until the command waits for it
            err = interrupted(process)
        finally:
            sidecar.resume()
        found = mesh.exports()[0]
    assert f"export {found.id[:8]} continues" in err
    assert f"paramd exports {found.id[:8]} --cancel" in err
    with paramd.connect(job=JOB) as mesh:
        # It may fail for the sidecar that stood still; the interrupt did not cancel it.
        assert mesh.export_ended(found, timeout=60).state is not ExportState.CANCELLED


def test_ctrl_c_while_waiting_for_an_edit_says_what_may_have_happened() -> None:
    # The edit waits for the trainer to go on. A sidecar that stands still would not do: after
    # some seconds its rank is taken for lost, and no edit begins.
    trainer = psutil.Process(the_sidecar().ppid())
    with paramd.connect(job=JOB) as mesh:
        known = len(mesh.edits(limit=1000))
        trainer.suspend()
        try:
            process = begun("edit", "layers.0.up.bias", "--add", "0.25", "--timeout", "60")
            wait_for(lambda: len(mesh.edits(limit=1000)) > known, "the edit's begin")
            err = interrupted(process)
        finally:
            trainer.resume()
    assert "if the edit was committed already it is applied all the same" in err
    assert "paramd edits" in err


@pytest.mark.parametrize("mine", ["with mesh.pause():", "mesh.pause(lease=40);"])
def test_ctrl_c_in_a_pause_resumes_or_says_when(mine: str) -> None:
    hold = "def hold(): print(flush=True); time.sleep(60)"
    script = f"import paramd, time\nmesh = paramd.connect({JOB!r})\n{hold}\n{mine} hold()"
    with begun(script, program=("-c",)) as process:
        read_line(process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    said = "".join(re.findall("paramd: .*", err))
    resumes = "resumes in [34]. s, or with: paramd resume" if "lease" in mine else "^$"
    assert re.search(resumes, said), err
    with paramd.connect(job=JOB) as mesh:
        assert mesh.pause_state().paused == bool(said)
        assert mesh.resume().state == "running"


def on_terminal(*arguments: str, columns: int = 80) -> str:
    """What a command prints on a terminal of that width."""
    screen, shell = pty.openpty()
    termios.tcsetwinsize(shell, (24, columns))
    try:
        with subprocess.Popen(
            [sys.executable, "-m", "paramd.cli", *arguments],
            stdin=subprocess.DEVNULL, stdout=shell, stderr=subprocess.DEVNULL,
        ) as process:  # fmt: skip
            os.close(shell)
            found = b""
            with suppress(OSError):  # how a terminal ends
                while part := os.read(screen, 65536):
                    found += part
            assert process.wait(60) == 0
    finally:
        os.close(screen)
    text = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", found.decode())
    # A return without a newline begins a line that is drawn again.
    return text.replace("\r\n", "\n").replace("\r", "\n")


def test_a_watched_status_begins_with_the_verdict_that_all_others_show() -> None:
    # A pause of another test may not be over yet.
    wait_for(lambda: "health: running" in ran("status")[1], "training runs", 60.0)
    with begun("status", "--watch", "--every", "0.2s") as process:
        head = read_line(process)
        assert process.stdout is not None
        health = process.stdout.readline()
        interrupted(process)
    assert head.startswith(f"job {JOB}, run 1, step ")
    # Ages within the line move on between two looks.
    begin = health.partition(",")[0].strip()
    assert begin.startswith("health: ")
    for other in ("status", "watch", "alerts"):
        assert begin in ran(other)[1], other


def test_a_pause_is_a_block_and_an_edit_is_undone_by_itself(
    capfd: pytest.CaptureFixture[str],
) -> None:
    name, count = "layers.0.norm1.bias", 0
    with paramd.connect(JOB) as mesh:
        with mesh.pause(lease="1m", timeout=None) as pause:
            assert pause.paused
            assert " paused " in ran("status")[0]
            assert mesh.why()[0].phase == "PAUSED"
            before = mesh[name].summon()
            edit = mesh.edit(name, set=[7.0] * before.numel())
            assert mesh[name].summon().tolist() == [7.0] * before.numel()
            assert mesh.undo(edit).state == "APPLIED"
            assert mesh[name].summon().equal(before)
        assert mesh.pause_state().state == "running"
        for _ in mesh.grads(name, dtype="float64"):
            count += 1
            break
        with suppress(KeyError):
            for _ in mesh.follow(name):
                raise KeyError
    assert count == 1
    assert capfd.readouterr() == ("", "")


# What people type first (a command behind $), and a part of the answer or of the error.
HABITS = (
    ("paramd.connect('live')", "Mesh of job 'live'"),
    ("paramd.connect('liev')", "jobs that run here: live"),
    ("paramd.connect(context='lab')", "use url="),
    ("paramd.list_jobs()", "running_jobs"),
    ("paramd.Mesh, paramd.ParamdError", "ParamdError"),
    ("len(mesh), bool(mesh)", "True"),
    ("mesh.keys()", r"names\(\)"),
    ("mesh.named_parameters()", "summon"),
    ("mesh.ranks, mesh.world_size", "status"),
    ("mesh.step", "bound method Mesh.step"),
    ("mesh.undo(now=True)", r"Mesh.undo\(\) got an unexpected .*help"),
    ("mesh.pause(10)", r"Mesh.pause\(\) takes"),
    ("mesh.set_lr(1)", "set_hyperparameters"),
    ("mesh.checkpoint('x')", "export"),
    ("mesh.layout", "<Layout of"),
    ("mesh.state_dict().keys()", "head.weight"),
    ("mesh.summon('head')", r"write 'head\.\*'"),
    ("mesh.summon('layers.0')", r"write 'layers\.0\.\*'"),
    ("mesh.summon('head.weight[0]')", "one row is"),
    ("mesh.summon('head.weight[::2]')", "not a slice"),
    ("mesh.summon('head.{weight,bias}')", "globs"),
    (r"mesh.summon('layers\\..*')", "globs"),
    ("mesh.summon('numel>1000')", "params and stats"),
    ("mesh.params('head.*', 'numel > 1K')", "head.weight"),
    ("mesh.params('norm>1e9', 'numel>1')", "0 "),
    ("mesh.stats('norm>0', 'numel>1000')", "head.weight"),
    ("mesh.stats('numel>1e15')", "no tensor satisfies numel>1e15"),
    ("mesh.stats('head.weight[0:2]', 'numel>1')[0].shape[0]", "^2$"),
    ("mesh.params('head.weight[0:1]', f'norm>{mesh.stats()[\"head.weight\"].norm / 2}')", "\\n0 "),
    ("mesh.stats()['head.weight'].norm", "[0-9]"),
    ("sorted(mesh.stats(), key=lambda row: row.norm)[0]", "TensorStats"),
    ("'head.weight' in mesh.params()", "True"),
    ("mesh.stats()[:1]", "norm .*std"),
    ("pickle.loads(pickle.dumps(mesh.stats())).step", "[0-9]"),
    ("pickle.loads(pickle.dumps(mesh.status())).job", "live"),
    ("torch_again(mesh.summon('head.weight'))", "head.weight"),
    ("(found := mesh.summon('head.weight')) == found, found != found", r"\(True, False\)"),
    ("mesh.summon('head.weight').allclose(1)", r"use mesh\.diff"),
    ("mesh.summon('head.weight').to('cpu')", "device="),
    ("mesh.summon('head.weight').half()", "dtype="),
    ("mesh.summon('head.weight').to_pandas()", "numpy"),
    ("mesh.summon('head.weight').__enter__()", "writeback=True"),
    ("mesh.summon('head.weight', device='cuda:99')", "device: 'cuda:99'"),
    ("mesh.edit('head.weight', 0.0)", "set="),
    ("mesh.edit('head.weight', set=0.0, dry_run=True)", "DRY RUN.* -> 0"),
    ("mesh.edit('head.weight', set=list(range(3)), dry_run=True)", "shape"),
    ("mesh.set_hyperparameters(0, lrr=1.0)", "it has lr"),
    ("(edit := mesh.edit('head.weight', mul=1.0)).undo()", r"mesh.undo\(edit\)"),
    ("mesh.undo(mesh.edit('head.weight', mul=1.0))", "undo"),
    ("mesh.undo(mesh.edits())", "expected an edit"),
    ("mesh.edits(state='applied')", "state .*who"),
    ("mesh.rollback(-10)", "expected a restore point"),
    ("mesh.rollback('nope')", "restore point 'nope'|states"),
    ("mesh.diff('nope')", "'mark:nope'"),
    ("mesh.export('/a b/x')", r"'a-b/x'.*add_destination\('a-b', '/a b'\).*'a-b=/a b'\. .*down"),
    ("mesh.export('/x')", "'/x'; write NAME/KEY; .* absolute path of the job's hosts.*download"),
    ("mesh.export('s3://u:SECRET@b')", "'s3://b'; write NAME/KEY"),
    ("mesh.export('s3://u:SECRET@b/' + 'k' * 80 + '/x')", "n: 's3://b/k{80}/x'; write 'k{64}/x'"),
    ("mesh.export('/nfs/checkpoints/x')", "'data/x'"),
    ("mesh.export('now').wait().destination", "checkpoints/now"),
    ("mesh.export('checkpoints').wait().destination", r"checkpoints/step-\d"),
    ("mesh.exports().to_pandas().columns", "destination"),
    ("mesh.destinations()['checkpoints'], mesh.export_schedules()", "'directory'.*0 rows"),
    ("mesh.lanes(), mesh.reaches()", "same-host"),
    ("mesh.exports()[0], mesh.params()[0]", "<paramd.ExportInfo .{8} to .*<paramd.ParamInfo name"),
    ("(made := mesh.export('y'))._repr_html_(), dir(made)", "<td>checkpoints/y.*'written_bytes'"),
    ("mesh.logs(0)._repr_html_()", "<pre>==&gt; rank 0"),
    ("mesh.stats()[0]._repr_html_()", "<th>norm</th>.*<td>"),
    ("mesh.summon('*', progress=lambda *read: seen.append(read)), seen[-1]", r"\((\d+), \1\)\)$"),
    ("mesh.pause_state()", "PauseState running at step"),
    ("mesh.spectrum('head.weight')", "Spectrum head.weight"),
    ("mesh.logs(0)", "RankLog of rank 0"),
    ("next(iter(mesh.grads('*')))", "GradFrame"),
    ("next(mesh.grads())", "no pattern"),
    ("$ jobs -o name", "live"),
    ("$ ls", "paramd jobs"),
    ("$ stop", "paramd pause"),
    ("$ unpause", "paramd resume"),
    ("$ checkpoint", "paramd export"),
    ("$ read head.weight", "paramd summon"),
    ("$ status --json", "-o json"),
    ("$ status -o yaml", "--output': 'yaml' is not one of"),
    ("$ status live", "--job live"),
    ("$ status --every 9d", "0.2 s to 1 h"),
    ("$ summon head.weight -o x.safetensors", "use -f FILE"),
    ("$ stats 'norm>0' numel>1000", "head.weight"),
    ("$ stats 'max<-1e30' -o json", r'"stats": \[\]\s*}'),
    ("$ edit x --set 0", "--fill 0"),
    ("$ edit x --scale 2", "--mul 2"),
    ("$ edit x --mul", "see: paramd edit --help"),
    ("$ export --overwrite", "checkpoints/step-"),
    ("$ exports --add-destination here=/tmp", "here .*directory"),
    ("$ pause --lease 1m", "LEASE"),
    ("$ resume", "running"),
)


def torch_again(found: Any) -> Any:
    """By torch's own file format, read as it reads strangers' files."""
    torch.save(found, (file := io.BytesIO()))
    return torch.load(io.BytesIO(file.getvalue()))


@pytest.mark.parametrize(("typed", "part"), HABITS, ids=[typed for typed, _ in HABITS])
def test_what_people_type_first_works_or_names_what_does(
    typed: str, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if typed.startswith("$ "):
        main(shlex.split(typed[2:]))
        told = "".join(capsys.readouterr())
    else:
        with paramd.connect(job=JOB) as mesh:
            names = globals() | {"mesh": mesh, "pickle": pickle, "seen": []}
            try:
                told = repr(eval(typed, names))  # noqa: S307
            except paramd.ParamdError as error:
                told = str(error)
    assert re.search(part, told, re.DOTALL), told


@pytest.mark.parametrize(
    "command",
    [("params",), ("stats", "*"), ("edits",), ("audit",), ("alerts",), ("grads", "*", "-n", "1")],
)
def test_tables_fit_a_terminal_of_80_columns(command: tuple[str, ...]) -> None:
    # Each line once: some are drawn again.
    lines = list(dict.fromkeys(on_terminal(*command).splitlines()))
    assert max(map(len, lines)) <= 80, lines
    names = [line.split()[0] for line in lines if line.startswith("layers.")]
    assert len(set(names)) == len(names)
