"""Simulated courses of gradients: what is wrong is told with the right layer, and what is healthy
with no word."""

import math
import random
from collections.abc import Callable, Sequence

import pytest

from paramd_service.alerts.book import Finding
from paramd_service.alerts.courses import DEAD, LEAST, Courses, Sampled

LAYERS = [f"layers.{n}.weight" for n in range(24)]
AT = 30
"""The sample from which on something is wrong."""
COUNT = 60

Norm = Callable[[int, int, random.Random], float]
"""A layer's norm by its number and the sample's."""


def usual(layer: int, _sample: int, chance: random.Random) -> float:
    """Layers differ by a factor of 50, and their gradients by a third from sample to sample."""
    return 0.1 * (1 + layer) * chance.lognormvariate(0.0, 0.3)


def told(norm: Norm, *, seed: int = 3, layers: Sequence[str] = LAYERS) -> list[tuple[int, Finding]]:
    """(sample, finding) of all samples; a norm below zero is a gradient that is missing."""
    chance, courses = random.Random(seed), Courses()
    found: list[tuple[int, Finding]] = []
    for sample in range(COUNT):
        norms = [norm(number, sample, chance) for number in range(len(layers))]
        sampled = [
            Sampled(fqn=fqn, norm=max(one, 0.0), absent=one < 0)
            for fqn, one in zip(layers, norms, strict=True)
        ]
        found += [(sample, one) for one in courses.take(sampled, 10 * sample)]
    return found


def changed(factor: Callable[[int, int], float]) -> Norm:
    """The usual norms, times a factor by layer and samples since `AT`."""

    def norm(layer: int, sample: int, chance: random.Random) -> float:
        value = usual(layer, sample, chance)
        return value * factor(layer, sample - AT) if sample >= AT else value

    return norm


SICK: dict[str, tuple[Norm, str, str]] = {
    "explodes at once": (changed(lambda n, _: 300.0 if n == 7 else 1.0), "explode", LAYERS[7]),
    "explodes slowly": (
        changed(lambda n, t: 1.3 ** (t + 1) if n == 7 else 1.0), "explode", LAYERS[7]
    ),
    "all explode slowly": (changed(lambda n, t: 1.3**t), "explode", ""),
    "rate times 100": (changed(lambda n, t: 100.0), "explode", ""),
    "vanishes": (changed(lambda n, _: 1e-6 if n == 7 else 1.0), "vanish", LAYERS[7]),
    "all vanish": (changed(lambda n, _: 1e-7), "vanish", ""),
    "dead": (changed(lambda n, _: 0.0 if n == 7 else 1.0), "vanish", LAYERS[7]),
    "clipped, and explodes": (
        changed(lambda n, _: 1.0 if n == 7 else 1e-5), "vanish", ""
    ),
    "detached": (changed(lambda n, _: -1.0 if n == 7 else 1.0), "missing", LAYERS[7]),
}  # fmt: skip


@pytest.mark.parametrize("what", SICK)
def test_a_planted_trouble_is_told_with_its_layer_and_step(what: str) -> None:
    norm, kind, fqn = SICK[what]
    found = told(norm)
    assert found, "nothing was told"
    first, finding = found[0]
    assert first >= AT, found[0]
    # At once in the pace of hurried samples, which follow an odd one; a slow one takes as long as
    # it grows.
    assert first - AT <= (14 if "slowly" in what else DEAD), first
    assert kind in finding.subject
    assert fqn in ("", finding.fqn)
    assert f"since step {10 * first}" in finding.reason
    whose = "the gradient of " * (kind != "missing") + (finding.fqn or "the whole model")
    assert finding.reason.startswith(f"{whose} ")
    # One finding at a time, however many layers.
    assert len({sample for sample, _ in found}) == len(found)


def test_the_worst_layer_is_named_first_and_the_others_are_listed() -> None:
    norm = changed(lambda n, _: {3: 50.0, 7: 4000.0, 9: 90.0}.get(n, 1.0))
    finding = told(norm)[0][1]
    assert finding.fqn == LAYERS[7]
    assert f"also {LAYERS[9]}" in finding.reason
    assert LAYERS[0] not in finding.reason


