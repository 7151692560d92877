"""When an update settles, when it rests, and what is proven: the hooks in one process."""

import copy
import gc
import os
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from paramd.layout.types import TensorKind
from paramd.memory.arena import HostArena
from paramd.memory.control_page import (
    Changed,
    Changes,
    ControlPage,
    Word,
    changes_of,
    is_stray,
    read_text,
    sample_digest,
    unserved_reason,
)
from paramd.memory.gate import CopyEnd, CopySpan, State, copy_at_one_step, copy_at_rest
from paramd.memory.handover import Descriptors
from paramd.state import Settling
from paramd.trainer.attaching.checks import changes_in_forward
from paramd.trainer.boundary.agreement import CAPTURE, Agreement, Request
from paramd.trainer.boundary.boundary import LEFT_AT_REST, MOST_SEARCHES, PROBATION, Boundary
from paramd.trainer.boundary.signals import Signals
from paramd.trainer.home import moving
from paramd.trainer.home.owned import ParameterStorage

pytestmark = pytest.mark.usefixtures("few_objects")
WIDTH = 8


class NoEdits:
    """In the editor's place: nobody edits here."""

    failed = False

    def accept(self, request: Request) -> bool:
        return False

    def apply(self, request: Request, gate: object) -> None:
        raise AssertionError


class Bench:
    """A model whose parameters live in an arena, its boundary and its signals."""

    def __init__(self, model: nn.Module, *, always_strict: str = "") -> None:
        self.model = model
        self.home = ParameterStorage(model)
        size = self.home.arena_bytes
        self.shared = Descriptors.create(size)
        self.page = ControlPage(self.shared.page)
        self.arena = HostArena(self.shared.arena, size)
        self.home.move_in(self.arena.buffer)
        self.boundary = Boundary(
            self.page, self.shared.wake, self.home, Agreement(None, timeout_s=1), editor=NoEdits(),
            copy_state=lambda _: None, hold_cap_s=1, stall_budget_ns=0, always_strict=always_strict,
        )  # fmt: skip
        self.signals = Signals(model, self.boundary)
        self.signals.open()

    @property
    def settled(self) -> bool:
        return not self.page[Word.SEQ] & 1

    @property
    def rests(self) -> bool:
        return bool(self.page[Word.REST])

    def forward_backward(self) -> None:
        self.model(torch.ones(2, WIDTH)).sum().backward()

    def train(self, optimizer: torch.optim.Optimizer, rounds: int = PROBATION + 2) -> None:
        for _ in range(rounds):
            optimizer.zero_grad()
            self.forward_backward()
            optimizer.step()

    def copy(self, how: Callable[..., Any], **options: Any) -> tuple[CopyEnd, Any]:
        target = (os.urandom(1) * self.arena.size_bytes)[:]
        buffer = bytearray(target)
        view = torch.frombuffer(buffer, dtype=torch.uint8)
        span = CopySpan(self.arena.address, view.data_ptr(), self.arena.size_bytes)
        end, state = how(self.page, [span], **options)
        return end, state

    def at_rest(self, **options: Any) -> tuple[CopyEnd, Any]:
        digest = lambda: sample_digest(self.page, self.arena.buffer)  # noqa: E731
        return self.copy(copy_at_rest, digest=digest, **options)

    def close(self) -> None:
        self.signals.close()
        self.boundary.close()
        self.home.move_out()
        self.page.close()
        self.arena.close()
        self.shared.close()


Make = Callable[..., Bench]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Bench] = []

    def build(model: nn.Module | None = None, **options: Any) -> Bench:
        made.append(Bench(model if model is not None else _model(), **options))
        return made[-1]

    yield build
    for bench in made:
        bench.close()


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def _sgd(bench: Bench) -> torch.optim.Optimizer:
    return torch.optim.SGD(bench.model.parameters(), lr=0.1)


def test_a_state_is_settled_when_training_goes_on(make: Make) -> None:
    bench = make()
    optimizer = _sgd(bench)
    bench.train(optimizer)

    assert not bench.settled
    assert bench.rests
    bench.model(torch.ones(2, WIDTH))
    assert bench.settled
    assert bench.page[Word.STEP] == bench.boundary.step == PROBATION + 2
    assert bench.copy(copy_at_one_step)[0] is CopyEnd.DONE


def test_a_forward_that_is_not_differentiated_settles_nothing(make: Make) -> None:
    bench = make()
    bench.train(_sgd(bench))

    with torch.no_grad():
        bench.model(torch.ones(2, WIDTH))
    with torch.inference_mode():
        bench.model(torch.ones(2, WIDTH))
    copy.deepcopy(bench.model)(torch.ones(2, WIDTH))

    assert not bench.settled


def test_weights_swapped_in_are_read_only_by_whoever_says_so(make: Make) -> None:
    bench = make()
    bench.train(_sgd(bench))

    for parameter in bench.model.parameters():
        parameter.data.mul_(0.5)

    assert bench.at_rest()[0] is CopyEnd.CHANGED
    assert bench.at_rest(changed_too=True)[0] is CopyEnd.DONE


def test_a_rest_that_ends_during_a_copy_is_no_state(make: Make) -> None:
    bench = make()
    optimizer = _sgd(bench)
    bench.train(optimizer)

    def go_on(point: str) -> None:
        if point == "copy-moved":
            optimizer.step()

    assert bench.at_rest(at_point=go_on)[0] is CopyEnd.OVERTAKEN


def test_a_new_attachment_is_trusted_after_some_steps_without_a_stray_change(make: Make) -> None:
    bench = make()
    optimizer = _sgd(bench)
    for _ in range(PROBATION):
        assert bench.page[Word.STRICT] == 1
        bench.forward_backward()
        assert not bench.settled, "strict: SEQ is even within the boundary alone"
        optimizer.step()
    bench.forward_backward()
    assert bench.page[Word.STRICT] == 0
    assert bench.settled


