"""Sparse gradients while helpers are late, for many iterations: nothing damages the heap.

    python -m tests.sequences.loops.sparse [--iterations 10000] [--rounds 10] [--seed 7]

Each round is a new job of two ranks with DDP and gloo, whose embeddings have sparse gradients, and
whose control plane is late by another time; a client reads meanwhile whatever there is. In every
other round the C library checks its heap at each call. A rank that ends by a signal, or whose
stderr tells of a damaged heap, is what this looks for; losses have to be those without paramd.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from random import Random

import torch
import torch.distributed as dist
from torch import nn

import paramd
from paramd.errors import ParamdError
from tests import leaks
from tests.ending import end
from tests.launch import ROOT, start_ranks

JOB = "main"
CHECKED = {"LD_PRELOAD": "libc_malloc_debug.so.0", "MALLOC_CHECK_": "3"}
"""glibc's checks of its heap; without its caches, so other rounds go without."""
SIGNS = ("malloc", "free()", "corrupted", "double free", "tcache", "munmap_chunk", "realloc():")
SOON_S, LATE_S = (0.0, 6.0), (21.0, 26.0)
"""How late helpers are, in seconds: while `attach` waits, or while the training goes on."""
REST_S = 0.012
"""Of each iteration where it is to go on until they are there."""
ENDS_S = 1200.0
"""The longest a round may take, on a busy machine."""


class Net(nn.Module):
    """Two embeddings, of which batches touch a few rows, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.Embedding(997, 24, sparse=True)
        self.bag = nn.EmbeddingBag(211, 24, sparse=True, mode="sum")
        self.out = nn.Linear(24, 5)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found = self.words(rows).mean(1) + self.bag(rows % 211)
        return (self.out(found) - 1).square().mean()  # type: ignore[no-any-return]


def train(given: argparse.Namespace) -> None:
    """One rank. Prints the loss of every 50th iteration."""
    from tests.sequences.loops.training import late_helpers

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    attachment = None
    if given.late_s >= 0:
        late_helpers(given.late_s)
        attachment = paramd.attach(model, optimizer, job=JOB, resume="never")
    draws = torch.Generator().manual_seed(given.seed * 2 + dist.get_rank())
    for number in range(given.iterations):
        # Rows are drawn in any number, so what is reduced has another size each time.
        count = int(torch.randint(1, 40, (), generator=draws))
        loss = model(torch.randint(0, 997, (count, 7), generator=draws))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if given.late_s > SOON_S[1]:
            time.sleep(REST_S)
        if number % 50 == 49:
            print(f"loss {number} {loss.item()!r}", flush=True)
    if attachment is not None:
        attachment.detach()


def one_round(folder: Path, seed: int, iterations: int, late_s: float, *, checked: bool) -> str:
    """Runs one job to its end. Returns rank 0's losses; raises AssertionError."""
    env = {"PARAMD_LINGER_S": "2", "PYTHONPATH": str(ROOT)} | (CHECKED if checked else {})
    args = ["--train", "--iterations", str(iterations), "--seed", str(seed)]
    state = folder / "state"
    state.mkdir(mode=0o700, exist_ok=True)
    os.environ["PARAMD_STATE_DIR"] = str(state)
    # A script, not a module: what is forked would keep the library that it has.
    with start_ranks(
        __file__, 2, args=[*args, f"--late-s={late_s}"], env=env, state_dir=state
    ) as ranks:
        ends = threading.Event()
        reader = threading.Thread(target=read, args=(ends,), daemon=True)
        if late_s >= 0:
            reader.start()
        results = ranks.wait(timeout_s=ENDS_S)
        ends.set()
        if late_s >= 0:
            reader.join(30)
        for one in results:
            signs = [line for line in one.stderr.splitlines() if any(s in line for s in SIGNS)]
            late = " (it was ended: late)" if one.killed else ""
            said = f"rank {one.rank} ended with {one.returncode}{late}\n{ranks.outputs()}"
            said += "".join(f"\n--- {path}\n{path.read_text()[-4000:]}" for path in logs(state))
            assert one.returncode == 0, said
            assert not signs, said
        return results[0].stdout


def logs(state: Path) -> list[Path]:
    return sorted(state.glob(f"{JOB}/*.log"))


def read(ends: threading.Event) -> None:
    """Whatever there is, as soon as there is something."""
    while not ends.is_set():
        try:
            with paramd.connect(job=JOB, timeout=5) as mesh:
                while not ends.is_set():
                    mesh.summon("*", timeout=5)
                    frames = mesh.grads("*")
                    for _ in range(5):
                        if ends.is_set():
                            break
                        dict(next(frames))
                    frames.close()
        except (ParamdError, StopIteration):
            time.sleep(0.3)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=10_000, help="of all rounds")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--late-s", type=float, default=-1.0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train:
        train(given)
        return 0
    leaks.adopt_orphans()
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(10**6)
    each, done = given.iterations // given.rounds, 0
    for turn in range(given.rounds):
        within = SOON_S if turn % 3 == 2 else LATE_S
        late_s = round(Random(f"{seed} {turn}").uniform(*within), 1)
        with tempfile.TemporaryDirectory(prefix="sparse-") as name:
            folder, checked = Path(name), turn % 2 == 1
            wanted = one_round(folder, seed + turn, each, -1, checked=False)
            told = one_round(folder, seed + turn, each, late_s, checked=checked)
        assert "nan" not in wanted, "a training whose losses say nothing"
        assert _losses(told) == _losses(wanted), f"round {turn}: other losses than without paramd"
        done += each
        print(f"seed {seed}, round {turn}: {done} iterations, helpers late by {late_s} s"
              f"{', heap checked' * checked}", flush=True)  # fmt: skip
    print(f"{done} iterations of two ranks: the heap is whole, losses are those without paramd")
    return 0


def _losses(told: str) -> list[str]:
    return [line for line in told.splitlines() if line.startswith("loss ")]


if __name__ == "__main__":
    if "--train" in sys.argv:
        end(main)
    sys.exit(main())
