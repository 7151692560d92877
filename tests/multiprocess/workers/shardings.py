"""Ranks with different modules, and DeepSpeed's partitions: read and edited while they train.

    shardings gpipe --folder F

Each case trains twice from the same seed. In the first training rank 0 reads gradients, pauses
the job, edits it, undoes nothing, exports it, as any other program would; the second has no paramd,
and makes the same edit itself. All values read must be those of their step, and both trainings
must end with the same bits.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import paramd
from paramd.errors import ConflictError, UsageError
from tests.ending import end

JOB = "shardings"
FACTOR, AFTER, MOST_STEPS = 0.5, 3, 4000
ALLOWED_S = 60.0
Values = dict[str, torch.Tensor]


class Training(Protocol):
    """One training of a case, on this rank."""

    names: list[str]
    """All names of the mesh."""
    edited_within_step: bool
    """Whether a step ends after the edits of its boundary."""
    has_gradients: bool
    """Whether frames of gradients have them."""

    def attach(self) -> Any:
        """Attach it as job JOB."""

    def step(self, number: int) -> Values:
        """One update; the gradients that it used, those that this rank knows."""

    def values(self) -> Values:
        """What this rank knows of the parameters, whole. Collective."""

    def averages(self) -> Values:
        """What it can tell of the optimizer's `exp_avg` after a step, whole. Collective."""

    def edit(self) -> None:
        """Multiply every parameter by FACTOR, and forget its moments."""

    def state(self) -> list[torch.Tensor]:
        """All that the next step depends on."""


CASES: dict[str, Callable[[], Training]] = {}