def test_a_change_between_forward_and_step_makes_it_strict(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    bench = make()
    optimizer = _sgd(bench)
    bench.train(optimizer)
    bench.forward_backward()
    seq = bench.page[Word.SEQ]
    assert bench.settled

    for parameter in bench.model.parameters():
        parameter.data.add_(1.0)
    optimizer.step()

    assert bench.page[Word.STRAY_COUNT] == 1
    assert is_stray(bench.page.words, seq), "what was copied under it is no state"
    assert not is_stray(bench.page.words, seq - 2)
    assert bench.page[Word.STRICT] == 1
    bench.forward_backward()
    assert not bench.settled
    assert "attachment.update()" in caplog.text


def test_what_a_script_changes_around_an_update_is_noted_for_who_waits_for_it(make: Make) -> None:
    bench = make()
    optimizer, words = _sgd(bench), bench.page.words
    bench.train(optimizer)

    def halve(*, data: bool = False) -> None:
        with torch.no_grad():
            for value in bench.model.parameters():
                (value.data if data else value).mul_(0.5)

    def update(before: Callable[[], None], after: Callable[[], None]) -> None:
        optimizer.zero_grad()
        bench.forward_backward()
        before()
        optimizer.step()
        after()

    def noted() -> Changes:
        return changes_of(words, words[Word.STEP])

    def nothing() -> None: ...

    update(nothing, halve)
    update(nothing, nothing)
    assert noted() == Changes(), "nobody waits for it"
    words[Word.ARM_STEP] = 10**6
    update(nothing, halve)
    bench.forward_backward()
    assert noted() == Changes(after=Changed.WRITTEN | Changed.SAMPLES)
    update(nothing, lambda: halve(data=True))
    assert changes_of(words, words[Word.STEP] + 1).resting == Changed.WRITTEN | Changed.SAMPLES
    bench.forward_backward()
    assert noted().after == Changed.SAMPLES
    update(halve, nothing)
    bench.forward_backward()
    assert noted() == Changes(before=Changed.WRITTEN | Changed.SAMPLES, resting=Changed.SAMPLES)
    update(nothing, nothing)
    bench.forward_backward()
    assert noted() == Changes()


def _noted(bench: Bench) -> Changes:
    return changes_of(bench.page.words, bench.boundary.step)


def test_a_change_between_two_settlings_of_a_state_is_noted_for_who_copied_the_first(
    make: Make,
) -> None:
    """Of which the few samples that are compared while nobody reads see nothing."""
    bench = make()
    bench.boundary.keeper = SimpleNamespace(  # type: ignore[assignment]
        kept=lambda _: None, rested=lambda _: None,
        settling=lambda *_, **__: False, ended=lambda *_, **__: False,
    )  # fmt: skip
    optimizer = _sgd(bench)
    bench.train(optimizer)
    bench.page[Word.ARM_STEP] = 10**6
    bench.train(optimizer, 1)
    bench.model(torch.ones(2, WIDTH))
    assert bench.settled
    contents = bench.home.contents
    assert contents is not None
    place = next(place for place in contents.indices if place not in contents._at_seen)
    torch.frombuffer(bench.arena.buffer, dtype=torch.float32)[2 * place] += 1.0
    bench.boundary.kept()
    assert bench.page[Word.STRAY_COUNT] == 0
    assert _noted(bench).after == Changed.SAMPLES
    bench.train(optimizer, 1)
    assert _noted(bench).before == Changed.SAMPLES
    bench.train(optimizer, 1)
    assert _noted(bench) == Changes()


def test_a_parameter_replaced_right_before_its_update_is_noted_as_changed_before_it(
    make: Make,
) -> None:
    """Weight decay takes its value into the optimizer's state."""
    bench = make()
    optimizer = _sgd(bench)
    bench.train(optimizer)
    bench.page[Word.ARM_STEP] = 10**6
    bench.train(optimizer, 2)
    assert _noted(bench) == Changes()
    bench.forward_backward()
    weight = next(bench.model.parameters())
    weight.data = weight.data * 0.5
    optimizer.step()
    assert _noted(bench).before == Changed.WRITTEN


def test_other_inputs_of_an_update_than_recorded_are_noted(make: Make) -> None:
    """Hyper-parameters that a script sets between forward and step, and optimizer state."""
    bench = make()
    optimizer = torch.optim.SGD(bench.model.parameters(), lr=0.1, momentum=0.9)
    bench.home.states = lambda: [one for s in optimizer.state.values() for one in s.values()]
    recorded = [0.1]
    bench.boundary.follow_record(lambda: recorded == [g["lr"] for g in optimizer.param_groups])
    bench.train(optimizer)
    bench.page[Word.ARM_STEP] = 10**6
    bench.train(optimizer, 2)
    assert _noted(bench) == Changes()
    bench.forward_backward()
    optimizer.param_groups[0]["lr"] = 0.2
    optimizer.step()
    assert _noted(bench) == Changes(before=Changed.INPUTS)
    recorded[0] = 0.2
    bench.forward_backward()
    next(iter(optimizer.state.values()))["momentum_buffer"].zero_()
    optimizer.step()
    assert _noted(bench) == Changes(before=Changed.INPUTS)
    bench.train(optimizer, 1)
    assert _noted(bench) == Changes()


def test_a_change_after_a_state_was_settled_by_a_backward_is_seen(make: Make) -> None:
    """Its boundary comes with the next update, and must not take the changed for the settled."""
    bench = make()
    optimizer = _sgd(bench)
    bench.train(optimizer)
    bench.model.eval()
    bench.forward_backward()
    assert bench.settled, "the backward has settled it"
    seq, digest = bench.page[Word.SEQ], bench.page[Word.SETTLED_DIGEST]
    for parameter in bench.model.parameters():
        parameter.data.add_(1.0)
    assert sample_digest(bench.page, bench.arena.buffer) != digest
    optimizer.step()
    assert bench.page[Word.STRAY_COUNT] == 1
    assert is_stray(bench.page.words, seq)


class _Inner(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        super().step()
        self.seen = self.watch()


def test_an_embedding_with_a_max_norm_is_strict_for_ever(make: Make) -> None:
    model = nn.Embedding(5, WIDTH, max_norm=1.0)
    bench = make(model, always_strict=changes_in_forward(model))
    assert "max_norm" in changes_in_forward(model)
    optimizer = _sgd(bench)
    for _ in range(PROBATION + 3):
        model(torch.tensor([1, 2])).sum().backward()
        assert not bench.settled
        optimizer.step()


def test_a_step_within_a_step_ends_with_the_outer_one(make: Make) -> None:
    bench = make()
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)  # wraps the base's step as well
    optimizer = _Inner(bench.model.parameters(), lr=0.1)
    optimizer.watch = lambda: bench.rests
    bench.forward_backward()

    optimizer.step()

    assert optimizer.seen is False
    assert bench.rests
    assert bench.boundary.step == 1


def test_any_optimizer_of_the_model_makes_updates_and_no_other(make: Make) -> None:
    bench, stranger = make(), nn.Parameter(torch.zeros(3))
    stranger.grad = torch.ones(3)
    torch.optim.SGD([stranger], lr=0.1).step()
    assert bench.boundary.step == 0

    bench.train(_sgd(bench), rounds=2)
    assert bench.boundary.step == 2
    assert len(bench.signals.optimizers) == 0, "the optimizer is gone, and nobody keeps it"


def test_an_optimizer_that_gets_a_parameter_of_the_model_later_is_followed(make: Make) -> None:
    bench = make()
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1)
    optimizer.step()
    optimizer.add_param_group({"params": list(bench.model.parameters())})
    optimizer.step()
    assert bench.boundary.step == 1


