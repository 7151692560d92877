"""A frame has the gradients that the optimizer consumed, whoever computed them and when."""

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paramd.layout.types import Box
from paramd.memory.control_page import Word, in_time
from paramd.memory.gradient_program import NoFrame, NoGradient, Notes, Slot, read_no_frame
from paramd.trainer.boundary.boundary import MOST_SEARCHES, PROBATION
from paramd.trainer.boundary.gradients import GradientCapture
from tests.unit.trainer.test_boundary import WIDTH, Bench
from tests.unit.trainer.test_boundary import Container as Stepping

pytestmark = pytest.mark.usefixtures("few_objects")


class Read(Bench):
    """A bench whose gradients a sidecar, played by the test, wants of every update."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.capture = self.boundary.gradients = GradientCapture(
            self.page,
            self.shared.wake,
            self.shared.gradients,
            arena_bytes=self.arena.size_bytes,
            pieces=self.home.pieces,
            departed=self.home.departed,
            lossless_budget_ns=0,
        )
        self.capture.iteration = self.boundary.iteration
        self.slot: Slot = self.capture._slots[0][0]
        self.slot.write_program([(0, self.arena.size_bytes)], self.page.words)
        self.arm()

    def arm(self) -> None:
        """Want the gradients of the next update."""
        self.wanted = self.boundary.step + 1
        self.page[self.slot.arm_word] = in_time(self.wanted, rewound=0)

    def frame(self) -> dict[str, torch.Tensor | NoGradient]:
        """The frame of the update that was wanted, which is over; the next one is wanted."""
        done = self.page[self.slot.done_word]
        assert done == in_time(self.wanted, rewound=0), "the update has no frame"
        self.notes: Notes = self.slot.read_notes()
        assert self.notes.step == self.wanted
        why = {note.arena_begin: NoGradient(note.none) for note in self.notes.notes}
        room = self.capture._memory.buffer
        found: dict[str, torch.Tensor | NoGradient] = {}
        for shard, begin in self.home.pieces():
            if begin in why:
                found[shard.fqn] = why[begin]
                continue
            piece, region = shard.tensor, shard.region
            flat = torch.frombuffer(room, dtype=torch.float32, count=piece.numel(), offset=begin)
            whole = found.setdefault(shard.fqn, torch.full(shard.shape, torch.nan))
            assert isinstance(whole, torch.Tensor)
            assert isinstance(region, Box)
            at = tuple(slice(b, e) for b, e in zip(region.begin, region.end, strict=True))
            whole[at] = flat.as_strided(piece.shape, piece.stride())
        self.arm()
        return found

    def no_frame(self) -> NoFrame:
        """Why the update that was wanted has no frame; the next one is wanted."""
        assert self.page[self.slot.done_word] == -in_time(self.wanted, rewound=0)
        self.arm()
        return read_no_frame(self.page.words, 0)

    def consumed(self) -> dict[str, torch.Tensor | None]:
        """The gradients as they are now."""
        named = self.model.named_parameters()
        return {n: p.grad.clone() if p.grad is not None else None for n, p in named}

    def close(self) -> None:
        self.capture.close()
        super().close()


Make = Callable[..., Read]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Read] = []

    def build(model: nn.Module | None = None) -> Read:
        layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        made.append(Read(model if model is not None else layers))
        return made[-1]

    yield build
    for one in made:
        one.close()


class Closure:
    """Computes other gradients each time; notes them, and what readers have meanwhile."""

    def __init__(self, bench: Read, optimizer: torch.optim.Optimizer | None = None) -> None:
        self.bench = bench
        self.optimizer = optimizer
        self.computed: list[dict[str, torch.Tensor | None]] = []
        self.settled: list[bool] = []
        self.rested: list[bool] = []

    def __call__(self) -> torch.Tensor:
        self.bench.model.zero_grad()
        self.settled.append(self.bench.settled)
        self.rested.append(self.bench.rests)
        loss = self.bench.model(torch.randn(2, WIDTH)).square().sum()
        self.settled[-1] = self.bench.settled
        self.rested[-1] = self.bench.rests
        loss.backward()
        self.computed.append(self.bench.consumed())
        return loss


def same(found: Any, wanted: Any) -> bool:
    assert found.keys() == wanted.keys()
    return all(torch.equal(found[name], wanted[name]) for name in wanted)


OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.5),
    "sgd-fused": lambda ps: torch.optim.SGD(ps, lr=0.01, fused=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "adamw-fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "adamw-foreach": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.01),
    "rprop": lambda ps: torch.optim.Rprop(ps, lr=0.01),
    "lbfgs-1": lambda ps: torch.optim.LBFGS(ps, max_iter=1),
    "lbfgs": lambda ps: torch.optim.LBFGS(ps, max_iter=3),
    "lbfgs-searching": lambda ps: torch.optim.LBFGS(ps, line_search_fn="strong_wolfe"),
    "computes-twice": lambda ps: Twice(ps, lr=0.01),
    "sharpness-aware": lambda ps: SharpnessAware(ps, lr=0.01),
    "calling-its-base": lambda ps: CallingItsBase(ps, lr=0.01),
}


class Twice(torch.optim.SGD):
    """Computes gradients twice before it changes anything; the second ones count."""

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            closure()
            closure()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(parameter.grad, alpha=-group["lr"])


class SharpnessAware(torch.optim.SGD):
    """Changes parameters before it computes the gradients that it updates with."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(0.125)
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(0.125).add_(parameter.grad, alpha=-0.01)