def forget(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        for name, value in state.items():
            if name != "step":
                value.zero_()


class Modules:
    """Modules of this rank's own, each parameter of which it holds whole."""

    names: list[str]
    edited_within_step = False
    has_gradients = True

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.modules = dict(modules)
        self.optimizer = torch.optim.AdamW(
            [p for module in modules.values() for p in module.parameters()], lr=1e-2
        )

    def named(self) -> dict[str, nn.Parameter]:
        return {
            f"{key}.{name}": parameter
            for key, module in self.modules.items()
            for name, parameter in module.named_parameters()
        }

    def attach(self) -> Any:
        return paramd.attach(self.modules, self.optimizer, job=JOB)

    def values(self) -> Values:
        return {name: p.detach().clone() for name, p in self.named().items()}

    def averages(self) -> Values:
        state = self.optimizer.state
        return {name: state[p]["exp_avg"].clone() for name, p in self.named().items()}

    def gradients(self) -> Values:
        found = {name: p.grad for name, p in self.named().items()}
        return {name: grad.clone() for name, grad in found.items() if grad is not None}

    def edit(self) -> None:
        with torch.no_grad():
            for parameter in self.named().values():
                parameter.mul_(FACTOR)
        forget(self.optimizer)

    def state(self) -> list[torch.Tensor]:
        moments = [
            value for state in self.optimizer.state.values() for value in dict(state).values()
        ]
        return [*self.named().values(), *moments]


class Pipeline(Modules):
    """Two stages of two microbatches, each on a rank, under one of torch's schedules."""

    def __init__(self, schedule: str) -> None:
        from torch.distributed import pipelining

        torch.manual_seed(0)
        parts = [
            nn.Sequential(nn.Linear(7, 11), nn.ReLU()),
            nn.Sequential(nn.Linear(11, 5), nn.BatchNorm1d(5)),
        ]
        self.rank = rank = dist.get_rank()
        self.stage = pipelining.PipelineStage(parts[rank], rank, 2, torch.device("cpu"))
        made = getattr(pipelining, schedule)
        self.schedule = made(self.stage, n_microbatches=2, loss_fn=nn.functional.mse_loss)
        super().__init__({f"stage{rank}": parts[rank]})
        self.names = ["stage0.0.weight", "stage0.0.bias", "stage1.0.weight", "stage1.0.bias"]
        self.names += ["stage1.1.weight", "stage1.1.bias"]

    def step(self, number: int) -> Values:
        generator = torch.Generator().manual_seed(number)
        inputs, target = (torch.randn(8, n, generator=generator) for n in (7, 5))
        self.optimizer.zero_grad()
        if self.rank == 0:
            self.schedule.step(inputs)
        else:
            self.schedule.step(target=target)
        gradients = self.gradients()
        self.optimizer.step()
        return gradients


CASES["gpipe"] = lambda: Pipeline("ScheduleGPipe")
CASES["1f1b"] = lambda: Pipeline("Schedule1F1B")


class Experts(Modules):
    """A layer on all ranks, and on each rank an expert that only it has."""

    def __init__(self) -> None:
        rank = dist.get_rank()
        torch.manual_seed(0)
        shared = nn.Linear(6, 6)
        torch.manual_seed(1 + rank)
        super().__init__({"shared": shared, f"expert{rank}": nn.Linear(6, 3)})
        both = [(m, n) for m in ("shared", "expert0", "expert1") for n in ("weight", "bias")]
        self.names = [".".join(one) for one in both]

    def step(self, number: int) -> Values:
        generator = torch.Generator().manual_seed(number)
        inputs = torch.randn(4, 6, generator=generator)
        shared, own = self.modules.values()
        self.optimizer.zero_grad()
        own(torch.tanh(shared(inputs))).square().mean().backward()
        for parameter in shared.parameters():
            dist.all_reduce(parameter.grad)
        gradients = self.gradients()
        self.optimizer.step()
        return gradients


CASES["experts"] = Experts


class Zero:
    """DeepSpeed's engine over a network whose parameters lie across the partitions' borders."""

    edited_within_step = True
    has_gradients = False

    def __init__(self, stage: int, *, bf16: bool) -> None:
        import deepspeed

        # Else it compiles its operator for shared memory, which takes a minute.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(13, 9), nn.Tanh(), nn.Linear(9, 5), nn.LayerNorm(5))
        self.names = [name for name, _ in model.named_parameters()]
        decay = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() == 1]
        groups: list[dict[str, Any]] = [{"params": decay}, {"params": rest, "weight_decay": 0.0}]
        config = {
            "train_micro_batch_size_per_gpu": 3,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 0.5,
            "bf16": {"enabled": bf16},
            "zero_optimization": {
                "stage": stage,
                "overlap_comm": False,
                # In stage 3, weights are partitioned and biases kept whole.
                "stage3_param_persistence_threshold": 20,
            },
        }
        self.dtype = torch.bfloat16 if bf16 else torch.float32
        self.engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(groups, lr=1e-2),
            config=config,
            dist_init_required=False,
        )

    def attach(self) -> Any:
        from paramd.integrations.deepspeed import attach

        return attach(self.engine, job=JOB)

    def step(self, number: int) -> Values:
        for micro in range(2):
            generator = torch.Generator().manual_seed(4 * number + 2 * micro + dist.get_rank())
            loss = self.engine(torch.randn(3, 13, generator=generator).to(self.dtype))
            self.engine.backward(loss.float().square().mean() + loss.float().mean())
            self.engine.step()
        return {}

    def values(self) -> Values:
        from deepspeed.utils import safe_get_full_fp32_param

        named = self.engine.module.named_parameters()
        return {name: safe_get_full_fp32_param(p).clone() for name, p in named}

    def averages(self) -> Values:
        return {}

    def edit(self) -> None:
        optimizer: Any = self.engine.optimizer
        three = hasattr(optimizer, "fp32_partitioned_groups_flat")
        name = "fp32_partitioned_groups_flat" if three else "single_partition_of_fp32_groups"
        flats = list(getattr(optimizer, name))
        held: list[torch.Tensor] = [flat.data for flat in flats]
        for parameter in self.engine.module.parameters():
            local: Any = parameter
            held += [local.data, local.ds_tensor.data] if three else [local.data]
        done: set[int] = set()
        for tensor in sorted(held, key=torch.Tensor.numel, reverse=True):
            # Exact in every precision, so copies stay copies.
            storage = tensor.untyped_storage().data_ptr()
            if tensor.numel() and storage not in done:
                done.add(storage)
                tensor.new_empty(0).set_(tensor.untyped_storage()).mul_(FACTOR)
        forget(optimizer.optimizer)

    def state(self) -> list[torch.Tensor]:
        import deepspeed

        parameters = list(self.engine.module.parameters())
        with deepspeed.zero.GatheredParameters(parameters):
            copies = [p.detach().clone() for p in parameters]
        moments = [v for s in self.engine.optimizer.optimizer.state.values() for v in s.values()]
        return [*copies, *self.values().values(), *moments]