def test_a_layer_that_is_frozen_has_no_gradient_and_the_rest_does_not_vanish() -> None:
    courses, found = Courses(), []
    for sample in range(COUNT):
        large = [Sampled(fqn="large", norm=1e6)] if sample < AT else []
        if not large:
            courses.forget(["large"])
        found += courses.take([Sampled(fqn="small", norm=1.0), *large], sample)
        assert courses.has_gradient("large") is bool(large)
    assert found == []
    assert courses.total() == 1.0


def test_after_a_rollback_gradients_of_an_earlier_time_are_compared_with_that_time() -> None:
    courses = Courses()

    def takes(steps: Sequence[int], norm: float) -> list[Finding]:
        return [
            one for step in steps for one in courses.take([Sampled(fqn=LAYERS[0], norm=norm)], step)
        ]

    assert takes(range(10), 100.0) == []
    # Kept samples are of this time alone.
    assert takes(range(100, 150), 1.0) == []
    assert takes(range(5, 15), 100.0) == [], "it is as it was there"
    assert takes(range(200, 206), 1e4), "what explodes after that is told"
    # Back before it exploded it is over at once.
    assert takes(range(15, 18), 100.0) == []
    assert courses.warm_count == LEAST


def young(layer: int, sample: int, chance: random.Random) -> float:
    """Deep layers start with next to no gradient, and grow by hundreds in the first minutes."""
    grown = 1.0 if layer < 12 else 300.0 / (1 + 299 * math.exp(-sample / 3))
    return usual(layer, sample, chance) * (grown / 300.0 if layer >= 12 else 1.0)


def restarts(layer: int, sample: int, chance: random.Random) -> float:
    return usual(layer, sample, chance) * (1 + 2 * abs(math.sin(sample / 4)))


def adversarial(layer: int, sample: int, chance: random.Random) -> float:
    return usual(layer, sample, chance) * math.exp(1.2 * math.sin(sample) + chance.gauss(0, 0.5))


def experts(layer: int, sample: int, chance: random.Random) -> float:
    """Experts without a token have a gradient of zeros, or none."""
    if layer < 12 and chance.random() < 0.2:
        return 0.0 if layer < 6 else -1.0
    return usual(layer, sample, chance)


def unfrozen(layer: int, sample: int, chance: random.Random) -> float:
    """Half of the layers begin to train in the middle, with gradients larger than all before."""
    return (
        -1.0
        if layer >= 12 and sample < AT
        else usual(layer, sample, chance) * (30.0 if layer >= 12 else 1.0)
    )


def converging(layer: int, sample: int, chance: random.Random) -> float:
    return usual(layer, sample, chance) * 0.8**sample


def bad_batch(layer: int, sample: int, chance: random.Random) -> float:
    return usual(layer, sample, chance) * (40.0 if sample % 17 == 16 else 1.0)


def longer_batches(layer: int, sample: int, chance: random.Random) -> float:
    return usual(layer, sample, chance) * (0.4 if sample >= AT else 1.0)


def warm_up(layer: int, sample: int, chance: random.Random) -> float:
    return usual(layer, sample, chance) * (8.0 / (1 + sample))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "norm",
    [usual, young, restarts, adversarial, experts, unfrozen, converging, bad_batch, longer_batches,
     warm_up],
)  # fmt: skip
def test_of_healthy_training_nothing_is_told(norm: Norm, seed: int) -> None:
    assert told(norm, seed=seed) == []


def test_a_norm_higher_than_ever_that_matters_is_followed_by_more_samples_at_once() -> None:
    chance, courses = random.Random(3), Courses()

    def take(step: int, layer: int, factor: float) -> bool:
        courses.take([
            Sampled(fqn=fqn, norm=usual(n, step, chance) * (factor if n == layer else 1.0))
            for n, fqn in enumerate(LAYERS)
        ], step)  # fmt: skip
        return courses.suspicious

    assert not any(take(step, 0, 1.0) for step in range(LEAST, AT))
    # A small layer alone changes nothing.
    assert not take(AT, 0, 5.0)
    assert take(AT + 1, 23, 6.0)
    # It was one bad batch.
    assert not take(AT + 2, 23, 1.0)
