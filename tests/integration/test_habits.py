"""What people type at first, in the shell and in Python, works or says what does.

Row by row, against a real training.
"""

import copy
import json
from collections.abc import Iterator
from pathlib import Path

import numpy
import pandas
import pytest
import torch

import paramd
from paramd.errors import (
    ConflictError,
    DeadlineError,
    DeniedError,
    NotFoundError,
    UnknownNameError,
    UsageError,
)
from tests.integration.client_job import answer, demo_training

Capture = pytest.CaptureFixture[str]

JOB = "habits"
WEIGHT = "layers.0.up.weight"


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with demo_training(tmp_path_factory.mktemp("habits"), JOB) as found:
        yield found


@pytest.fixture(autouse=True)
def the_job(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARAMD_STATE_DIR", str(state))
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def mesh(the_job: None) -> Iterator[paramd.Mesh]:
    with paramd.connect(JOB) as found:
        yield found


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("help edit", "paramd edit --help"),
        ("help", "paramd --help"),
        ("set", "paramd set-hyperparameters GROUP lr=X"),
        ("lr", "paramd set-hyperparameters"),
        ("hyper", "paramd set-hyperparameters"),
        ("config", "paramd context list"),
        ("params -n 3", "paramd params | head"),
        ("stats --limit 3", "paramd stats | head"),
        ("top -n 1", "paramd status"),
        ("edit X --scale 0.5", "--mul 0.5"),
        ("edit X --scale=0.5", "--mul 0.5"),
        ("edit X --set 0.25", "--fill 0.25"),
        ("edit X --scale", "--mul X"),
        ("ls", "paramd jobs"),
        ("get", "paramd summon NAME -f FILE"),
        ("version", "paramd --version"),
        ("status --json", "-o json"),
        (f"status {JOB}", f"write --job {JOB}"),
        (f"status --job {JOB} -o yaml", "'table', 'wide', 'json', 'jsonl', 'name'"),
        ("stauts", "status"),
    ],
)
def test_a_guess_in_the_shell_names_what_works(capsys: Capture, typed: str, said: str) -> None:
    assert said in answer(capsys, *typed.split(), code=2)[1]


def test_hyperparameters_are_listed_and_set_by_one_command(
    mesh: paramd.Mesh, capsys: Capture
) -> None:
    out, _ = answer(capsys, "set-hyperparameters", "--job", JOB)
    assert "lr=" in out
    (group,) = json.loads(answer(capsys, "set-hyperparameters", "-o", "json")[0])["groups"]
    groups = mesh.hyperparameters()
    assert groups[0]["lr"] == group["values"]["lr"]
    assert "lr=" in repr(groups)
    mesh.set_hyperparameters(groups[0].name, lr=groups[0]["lr"])
    assert "lr=1e-4" in answer(capsys, "set-hyperparameters", "0", code=2)[1]


def test_a_name_has_its_shape_at_once_and_reads_its_values(mesh: paramd.Mesh) -> None:
    weight = mesh[WEIGHT]
    rows, columns = weight.shape
    assert (weight.dtype, weight.numel, weight.ndim) == ("float32", rows * columns, 2)
    assert f"'{WEIGHT}' [{rows}, {columns}] float32" in repr(weight)
    assert weight.numpy().shape == weight.shape
    assert numpy.asarray(weight, dtype="float64").dtype == "float64"
    assert weight.norm() > 0
    assert weight.stats().norm > 0
    assert weight.summon(dtype="bfloat16").dtype == torch.bfloat16
    with pytest.raises(UsageError, match=r'numpy\(dtype="float32"\)'):
        weight.numpy(dtype="bfloat16")
    part = mesh[f"{WEIGHT}[0:1]"]
    assert (part.shape, part.numel) == ((1, columns), columns)
    assert part.summon().shape == part.shape
    assert part.edit(mul=1.0, dry_run=True).shown_state == "DRY RUN"


def test_a_name_that_is_none_is_not_found_at_once(mesh: paramd.Mesh) -> None:
    with pytest.raises(NotFoundError, match=f"did you mean .*'{WEIGHT}'"):
        mesh["layers.0.up.wieght"]
    with pytest.raises(LookupError):
        mesh["misspelt"]
    with pytest.raises(UsageError, match=r"matches .* tensors; .*mesh\.summon"):
        mesh["layers.*"]


