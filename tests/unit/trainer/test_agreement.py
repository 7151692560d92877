"""Agreement: equal requests on all ranks or none, over real gloo groups and in simulation."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from paramd.memory.control_page import KEPT, Word, note_agreed, note_failed
from paramd.trainer.boundary import agreement as module
from paramd.trainer.boundary.agreement import (
    EDIT,
    NOTHING,
    QUIET_BOUNDARIES,
    Agreement,
    AgreementLost,
    Request,
    Round,
    idle_interval,
    promise,
    quiet_interval,
)
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.sidecar.copying.page_requests import Boundary, PageRequests, fate_of

TIMEOUT_S = 20.0
MS = 1_000_000


def edit(number: int, token: int = 7) -> Request:
    return Request(number, token, EDIT, 0)


class Ranks:
    """Agreements of several ranks of one gloo world, each with a thread of its own."""

    def __init__(self, world_size: int) -> None:
        store = torch._C._distributed_c10d.HashStore()
        self.pool = ThreadPoolExecutor(world_size)

        def make(rank: int) -> Agreement:
            group: Any = dist.ProcessGroupGloo(
                store, rank, world_size, timedelta(seconds=TIMEOUT_S)
            )
            return Agreement(group, timeout_s=TIMEOUT_S)

        self.agreements = list(self.pool.map(make, range(world_size)))

    def boundary(
        self,
        *requests: Request,
        step_time_ns: int = 200 * MS,
        clients: Sequence[bool] = (True, True, True),
        iterations: tuple[int, ...] = (),
        within: Sequence[bool | None] = (None, None, None),
        postponed: Sequence[int] = (0, 0, 0),
    ) -> list[Round | None]:
        """One boundary of every rank, in which each takes part with its request.

        `clients` are the ranks that have any; `iterations` are those of the ranks, all the same
        when there are none.
        """

        def one(agreement: Agreement, request: Request) -> Round | None:
            heard = agreement.collect()
            if agreement.due:
                agreement.launch(
                    request,
                    pending=request.number > 0,
                    stay=True,
                    step_time_ns=step_time_ns,
                    iteration=iterations[self.agreements.index(agreement)] if iterations else 0,
                    expected=False,
                    quiet=not clients[self.agreements.index(agreement)],
                    within=within[self.agreements.index(agreement)],
                    postponed=postponed[self.agreements.index(agreement)],
                )
            return heard

        return list(self.pool.map(one, self.agreements, requests))


@pytest.fixture
def make() -> Iterator[Callable[..., Ranks]]:
    made: list[Ranks] = []

    def factory(world_size: int) -> Ranks:
        made.append(Ranks(world_size))
        return made[-1]

    yield factory
    for ranks in made:
        ranks.pool.shutdown()
        # The groups go with their agreements, and gloo's threads with them.
        ranks.agreements.clear()


def told(rounds: list[Round | None]) -> list[Request | None]:
    return [heard.agreed if heard is not None else None for heard in rounds]


@pytest.mark.parametrize(
    "unequal",
    [
        (edit(4), edit(4), NOTHING),
        (edit(4), edit(5), edit(4)),
        (edit(5), edit(4), edit(4)),
        (edit(4, token=1), edit(4, token=2), edit(4, token=1)),
    ],
)
def test_unequal_requests_are_agreed_by_nobody(
    make: Callable[..., Ranks], unequal: tuple[Request, ...]
) -> None:
    ranks = make(3)
    ranks.boundary(*unequal)
    assert told(ranks.boundary(*unequal)) == [None] * 3
    ranks.boundary(edit(9), edit(9), edit(9))
    assert told(ranks.boundary(NOTHING, NOTHING, NOTHING)) == [edit(9)] * 3


def test_ranks_at_different_iterations_agree_on_nothing_and_are_told_how_far_apart_they_are(
    make: Callable[..., Ranks],
) -> None:
    ranks = make(2)
    ranks.boundary(edit(4), edit(4), iterations=(10, 11), within=(True, False))
    apart = ranks.boundary(edit(4), edit(4), iterations=(11, 11))
    assert told(apart) == [None] * 2
    assert [heard.iterations for heard in apart if heard is not None] == [(10, 11)] * 2
    # Where one computes says nothing of the other's boundary.
    assert [heard.differs for heard in apart if heard is not None] == [False] * 2
    assert told(ranks.boundary(NOTHING, NOTHING)) == [edit(4)] * 2


@pytest.mark.parametrize(
    ("within", "differs"),
    [
        ((None, None), False),
        ((True, None), False),
        ((None, False), False),
        ((True, True), False),
        ((False, False), False),
        ((True, False), True),
    ],
)
def test_all_ranks_learn_that_fsdp_computes_at_the_boundaries_of_some_only(
    make: Callable[..., Ranks], within: tuple[bool | None, ...], differs: bool
) -> None:
    """A rank that did not look, as no request has reached it yet, says nothing."""
    ranks = make(2)
    ranks.boundary(edit(4), NOTHING, within=within, postponed=(3, 3))
    first = ranks.boundary(NOTHING, NOTHING, postponed=(3, 0))
    assert [heard.differs for heard in first if heard] == [differs] * 2
    assert [heard.postponed for heard in first if heard] == [3] * 2
    second = ranks.boundary(NOTHING, NOTHING)
    assert [(heard.differs, heard.postponed) for heard in second if heard] == [(False, 0)] * 2


def test_a_request_that_was_agreed_is_not_agreed_again(make: Callable[..., Ranks]) -> None:
    ranks = make(2)
    ranks.boundary(edit(4), edit(4))
    assert told(ranks.boundary(edit(4), edit(4))) == [edit(4)] * 2
    assert told(ranks.boundary(edit(3), edit(3))) == [None] * 2
    assert told(ranks.boundary(NOTHING, NOTHING)) == [None] * 2


def test_without_clients_rounds_are_rare_until_one_rank_has_one(make: Callable[..., Ranks]) -> None:
    ranks, step_ns = make(2), 20 * MS
    quiet = quiet_interval(step_ns)
    assert quiet == 5 * idle_interval(step_ns)

    def rounds(clients: tuple[bool, bool]) -> int:
        heard = [
            ranks.boundary(NOTHING, NOTHING, step_time_ns=step_ns, clients=clients)
            for _ in range(4 * quiet)
        ]
        return sum(one[0] is not None for one in heard)

    assert rounds((False, False)) == 4
    # The first of these rounds is still the one that the quiet ranks have agreed on.
    assert rounds((True, False)) >= 15
    assert rounds((False, False)) <= 5


class Absent:
    """A group whose other ranks never come."""

    def __init__(self) -> None:
        self.waited: list[timedelta] = []

    def allreduce(self, _tensors: object, _options: object) -> Absent:
        return self

    def wait(self, timeout: timedelta) -> None:
        self.waited.append(timeout)
        raise RuntimeError("timed out")


@pytest.mark.parametrize(("request_", "timeout_s"), [(NOTHING, 0.2), (edit(1), 9.0)])
def test_a_rank_that_does_not_come_loses_the_agreement_later_when_an_edit_is_promised(
    request_: Request, timeout_s: float
) -> None:
    group = Absent()
    alone: Any = group
    agreement = Agreement(alone, timeout_s=0.2, edit_timeout_s=9.0)
    agreement.collect()
    agreement.launch(request_, pending=False, stay=True, step_time_ns=0)
    with pytest.raises(AgreementLost, match=r"did not end within"):
        agreement.collect()
    assert group.waited == [timedelta(seconds=timeout_s)]


class Page:
    """Words whose every access by the trainer may be preceded by something of the sidecar's."""

    def __init__(self, before: Callable[[], None] = lambda: None) -> None:
        self.words = [0] * 512
        self.before = before

    def __getitem__(self, word: int) -> int:
        self.before()
        return self.words[word]

    def __setitem__(self, word: int, value: int) -> None:
        self.before()
        self.words[word] = value


