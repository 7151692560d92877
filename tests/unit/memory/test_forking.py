"""A forked child must not reach its parent's parameters."""

import os

from paramd.memory import descriptors
from paramd.memory.arena import HostArena, private_in_children

SIZE_BYTES = 1 << 16


def test_a_childs_writes_stay_its_own() -> None:
    descriptor = descriptors.create_memory("paramd-test", SIZE_BYTES)
    arena = HostArena(descriptor, SIZE_BYTES)
    private_in_children(arena)
    arena.buffer[10] = 1
    child = os.fork()
    if child == 0:
        arena.buffer[10] += 1
        os._exit(arena.buffer[10])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert arena.buffer[10] == 1
    arena.close()
    os.close(descriptor)
