"""Engines that follow: what is in force is one version whole, whatever an engine does."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from paramd.errors import ConflictError, UsageError
from paramd.integrations.engines import Engine, EngineFollower, Update, open_engine
from paramd.layout.exports.settings import NameMap
from paramd.mesh.frames.frames import ParamFrame
from tests.integration.engine_servers import Model, engine_server

NAMES = ("embed.weight", "layer.weight", "head.weight")


def weights(step: int) -> dict[str, torch.Tensor]:
    return {name: torch.full((4, 3), float(step), dtype=torch.bfloat16) for name in NAMES}


def frame(step: int) -> ParamFrame:
    return ParamFrame(
        weights(step), changed=NAMES, job="run", incarnation=1, history=0, step=step, dropped=0,
        sent_bytes=9,
    )  # fmt: skip


async def frames(*steps: int) -> AsyncIterator[ParamFrame]:
    for step in steps:
        yield frame(step)
        await asyncio.sleep(0)


@pytest.fixture
def model(tmp_path: Path) -> Model:
    (tmp_path / "original").mkdir()
    save_file(weights(0), tmp_path / "original" / "model.safetensors")
    return Model(str(tmp_path / "original"))


@pytest.fixture(params=["vllm", "sglang"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def url(kind: str, model: Model) -> Iterator[str]:
    with engine_server(kind, model) as found:
        yield found


def follower(engine: Engine, tmp_path: Path, **options: object) -> EngineFollower:
    (tmp_path / "shared").mkdir(exist_ok=True)
    return EngineFollower(
        engine=engine,
        directory=tmp_path / "shared",
        pauses_s=(0.01,),
        **options,  # type: ignore[arg-type]
    )


async def all_of(one: EngineFollower, *steps: int) -> list[Update]:
    try:
        return [update async for update in one.updates(frames(*steps))]
    finally:
        await one.engine.close()


def assert_holds(model: Model, step: int) -> None:
    """All of one step, and generating."""
    assert model.version == (f"run-1-{step}" if step else "default")
    assert sorted(model.weights) == sorted(NAMES)
    for name, tensor in weights(step).items():
        assert torch.equal(model.weights[name], tensor), name
    assert not model.paused


@pytest.mark.parametrize("pause", ["wait", "abort", "keep"])
def test_each_frame_comes_into_force_under_its_version(
    kind: str, url: str, model: Model, tmp_path: Path, pause: str
) -> None:
    one = follower(open_engine(kind, url, pause=pause), tmp_path)
    found = asyncio.run(all_of(one, 3, 4, 5, 9))
    assert [(update.ok, update.in_force) for update in found] == [
        (True, f"run-1-{step}") for step in (3, 4, 5, 9)
    ]
    assert_holds(model, 9)
    # The version in force and the one before; nothing half written.
    assert sorted(path.name for path in (tmp_path / "shared").iterdir()) == ["run-1-5", "run-1-9"]


def test_a_load_that_fails_half_way_leaves_the_old_weights_in_force(
    kind: str, url: str, model: Model, tmp_path: Path
) -> None:
    async def run() -> list[Update]:
        one = follower(open_engine(kind, url), tmp_path)
        one._good = await one.engine.serving()
        found = [await one.update(frame(1))]
        model.fail_after = 2
        found.append(await one.update(frame(2)))
        assert_holds(model, 1)
        found.append(await one.update(frame(2)))
        await one.engine.close()
        return found

    found = asyncio.run(run())
    assert [(update.ok, update.in_force) for update in found] == [
        (True, "run-1-1"),
        (False, "run-1-1"),
        (True, "run-1-2"),
    ]
    assert "out of memory" in found[1].reason
    assert_holds(model, 2)


def test_before_any_frame_an_engine_gets_back_what_it_was_started_with(
    kind: str, url: str, model: Model, tmp_path: Path
) -> None:
    model.fail_after = 1
    one = follower(open_engine(kind, url), tmp_path, attempts=1)
    with pytest.raises(ConflictError, match="The engine has version default"):
        asyncio.run(all_of(one, 7))
    assert_holds(model, 0)


def test_an_engine_that_refuses_is_tried_again_with_the_newest_frame(
    kind: str, url: str, model: Model, tmp_path: Path
) -> None:
    route = {"vllm": "/collective_rpc", "sglang": "/update_weights_from_disk"}[kind]

    async def run() -> list[Update]:
        one, found = follower(open_engine(kind, url), tmp_path), []
        model.refuse.add(route)
        async for update in one.updates(frames(1, 2, 3, 4)):
            found.append(update)
            if len(found) == 3:
                model.refuse.clear()
        await one.engine.close()
        return found

    found = asyncio.run(run())
    assert [update.ok for update in found[:3]] == [False] * 3
    assert all(update.reason for update in found[:3])
    # Whether weights could be put back is not known: the same route refuses.
    assert [update.in_force for update in found[:3]] == [""] * 3
    assert found[-1].step == 4
    assert found[-1].ok
    assert_holds(model, 4)


def test_an_engine_that_died_is_found_again_at_its_address(
    kind: str, model: Model, tmp_path: Path
) -> None:
    async def run() -> None:
        with engine_server(kind, model) as url:
            one = follower(open_engine(kind, url), tmp_path)
            one._good = await one.engine.serving()
            assert (await one.update(frame(1))).ok
        found = await one.update(frame(2))
        assert (found.ok, found.in_force) == (False, "")
        assert "does not answer" in found.reason
        again = Model(str(tmp_path / "original"))
        with engine_server(kind, again, port=int(url.rpartition(":")[2])):
            assert (await one.update(frame(2))).ok
            assert_holds(again, 2)
            await one.engine.close()

    asyncio.run(run())


def test_what_another_job_left_under_a_version_is_not_taken_for_it(
    kind: str, url: str, model: Model, tmp_path: Path
) -> None:
    (tmp_path / "shared" / "run-1-1").mkdir(parents=True)
    save_file(weights(99), tmp_path / "shared" / "run-1-1" / "model.safetensors")
    asyncio.run(all_of(follower(open_engine(kind, url), tmp_path), 1))
    assert_holds(model, 1)


def test_names_are_those_of_the_engines_checkpoint(
    kind: str, url: str, model: Model, tmp_path: Path
) -> None:
    names = NameMap.of({"layer.*": "model.layers.0.*"})
    asyncio.run(all_of(follower(open_engine(kind, url), tmp_path, names=names), 1))
    assert "model.layers.0.weight" in model.weights


def test_the_engines_key_is_sent_and_its_refusal_told(
    kind: str, url: str, model: Model, tmp_path: Path
) -> None:
    model.key = "sesame"
    asyncio.run(all_of(follower(open_engine(kind, url, token="sesame"), tmp_path), 1))
    assert_holds(model, 1)
    with pytest.raises(ConflictError, match=r"refused \(401\): Unauthorized"):
        asyncio.run(all_of(follower(open_engine(kind, url), tmp_path), 2))


def test_a_directory_that_is_missing_or_full_leaves_the_engine_alone(
    kind: str, url: str, model: Model, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="create one that the engine can read"):
        EngineFollower(engine=open_engine(kind, url), directory=tmp_path / "missing")

    async def run() -> Update:
        one = follower(open_engine(kind, url), tmp_path)
        one._good = await one.engine.serving()
        (tmp_path / "shared").rmdir()
        model.calls.clear()
        found = await one.update(frame(1))
        await one.engine.close()
        return found

    found = asyncio.run(run())
    assert (found.ok, found.in_force, model.calls) == (False, "default", [])
