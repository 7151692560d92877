"""Gradients of odd placements, dtypes and habits: made by hand, read by rank 0 meanwhile.

The optimizers change nothing, so a gradient may be whatever a case needs. Each case makes
updates on both ranks until its reader, a thread of rank 0, has what it wants.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import paramd
from paramd.mesh.frames.frames import GradFrame
from paramd.mesh.mesh import Mesh
from paramd.trainer.attaching.attachment import Attachment
from paramd.trainer.settings import AttachSettings
from tests.rank import run

JOB = "cases"
ROWS, WIDTH = 5, 3
Frames = list[GradFrame[Any]]


class Idle(torch.optim.Optimizer):
    """Changes nothing."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(list(parameters), {})

    def step(self, closure: Any = None) -> None:
        pass


class Model(nn.Module):
    """Parameters by what their gradients will be."""

    def __init__(self) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (2,))
        self.mesh = mesh
        whole = torch.zeros(ROWS, WIDTH)

        def placed(*placements: Any) -> nn.Parameter:
            return nn.Parameter(distribute_tensor(whole.clone(), mesh, list(placements)))

        self.plain = nn.Parameter(whole.clone())
        self.unused = nn.Parameter(whole.clone())
        self.wide = nn.Parameter(whole.bfloat16())
        self.turned = nn.Parameter(whole.clone())
        self.sparse = nn.Parameter(whole.clone())
        self.scalar = nn.Parameter(torch.tensor(0.0))
        self.summed = placed(Replicate())
        self.averaged = placed(Replicate())
        self.given_whole = placed(Shard(0))
        self.given_shard = placed(Replicate())
        self.awaited = placed(Shard(0))
        self.other = nn.Parameter(whole.clone())
        self.one = nn.Parameter(whole.clone())
        self.twin = nn.Parameter(self.one.data)


def gradients(model: Model, value: float) -> None:
    """Sets the gradients of one update. Sums are made of different parts on each rank."""
    rank, mesh = dist.get_rank(), model.mesh
    whole = torch.full((ROWS, WIDTH), value)
    rising = torch.arange(ROWS * WIDTH, dtype=torch.float32).view(ROWS, WIDTH) + value
    model.plain.grad = whole.clone()
    model.unused.grad = None
    model.wide.grad = None
    model.wide.grad_dtype = None  # type: ignore[attr-defined]
    model.wide.grad = whole.double()
    model.turned.grad = rising.t().contiguous().t()
    model.sparse.grad = whole.to_sparse()
    model.scalar.grad = torch.tensor(value)
    part = whole * (0.25 if rank == 0 else 0.75)
    model.summed.grad = DTensor.from_local(part, mesh, [Partial()])
    model.averaged.grad = DTensor.from_local(2 * part, mesh, [Partial("avg")])
    model.given_whole.grad = DTensor.from_local(rising, mesh, [Replicate()])
    model.given_shard.grad = distribute_tensor(rising, mesh, [Shard(0)])
    parts = DTensor.from_local(rising / 2, mesh, [Partial()])
    model.awaited.grad = parts.redistribute(placements=[Shard(0)], async_op=True)
    model.other.grad = whole.clone()
    model.one.grad, model.twin.grad = whole.clone(), rising.clone()


class Cases:
    """What every case needs."""

    def __init__(self) -> None:
        self.model = Model()
        mine = [p for name, p in self.model.named_parameters() if name != "other"]
        self.first = Idle(iter(mine))
        self.second = Idle(iter([self.model.other]))
        settings = AttachSettings.from_environment()
        self.attachment: Attachment = paramd.attach(
            self.model, [self.first, self.second], job=JOB, settings=settings
        )
        self.mesh: Mesh | None = paramd.connect(job=JOB) if dist.get_rank() == 0 else None

    def read(
        self, update: Callable[[int], None], *patterns: str, count: int = 4, **options: Any
    ) -> Frames:
        """Makes updates until rank 0 has read `count` frames; returns them there."""
        frames: Frames = []
        failed: list[BaseException] = []

        def work() -> None:
            assert self.mesh is not None
            try:
                for frame in self.mesh.grads(*patterns, **options):
                    frames.append(frame)
                    if len(frames) == count:
                        return
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=work)
        if self.mesh is not None:
            thread.start()
        while True:
            update(self.attachment.step + 1)
            time.sleep(0.004)
            over = torch.tensor([int(self.mesh is not None and not thread.is_alive())])
            dist.all_reduce(over)
            if over.item():
                break
        if self.mesh is not None:
            thread.join()
        if failed:
            raise failed[0]
        return frames

    def step(self, number: int) -> None:
        """One update of the first optimizer."""
        gradients(self.model, float(number))
        self.first.step()


