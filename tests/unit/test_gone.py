"""What a release took away says what replaces it, at every door: all rows of the table."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import paramd
from paramd import gone
from paramd.cli.main import main
from paramd.cli.settings import read_file
from paramd.errors import GoneError, UsageError
from paramd.gone import GONE, Door, Gone
from paramd.integrations import training
from paramd.mesh.amesh import AsyncMesh
from paramd.mesh.edits import calls
from paramd.mesh.edits.calls import PauseState, PauseWord
from paramd.mesh.mesh import Mesh
from paramd.trainer.attaching.attach import attach
from paramd.trainer.attaching.attachment import Attachment
from paramd_service.alerts.config import parse_alerts
from paramd_service.control.base.config import ControlConfig
from paramd_service.edits.spec import load_edits
from paramd_service.sidecar.main import parse
from tests.control_services import services
from tests.unit.control.test_control_http import RIGHT, build_app, client_of

KINDS = {kind.__name__: kind for kind in (Mesh, Attachment, PauseState)}
"""Classes that tell; another one needs `@gone.tells`, and to stand here."""

SAMPLES = (
    Gone("command", "herald", "use samples"),
    Gone("command", "alerts herald", "use samples"),
    Gone("flag", "alerts --herald", "use samples"),
    Gone("flag", "export-schedule create --herald-s", "use samples"),
    Gone("setting", "herald_s", "use samples"),
    Gone("setting", "alerts.herald_s", "use samples"),
    Gone("setting", "edits.herald_s", "use samples"),
    Gone("rest", "POST /jobs/{}/heralds", "use samples"),
    # A route that still exists has a parameter there.
    Gone("rest", "GET /jobs/{}/exports/herald", "use samples"),
    Gone("python", "Mesh.herald", "use samples"),
    Gone("python", "Attachment.herald", "use samples"),
    Gone("python", "paramd.herald", "use samples"),
)
"""A row of every form, so that each door is tried even where the table has none."""


def rows(door: Door) -> list[Any]:
    found = [row for row in (*GONE, *SAMPLES) if row.door == door]
    return [pytest.param(row, id=row.name.replace(" ", "_")) for row in found]


@pytest.fixture(autouse=True)
def _table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gone, "GONE", (*GONE, *SAMPLES))


@pytest.mark.parametrize("row", [*rows("command"), *rows("flag")])
def test_a_command_line_says_what_replaces_it(
    row: Gone, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(row.name.split()) == 2
    assert capsys.readouterr().err == f"paramd: `paramd {row.name}` is gone: {row.instead}\n"


def refusal(call: Callable[..., object], *given: Any, **named: Any) -> str:
    with pytest.raises(UsageError) as refused:
        call(*given, **named)
    return str(refused.value)


@pytest.mark.parametrize("row", [row for row in rows("setting") if "." not in row.values[0].name])
def test_a_setting_says_what_replaces_it(row: Gone, tmp_path: Path) -> None:
    option = f"--{row.name.replace('_', '-')}"
    said = f"{option} is gone: {row.instead}"
    for given in ([option], [f"{option}=3"]):
        assert refusal(ControlConfig.from_arguments, given) == said
        assert refusal(parse, ["--job", "run", "--rank", "0", "--socket", "x", *given]) == said
    assert refusal(attach, **{row.name: "3"}) == f"attach({row.name}=...) is gone: {row.instead}"
    file = tmp_path / "paramd.toml"
    file.write_text(f'{row.name} = "3"\n')
    told = refusal(read_file, file, trusted=True)
    assert told == f"{file}: {row.name!r} is gone: {row.instead}"
    # A warning: what was left in the environment keeps nothing from starting.
    variable = f"PARAMD_{row.name.upper()}"
    assert gone.variables({variable: "3"}) == [f"{variable} is gone: {row.instead}"]


READERS: dict[str, Callable[[str], object]] = {
    "alerts": lambda key: parse_alerts({key: 3}, place="here"),
    "edits": lambda key: load_edits([], {"PARAMD_EDITS": json.dumps({key: 3})}),
}
"""Tables of paramd.toml whose keys are settings."""


@pytest.mark.parametrize("row", [row for row in rows("setting") if "." in row.values[0].name])
def test_a_key_of_a_table_says_what_replaces_it(row: Gone) -> None:
    table, _, key = row.name.partition(".")
    assert refusal(READERS[table], key).endswith(f"{key!r} is gone: {row.instead}")


@pytest.mark.parametrize("row", rows("rest"))
async def test_an_operation_answers_gone_behind_the_token_gate(row: Gone) -> None:
    method, _, path = row.name.partition(" ")
    url = gone.API + path.replace("{}", "x")
    async with client_of(build_app(services())) as client:
        answer = await client.request(method, url, headers=RIGHT)
        assert (answer.status_code, answer.headers["content-type"]) == (
            410,
            "application/problem+json",
        )
        assert answer.json() == {
            "type": "urn:paramd:error:gone",
            "title": "Gone",
            "status": 410,
            "detail": f"{row.name} is gone: {row.instead}",
            "instead": row.instead,
        }
        stranger = await client.request(method, url)
        unknown = await client.request(method, f"{gone.API}/never/was")
        assert (stranger.status_code, stranger.json()) == (401, unknown.json())


@pytest.mark.parametrize("row", rows("python"))
def test_a_python_name_says_what_replaces_it(row: Gone) -> None:
    owner, _, name = row.name.rpartition(".")
    name, _, keyword = name.removesuffix(")").partition("(")
    for kind in (AsyncMesh, Mesh) if owner == "Mesh" else (KINDS.get(owner, paramd),):
        assert kind is not paramd or owner in ("", "paramd"), f"{owner} is not among KINDS"
        holder = object.__new__(kind) if isinstance(kind, type) else kind
        with pytest.raises(GoneError) as refused:
            getattr(holder, name)(**{keyword: 3} if keyword else {})
        shown = f"{row.name[:-1]}=...)" if keyword else row.name
        assert str(refused.value) == f"{shown} is gone: {row.instead}"
        # What asks whether there is such a name goes on as with any other.
        assert hasattr(holder, name) == bool(keyword)


@pytest.mark.parametrize("old", gone.RENAMED)
def test_a_name_from_users_loops_works_with_a_warning(old: str) -> None:
    new = gone.RENAMED[old]
    if "(" in old:
        of, _, keyword = old.rstrip(")").partition("(")
        taking = gone.keywords(of)(lambda **named: named)
        for value, taken in ((3, {new: 3}), (None, {} if new == "timeout" else {new: None})):
            with pytest.warns(FutureWarning, match=f"{keyword}=\\) is now {new}="):
                assert taking(**{keyword: value}) == taken
        with pytest.raises(UsageError, match=f"{keyword}= is now {new}=; give only {new}="):
            taking(**{keyword: 3, new: 4})
        return
    owner, _, name = old.rpartition(".")
    made = {"PauseState": PauseState(state=PauseWord.PAUSED), calls.__name__: calls}
    holder = made.get(owner) or object.__new__(KINDS[owner])
    more = "; compare .* 'paused'" if new == "pause_state" else ""
    with pytest.warns(FutureWarning, match=f"{old} is now {owner}.{new}{more}"):
        assert getattr(holder, name) == getattr(holder, new)


def test_a_frameworks_own_state_stays_beside_what_a_user_names_in_the_old_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: dict[str, Any] = {}

    def attached(*_: object, **named: Any) -> Any:
        taken.update(named)
        return SimpleNamespace(rank=1)

    monkeypatch.setattr(training, "attach", attached)
    with pytest.warns(FutureWarning, match="extra_state="):
        begun = training.Training("none", {"keep": {"loader": 1}})
    begun.begin(None, None, step=3, extra_state={"scheduler": 2})
    assert taken["extra_state"] == {"scheduler": 2, "loader": 1}


async def test_an_export_without_a_limit_asks_for_the_longest() -> None:
    asked: list[Any] = []

    async def create(body: Any, _: object) -> None:
        asked.append(body.get("timeout_s"))

    mesh: Any = object.__new__(AsyncMesh)
    mesh._exports = SimpleNamespace(create=create)
    for given in ({}, {"timeout": None}, {"timeout": "20m"}):
        await mesh.export("a/b", **given)
    assert asked == [None, 86_400.0, 1200.0]