def ready(words: Any, number: int, token: int = 7) -> None:
    """What the sidecar writes, with its own code."""
    reaching = PageRequests(words, lambda *_: None, lambda _: None)
    reaching.arm(Boundary(number, [], False, lambda _: None, token=token, action=EDIT))


def test_an_edit_that_is_agreed_on_and_postponed_has_no_outcome_until_it_is_applied() -> None:
    """Others are agreed on in the meantime: the end of a pause, for example."""
    words, outcomes = [0] * 512, []
    reaching = PageRequests(words, lambda *_: None, lambda _: None)
    reaching.arm(Boundary(4, [], False, outcomes.append, token=7, action=EDIT))
    words[Word.EDIT_AGREED] = 4
    words[Word.AGREED] = 5
    reaching.serve(True)
    assert outcomes == []
    assert fate_of(words, 4, ended=False) == pb.BOUNDARY_FATE_AGREED
    words[Word.EDIT_APPLIED], words[Word.EDIT_STEP] = 4, 12
    reaching.serve(True)
    assert [(one.step, one.reason) for one in outcomes] == [(12, "")]


def test_a_request_taken_back_at_any_moment_is_promised_or_certainly_not() -> None:
    ends = set()
    for moment in range(12):
        page = Page()
        ready(page.words, 4)
        accesses = 0

        def sidecar(page: Page = page, moment: int = moment) -> None:
            nonlocal accesses
            if accesses == moment:
                page.words[Word.READY] = 0
            accesses += 1

        page.before = sidecar
        taken = promise(page, 0, lambda _: True)
        # The pause before the look at PROMISED is longer than these few accesses.
        fate = fate_of(page.words, 4, ended=False)
        if taken == NOTHING:
            assert fate == pb.BOUNDARY_FATE_WITHDRAWN
        else:
            assert taken == edit(4)
            assert fate == pb.BOUNDARY_FATE_IN_DOUBT
        ends.add(taken)
    assert ends == {NOTHING, edit(4)}