def every_placement(cases: Cases) -> None:
    """Sums, averages, slices of whole ones, awaited ones; what cannot be told is None."""
    frames = cases.read(cases.step, "*", count=6)
    for frame in frames:
        value = torch.full((ROWS, WIDTH), float(frame.step))
        rising = torch.arange(ROWS * WIDTH, dtype=torch.float32).view(ROWS, WIDTH) + frame.step
        missing = {"unused", "sparse", "given_shard", "other", "one", "twin"}
        assert set(frame.none) == missing, frame.none
        assert frame["unused"] is None
        assert "another optimizer" in frame.none["other"]
        assert "its placement differs" in frame.none["given_shard"]
        assert frame.scale == 1.0
        assert frame.clip_factor is None
        for name in ("plain", "summed", "averaged"):
            assert torch.equal(frame[name], value), (frame.step, name, frame[name])
        for name in ("turned", "given_whole", "awaited"):
            assert torch.equal(frame[name], rising), (frame.step, name, frame[name])
        assert frame["wide"].dtype == torch.bfloat16
        assert torch.equal(frame["wide"], value.bfloat16())
        assert frame["scalar"].item() == frame.step
    assert_rising(frames)


def statistics_of_sums(cases: Cases) -> None:
    """Statistics of a gradient that is a sum are those of the sum."""
    for frame in cases.read(cases.step, "summed", "plain", kind="histogram", count=4):
        for name in ("summed", "plain"):
            found = frame[name]
            assert (found.min, found.max, found.count) == (frame.step, frame.step, ROWS * WIDTH)
        assert frame["summed"].exponents == frame["plain"].exponents
        assert frame.total.count == 2 * ROWS * WIDTH


def slices_rows_and_casts(cases: Cases) -> None:
    frames = cases.read(cases.step, "turned[1:3]", "scalar", dtype=torch.float64, count=3)
    for frame in frames:
        rising = torch.arange(ROWS * WIDTH).view(ROWS, WIDTH).double() + frame.step
        assert torch.equal(frame["turned"], rising[1:3])
    for frame in cases.read(cases.step, "turned", "awaited", "scalar", rows=2, count=3):
        rising = torch.arange(ROWS * WIDTH).view(ROWS, WIDTH).float() + frame.step
        assert torch.equal(frame["turned"], rising[[0, 2]])
        assert torch.equal(frame["awaited"], rising[[0, 2]])
        assert frame["scalar"].item() == frame.step


def several_optimizers(cases: Cases) -> None:
    """A frame has the gradients of the optimizer that steps, and no others."""

    def update(number: int) -> None:
        gradients(cases.model, float(number))
        (cases.first if number % 2 else cases.second).step()

    frames = cases.read(update, "plain", "other", count=6)
    for frame in frames:
        mine, theirs = ("plain", "other") if frame.step % 2 else ("other", "plain")
        assert frame[mine].unique().item() == frame.step
        assert frame[theirs] is None
    assert not frames or {frame.step % 2 for frame in frames} == {0, 1}


def accumulation(cases: Cases) -> None:
    """Backwards without a step give no frame; the frame has their sum."""

    def update(number: int) -> None:
        cases.model.plain.grad = None
        for _ in range(3):
            (cases.model.plain * float(number)).sum().backward()
        cases.first.step()

    frames = cases.read(update, "plain", count=4)
    for frame in frames:
        assert frame["plain"].unique().item() == 3 * frame.step
    assert_rising(frames)


def closures(cases: Cases) -> None:
    """A step that computes its gradients itself has a frame of these."""
    plain = cases.model.plain
    optimizer = torch.optim.SGD([plain], lr=0.0)

    def update(number: int) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (plain * float(number)).sum()
            loss.backward()
            return loss

        optimizer.step(closure)

    for frame in cases.read(update, "plain", count=4):
        assert frame["plain"].unique().item() == frame.step


class Refused(Exception):
    """A guard does not like the gradients."""