def test_what_is_no_name_of_a_mesh_says_which_is(mesh: paramd.Mesh) -> None:
    with pytest.raises(UsageError, match=r"mesh\.edit\('head\.weight', set=value\)"):
        mesh["head.weight"] = torch.zeros(1)  # type: ignore[index]
    for guess, meant in (
        ("keys", "mesh.names"),
        ("items", "mesh.summon"),
        ("lr", "mesh.hyperparameters"),
        ("gradients", "mesh.grads"),
    ):
        with pytest.raises(UnknownNameError, match=f"there is no Mesh.{guess}: use {meant}"):
            getattr(mesh, guess)
        assert not hasattr(mesh, guess)
    for guess, meant in (("mean", r"stats\(\)"), ("grad", "mesh.grads"), ("mul_", "edit")):
        with pytest.raises(UnknownNameError, match=meant):
            getattr(mesh[WEIGHT], guess)
    assert not hasattr(mesh, "nothing_of_the_kind")


def test_the_step_is_told_where_it_is_looked_for(mesh: paramd.Mesh) -> None:
    assert "current_step" in repr(mesh)
    assert "current_step" in repr(mesh.step)
    assert mesh.current_step > 0


def test_a_mesh_is_a_card_in_a_notebook(mesh: paramd.Mesh) -> None:
    card = mesh._repr_html_()
    assert f"<td>{JOB}</td>" in card
    assert "<td>1 of 1</td>" in card
    assert mesh.url in card
    with mesh.pause():
        assert "<td>1 of 1</td>" in mesh._repr_html_(), "a pause on request is no illness"
    mesh.close()
    assert "closed" in mesh._repr_html_()


def test_a_lease_is_given_as_a_timeout_is(mesh: paramd.Mesh) -> None:
    with mesh.pause(lease="10s", timeout="1m") as pause:
        assert 0 < pause.lease_left_s <= 10
    with (
        pytest.warns(FutureWarning, match=r"pause\(lease_s=\) is now lease="),
        mesh.pause(
            lease_s=10  # type: ignore[call-arg]
        ),
    ):
        pass


def test_undo_alone_undoes_the_last_edit(mesh: paramd.Mesh) -> None:
    edit = mesh.edit("layers.0.up.bias", add=0.25)
    assert mesh.undo().undo_of == edit.id


def test_a_table_becomes_json_and_a_frame(mesh: paramd.Mesh) -> None:
    stats = mesh.stats("layers.0.*")
    told = json.loads(json.dumps(stats.to_dict()))
    assert (told["job"], told["step"]) == (JOB, stats.step)
    assert told["rows"][0]["norm"] == stats[0].norm
    assert told["total"]["count"] == stats.total.count
    assert json.loads(json.dumps(stats[0].to_dict()))["shape"] == list(stats[0].shape)
    numbers = ["count", "zero_count", "nan_count", "inf_count", "norm", "mean", "std", "min", "max"]
    for frame in (pandas.DataFrame(stats), stats.to_pandas()):
        assert sorted(frame.columns) == sorted(["name", "shape", "dtype", *numbers])
        assert frame["norm"][0] == stats[0].norm
    counted = mesh.stats(WEIGHT, histogram=True)
    assert counted.to_pandas()["exponents"][0] == counted[0].exponents
    again = copy.deepcopy(stats[0])
    assert (again, again.summary) == (stats[0], stats[0].summary)
    with pytest.raises(UnknownNameError, match=r"to_pandas\(\)\.plot\(\)"):
        stats.plot()  # type: ignore[attr-defined]
    for rows in (mesh.params(), mesh.status(), mesh.edits(), mesh.alerts(), mesh.destinations()):
        assert len(json.loads(json.dumps(rows.to_dict()))["rows"]) == len(rows)
    edit = mesh.edit(WEIGHT, mul=1.0, dry_run=True)
    assert json.loads(json.dumps(edit.to_dict()))["id"] == edit.id


def test_a_file_is_what_its_name_says(mesh: paramd.Mesh, tmp_path: Path, capsys: Capture) -> None:
    from safetensors.torch import load_file

    found = mesh.summon("layers.0.*")
    for name in ("a.pt", "a.pth", "a.bin"):
        found.save(tmp_path / name)
        loaded = torch.load(tmp_path / name)
        assert type(loaded) is dict
        assert found == loaded
    for name in ("a.safetensors", "plain", "model.v2", "step-0.5"):
        found.save(tmp_path / name)
        assert found == load_file(tmp_path / name)
    for name in ("a.npz", "a.ckpt", "a.gguf", "a.h5"):
        with pytest.raises(UsageError, match=r"expected \.safetensors, or for torch.load \.pt"):
            found.save(tmp_path / name)
        assert not (tmp_path / name).exists()
    with pytest.raises(UsageError, match=r"mesh\.summon\('\*', buffers=True\)\.save"):
        mesh.download(tmp_path / "m.pt")
    assert not (tmp_path / "m.pt").exists()
    assert "does not end in .safetensors" in answer(capsys, "summon", "*", "-f", "m.pt", code=2)[1]