class Container(torch.optim.Optimizer):
    """Like torchtitan's for optimizers in backward: its own step does nothing."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in parameters]
        super().__init__(parameters, {})
        for parameter, own in zip(parameters, self.optimizers, strict=True):
            parameter.register_post_accumulate_grad_hook(self._stepping(own))

    @staticmethod
    def _stepping(own: torch.optim.Optimizer) -> Callable[[torch.Tensor], None]:
        def hook(_: torch.Tensor) -> None:
            own.step()
            own.zero_grad()

        return hook

    def step(self, closure: Any = None) -> None:
        pass


def test_the_empty_step_of_a_container_is_no_update(make: Make) -> None:
    bench = make()
    container = Container(list(bench.model.parameters()))
    for round_ in range(1, 4):
        bench.forward_backward()
        container.step()
        assert bench.boundary.step == round_
        assert bench.rests


class Looking(torch.autograd.Function):
    """Calls something in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, look: Callable[[], None]) -> torch.Tensor:
        ctx.look = look
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.look()
        return gradient, None


class Looked(nn.Module):
    """Two layers; the second is updated when `look` is called, the first is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.look: Callable[[], None] = lambda: None
        self.reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant:
            x = checkpoint(self.first, x.requires_grad_(), use_reentrant=True)
            return checkpoint(self.second, Looking.apply(x, self.look), use_reentrant=True)  # type: ignore[no-untyped-call,no-any-return]
        return self.second(Looking.apply(self.first(x), self.look))  # type: ignore[no-untyped-call,no-any-return]


def test_nothing_rests_while_a_backward_has_updated_some_parameters(make: Make) -> None:
    model = Looked()
    bench = make(model)
    seen: list[tuple[bool, bool]] = []
    model.look = lambda: seen.append((bench.settled, bench.rests))
    container = Container(list(model.parameters()))
    for round_ in range(1, PROBATION + 3):
        bench.forward_backward()
        container.step()
        assert bench.boundary.step == round_
        assert bench.rests
    assert seen == [(False, False)] * (PROBATION + 2)


def test_a_backward_that_raises_leaves_its_update_open(make: Make) -> None:
    model = Looked()
    bench, container = make(model), Container(list(model.parameters()))
    bench.forward_backward()
    container.step()

    def fail() -> None:
        raise ArithmeticError

    model.look = fail
    with pytest.raises(ArithmeticError):
        bench.forward_backward()
    assert bench.boundary.step == 1
    assert not bench.rests
    bench.model(torch.ones(2, WIDTH))
    assert not bench.settled, "half of the parameters are of the failed update"
    model.look = lambda: None
    bench.forward_backward()
    container.step()
    assert bench.boundary.step == 2
    assert bench.rests


def test_two_threads_settle_when_both_have_gone_on(make: Make) -> None:
    bench = make(nn.ModuleDict({"one": _model(), "two": _model()}))
    one, two = bench.model["one"], bench.model["two"]
    optimizers = [torch.optim.SGD(half.parameters(), lr=0.1) for half in (one, two)]
    stepped, go_on, done = threading.Event(), threading.Event(), threading.Event()

    def other() -> None:
        two(torch.ones(2, WIDTH)).sum().backward()
        optimizers[1].step()
        stepped.set()
        assert go_on.wait(20)
        two(torch.ones(2, WIDTH))
        done.set()
        assert go_on.wait(20)

    for _ in range(PROBATION + 1):
        one(torch.ones(2, WIDTH)).sum().backward()
        optimizers[0].step()
    thread = threading.Thread(target=other)
    thread.start()
    assert stepped.wait(20)
    one(torch.ones(2, WIDTH))
    assert not bench.settled, "the other thread may still change what it updated"
    go_on.set()
    assert done.wait(20)
    assert bench.settled
    thread.join()


def test_backwards_are_counted_once_each(make: Make) -> None:
    class Outputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = _model()

        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            y = self.inner(x)
            return {"loss": y.sum(), "more": (y, [y * 2]), "own": self.inner[0].bias}

    bench = make(Outputs())
    for _ in range(3):
        found = bench.model(torch.ones(2, WIDTH))
        (found["loss"] + found["more"][1][0].sum()).backward()
    bench.model(torch.ones(2, WIDTH))["more"][0].sum().backward()
    assert bench.boundary.iteration() == 4
    assert not bench.model.inner[0].bias._backward_hooks  # which would stay for ever


def test_an_optimizer_that_raised_and_is_gone_holds_nothing_open(make: Make) -> None:
    bench = make()
    optimizer = _sgd(bench)
    bench.boundary.begin(optimizer)  # and its step raises
    del optimizer
    gc.collect()
    bench.train(_sgd(bench), 2)
    assert bench.boundary.step == 2


class Failing(torch.optim.SGD):
    """Raises in the middle of its step while `fails`: some parameters are new, others old."""

    fails = False

    def step(self, closure: Any = None) -> None:
        super().step()
        if self.fails:
            raise ArithmeticError


def _halves(bench: Bench) -> tuple[Failing, torch.optim.Optimizer]:
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)  # wraps the base's step as well
    one, two = bench.model
    return Failing(one.parameters(), lr=0.1), torch.optim.SGD(two.parameters(), lr=0.1)


@pytest.mark.parametrize("rounds", [1, PROBATION + 2])
def test_a_copy_says_whether_the_script_had_changed_its_state(make: Make, rounds: int) -> None:
    """With one round the attachment is strict: after its boundary the state rests again."""
    bench = make()
    optimizer = _sgd(bench)
    bench.train(optimizer, rounds)
    assert bench.at_rest()[1].settling is Settling.LEFT
    with torch.no_grad():
        bench.model[0].weight.mul_(0.5)
    assert bench.at_rest()[0] is CopyEnd.CHANGED
    assert bench.at_rest(changed_too=True)[1].settling is Settling.CHANGING
    bench.forward_backward()
    assert _of_what_settled(bench).settling is Settling.CHANGED

    optimizer.step()
    assert bench.at_rest()[1].settling is Settling.LEFT
    bench.model(torch.ones(2, WIDTH))
    assert _of_what_settled(bench).settling is Settling.KEPT


def _of_what_settled(bench: Bench) -> State:
    end, state = bench.copy(copy_at_one_step) if bench.settled else bench.at_rest()
    assert end is CopyEnd.DONE
    return state


def test_a_step_that_raised_and_is_never_tried_again_holds_nothing_open(make: Make) -> None:
    bench = make()
    failing, other = _halves(bench)
    bench.train(other)
    failing.fails = True
    bench.forward_backward()
    with pytest.raises(ArithmeticError):
        failing.step()
    bench.model(torch.ones(2, WIDTH))
    assert not bench.settled, "it may be tried again"

    other.step()
    assert not bench.rests, "half of the other parameters may be of the step that raised"
    bench.forward_backward()
    assert bench.settled
    assert bench.page[Word.STEP] == bench.boundary.step == PROBATION + 3, "and counts as no update"
    end, state = bench.copy(copy_at_one_step)
    assert (end, state.step) == (CopyEnd.DONE, PROBATION + 3)

    failing.fails = False
    failing.step()
    other.step()
    assert bench.boundary.step == PROBATION + 5


def test_without_forwards_another_optimizers_second_update_shows_that_training_goes_on(
    make: Make,
) -> None:
    bench = make()
    failing, other = _halves(bench)
    bench.forward_backward()
    failing.fails = True
    with pytest.raises(ArithmeticError):
        failing.step()
    other.step()
    assert bench.page[Word.STEP] == 0
    other.step()
    assert bench.page[Word.STEP] == 1
    assert bench.rests


def test_a_step_that_raised_is_tried_again_after_another_one(make: Make) -> None:
    bench = make()
    failing, other = _halves(bench)
    bench.forward_backward()
    failing.fails = True
    with pytest.raises(ArithmeticError):
        failing.step()
    other.step()
    failing.fails = False
    failing.step()
    assert bench.boundary.step == 2
    assert bench.page[Word.STEP] == 0, "no boundary lies between them"
    assert bench.rests


@pytest.mark.parametrize("settled", [False, True])
def test_a_step_that_only_fills_an_empty_optimizer_is_no_update(make: Make, settled: bool) -> None:
    bench = make()
    bench.train(_sgd(bench))
    step = bench.boundary.step
    if settled:
        bench.model(torch.ones(2, WIDTH))
    bench.model.zero_grad()
    optimizer = torch.optim.AdamW(bench.model.parameters(), lr=0.1)
    before = bench.page[Word.SEQ]
    _init_optim_state(optimizer)
    assert optimizer.state
    assert bench.boundary.step == step
    assert bench.settled is settled
    assert bench.rests is not settled
    if settled:
        assert bench.page[Word.SEQ] > before, "a copy that was under way is none"
        assert bench.copy(copy_at_one_step)[0] is CopyEnd.DONE
    else:
        assert bench.at_rest()[0] is CopyEnd.DONE
    bench.train(optimizer, 2)
    assert bench.boundary.step == step + 2


def test_weights_changed_before_such_a_step_still_show(make: Make) -> None:
    bench = make()
    bench.train(_sgd(bench))
    bench.model.zero_grad()
    with torch.no_grad():
        bench.model[0].weight.zero_()
    _init_optim_state(torch.optim.AdamW(bench.model.parameters(), lr=0.1))
    assert bench.at_rest()[0] is CopyEnd.CHANGED


def test_a_framework_that_fills_optimizers_its_own_way_makes_no_update(make: Make) -> None:
    bench = make()
    optimizer = torch.optim.Adam(bench.model.parameters(), lr=0.0)
    for parameter in bench.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert optimizer.state
    assert bench.boundary.step == 0
    assert bench.rests


def test_the_first_step_of_a_warmup_is_an_update_and_so_is_one_of_zeros(make: Make) -> None:
    bench = make()
    bench.forward_backward()
    torch.optim.Adam(bench.model.parameters(), lr=0.0).step()
    assert bench.boundary.step == 1
    bench.model.zero_grad()
    bench.model(torch.zeros(2, WIDTH)).mul(0).sum().backward()
    torch.optim.Adam(bench.model.parameters(), lr=torch.tensor(0.0)).step()
    assert bench.boundary.step == 2


def test_a_filling_step_that_raises_is_over_when_training_continues(make: Make) -> None:
    bench = make()
    bench.train(_sgd(bench))
    bench.model(torch.ones(2, WIDTH))
    bench.model.zero_grad()
    optimizer = Failing(bench.model.parameters(), lr=0.1)
    optimizer.fails = True
    with pytest.raises(ArithmeticError):
        _init_optim_state(optimizer)
    assert not bench.settled
    bench.model(torch.ones(2, WIDTH))
    assert bench.settled
    assert bench.boundary.step == PROBATION + 2


def test_a_record_is_not_made_amid_the_next_update(make: Make) -> None:
    bench = make()
    kept: list[int] = []
    asked: list[int] = []
    bench.boundary.keeper = SimpleNamespace(  # type: ignore[assignment]
        kept=kept.append, rested=lambda _: None,
        settling=lambda *_, **__: False, ended=lambda step, **_: bool(asked.append(step)),
    )  # fmt: skip
    optimizer = _sgd(bench)
    bench.train(optimizer)
    bench.boundary.kept()
    bench.boundary.settle()
    assert asked[-1:] == kept  # whose standing snapshot may be due: no forward comes to say so
    bench.forward_backward()  # of the next one, whose gradients are there now
    bench.boundary.kept()
    assert kept == [PROBATION + 2]


@pytest.mark.parametrize("settled", [False, True])
def test_buffers_and_record_are_kept_while_no_reader_takes_them_for_a_state(
    make: Make, settled: bool
) -> None:
    """A forward without a backward has settled the state before the end of the iteration."""
    bench = make()
    seen: list[tuple[bool, bool]] = []
    bench.boundary.keeper = SimpleNamespace(  # type: ignore[assignment]
        kept=lambda _: seen.append((bench.settled, bench.rests)), rested=lambda _: None,
        settling=lambda *_, **__: False, ended=lambda *_, **__: False,
    )  # fmt: skip
    bench.train(_sgd(bench))
    if settled:
        bench.model(torch.ones(2, WIDTH))
    bench.page[Word.BUFFERS_STEP] = bench.page[Word.STEP]
    before = bench.page[Word.SEQ], bench.page[Word.REST]
    bench.boundary.kept()
    assert seen == [(False, False)]
    assert (bench.settled, bench.rests) == (settled, not settled)
    assert bench.page[Word.SEQ if settled else Word.REST] > before[not settled]
    assert bench.page[Word.BUFFERS_STEP] == -1, "they are no boundary's any more"
    bench.train(_sgd(bench), 1)
    assert bench.page[Word.STRAY_COUNT] == 0


@pytest.mark.parametrize("again", [None, False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_a_backward_through_several_attached_modules_is_counted_once(
    make: Make, count: int, again: bool | None
) -> None:
    """As of ranks with stages of their own; also computed again in it, reentrantly or not."""
    bench = make(nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count)))
    optimizer = _sgd(bench)
    for _ in range(3):
        for _ in range(2):  # Batches whose gradients are accumulated.
            x = torch.ones(2, WIDTH, requires_grad=True)
            for module in bench.model:
                x = module(x) if again is None else checkpoint(module, x, use_reentrant=again)
            x.sum().backward()
        optimizer.step()
    assert bench.boundary.iteration() == 6


class Through(nn.Module):
    """A stage of a pipeline, of several modules that are attached."""

    def __init__(self, parts: nn.ModuleList) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("stages", [1, 2])
def test_a_step_of_a_schedule_is_one_backward_whatever_a_rank_has_of_it(
    make: Make, stages: int, parts: int
) -> None:
    """Ranks whose stages differ would else never be at one iteration."""
    shares = [nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(parts)) for _ in range(stages)]
    bench = make(nn.ModuleList(shares))
    made = [
        pipelining.PipelineStage(Through(share), number, stages, torch.device("cpu"))
        for number, share in enumerate(shares)
    ]
    loss = nn.functional.mse_loss
    schedule: Any = (
        pipelining.ScheduleGPipe(made[0], 2, loss_fn=loss)
        if stages == 1
        else pipelining.ScheduleInterleaved1F1B(made, 2, loss_fn=loss)  # type: ignore[arg-type]
    )
    optimizer, batch = _sgd(bench), torch.ones(4, WIDTH)
    counts = []
    for _ in range(4):
        schedule.step(batch, target=batch)
        counts.append(bench.boundary.iteration())
        optimizer.step()
        optimizer.zero_grad()
        if stages == 1:
            # That of several stages runs backwards in it, which fail.
            with torch.no_grad():
                schedule.eval(batch, target=batch)
    # The first shows that stages run them.
    assert counts == [0, 1, 2, 3]
    assert bench.boundary.step == 4
    bench.signals.close()
    assert not any("clear_runtime_states" in vars(stage) for stage in made)


@pytest.mark.usefixtures("alone")
def test_a_stage_that_is_made_anew_over_its_modules_is_followed_too(make: Make) -> None:
    """As for another shape of the batch; the script still has the first."""
    bench = make(nn.ModuleList([nn.Linear(WIDTH, WIDTH)]))
    optimizer, counts, settled = _sgd(bench), [], []
    schedules: list[Any] = []
    for size in (4, 8):
        stage = pipelining.PipelineStage(Through(bench.model), 0, 1, torch.device("cpu"))
        schedules.append(pipelining.ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss))
        batch = torch.ones(size, WIDTH)
        for _ in range(PROBATION + 2):
            schedules[-1].step(batch, target=batch)
            counts.append(bench.boundary.iteration())
            settled.append(bench.settled)
            optimizer.step()
    # The first step of each shows that it runs the module.
    assert counts == [0, 1, 2, 3, 4, 4, 5, 6, 7, 8]
    assert settled[-1], "where the schedule began its step"
    schedules[0].step(torch.ones(4, WIDTH), target=torch.ones(4, WIDTH))
    assert bench.boundary.iteration() == 9


def test_the_end_of_the_process_settles_what_was_not_changed_since(make: Make) -> None:
    bench = make()
    bench.train(_sgd(bench))
    bench.boundary.leave()
    assert bench.settled

    swapped = make()
    swapped.train(_sgd(swapped))
    for parameter in swapped.model.parameters():
        parameter.data.mul_(0.5)
    swapped.boundary.leave()
    assert not swapped.settled


def test_why_parameters_are_not_served_is_said_and_taken_back(make: Make) -> None:
    bench = make()
    bench.train(_sgd(bench))
    bench.model.to(torch.bfloat16)
    bench.model(torch.ones(2, WIDTH, dtype=torch.bfloat16))
    assert bench.page[Word.UNSERVED] == 1
    assert "is bfloat16" in read_text(bench.page)
    assert not bench.settled
    assert not bench.rests


def test_a_step_with_a_closure_goes_on_after_a_layer_was_pruned(make: Make) -> None:
    bench = make()
    optimizer = torch.optim.LBFGS(bench.model.parameters(), lr=0.1, max_iter=1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = bench.model(torch.ones(2, WIDTH)).square().sum()
        loss.backward()
        return loss

    for _ in range(PROBATION + 2):
        optimizer.step(closure)
    before = bench.boundary.step
    # The module gives its weight up for one of another name.
    prune.identity(bench.model[0], "weight")
    for _ in range(2):
        optimizer.step(closure)
    assert bench.boundary.step == before + 2
    assert "'0.weight' was float32" in unserved_reason(bench.page)


def test_a_model_is_served_again_at_the_next_boundary_once_its_pruning_is_removed(
    make: Make,
) -> None:
    bench = make()
    optimizer = _sgd(bench)
    bench.train(optimizer)
    for layer in bench.model:
        prune.l1_unstructured(layer, "weight", amount=0.5)
    # Long enough for tries to have become rare.
    bench.train(optimizer, 40)
    assert "'0.weight' was float32" in unserved_reason(bench.page)
    assert not bench.settled
    for layer in bench.model:
        prune.remove(layer, "weight")
    seen = _boundaries(bench)
    optimizer.zero_grad()
    bench.forward_backward()
    assert unserved_reason(bench.page) == ""
    assert seen == [1], "the pruned weights are in the arena"
    for shard, begin in bench.home.pieces():
        live = bench.model.get_parameter(shard.fqn)
        assert live.data_ptr() == bench.arena.address + begin, shard.fqn
    assert int((bench.model[0].weight == 0).sum()) == WIDTH * WIDTH // 2


CHANGES_OF_SHAPE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda data: data.t(),
    "shorter": lambda data: data[: WIDTH // 2],
}


@pytest.mark.parametrize("change", CHANGES_OF_SHAPE.values(), ids=CHANGES_OF_SHAPE)
def test_a_parameter_of_another_shape_in_its_own_memory_is_not_served(
    make: Make, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    bench = make()
    optimizer = _sgd(bench)
    bench.train(optimizer)
    weight = bench.model[0].weight
    before = weight.data
    weight.data = change(before)
    optimizer.zero_grad()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench.model[0], "forward", lambda batch: batch)
        bench.forward_backward()
    assert not bench.settled
    assert "'0.weight' was float32" in unserved_reason(bench.page)
    assert "attachment.refresh()" in unserved_reason(bench.page)
    weight.data = before
    optimizer.step()
    bench.forward_backward()
    assert unserved_reason(bench.page) == ""


def _clamped(bench: Bench, _: torch.optim.Optimizer) -> None:
    for parameter in bench.model.parameters():
        parameter.data = parameter.data.clamp(-1, 1)


def _restored(bench: Bench, optimizer: torch.optim.Optimizer) -> None:
    """As SAM does, whose state shares the memory that the parameter gets."""
    for parameter in bench.model.parameters():
        optimizer.state[parameter]["old"] = parameter.data.clone()
        parameter.data.add_(1.0)
    for parameter in bench.model.parameters():
        parameter.data = optimizer.state[parameter]["old"]


def _from_a_vector(bench: Bench, _: torch.optim.Optimizer) -> None:
    vector = nn.utils.parameters_to_vector(bench.model.parameters())
    nn.utils.vector_to_parameters(vector * 0.5, bench.model.parameters())


@pytest.mark.parametrize("change", [_clamped, _restored, _from_a_vector])
def test_new_memory_at_each_update_costs_no_search_and_is_told_once(
    make: Make,
    change: Callable[[Bench, torch.optim.Optimizer], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = make()
    optimizer = _sgd(bench)
    bench.home.states = lambda: [one for s in optimizer.state.values() for one in s.values()]
    bench.train(optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(moving, "live_tensors", None)
        for _ in range(3 * MOST_SEARCHES):
            bench.train(optimizer, 1)
            change(bench, optimizer)
            values = [parameter.detach().clone() for parameter in bench.model.parameters()]
            bench.model(torch.ones(2, WIDTH))
            assert bench.settled
            assert all(map(torch.equal, bench.model.parameters(), values))
            for shard, _ in bench.home.pieces():
                assert torch.equal(shard.tensor, shard.slot.tensor())
            assert not bench.home.check()
    (told,) = (one for one in caplog.records if one.levelname == "WARNING")
    assert "new memory at each update" in told.getMessage()
    assert bench.page[Word.STALL_COUNT] == 3 * MOST_SEARCHES


def test_memory_that_the_script_shares_is_searched_for_when_somebody_reads(make: Make) -> None:
    bench = make()
    optimizer = _sgd(bench)
    kept: list[torch.Tensor] = []
    for _ in range(MOST_SEARCHES + 2):
        bench.train(optimizer, 1)
        _clamped(bench, optimizer)
        kept = [parameter.data for parameter in bench.model.parameters()]
        bench.model(torch.ones(2, WIDTH))
    assert not bench.settled
    assert bench.home.check()
    bench.train(optimizer, 1)
    _clamped(bench, optimizer)
    kept = [parameter.data for parameter in bench.model.parameters()]
    bench.page[Word.WANT] += 1
    bench.model(torch.ones(2, WIDTH))
    assert bench.settled
    assert bench.copy(copy_at_one_step)[0] is CopyEnd.DONE
    with torch.no_grad():
        kept[0].fill_(7.0)
    assert bool((next(bench.model.parameters()) == 7.0).all()), "they still share it"
    assert bench.page[Word.STRAY_COUNT] == 0


def test_memory_that_the_script_shares_is_searched_for_where_all_ranks_stay(make: Make) -> None:
    bench = make()
    optimizer = _sgd(bench)
    kept: list[torch.Tensor] = []
    for _ in range(MOST_SEARCHES + 2):
        bench.train(optimizer, 1)
        _clamped(bench, optimizer)
        kept = [parameter.data for parameter in bench.model.parameters()]
        bench.model(torch.ones(2, WIDTH))
    assert kept
    assert bench.home.check()
    bench.boundary.stay(lambda: False)
    assert bench.settled
    assert not bench.home.check()


def test_what_still_uses_the_old_memory_keeps_its_values(make: Make) -> None:
    bench = make()
    optimizer = _sgd(bench)
    bench.train(optimizer)
    backup = [parameter.data for parameter in bench.model.parameters()]
    before = [tensor.clone() for tensor in backup]
    for parameter in bench.model.parameters():
        parameter.data = parameter.data * 2
    bench.model(torch.ones(2, WIDTH))
    assert bench.settled
    assert all(map(torch.equal, backup, before))


def test_within_a_functional_call_nothing_has_left(make: Make) -> None:
    bench = make()
    optimizer = _sgd(bench)
    bench.train(optimizer)
    before = {name: p.detach().clone() for name, p in bench.model.named_parameters()}
    other = {name: torch.zeros_like(p, requires_grad=True) for name, p in before.items()}

    torch.func.functional_call(bench.model, other, (torch.ones(2, WIDTH),)).sum().backward()

    assert not bench.settled
    assert all(torch.equal(p, before[n]) for n, p in bench.model.named_parameters())
    assert all(bool((value == 0).all()) for value in other.values())
    bench.model(torch.ones(2, WIDTH))
    optimizer.step()
    assert bench.page[Word.STEP] == PROBATION + 2


def test_parameters_that_leave_at_rest_are_seen_and_told(make: Make) -> None:
    bench = make()
    bench.train(_sgd(bench))
    layer = bench.model[0]
    bench.boundary.look_at_rest()
    seen_ns = bench.page[Word.REST_SEEN_NS]
    assert seen_ns
    before, layer.weight = layer.weight, nn.Parameter(torch.zeros(WIDTH, WIDTH))
    bench.boundary.look_at_rest()
    assert bench.page[Word.REST_SEEN_NS] == seen_ns
    assert bench.page[Word.UNSERVED] == 1
    assert read_text(bench.page) == LEFT_AT_REST
    layer.weight = before
    bench.boundary.look_at_rest()
    assert bench.page[Word.REST_SEEN_NS] > seen_ns
    assert bench.page[Word.UNSERVED] == 0


def _swapped(bench: Bench, value: float = 0.5) -> None:
    for parameter in bench.model.parameters():
        parameter.data.fill_(value)


def _kept(bench: Bench) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in bench.model.parameters()]


def _restored(bench: Bench, kept: list[torch.Tensor], *, times: float = 1.0) -> None:
    for parameter, values in zip(bench.model.parameters(), kept, strict=True):
        parameter.data.copy_(values * times)


def _boundaries(bench: Bench) -> list[int]:
    """A list that grows by one with each boundary proper."""
    seen: list[int] = []
    acting = bench.boundary._acting
    at_boundary = acting.at_boundary

    def noted(at_home: bool, iteration: int = 0) -> None:
        seen.append(int(at_home))
        at_boundary(at_home, iteration)

    acting.at_boundary = noted  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("settled_before", [False, True])
def test_weights_that_stand_in_are_read_with_their_label_only(
    make: Make, settled_before: bool
) -> None:
    bench = make()
    bench.train(_sgd(bench))
    if settled_before:
        bench.boundary.settle()
        assert bench.settled
    before = _boundaries(bench)

    assert bench.boundary.stand_in("ema")
    # Before anything is swapped: the script says that it is about to.
    assert not bench.settled
    assert bench.at_rest()[0] is CopyEnd.CHANGED
    kept = _kept(bench)
    _swapped(bench)
    bench.model(torch.ones(2, WIDTH)).sum().backward()
    bench.boundary.settle()
    assert not bench.settled
    assert bench.at_rest()[0] is CopyEnd.CHANGED
    end, state = bench.at_rest(changed_too=True)
    assert (end, state.label, state.step) == (CopyEnd.DONE, "ema", PROBATION + 2)
    assert "'ema'" in unserved_reason(bench.page)
    _restored(bench, kept)
    bench.boundary.training_weights_again("ema", failed=False)

    assert unserved_reason(bench.page) == ""
    end, state = bench.at_rest()
    assert (end, state.label) == (CopyEnd.DONE, "")
    bench.model(torch.ones(2, WIDTH))
    assert bench.settled
    # One boundary for each update, as on ranks that were in no block.
    assert before == ([] if settled_before else [1])


def test_a_copy_that_a_block_begins_under_is_no_state(make: Make) -> None:
    bench = make()
    bench.train(_sgd(bench))
    bench.boundary.settle()

    def swap(point: str) -> None:
        if point == "copy-moved":
            bench.boundary.stand_in("ema")

    assert bench.copy(copy_at_one_step, at_point=swap)[0] is CopyEnd.OVERTAKEN


def test_a_step_never_has_two_values(make: Make) -> None:
    bench = make()
    optimizer = _sgd(bench)
    bench.train(optimizer)
    bench.boundary.settle()
    kept = _kept(bench)
    bench.boundary.stand_in("schedule-free")
    _restored(bench, kept, times=1.0001)
    bench.boundary.training_weights_again("schedule-free", failed=False)

    bench.forward_backward()
    assert not bench.settled
    assert not bench.rests
    assert "'schedule-free'" in unserved_reason(bench.page)
    optimizer.step()
    bench.model(torch.ones(2, WIDTH))
    assert bench.settled
    assert unserved_reason(bench.page) == ""


@pytest.mark.parametrize("restores", [False, True])
def test_a_block_that_raised_keeps_its_label_while_samples_differ(
    make: Make, restores: bool
) -> None:
    bench = make()
    bench.train(_sgd(bench))
    kept = _kept(bench)
    bench.boundary.stand_in("ema")
    _swapped(bench)
    if restores:
        _restored(bench, kept)
    bench.boundary.training_weights_again("ema", failed=True)

    end, state = bench.at_rest(changed_too=True)
    assert (end, state.label) == (CopyEnd.DONE, "" if restores else "ema")
    bench.boundary.leave()
    # A process that ends here leaves the training's weights, or none that anyone takes for them.
    assert bench.settled is restores


class Counting(nn.Linear):
    """Its buffer counts forwards, as a batch norm's does."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return super().forward(batch)


