"""What integrations refuse before anything is attached."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paramd.errors import UsageError
from paramd.integrations import versions
from paramd.integrations.versions import require


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ("4.57.1", "transformers 4.57.1 is installed"),
        ("6.0", "transformers 6.0 is installed"),
        (None, "this needs transformers>=5.0,<6; run: pip install 'paramd[hf]'"),
    ],
)
def test_a_version_out_of_range_is_named_with_the_range(
    found: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(package: str) -> str:
        if found is None:
            raise versions.PackageNotFoundError(package)
        return found

    monkeypatch.setattr(versions, "version", version)
    with pytest.raises(UsageError) as caught:
        require("transformers", at_least="5.0", below="6", extra="hf")
    assert said in str(caught.value)
    assert "transformers>=5.0,<6" in str(caught.value)


@pytest.mark.parametrize("found", ["5.0", "5.0.0", "5.23.0", "5.99.dev1+cpu"])
def test_a_version_within_the_range_is_taken(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version", lambda _: found)
    require("transformers", at_least="5.0", below="6", extra="hf")


def test_a_strategy_that_is_not_served_is_named_with_those_that_are() -> None:
    lightning = pytest.importorskip("paramd.integrations.lightning")

    class DeepSpeedStrategy:
        pass

    trainer: Any = SimpleNamespace(strategy=DeepSpeedStrategy())
    with pytest.raises(UsageError, match=r"DeepSpeedStrategy is not supported.*DDPStrategy"):
        lightning.ParamdCallback(job="none").on_train_start(trainer, None)


def test_a_trainer_with_deepspeed_is_refused() -> None:
    from paramd.integrations.hf import ParamdCallback

    args: Any = SimpleNamespace(deepspeed={"zero_optimization": {"stage": 2}})
    with pytest.raises(UsageError, match=r"DeepSpeed is not supported.*FSDP2"):
        ParamdCallback(job="none").on_train_begin(args, Any, Any, model=None, optimizer=None)


def test_what_is_no_trainer_of_torchtitan_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from paramd.integrations.torchtitan import attached

    monkeypatch.setattr(versions, "version", lambda _: "0.2.2")
    with pytest.raises(UsageError, match="has no model_parts"), attached(object(), job="none"):
        pass