@pytest.mark.parametrize(
    ("guess", "meant"),
    [
        ("connect_async", "paramd.aio.connect"),
        ("aconnect", "paramd.aio.connect"),
        ("init", r"paramd.attach\(model, optimizer, job=...\)"),
        ("load", r"paramd.connect\('JOB'\).summon"),
        ("jobs", "paramd.places.running_jobs"),
    ],
)
def test_a_guess_of_the_module_names_what_works(guess: str, meant: str) -> None:
    with pytest.raises(UnknownNameError, match=f"there is no paramd.{guess}: use {meant}"):
        getattr(paramd, guess)


def test_a_guess_of_a_keyword_names_the_right_one() -> None:
    with pytest.raises(UnknownNameError, match=r"no attach\(name=...\): use job="):
        paramd.attach(torch.nn.Linear(2, 2), None, name="x")  # type: ignore[call-arg]
    with pytest.raises(UnknownNameError, match=r"no connect\(name=...\): use job="):
        paramd.connect(name=JOB)  # type: ignore[call-arg]


def test_every_type_that_is_printed_can_be_imported(mesh: paramd.Mesh) -> None:
    edit = mesh.edit(WEIGHT, mul=1.0, dry_run=True)
    table = mesh.stats(WEIGHT)
    for found in (mesh, mesh[WEIGHT], edit, table[0], mesh.pause_state(), mesh.why()[0]):
        name = repr(found).removeprefix("<").split()[0].removeprefix("paramd.")
        assert isinstance(found, getattr(paramd, name)), name
    assert isinstance(table, paramd.StatsTable)
    assert isinstance(mesh.summon(WEIGHT), paramd.Summoned)


def test_a_dry_run_is_called_one_everywhere(mesh: paramd.Mesh, capsys: Capture) -> None:
    edit = mesh.edit(WEIGHT, mul=1.0, dry_run=True)
    out, _ = answer(capsys, "edits")
    (line,) = [line for line in out.splitlines() if line.startswith(edit.id[:8])]
    assert "  DRY RUN  " in line
    assert "DRY RUN" in answer(capsys, "edit", WEIGHT, "--mul", "1", "--dry-run")[0]
    # Documents keep the control plane's word, beside what it was.
    (row,) = json.loads(answer(capsys, "edits", edit.id, "-o", "json")[0])["edits"]
    assert (row["state"], row["dry_run"]) == ("ABORTED", True)


def test_a_timeout_bounds_copies_too(mesh: paramd.Mesh) -> None:
    mesh.summon(WEIGHT)
    for transport in ("auto", "same-host", "stream", "grpc"):
        with pytest.raises(DeadlineError):
            mesh.summon(WEIGHT, timeout=1e-6, transport=transport)


def test_logs_without_a_rank_are_those_of_all(capsys: Capture) -> None:
    out, _ = answer(capsys, "logs")
    assert out.startswith("==> rank 0, sidecar <==")
    (first, *_) = json.loads(answer(capsys, "logs", "-n", "2", "-o", "json")[0])["logs"]
    assert (first["rank"], first["source"], len(first["lines"])) == (0, "sidecar", 2)


def test_a_viewer_is_told_its_role_and_never_to_fetch_the_owners_token(
    mesh: paramd.Mesh, capsys: Capture
) -> None:
    made = json.loads(answer(capsys, "token", "create", "--role", "viewer", "-o", "json")[0])
    (token,) = [one["token"] for one in made["tokens"]]
    with paramd.connect(mesh.url, token, job=JOB) as viewer:
        with pytest.raises(DeniedError) as editing:
            viewer.edit(WEIGHT, mul=1.0)
        with pytest.raises(DeniedError) as reading:
            viewer.summon(WEIGHT)
    assert str(editing.value).startswith("this token's role is viewer; changing a training needs")
    assert "this token's role is viewer; this call needs reader" in str(reading.value)
    for told in (editing, reading):
        assert "paramd token create --role" in str(told.value)
        assert "endpoint.json" not in str(told.value)
        assert "token=" not in str(told.value)


def test_errors_say_what_to_do_in_one_breath(mesh: paramd.Mesh) -> None:
    with pytest.raises(UsageError, match=r"dtype: 'fp16'; did you mean 'float16'\?"):
        mesh.summon(WEIGHT, dtype="fp16")
    with pytest.raises(UsageError, match="no scheme; write 'http://localhost:8470'"):
        paramd.connect("localhost:8470")
    refused = r"^edit [0-9a-f]{8} was applied on no rank: if_step is 0, but .*; pause training"
    with pytest.raises(ConflictError, match=refused):
        mesh.edit(WEIGHT, mul=1.0, if_step=0)
