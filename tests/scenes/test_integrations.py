"""What integrations refuse before anything is attached."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paramd.errors import UsageError


def test_a_strategy_that_is_not_served_is_named_with_those_that_are() -> None:
    lightning = pytest.importorskip("paramd.integrations.lightning")

    class DeepSpeedStrategy:
        pass

    trainer: Any = SimpleNamespace(strategy=DeepSpeedStrategy())
    with pytest.raises(UsageError, match=r"DeepSpeedStrategy is not supported.*DDPStrategy"):
        lightning.ParamdCallback(job="none").on_train_start(trainer, None)


def test_going_on_from_memory_is_refused_where_the_loop_cannot_be_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from paramd.integrations.training import Training

    for training in (Training("none", {"resume": "auto"}), Training("none", {})):
        with pytest.raises(UsageError, match=r"not work with Lightning.*ckpt_path"):
            training.check_no_resume("Lightning", "use fit(ckpt_path=...)")
        # The second one: as its environment says.
        monkeypatch.setenv("PARAMD_RESUME", "auto")
    monkeypatch.delenv("PARAMD_RESUME")
    Training("none", {}).check_no_resume("Lightning", "")


def test_memory_and_a_checkpoint_are_not_both_gone_on_from() -> None:
    from paramd.integrations.hf import ParamdCallback

    callback = ParamdCallback(job="none", resume="auto")
    args: Any = SimpleNamespace(deepspeed=None)
    state: Any = SimpleNamespace(global_step=3)
    with pytest.raises(UsageError, match="resume_from_checkpoint cannot be combined; choose one"):
        callback.on_train_begin(args, state, Any)


def test_what_no_accelerator_has_prepared_is_refused() -> None:
    """Before `prepare` there is nothing to serve; and what it wraps is looked into once only."""
    import torch
    from accelerate import Accelerator

    import paramd

    accelerator = Accelerator(cpu=True)
    model: Any = torch.nn.Linear(2, 2)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=r"prepared no model; call accelerator\.prepare"):
        paramd.attach(accelerator=accelerator, job="none")
    accelerator.prepare(model)
    with pytest.raises(UsageError, match=r"prepared no optimizer; call accelerator\.prepare"):
        paramd.attach(accelerator=accelerator, job="none")
    with pytest.raises(UsageError, match="pass either accelerator, or model"):
        paramd.attach(model, optimizer, accelerator=accelerator, job="none")


def test_a_trainer_with_deepspeed_is_refused() -> None:
    from paramd.integrations.hf import ParamdCallback

    args: Any = SimpleNamespace(deepspeed={"zero_optimization": {"stage": 2}})
    with pytest.raises(UsageError, match=r"DeepSpeed is not supported.*FSDP2"):
        ParamdCallback(job="none").on_train_begin(args, Any, Any, model=None, optimizer=None)


def test_an_optimizer_that_accelerate_prepared_is_the_one_inside() -> None:
    import torch
    from accelerate import Accelerator

    from paramd.trainer.attaching.checks import optimizers_of

    inner = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    prepared = Accelerator(cpu=True).prepare(inner)
    assert prepared is not inner
    assert optimizers_of(prepared) == [inner]
    assert optimizers_of([prepared, inner]) == [inner]