def test_buffers_are_copied_only_where_they_are_of_the_parameters_step() -> None:
    """A capture is agreed on right after a forward that was no boundary: at the next update."""
    bench = Bench(Counting())
    page, words = bench.page, bench.page.words
    optimizer, batch = _sgd(bench), torch.ones(1, WIDTH)
    (at,) = (begin for shard, begin in bench.home._placed(TensorKind.BUFFER))

    def armed(number: int) -> None:
        words[Word.BUFFERS_WANTED], words[Word.TOKEN] = number, 7 * number
        words[Word.ACTION], words[Word.READY] = CAPTURE, number

    def copied(number: int) -> float | None:
        """The buffer that the sidecar takes for the request; None: the request was missed."""
        assert page[Word.AGREED] == number
        if (page[Word.BUFFERS_FOR], page[Word.BUFFERS_STEP]) != (number, page[Word.AGREED_STEP]):
            return None
        return torch.frombuffer(bench.arena.buffer, dtype=torch.float32, offset=at, count=1).item()

    for _ in range(3):
        bench.model(batch).sum().backward()
        optimizer.step()
    bench.model.eval()
    armed(1)
    bench.model(batch)
    # The state of step 3 is settled here, and the buffers are of step 4 already.
    optimizer.step()
    assert page[Word.AGREED_STEP] == 3
    assert copied(1) in (None, 3.0)
    bench.model.train()
    armed(2)
    bench.model(batch)
    assert (page[Word.AGREED_STEP], copied(2)) == (4, 4.0)
    bench.close()


def test_buffers_of_a_boundary_that_a_forward_has_run_ahead_of_are_not_those_of_its_step() -> None:
    bench = Bench(nn.Linear(WIDTH, WIDTH))
    optimizer, acting = torch.optim.SGD(bench.model.parameters(), lr=0.1), bench.boundary._acting
    batch = torch.ones(1, WIDTH)

    def update() -> None:
        bench.model(batch).sum().backward()
        optimizer.step()

    update()
    update()
    assert acting.buffers_fit, "the boundary was at a forward of the training"
    bench.model.eval()
    bench.model(batch)
    optimizer.step()
    assert not acting.buffers_fit, "the forward before the step may have changed them"
    bench.model.train()
    update()
    assert acting.buffers_fit
    bench.close()
