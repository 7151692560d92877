"""What `paramd track` tells a tracker: each number at its own step, each history a run."""

from collections.abc import AsyncIterator, Mapping
from types import SimpleNamespace
from typing import Any

from paramd.integrations.trackers import Following, Histogram
from paramd.layout.stats import EMPTY, summarize
from paramd.mesh.insight.updates import Updates
from paramd.mesh.results import StatsTable, TensorStats
from paramd.state import At


class Mesh:
    """A job at the states that the test says."""

    def __init__(self) -> None:
        self.now = At(0, 0)
        self.ahead = 2
        self.told: list[Any] = []

    async def stats(self, *_: str, histogram: bool) -> StatsTable:
        total = TensorStats(name="total", dtype="", shape=(0,), whole=summarize(EMPTY))
        history, step = self.now
        return StatsTable([], total=total, job="j", incarnation=4, step=step, history=history)

    async def grads(self, *_: str, kind: str) -> AsyncIterator[Any]:
        at = At(self.now.history, self.now.step + self.ahead)

        class Frame(dict[str, Any]):
            history, step = at

        yield Frame()

    async def updates(self, *_: str, **_how: float) -> Updates:
        return Updates([], job="j", incarnation=4, history=self.now.history)

    async def alerts(self, *, limit: int) -> list[Any]:
        return []

    async def edits(self, *, state: str, limit: int) -> list[Any]:
        return self.told


class Run:
    def __init__(self, name: str, history: int) -> None:
        self.name, self.history = name, history
        self.steps: list[tuple[str, int]] = []
        self.closed = False

    def numbers(self, values: Mapping[str, float], step: int) -> None:
        self.steps.append((min(values), step))

    def histograms(self, found: Mapping[str, Histogram], step: int) -> None:
        raise AssertionError("none was asked for")

    def note(self, text: str, step: int) -> None:
        self.steps.append((text, step))

    def close(self) -> None:
        self.closed = True


async def test_steps_that_come_again_are_a_run_of_their_own() -> None:
    mesh: Any = Mesh()
    runs: list[Run] = []

    def opened(name: str, history: int) -> Run:
        assert all(run.closed for run in runs)
        runs.append(Run(name, history))
        return runs[-1]

    following = Following(mesh, opened, ["*"], ["gradients"])
    for history, step in ((0, 10), (0, 11), (0, 11), (1, 3), (1, 4), (1, 10), (3, 1)):
        mesh.now = At(history, step)
        await following.look()
    assert [(run.name, run.history) for run in runs] == [("j-4", 0), ("j-4", 1), ("j-4", 3)]
    seen = [[step for name, step in run.steps if "grad" not in name] for run in runs]
    assert seen == [[10, 11], [3, 4, 10], [1]]
    of_gradients = [[step for name, step in run.steps if "grad" in name] for run in runs]
    assert of_gradients == [[12, 13], [5, 6, 12], [3]]
    following.close()
    assert all(run.closed for run in runs)


async def test_an_edit_is_noted_at_its_own_step() -> None:
    mesh: Any = Mesh()
    run = Run("", 0)
    following = Following(mesh, lambda *_: run, ["*"])
    await following.look()
    mesh.told = [SimpleNamespace(id="abcdefghij", step=7, note="warm")]
    mesh.now = At(0, 9)
    await following.look()
    assert run.steps[-1] == ("edit abcdefgh applied at step 7: warm", 7)