def test_a_trainer_that_looks_while_a_request_is_written_over_sees_one_of_the_two() -> None:
    """The other way round: the trainer looks between any two stores of the sidecar."""
    seen = set()
    for moment in range(12):
        words, accesses = [0] * 512, 0
        ready(words, 4, token=40)
        sidecar = Page()
        sidecar.words = words

        def trainer(words: list[int] = words, moment: int = moment) -> None:
            nonlocal accesses
            if accesses == moment:
                copy = Page()
                copy.words = list(words)
                seen.add(promise(copy, 0, lambda _: True))
            accesses += 1

        sidecar.before = trainer
        ready(sidecar, 5, token=50)
        accesses = moment
        trainer()
    assert seen == {NOTHING, edit(4, 40), edit(5, 50)}


def test_what_is_not_accepted_is_not_promised() -> None:
    page = Page()
    ready(page.words, 4)
    assert promise(page, 0, lambda _: False) == NOTHING
    assert page.words[Word.PROMISED] == 0
    assert promise(page, 4, lambda _: pytest.fail("an agreed request was looked at")) == NOTHING


def test_the_fate_of_an_old_request_is_told_for_as_long_as_it_is_kept() -> None:
    words = [0] * 512
    for nth, number in enumerate(range(2, 2 * KEPT + 2, 2)):
        note_agreed(words, nth, number)
        words[Word.AGREED] = number
    note_failed(words, 3, 8)
    fates = {number: fate_of(words, number, ended=False) for number in (1, 3, 6, 8, 9)}
    assert fates == {
        1: pb.BOUNDARY_FATE_UNSPECIFIED,  # below the oldest kept
        3: pb.BOUNDARY_FATE_WITHDRAWN,
        6: pb.BOUNDARY_FATE_DONE,
        8: pb.BOUNDARY_FATE_TORN,
        9: pb.BOUNDARY_FATE_WITHDRAWN,
    }
    # As a respawned sidecar may find it: later ones agreed, another one promised since.
    words[Word.PROMISED] = words[Word.AGREED] + 1
    assert fate_of(words, 6, ended=True) == pb.BOUNDARY_FATE_DONE
    assert fate_of(words, words[Word.PROMISED], ended=True) == pb.BOUNDARY_FATE_IN_DOUBT