for stage in (1, 2, 3):
    CASES[f"zero{stage}"] = partial(Zero, stage, bf16=False)
    CASES[f"zero{stage}-bf16"] = partial(Zero, stage, bf16=True)


class Client(threading.Thread):
    """Rank 0's other program; what it read is compared once the training is over."""

    def __init__(self, *, gradients: bool) -> None:
        super().__init__(name="client")
        self._gradients = gradients
        self.done = threading.Event()
        self.failure: BaseException | None = None
        self.grads: list[tuple[int, Values]] = []
        self.held = self.edited = -1
        self.before: Values = {}
        self.after: Values = {}
        self.averages: Values = {}
        self.averaged = self.exported = -1
        self.listed: list[str] = []

    def run(self) -> None:
        try:
            with paramd.connect(job=JOB, timeout=ALLOWED_S) as mesh:
                self._use(mesh)
        except BaseException as error:
            self.failure = error
        self.done.set()

    def _use(self, mesh: Any) -> None:
        self.listed = [row.name for row in mesh.params()]
        for frame in mesh.grads("*"):
            if not self._gradients:
                assert set(frame.none) == set(self.listed)
                break
            assert set(frame.none) <= {"frozen"}, dict(frame.none)
            gradients = {name: one.clone() for name, one in frame.items() if one is not None}
            self.grads.append((frame.step, gradients))
            if len(self.grads) == 2:
                break
        mesh.pause()
        found = mesh.summon("*")
        self.held, self.before = found.step, dict(found)
        mesh.edit("*", mul=FACTOR, reset_moments=True, if_step=found.step)
        self.after = dict(mesh.summon("*"))
        mesh.resume()
        state = mesh.optimizer()
        self.averaged = state.step
        self.averages = {name: of["exp_avg"] for name, of in state.items() if of}
        self.exported = mesh.export("out/one", include=("parameters",)).wait(ALLOWED_S).step


def gathered(mine: Any) -> list[Any]:
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    return everybody


def united(parts: list[Values]) -> Values:
    return {name: value for part in parts for name, value in part.items()}


def same(found: Mapping[str, torch.Tensor], wanted: Values, names: list[str], what: str) -> None:
    for name in names:
        one, other = found[name], wanted[name].to(found[name].dtype)
        # Gradients of a step that is skipped may be NaN.
        assert torch.equal(one.nan_to_num(), other.nan_to_num()), (what, name)


def attached_training(training: Training, client: Client | None) -> tuple[int, int]:
    """Trains until the client is done; the step that was edited, and the last one."""
    attachment = training.attach()
    history, gradients, averages = {0: training.values()}, {}, {}
    if client is not None:
        client.start()
    left = AFTER
    while left and attachment.step < MOST_STEPS:
        number = attachment.step + 1
        gradients[number] = training.step(number)
        assert attachment.step == number
        history[number] = training.values()
        averages[number] = training.averages()
        done = torch.tensor([int(client is None or client.done.is_set())])
        dist.all_reduce(done, op=dist.ReduceOp.MIN)
        left -= int(done)
    last = attachment.step
    attachment.detach()
    everything = gathered((history, gradients, averages))
    plan = [0]
    if client is not None:
        client.join()
        if client.failure is not None:
            raise client.failure
        compare(client, training, *zip(*everything, strict=True))
        plan = [client.held]
    dist.broadcast_object_list(plan, src=0)
    return plan[0], last


