"""A host that a training nearly fills, by arithmetic: what sidecars are granted in its first steps.

The figures are of Qwen2.5-0.5B in float32 with AdamW, FSDP2 on two ranks of a host of 24 GB, which
alone leaves 9.4 GB at its lowest. The real grants decide (room.py), asked at each moment of the
first steps.
"""

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from paramd.errors import ExhaustedError
from paramd.memory.left import Growth, Limit, Memory, Purpose
from paramd_service.sidecar.room import HostRoom

MB = 10**6
HOST_BYTES = 24_000 * MB
WORLD_SIZE = 2
SHARD_BYTES = 988 * MB
"""Parameters of a rank; its gradients take as much, the state of AdamW twice as much."""
STATE_BYTES = 2 * SHARD_BYTES
STANDING_BYTES = SHARD_BYTES + STATE_BYTES
PASSING_BYTES = 1_850 * MB
"""What a rank takes for a forward and backward, and gives back: whole layers, activations."""
LOWEST_BYTES = 9_400 * MB
"""What the training alone leaves when it takes most."""
REST_BYTES = (
    HOST_BYTES
    - LOWEST_BYTES
    - WORLD_SIZE * (SHARD_BYTES + SHARD_BYTES + STATE_BYTES + PASSING_BYTES)
)
"""The system, interpreters and libraries."""


class Host:
    """A host with two trainers in lock-step, and what their sidecars were granted."""

    def __init__(self) -> None:
        self.private_bytes = 0
        """Of each trainer, beside the memory that it shares with its sidecar."""
        self.optimizer_bytes = 0
        """State in shared memory, of each."""
        self.granted_bytes = 0
        self.now_s = 1000.0
        self.lowest_bytes = HOST_BYTES

    @property
    def left_bytes(self) -> int:
        of_rank = SHARD_BYTES + self.private_bytes + self.optimizer_bytes
        return HOST_BYTES - REST_BYTES - WORLD_SIZE * of_rank - self.granted_bytes

    def memory(self) -> Memory:
        return Memory((Limit("the host", HOST_BYTES, self.left_bytes),))


class Ranks:
    """The sidecars: each looks at its trainer, then takes what it is granted."""

    def __init__(self, host: Host, folder: Path, stack: ExitStack) -> None:
        self.host = host
        self.growths = [Growth() for _ in range(WORLD_SIZE)]
        self.standing = [0] * WORLD_SIZE
        self.rooms = [
            HostRoom(
                folder / f"rank-{rank}.sock", rank, reserve_bytes=None,
                memory=host.memory, clock_s=lambda: host.now_s,
            )
            for rank in range(WORLD_SIZE)
        ]  # fmt: skip
        for room in self.rooms:
            room.open()
            stack.callback(room.close)

    def look(self, step: int) -> None:
        host = self.host
        host.lowest_bytes = min(host.lowest_bytes, host.left_bytes)
        host.now_s += 0.3
        for room, growth in zip(self.rooms, self.growths, strict=True):
            growth.see(host.private_bytes, step)
            coming_bytes = growth.coming_bytes(
                SHARD_BYTES + STATE_BYTES, host.optimizer_bytes, step
            )
            room.expect(step_bytes=growth.step_bytes, coming_bytes=coming_bytes)
        for rank, room in enumerate(self.rooms):
            count = room.decide()
            if count is not None and count < self.standing[rank]:
                host.granted_bytes -= (self.standing[rank] - count) * STANDING_BYTES
                self.standing[rank] = count

    def stand(self) -> None:
        """Each rank makes as many standing snapshots as it may have."""
        for rank, room in enumerate(self.rooms):
            held_bytes = self.standing[rank] * STANDING_BYTES
            while self.standing[rank] < room.standing_count(STANDING_BYTES, held_bytes):
                try:
                    with room.claimed(Purpose.STANDING, STANDING_BYTES):
                        self.host.granted_bytes += STANDING_BYTES
                except ExhaustedError:
                    break
                self.standing[rank] += 1
                held_bytes = self.standing[rank] * STANDING_BYTES

    def summon_all(self) -> int:
        """A reader wants all parameters of each rank at once; returns how many ranks grant it."""
        with ExitStack() as reading:
            count = 0
            for room in self.rooms:
                with suppress(ExhaustedError):
                    reading.enter_context(room.claimed(Purpose.SNAPSHOT, SHARD_BYTES))
                    self.host.granted_bytes += SHARD_BYTES
                    count += 1
            self.host.lowest_bytes = min(self.host.lowest_bytes, self.host.left_bytes)
            return count

    def released(self, count: int) -> None:
        self.host.granted_bytes -= count * SHARD_BYTES


def moments(host: Host) -> Iterator[int]:
    """The first steps of the training: at each change of its memory, the finished updates."""
    yield 0
    for step in range(6):
        for part in range(1, 11):
            # Forward and backward: gradients appear one after the other.
            host.private_bytes = SHARD_BYTES * part // 10 + PASSING_BYTES
            yield step
        # The state is made privately, then moves; what moves is there once.
        host.private_bytes, host.optimizer_bytes = SHARD_BYTES, STATE_BYTES
        yield step
        host.private_bytes = 0
        yield step + 1


@pytest.mark.parametrize("read", [False, True])
def test_nothing_is_taken_that_the_first_steps_need(tmp_path: Path, read: bool) -> None:
    host = Host()
    with ExitStack() as stack:
        ranks = Ranks(host, tmp_path, stack)
        granted = 0
        for step in moments(host):
            ranks.look(step)
            # Its last snapshot lasts until the next look.
            ranks.released(granted)
            granted = ranks.summon_all() if read else 0
            if step:
                ranks.stand()
            host.lowest_bytes = min(host.lowest_bytes, host.left_bytes)
        # Never into the reserve, at any moment.
        assert host.lowest_bytes >= HOST_BYTES // 20
        # What fits is there in the end, the same for both; with such a reader nothing does.
        assert ranks.standing == ([0, 0] if read else [1, 1])