class CallingItsBase(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_gradients_of_a_closure_are_those_of_its_update(
    make: Make, kind: str, by_name: bool
) -> None:
    bench = make()
    optimizer = OPTIMIZERS[kind](list(bench.model.parameters()))
    consumed = 1 if kind == "computes-twice" else 0
    for number in range(1, PROBATION + 4):
        closure = Closure(bench)
        optimizer.step(closure=closure) if by_name else optimizer.step(closure)
        assert bench.boundary.step == number
        assert same(bench.frame(), closure.computed[consumed])
        assert bench.rests
        calm = number > PROBATION
        served = closure.settled if calm else closure.rested
        if kind != "sharpness-aware":
            # The very first state is settled by the first forward, or by the step's begin.
            assert served[0] or number == 1
        else:
            assert not served[0], "parameters have moved"
        assert not any((closure.settled if calm else closure.rested)[1:])


def test_a_closure_that_raises_has_begun_no_update(make: Make) -> None:
    bench = make()
    optimizer = torch.optim.SGD(bench.model.parameters(), lr=0.01)
    bench.train(optimizer)
    bench.arm()

    def closure() -> torch.Tensor:
        Closure(bench)()
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        optimizer.step(closure)
    assert bench.settled
    computed = Closure(bench)
    optimizer.step(computed)
    assert same(bench.frame(), computed.computed[0])
    assert bench.boundary.step == PROBATION + 3


def test_another_update_within_a_closure_ends_what_readers_have(make: Make) -> None:
    bench = make()
    one, two = bench.model
    outer = torch.optim.LBFGS(one.parameters(), max_iter=1)
    inner = torch.optim.SGD(two.parameters(), lr=0.01)
    seen: list[bool] = []
    watch = inner.register_step_post_hook(lambda *_: seen.append(bench.settled))
    computed = Closure(bench)

    def closure() -> torch.Tensor:
        loss = computed()
        inner.step()
        return loss

    for _ in range(PROBATION + 2):
        outer.step(closure)
    watch.remove()
    assert computed.settled[-1]
    assert not any(seen)
    assert bench.boundary.step == 2 * (PROBATION + 2)


def test_several_optimizers_with_closures_have_frames_of_their_own(make: Make) -> None:
    bench = make()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in bench.model]
    for number in range(6):
        closure = Closure(bench)
        optimizers[number % 2].step(closure)
        frame = bench.frame()
        for name, wanted in closure.computed[0].items():
            if name.startswith(str(number % 2)):
                assert torch.equal(frame[name], wanted)
            else:
                assert frame[name] is NoGradient.OTHER_OPTIMIZER


def test_a_closure_accumulates_and_an_empty_one_leaves_what_is_there(make: Make) -> None:
    bench = make()
    optimizer = torch.optim.SGD(bench.model.parameters(), lr=0.01)

    def accumulate() -> None:
        for _ in range(3):
            bench.forward_backward()

    optimizer.step(accumulate)  # type: ignore[arg-type]
    assert same(bench.frame(), bench.consumed())
    optimizer.step(lambda: 0.0)
    assert same(bench.frame(), bench.consumed())


def test_why_an_update_has_no_frame_is_told(make: Make) -> None:
    bench = make()
    optimizer = torch.optim.SGD(bench.model.parameters(), lr=0.01, fused=True)
    optimizer.found_inf = torch.ones(1)  # type: ignore[attr-defined]
    bench.train(optimizer, 1)
    assert bench.no_frame() is NoFrame.SKIPPED
    optimizer.found_inf = torch.zeros(1)  # type: ignore[attr-defined]
    bench.train(optimizer, 1)
    bench.frame()

    container = Stepping(list(bench.model.parameters()))
    for _ in range(2):
        bench.forward_backward()
        container.step()
        assert bench.no_frame() is NoFrame.IN_BACKWARD


