"""What happens in an episode: a function of seed and episode number, so it can be repeated.

Kinds of faults are dealt from a shuffled deck that goes on from one episode to the next, so
every kind has its turn before any has its second.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from paramd.trainer import faults as trainer_faults
from paramd_service.sidecar import faults as sidecar_faults

CASES = (
    ("ddp", 2), ("fsdp1-full", 2), ("fsdp1-full-orig", 2), ("fsdp1-no-shard", 2), ("fsdp2", 2),
    ("fsdp2", 3), ("hsdp", 2), ("tp", 2), ("tp-fsdp2", 2), ("tp-ddp", 2), ("fsdp1-hybrid", 2),
    ("hsdp", 4),
)  # fmt: skip
STORES = ("embedded", "site", "site-postgres")
"""Where the control plane stands: beside rank 0; as a site of two jobs, with SQLite or with
PostgreSQL, all links going through `links`."""

RESUMABLE = frozenset({"standing-copied", "copy-sent", "copy-received", "mark-made"})
"""Points that only a training with resume="auto" passes: those of resume.py, and of tests."""
ON_DEVICE = frozenset({"state-allocated"})
"""Points that only parameters on a device pass: those of multiprocess/test_device_resume.py."""
SIDECAR_POINTS = sidecar_faults.POINTS - RESUMABLE - ON_DEVICE
TRAINER_POINTS = trainer_faults.POINTS - trainer_faults.ATTACH_POINTS

ANYWHERE = (
    *(f"sidecar {p} {a}" for p in sorted(SIDECAR_POINTS) for a in ("kill", "stop")),
    *(f"trainer {p} {a}" for p in sorted(TRAINER_POINTS) for a in ("kill", "stop")),
    *(f"{who} random {a}" for who in ("sidecar", "control", "trainer") for a in ("kill", "stop")),
    "sidecars all kill",
    *(f"{who} clock {way}" for who in ("sidecar", "control", "trainer") for way in ("+", "-")),
    *(f"sidecar version {which}" for which in ("newer", "older")),
    "sidecar descriptors few", "control descriptors few",
    "sidecar memory cgroup", "control memory cgroup",
    "sidecar memory address-space", "sidecar memory shared",
    "disk exports full", "disk state full",
)  # fmt: skip
AT_SITES = (
    *(f"link {who} {how}" for who in ("sidecar", "control") for how in ("cut", "slow", "reset")),
    "disk store full",
    "postgres random restart",
    "postgres random kill",
)
KINDS = (*ANYWHERE, *AT_SITES)

EVENTS_EACH = 32
STORM = 0.25
"""How often a second fault comes in the middle of another."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that is done to the job."""

    kind: str
    rank: int
    seconds: float
    """How long it lasts, where it does not end by itself."""

    @property
    def words(self) -> Sequence[str]:
        """Whom it strikes, where, and how."""
        return self.kind.split(" ")

    @property
    def ends_training(self) -> bool:
        who, _, how = self.words
        return who == "trainer" and how == "kill"


@dataclass(frozen=True, kw_only=True)
class Episode:
    """One site's life."""

    number: int
    kind: str
    world_size: int
    store: str
    events: tuple[tuple[Fault, ...], ...]
    """One after the other; the faults of one event at once."""


def episode(seed: int, number: int, *, events: int = EVENTS_EACH) -> Episode:
    """Episode `number` of a campaign with that seed."""
    chance = random.Random(f"{seed}/{number}")
    kind, world_size = chance.choice(CASES)
    store = STORES[(number + seed) % len(STORES)]
    deck = _deck(seed, number, store, 4 * events)
    dealt: list[tuple[Fault, ...]] = []
    for _ in range(events):
        kinds = [deck.pop(0)]
        if chance.random() < STORM:
            # No point: while another fault lasts nobody may come by there.
            second = next(k for k in deck if not _is_point(k))
            deck.remove(second)
            kinds.append(second)
        dealt.append(tuple(_fault(chance, kind, world_size) for kind in kinds))
    return Episode(
        number=number, kind=kind, world_size=world_size, store=store, events=tuple(dealt)
    )


def told(text: str, *, kind: str, world_size: int, store: str) -> Episode:
    """An episode of just these faults, to find out about one: "sidecar clock +@0; trainer random
    kill", each with the rank that it is for (rank 0 when not told). Raises ValueError."""
    events = []
    for one in filter(None, (part.strip() for part in text.split(";"))):
        what, _, rank = one.partition("@")
        if not _possible(what, store):
            raise ValueError(f"{what!r} is no fault of {store}; there are {', '.join(KINDS)}")
        events.append((Fault(kind=what, rank=int(rank or 0), seconds=2.0),))
    return Episode(number=0, kind=kind, world_size=world_size, store=store, events=tuple(events))


def _fault(chance: random.Random, kind: str, world_size: int) -> Fault:
    return Fault(
        kind=kind,
        rank=chance.randrange(world_size),
        seconds=chance.choice((0.1, 0.2, 0.4, 0.8, 4.0)),
    )


def _is_point(kind: str) -> bool:
    return kind.split(" ")[1] in SIDECAR_POINTS | TRAINER_POINTS


def _deck(seed: int, number: int, store: str, count: int) -> list[str]:
    """The next `count` kinds that can be there with this store, from where this number begins."""
    order, turn = _shuffled(seed, 0), 0
    skipped = number * EVENTS_EACH * 5 // 4
    found: list[str] = []
    while len(found) < count:
        if not order:
            turn += 1
            order = _shuffled(seed, turn)
        card = order.pop()
        if skipped > 0:
            skipped -= 1
        elif _possible(card, store):
            found.append(card)
    return found


def _shuffled(seed: int, turn: int) -> list[str]:
    order = list(KINDS)
    random.Random(f"{seed}/deck/{turn}").shuffle(order)
    return order


def _possible(kind: str, store: str) -> bool:
    if kind.startswith("postgres"):
        return store == "site-postgres"
    if kind == "disk store full":
        return store == "site"
    return kind in (ANYWHERE if store == "embedded" else KINDS)
