"""The 1 GiB model that summon.py and stats.py read: two ranks, a client, two raw senders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from benchmarks.harness import GIB
from benchmarks.ranks import WARM_HEAP, ObedientRanks

WORLD_SIZE = 2
WIDTH = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Big:
    """Everything that runs."""

    ranks: ObedientRanks
    client: ObedientRanks
    helpers: Sequence[int]
    """Pids of sidecars and of the control plane."""
    size_bytes: int

    @property
    def gib(self) -> float:
        return self.size_bytes / GIB

    def watched(self) -> list[int]:
        """Pids whose CPU time counts: clients, ranks, sidecars."""
        return [*self.ranks.pids, *self.client.pids, *self.helpers]

    def ask(self, *command: object) -> float:
        """The client's answer to one command."""
        return float(self.client.call(*command)[0])

    def advance(self) -> None:
        """One more step on all ranks, so that no snapshot of before serves again."""
        self.ranks.call("advance")


@contextmanager
def big(*, layers: int, environment: Mapping[str, str] | None = None) -> Iterator[Big]:
    """An attached FSDP2 model of `layers` x 64 MiB on two ranks, and a connected client.

    `environment` has more variables for the ranks and what they start.
    """
    with ExitStack() as stack:
        ranks = stack.enter_context(
            ObedientRanks(
                "benchmarks.workers.model",
                WORLD_SIZE,
                environment={**WARM_HEAP, **(environment if environment is not None else {})},
            )
        )
        size_bytes = ranks.call("build", WIDTH, layers)[0]
        helpers = [pid for pids in ranks.call("attach") for pid in pids]
        ranks.call("advance")
        client = stack.enter_context(
            ObedientRanks("benchmarks.workers.client", state_dir=ranks.state_dir)
        )
        client.call("connect")
        client.call("warm")
        yield Big(ranks=ranks, client=client, helpers=helpers, size_bytes=size_bytes)
