"""What happens in an episode: a function of seed and episode number, so it can be repeated."""

from __future__ import annotations

import random
from dataclasses import dataclass

from paramd_service.sidecar.faults import POINTS

CASES = (
    ("ddp", 2),
    ("ddp-odd", 1),
    ("fsdp1-full", 2),
    ("fsdp1-full-orig", 3),
    ("fsdp1-no-shard", 2),
    ("fsdp1-hybrid", 4),
    ("fsdp2", 2),
    ("fsdp2", 4),
    ("hsdp", 4),
    ("tp", 3),
    ("tp-fsdp2", 4),
    ("tp-ddp", 4),
)
EVENTS = (
    "kill-sidecar",
    "stop-sidecar",
    "fault-point",
    "kill-control",
    "stop-control",
    "stop-trainers",
    "quiet",
)
ENDS = ("well", "killed-resting", "killed-inside")
EVENTS_EACH = 8


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing that is done to the job, and for how long."""

    name: str
    rank: int
    seconds: float
    rule: str
    """For `fault-point`: point and action."""


@dataclass(frozen=True, kw_only=True)
class Episode:
    """One job's life."""

    kind: str
    world_size: int
    lockstep: bool
    events: tuple[Event, ...]
    end: str


def episode(seed: int, number: int) -> Episode:
    """Episode `number` of a soak with that seed."""
    chance = random.Random(f"{seed}/{number}")
    kind, world_size = chance.choice(CASES)
    return Episode(
        kind=kind,
        world_size=world_size,
        lockstep=chance.random() < 0.5,
        events=tuple(_event(chance, world_size) for _ in range(EVENTS_EACH)),
        end=chance.choice(ENDS),
    )


def _event(chance: random.Random, world_size: int) -> Event:
    return Event(
        name=chance.choice(EVENTS),
        rank=chance.randrange(world_size),
        seconds=chance.uniform(0.1, 6.0),
        rule=f"{chance.choice(sorted(POINTS))}:{chance.choice(['kill', 'stop'])}",
    )