def compare(
    client: Client, training: Training, history: Any, gradients: Any, averages: Any
) -> None:
    """What was read against what the ranks had."""
    names = training.names
    assert sorted(client.listed) == sorted(names), client.listed

    def at(step: int) -> Values:
        return united([one[step] for one in history])

    for step, frame in client.grads:
        wanted = united([one[step] for one in gradients])
        assert set(frame) == set(wanted) == set(names) - {"frozen"}
        same(frame, wanted, list(wanted), f"gradients of {step}")
    wanted = united([one[client.averaged] for one in averages])
    assert set(client.averages) == set(names) - {"frozen"}
    same(client.averages, wanted, list(wanted), "averages")
    assert set(client.before) >= set(names)
    edited = {name: value * FACTOR for name, value in client.before.items()}
    same(client.after, edited, names, "edited")
    # A pause within a step: the ranks looked at it when it was edited.
    held = client.after if training.edited_within_step else client.before
    same(held, at(client.held), names, "held")
    assert client.exported > client.held
    exported: Values = {}
    for file in (Path(os.environ["OUT"]) / "one").glob("*.safetensors"):
        exported.update(load_file(file))
    assert set(exported) == set(names)
    same(exported, at(client.exported), names, "exported")


def refused() -> None:
    """What attach refuses, on all ranks; an engine of the same process is then attached."""
    from paramd.integrations.deepspeed import attach

    with pytest.raises(UsageError, match="engine must be a DeepSpeedEngine, not Linear"):
        attach(nn.Linear(3, 3), job=JOB)
    training = Zero(2, bf16=False)
    engine, inner = training.engine, training.engine.optimizer.optimizer
    with pytest.raises(UsageError, match=r"integrations.deepspeed.attach\(engine"):
        paramd.attach(engine, inner, job=JOB)
    with pytest.raises(ConflictError, match=r"'0.weight' is partitioned by DeepSpeed"):
        paramd.attach(engine.module, inner, job=JOB)
    gather = pytest.raises(ConflictError, match="gather it with deepspeed")
    with gather, paramd.summon_full_params(engine.module):
        pass
    with pytest.raises(UsageError, match="resume and replicas are not supported"):
        attach(engine, job=JOB, resume="auto")
    with pytest.raises(UsageError, match=r"\(ZeRO stage 0\) is not supported; ZeRO stages 1, 2"):
        attach(Zero(0, bf16=False).engine, job=JOB)
    step = engine.optimizer.step
    for _ in range(2):
        attachment = attach(engine, job=JOB)
        with pytest.raises(ConflictError, match="already attached"):
            attach(engine, job="other")
        training.step(attachment.step + 1)
        assert attachment.step == engine.global_steps > 0
        attachment.detach()
        assert engine.optimizer.step == step
    print("all refused", flush=True)


def main(refusals: Callable[[], None] = refused) -> None:
    """Runs a case of CASES, or the refusals."""
    # A framework may hold parameters where attach() then does not see it, and refuses.
    gc.unfreeze()
    parser = argparse.ArgumentParser()
    parser.add_argument("case")
    parser.add_argument("--folder", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    out = arguments.folder / "out"
    out.mkdir(exist_ok=True)
    os.environ["OUT"] = str(out)
    os.environ["PARAMD_DESTINATIONS"] = json.dumps({"out": str(out)})
    dist.init_process_group("gloo")
    if arguments.case == "refused":
        refusals()
        return
    make = CASES[arguments.case]
    first = make()
    client = Client(gradients=first.has_gradients) if dist.get_rank() == 0 else None
    edited, last = attached_training(first, client)
    second = make()
    for number in range(1, last + 1):
        if number == edited + 1:
            second.edit()
        second.step(number)
    for mine, theirs in zip(first.state(), second.state(), strict=True):
        assert torch.equal(mine, theirs), "training is not the same"
    print(f"the same after {last} steps, {edited} edited", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    end(main)