class Simulation:
    """Trainers, sidecars and two control planes of one mesh, in any order that `chance` draws.

    Each trainer passes boundaries at its own time; sidecars act between any two accesses of a
    trainer to its page. Rounds are a minimum, collected when all ranks have launched them.
    """

    def __init__(self, chance: random.Random, world_size: int = 3) -> None:
        self.chance = chance
        self.pages = [Page(self._between) for _ in range(world_size)]
        self.launched: list[dict[int, Request]] = []
        self.at = [0] * world_size
        self.agreed = [0] * world_size
        self.applied: list[list[tuple[int, Request]]] = [[] for _ in range(world_size)]
        self.pending: list[Callable[[], None]] = []
        self.certain: set[int] = set()
        self.number = 0

    def run(self, steps: int) -> list[str]:
        """Violations of what must never be."""
        for _ in range(steps):
            self._sidecars(0.7)
            self._trainer(self.chance.randrange(len(self.pages)))
        for _ in range(4 * len(self.pages)):
            for rank in range(len(self.pages)):
                self._trainer(rank)
        self._sidecars(0.0)
        return self._violations()

    def _between(self) -> None:
        for _ in range(self.chance.choice((0, 0, 0, 1, 3))):
            self._sidecars(0.7)

    def _sidecars(self, probability: float) -> None:
        if self.chance.random() >= probability:
            return
        if self.pending and self.chance.random() < 0.7:
            self.pending.pop(self.chance.randrange(len(self.pending)))()
        elif self.chance.random() < 0.4:
            self._ask()

    def _ask(self) -> None:
        """A control plane asks all ranks; the calls arrive when they do, or never."""
        self.number += self.chance.choice((0, 1, 1, 1))
        number, token = max(1, self.number), self.chance.choice((1, 1, 1, 2))
        for page in self.pages:
            if self.chance.random() < 0.95:
                self.pending.append(partial(ready, page.words, number, token))
            if self.chance.random() < 0.3:
                self.pending.append(partial(self._withdraw, page, number))

    def _withdraw(self, page: Page, number: int) -> None:
        PageRequests(page.words, lambda *_: None, lambda _: None).take_back(number)
        self.pending.append(lambda: self._look(page, number))

    def _look(self, page: Page, number: int) -> None:
        if fate_of(page.words, number, ended=False) == pb.BOUNDARY_FATE_WITHDRAWN:
            self.certain.add(number)

    def _trainer(self, rank: int) -> None:
        page, boundary = self.pages[rank], self.at[rank]
        if boundary:
            messages = self.launched[boundary - 1]
            if len(messages) < len(self.pages):
                return
            self._collect(rank, boundary, messages)
        request = module.promise(page, self.agreed[rank], lambda _: self.chance.random() < 0.9)
        if len(self.launched) == boundary:
            self.launched.append({})
        self.launched[boundary][rank] = request
        self.at[rank] += 1

    def _collect(self, rank: int, boundary: int, messages: dict[int, Request]) -> None:
        page, mine = self.pages[rank], messages[rank]
        least = min(message.number for message in messages.values())
        equal = len({(message.number, message.token) for message in messages.values()}) == 1
        if least > self.agreed[rank] and equal:
            self.agreed[rank] = mine.number
            self.applied[rank].append((boundary, mine))
            page[Word.EDIT_AGREED] = mine.number
            note_agreed(page, len(self.applied[rank]), mine.number)
            page[Word.AGREED] = mine.number
        page[Word.PROMISED] = 0

    def _violations(self) -> list[str]:
        found = []
        # What only some ranks have collected yet the others will collect, too.
        common = min(self.at)
        known = [[one for one in applied if one[0] < common] for applied in self.applied]
        if any(applied != known[0] for applied in known):
            found.append("ranks differ")
        if self.certain & {request.number for applied in self.applied for _, request in applied}:
            found.append("withdrawn for certain, and applied")
        return found


@settings(max_examples=500, deadline=None)
@given(st.integers(0, 1 << 40), st.integers(2, 4))
def test_no_two_ranks_ever_differ_and_what_is_withdrawn_is_never_applied(
    seed: int, world_size: int
) -> None:
    assert Simulation(random.Random(seed), world_size).run(60) == []


def test_the_simulation_agrees_often_enough_to_show_something() -> None:
    worlds = [Simulation(random.Random(seed)) for seed in range(50)]
    for world in worlds:
        world.run(200)
    assert sum(len(world.applied[0]) for world in worlds) >= 20
    assert sum(len(world.certain) for world in worlds) >= 20


class OnPaper:
    """A group whose nth reduction is over the nth message of every rank, wherever it was sent."""

    def __init__(self, sent: list[list[torch.Tensor]], rank: int) -> None:
        self.sent, self.rank = sent, rank

    def allreduce(self, tensors: list[torch.Tensor], _options: object) -> Any:
        self.sent[self.rank].append(tensors[0].clone())
        nth = len(self.sent[self.rank]) - 1

        def wait(_timeout: timedelta) -> None:
            tensors[0].copy_(torch.stack([messages[nth] for messages in self.sent]).amin(0))

        return SimpleNamespace(wait=wait)