def retries(cases: Cases) -> None:
    """Of a step that a hook refuses, and that is tried again with others, these are shown."""
    plain = cases.model.plain

    def guard(*_: Any) -> None:
        raise Refused

    def update(number: int) -> None:
        plain.grad = torch.full((ROWS, WIDTH), -1.0)
        cases.attachment.clipped(2.0, 1.0)
        (plain * 0.0).sum().backward()
        refusing = cases.first.register_step_pre_hook(guard)
        try:
            cases.first.step()
        except Refused:
            refusing.remove()
        plain.grad = torch.full((ROWS, WIDTH), float(number))
        cases.attachment.clipped(4.0, 1.0)
        cases.first.step()

    for frame in cases.read(update, "plain", count=4):
        assert frame["plain"].unique().item() == frame.step
        assert frame.clip_factor is not None
        assert abs(frame.clip_factor - 0.25) < 1e-6


def clipping(cases: Cases) -> None:
    """The trainer says by which factor it clipped, for that update alone."""

    def update(number: int) -> None:
        gradients(cases.model, 2.0)
        cases.model.plain.grad = torch.full((ROWS, WIDTH), 2.0)
        if number % 2:
            norm = torch.nn.utils.clip_grad_norm_([cases.model.plain], 1.0)
            cases.attachment.clipped(norm, 1.0)
        cases.first.step()

    frames = cases.read(update, "plain", kind="stats", count=6)
    for frame in frames:
        if frame.step % 2:
            assert frame.clip_factor is not None
            assert abs(frame.clip_factor - 1 / (2 * (ROWS * WIDTH) ** 0.5)) < 1e-6
            assert abs(frame.total.norm - 1) < 1e-5
        else:
            assert frame.clip_factor is None
    assert not frames or {frame.step % 2 for frame in frames} == {0, 1}


def skipped_steps(cases: Cases) -> None:
    """A scaler that leaves out a step gives no frame; fused optimizers get scaled gradients."""
    model, optimizer = cases.model, cases.first
    attempts = [0]

    def update(number: int) -> None:
        attempts[0] += 1
        gradients(model, float(number))
        if attempts[0] % 3 == 0:
            return  # torch.amp.GradScaler does not call step() when it found an Inf
        optimizer.grad_scale = torch.tensor(8.0)  # type: ignore[attr-defined]
        optimizer.found_inf = torch.tensor(float(number % 4 == 0))  # type: ignore[attr-defined]
        optimizer.step()

    frames = cases.read(update, "plain", count=6)
    del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
    for frame in frames:
        assert frame.step % 4, "an update that was left out has no frame"
        assert frame.scale == 8.0
        assert frame["plain"].unique().item() == frame.step
    assert_rising(frames)


def explicit_updates(cases: Cases) -> None:
    """`attachment.update()` may stand for any optimizer, so all gradients are taken."""

    def update(number: int) -> None:
        gradients(cases.model, float(number))
        with cases.attachment.update():
            pass

    for frame in cases.read(update, "plain", "other", count=3):
        assert frame["plain"].unique().item() == frame["other"].unique().item() == frame.step


def every_third(cases: Cases) -> None:
    frames = cases.read(cases.step, "plain", every=3, count=4)
    assert all(frame.step % 3 == 0 for frame in frames)
    assert_rising(frames)


def lossless(cases: Cases) -> None:
    """Where the operator allows it, updates wait for a reader that is a little slow."""
    frames: Frames = cases.read(cases.step, "plain", kind="stats", lossless=True, count=25)
    steps = [frame.step for frame in frames[5:]]
    if frames:
        assert steps == list(range(steps[0], steps[0] + len(steps))), steps
        assert all(frame.dropped == 0 for frame in frames[6:])


def assert_rising(frames: Frames) -> None:
    steps = [frame.step for frame in frames]
    assert steps == sorted(set(steps)), steps
    gaps = [b - a - 1 for a, b in pairwise(steps)]
    every = 3 if frames and all(step % 3 == 0 for step in steps) else 1
    assert [frame.dropped for frame in frames[1:]] == [gap // every for gap in gaps]


def main() -> None:
    cases = Cases()
    for case in (
        every_placement,
        statistics_of_sums,
        slices_rows_and_casts,
        several_optimizers,
        accumulation,
        closures,
        retries,
        clipping,
        skipped_steps,
        explicit_updates,
        every_third,
        lossless,
    ):
        begin_s = time.monotonic()
        case(cases)
        print(f"passed {case.__name__} in {time.monotonic() - begin_s:.2f} s", flush=True)
    if cases.mesh is not None:
        cases.mesh.close()
    cases.attachment.detach()


if __name__ == "__main__":
    run(main)