def test_of_a_step_that_is_tried_again_the_last_try_counts(make: Make) -> None:
    class Refused(Exception):
        pass

    def guard(*_: Any) -> None:
        raise Refused

    bench = make()
    optimizer = torch.optim.SGD(bench.model.parameters(), lr=0.01)
    for clipped in (True, False):
        bench.train(optimizer, 1)
        bench.arm()
        Closure(bench)()
        bench.capture.clipped(0.5)
        refusing = optimizer.register_step_pre_hook(guard)
        with pytest.raises(Refused):
            optimizer.step()
        refusing.remove()
        last = Closure(bench)
        last()
        if clipped:
            bench.capture.clipped(0.25)
        optimizer.step()
        assert same(bench.frame(), last.computed[0])
        assert bench.notes.clip_factor == (0.25 if clipped else 0.0)
        optimizer.step()
        bench.frame()
        assert bench.notes.clip_factor == 0.0


class Failing(torch.optim.SGD):
    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise ArithmeticError
        return super().step(closure)


def test_a_step_that_raised_itself_is_shown_when_it_succeeds(make: Make) -> None:
    bench = make()
    optimizer = Failing(bench.model.parameters(), lr=0.01)
    optimizer.fails = True
    Closure(bench)()
    bench.capture.clipped(0.5)
    with pytest.raises(ArithmeticError):
        optimizer.step()
    assert bench.page[bench.slot.done_word] != in_time(1, rewound=0), "it may be tried again"
    optimizer.fails = False
    optimizer.step()
    assert same(bench.frame(), bench.consumed())
    assert bench.notes.clip_factor == 0.5, "of the same gradients"


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("with_closure", [True, False])
def test_what_hooks_of_the_script_make_of_gradients_is_shown(
    make: Make, everywhere: bool, with_closure: bool
) -> None:
    bench = make()
    optimizer = torch.optim.SGD(bench.model.parameters(), lr=0.01)

    def halve(who: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if who is not optimizer:
            return None
        closure = args[1] if len(args) > 1 else None

        def halved() -> Any:
            loss = closure() if closure is not None else None
            for parameter in bench.model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(0.5)
            return loss

        if closure is not None:
            return (args[0], halved), kwargs
        return halved()

    # Registered before ours on this optimizer, and after.
    add = register_optimizer_step_pre_hook if everywhere else optimizer.register_step_pre_hook
    hooks = [add(halve)]
    try:
        for _ in range(2):
            computed = Closure(bench)
            if with_closure:
                optimizer.step(computed)
            else:
                computed()
                optimizer.step()
            wanted = {n: g * 0.5 ** len(hooks) for n, g in computed.computed[0].items()}
            assert same(bench.frame(), wanted)
            hooks.append(add(halve))
    finally:
        for hook in hooks:
            hook.remove()


class Reducing(torch.optim.SGD):
    """As distributed optimizers do: their step reduces gradients, and calls its base's."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.mul_(0.25)
        return super().step()


def test_gradients_that_a_wrapping_step_has_changed_are_shown(make: Make) -> None:
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)  # wraps the base's step as well
    bench = make()
    optimizer = Reducing(bench.model.parameters(), lr=0.01)
    for _ in range(2):
        Closure(bench)()
        optimizer.step()
        assert same(bench.frame(), bench.consumed())


class Container(torch.optim.Optimizer):
    """Its members step, and clear their gradients."""

    def __init__(self, parts: list[nn.Module]) -> None:
        self.optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in parts]
        super().__init__([p for part in parts for p in part.parameters()], {})

    def step(self, closure: Any = None) -> Any:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_the_members_of_a_container_show_their_own_gradients(make: Make) -> None:
    bench = make()
    optimizer = Container(list(bench.model))
    for number in range(1, 4):
        computed = Closure(bench)
        computed()
        optimizer.step()
        assert bench.boundary.step == number
        assert same(bench.frame(), computed.computed[0])


@pytest.mark.parametrize("inside", [True, False])
def test_an_update_by_hand_shows_what_it_has_computed(make: Make, inside: bool) -> None:
    bench = make()
    by_hand = nn.Module()
    computed = Closure(bench)
    for _ in range(2):
        if not inside:
            computed()
        bench.boundary.begin(by_hand)
        if inside:
            computed()
        with torch.no_grad():
            for parameter in bench.model.parameters():
                parameter.sub_(parameter.grad, alpha=0.01)
        bench.boundary.end(by_hand)
        assert same(bench.frame(), computed.computed[-1])


def test_an_optimizer_within_an_update_shows_what_it_consumes(make: Make) -> None:
    bench = make()
    optimizer, window = torch.optim.SGD(bench.model.parameters(), lr=0.01), nn.Module()
    bench.boundary.begin(window)
    computed = Closure(bench)
    optimizer.step(computed)
    optimizer.zero_grad()
    bench.boundary.end(window)
    assert bench.boundary.step == 1
    assert same(bench.frame(), computed.computed[0])


@pytest.mark.parametrize("told", [True, False])
def test_gradients_of_replaced_parameters_are_those_of_the_new_ones(make: Make, told: bool) -> None:
    bench = make()
    optimizer = torch.optim.SGD(bench.model.parameters(), lr=0.01)
    window = nn.Module()

    def update() -> None:
        if told:
            optimizer.step()
            return
        bench.boundary.begin(window)
        bench.boundary.end(window)

    for _ in range(2):
        Closure(bench)()
        update()
        assert same(bench.frame(), bench.consumed())
    left = [weakref.ref(parameter) for parameter in bench.model.parameters()]
    state = {name: one.clone() for name, one in bench.model.state_dict().items()}
    bench.model.load_state_dict(state, assign=True)
    if told:
        optimizer.param_groups[0]["params"] = list(bench.model.parameters())
    else:
        del optimizer
    for _ in range(2):
        Closure(bench)()
        update()
        assert same(bench.frame(), bench.consumed())
    gc.collect()
    assert not any(one() is not None for one in left), "nobody keeps the old ones"


def test_parameters_that_are_not_in_their_place_yet_have_gradients(make: Make) -> None:
    bench = make()
    window = nn.Module()
    # The last ones are not brought back: nobody reads parameters, and that takes a search.
    for _ in range(MOST_SEARCHES + 2):
        for module in bench.model:
            for name, old in module._parameters.items():
                module._parameters[name] = nn.Parameter(old.detach().clone())
        Closure(bench)()
        bench.boundary.begin(window)
        bench.boundary.end(window)
        assert same(bench.frame(), bench.consumed())
    assert bench.home.check(), "the case has become another one"


FORMS: dict[str, Callable[[], torch.Tensor]] = {
    "row-major": lambda: torch.ones(WIDTH, WIDTH),
    "transposed": lambda: torch.ones(WIDTH, WIDTH).t(),
    "every other row": lambda: torch.ones(2 * WIDTH, WIDTH)[::2],
    "every other column": lambda: torch.ones(WIDTH, 2 * WIDTH)[:, ::2],
}
"""How a parameter lies in memory; the last two are in several pieces."""


@pytest.mark.parametrize("after", FORMS)
@pytest.mark.parametrize("before", FORMS)
def test_gradients_of_a_parameter_in_other_strides_are_shown(
    make: Make, before: str, after: str
) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model[0].weight = nn.Parameter(FORMS[before]())
    bench = make(model)
    window = nn.Module()
    # Also of an update after the boundary that cannot bring it back.
    for _ in range(2):
        model[0].weight = nn.Parameter(FORMS[after]())
        Closure(bench)()
        bench.boundary.begin(window)
        bench.boundary.end(window)
        assert same(bench.frame(), bench.consumed())


def test_gradients_of_a_parameter_transposed_in_its_own_memory_are_its_own(make: Make) -> None:
    bench = make()
    optimizer = torch.optim.SGD(bench.model.parameters(), lr=0.01)
    for _ in range(2):
        Closure(bench)()
        optimizer.step()
        assert same(bench.frame(), bench.consumed())
        bench.model[0].weight.data = bench.model[0].weight.data.t()
        optimizer.zero_grad()


def test_a_module_in_place_of_another_shows_its_own_gradients(make: Make) -> None:
    bench = make()
    window = nn.Module()
    bench.train(torch.optim.SGD(bench.model.parameters(), lr=0.01))
    bench.arm()
    # The weight of the first cannot be brought back, so the arena's plan keeps the old module.
    bench.model[0] = nn.Linear(WIDTH, WIDTH)
    bench.model[0].weight = nn.Parameter(torch.ones(WIDTH, WIDTH).t())
    for _ in range(2):
        Closure(bench)()
        bench.boundary.begin(window)
        bench.boundary.end(window)
        assert same(bench.frame(), bench.consumed())


def test_a_parameter_of_another_shape_has_no_gradient(make: Make) -> None:
    bench = make()
    window = nn.Module()
    bench.model[1].weight = nn.Parameter(torch.ones(2 * WIDTH, WIDTH))
    bench.model[1].bias = None
    Closure(bench)()
    bench.boundary.begin(window)
    bench.boundary.end(window)
    frame = bench.frame()
    assert frame.pop("1.weight") is NoGradient.CHANGED
    assert frame.pop("1.bias") is NoGradient.CHANGED
    assert all(isinstance(found, torch.Tensor) for found in frame.values())


def test_a_parameter_that_only_the_model_has_replaced_has_no_gradient(make: Make) -> None:
    bench = make()
    optimizer = torch.optim.SGD(bench.model.parameters(), lr=0.01)
    Closure(bench)()
    optimizer.step()
    bench.frame()
    bench.model[0].weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
    Closure(bench)()
    optimizer.step()
    frame = bench.frame()
    assert frame.pop("0.weight") is NoGradient.OTHER_OPTIMIZER
    assert all(isinstance(found, torch.Tensor) for found in frame.values())


def test_scaled_gradients_of_a_closure_say_their_scale(make: Make) -> None:
    bench = make()
    optimizer: Any = torch.optim.SGD(bench.model.parameters(), lr=0.01, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    computed = Closure(bench)
    scaler.scale(computed())
    scaler.step(optimizer, computed)
    scaler.update()
    assert same(bench.frame(), computed.computed[1])
    assert bench.notes.scale == 8.0


def test_notes_that_cannot_be_written_do_not_end_the_step(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    # A record with a traceback would keep the slot's memory until the next test.
    caplog.set_level(logging.CRITICAL, "paramd")
    bench = make()
    optimizer = torch.optim.SGD(bench.model.parameters(), lr=0.01)
    Closure(bench)()
    nothing_to_write: Any = None
    bench.capture.clipped(nothing_to_write)
    optimizer.step()
    assert bench.no_frame() is NoFrame.FAILED
    assert bench.boundary.step == 1


def test_a_slot_armed_too_late_is_answered_at_once(make: Make) -> None:
    bench = make()
    optimizer = torch.optim.SGD(bench.model.parameters(), lr=0.01)
    moment = bench.page[bench.slot.arm_word]
    bench.page[bench.slot.arm_word] = 0
    late = optimizer.register_step_post_hook(
        lambda *_: bench.page.words.__setitem__(bench.slot.arm_word, moment)
    )
    bench.forward_backward()
    optimizer.step()
    late.remove()
    assert bench.page[bench.slot.done_word] == -moment
    assert bench.page[Word.GRADIENTS_STEP] == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, CallingItsBase])
@pytest.mark.parametrize("has_closure", [False, True])
def test_compiled_steps_are_updates_and_our_code_stays_out_of_traces(
    make: Make, optimizer_class: Callable[..., torch.optim.Optimizer], has_closure: bool
) -> None:
    bench = make()
    optimizer = optimizer_class(bench.model.parameters(), lr=0.01)
    ours: list[str] = []

    def note(code: CodeType, _: object) -> None:
        if "/paramd/" in code.co_filename:
            ours.append(code.co_qualname)

    @torch.compile(backend="eager")
    def step(*closures: Closure) -> None:
        optimizer.step(*closures)

    from torch._dynamo.convert_frame import register_bytecode_hook

    hook = register_bytecode_hook(note)
    try:
        for number in range(1, 5):
            if has_closure:
                step(Closure(bench))
            else:
                Closure(bench)()
                step()
            assert bench.boundary.step == number
            assert bench.rests
            assert same(bench.frame(), bench.consumed())
    finally:
        hook.remove()
        torch._dynamo.reset()
    # A closure's forward has the model's hooks, which a trace goes through and leaves out.
    forwards = {"_Forward.__call__", "_Output.__call__"} if has_closure else set()
    assert set(ours) <= forwards


def test_the_boundary_of_a_step_with_a_closure_is_the_forward_within(make: Make) -> None:
    """There a state can be recorded for a restart, and put back by a rollback."""
    bench = make()
    optimizer = torch.optim.SGD(bench.model.parameters(), lr=0.01)
    asked: list[tuple[str, int]] = []
    bench.boundary.keeper = SimpleNamespace(  # type: ignore[assignment]
        rested=lambda _: None,
        settling=lambda step, **_: bool(asked.append(("forward", step))),
        ended=lambda step, **_: bool(asked.append(("elsewhere", step))),
    )
    for _ in range(3):
        optimizer.step(Closure(bench))
    assert asked == [("forward", 0), ("forward", 1), ("forward", 2)]