class Selfish(Agreement):
    """A planted bug: a rank plans its next round by its own load, not by what all have sent."""

    def _collected(self) -> Round:
        interval, heard = self._message[4], super()._collected()
        self._next_launch = self._launched_at + interval
        return heard


class Schedule:
    """Ranks of different load and clients, each at its own pace, now and then with a request."""

    def __init__(
        self, chance: random.Random, world_size: int, make: type[Agreement] = Agreement
    ) -> None:
        self.chance, self.world_size = chance, world_size
        self.sent: list[list[torch.Tensor]] = [[] for _ in range(world_size)]
        groups: list[Any] = [OnPaper(self.sent, rank) for rank in range(world_size)]
        self.ranks = [make(group, timeout_s=1) for group in groups]
        self.at = [0] * world_size
        self.launched: list[list[int]] = [[] for _ in range(world_size)]
        self.agreed: list[list[tuple[int, int]]] = [[] for _ in range(world_size)]
        self.asked: list[list[int]] = []
        """For each request the boundary of each rank from which on it is ready for it."""

    def run(self, turns: int) -> list[str]:
        """Violations of what must never be."""
        for _ in range(turns):
            if self.chance.random() < 0.01 and len(self.agreed[0]) == len(self.asked):
                self.asked.append([at + self.chance.randint(1, 9) for at in self.at])
            self._boundary(self.chance.randrange(self.world_size))
        common = min(self.at)
        launched = {tuple(b for b in one if b <= common) for one in self.launched}
        agreed = {tuple(one for one in found if one[0] <= common) for found in self.agreed}
        late = [
            number
            for number, (boundary, _) in enumerate(self.agreed[0])
            if boundary > max(self.asked[number]) + QUIET_BOUNDARIES + 1
        ]
        unheard = len(self.asked) > len(self.agreed[0]) and (
            common > max(self.asked[-1]) + QUIET_BOUNDARIES + 1
        )
        return (
            ["rounds do not match"] * (len(launched) > 1)
            + ["ranks act at different boundaries"] * (len(agreed) > 1)
            + ["a request waits for longer than a quiet interval"] * (bool(late) or unheard)
        )

    def _boundary(self, rank: int) -> None:
        agreement, nth = self.ranks[rank], len(self.sent[rank])
        if agreement._work is not None and any(len(sent) < nth for sent in self.sent):
            return  # it would wait for the others
        self.at[rank] = boundary = self.at[rank] + 1
        if agreement.passes(wanted=False):
            return
        heard = agreement.collect()
        if heard is not None and heard.agreed is not None:
            self.agreed[rank].append((boundary, heard.agreed.number))
        if not agreement.due:
            return
        number = len(self.asked)
        ready = number > len(self.agreed[rank]) and boundary >= self.asked[-1][rank]
        self.launched[rank].append(boundary)
        agreement.launch(
            edit(number) if ready else NOTHING,
            pending=ready,
            stay=False,
            # At least so that 0.2 s are no more boundaries than a quiet interval.
            step_time_ns=self.chance.choice((0, 4, 10, 47, 300)) * MS,
            expected=self.chance.random() < 0.02,
            quiet=self.chance.random() < 0.95,
        )


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 40), st.integers(2, 4))
def test_ranks_of_different_load_have_the_same_rounds_and_none_is_too_late(
    seed: int, world_size: int
) -> None:
    schedule = Schedule(random.Random(seed), world_size)
    assert schedule.run(1500) == []


def test_the_schedules_have_quiet_times_and_requests_and_show_a_rank_that_plans_alone() -> None:
    schedules = [Schedule(random.Random(seed), 2) for seed in range(10)]
    assert [schedule.run(1500) for schedule in schedules] == [[]] * 10
    assert sum(len(schedule.agreed[0]) for schedule in schedules) >= 10
    gaps = [b - a for one in schedules for a, b in pairwise(one.launched[0])]
    assert max(gaps) >= idle_interval(10 * MS) + 5
    selfish = [Schedule(random.Random(seed), 2, Selfish) for seed in range(10)]
    assert any("rounds do not match" in schedule.run(1500) for schedule in selfish)
