"""Exports of adapters, read by PEFT: as its own `save_pretrained` and `merge_and_unload` have them,
equal in every bit.
"""

from __future__ import annotations

import copy
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from paramd.errors import NotFoundError, UsageError
from paramd.layout.exports.plan import plan_export
from paramd.layout.exports.settings import ExportSettings, NameMap
from paramd.layout.merge import LocalLayout
from paramd.layout.types import Layout, TensorKind, TensorLayout
from paramd.trainer.model.hub import described
from paramd.trainer.resume.exported import Exported, Offered
from tests.integration.export_mesh import STEP, Tensors, raw, still_mesh
from tests.longer import sample
from tests.scenes.test_export_transformers import untied

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

WORDS = 61


class Net(nn.Module):
    """Every kind of layer that LoRA takes, and one that is trained whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16)
        self.up, self.down = nn.Linear(16, 300), nn.Linear(300, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, WORDS)


def net(**settings: Any) -> nn.Module:
    given = {"target_modules": ["embed", "up", "down"], "modules_to_save": ["head"], **settings}
    return peft.get_peft_model(Net(), peft.LoraConfig(r=6, lora_alpha=9, **given))


def biased() -> nn.Module:
    return net(target_modules=["up", "down"], use_rslora=True, lora_bias=True, bias="lora_only")


def half() -> nn.Module:
    """A base of 16 bits under an adapter of 32, as PEFT makes it."""
    config = peft.LoraConfig(r=4, target_modules=["up", "down"])
    return peft.get_peft_model(Net().to(torch.bfloat16), config)


def gpt2() -> nn.Module:
    """Weights of shape (in, out), and two adapters, of which the second is exported."""
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": WORDS, "n_positions": 16}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    config = peft.LoraConfig(r=3, target_modules=["c_attn"], fan_in_fan_out=True)
    found = peft.get_peft_model(model, config)
    found.add_adapter("other", config)
    return found


def llama() -> nn.Module:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes |= {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 28}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    targets = ["q_proj", "v_proj", "down_proj"]
    config = peft.LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


MODELS: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "net": (net, "fsdp1", "default"),
    "biased": (biased, "fsdp2", "default"),
    "half": (half, "fsdp2", "default"),
    "gpt2": (gpt2, "tensor_parallel", "other"),
    "llama": (llama, "fsdp2", "default"),
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


def trained(model: nn.Module) -> Any:
    """With values everywhere: a new adapter is zero."""
    torch.manual_seed(1)
    for one in model.parameters():
        one.data.normal_()
    return model


@pytest.mark.parametrize("name", sample(list(MODELS), ["net", "biased", "gpt2"]))
def test_an_adapter_is_written_and_merged_as_peft_does_it(name: str, tmp_path: Path) -> None:
    make, way, adapter = MODELS[name]
    model = trained(make())
    tensors, aliases = untied(model)
    root, theirs = tmp_path / "out", tmp_path / "theirs"
    root.mkdir()
    with still_mesh(tmp_path / "m", tensors, way, aliases=aliases, model=model) as mesh:
        written = ExportSettings(format="peft", adapter=adapter, max_shard_bytes=100)
        mesh.export(written, mesh.target(root, "adapter"))
        # PEFT's is cast once merged.
        dtype = "float16" if name == "net" else None
        merged = ExportSettings(merge=True, adapter=adapter, dtype=dtype)
        mesh.export(merged, mesh.target(root, "merged"))
        offered = Offered("", STEP, "safetensors", "test/merged", str(root / "merged"), "")
        with (
            closing(Exported(offered, mesh.layout, 0)) as resumed,
            pytest.raises(UsageError, match="averaged or merged"),
        ):
            resumed.open([], share=(0, 1))
    model.save_pretrained(theirs)
    folder = theirs / adapter if adapter != "default" else theirs
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (root / "adapter" / file).exists()
    same(load_file(root / "adapter" / "adapter_model.safetensors"),
         load_file(folder / "adapter_model.safetensors"))  # fmt: skip
    config, their_config = (
        json.loads((where / "adapter_config.json").read_text())
        for where in (root / "adapter", folder)
    )
    # PEFT keeps these names in a set, whose order differs from process to process.
    for document in (config, their_config):
        document["target_modules"] = sorted(document["target_modules"])
    assert config == their_config
    assert list(config) == list(their_config)
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(plain(make)), root / "adapter")
    theirs_again = peft.PeftModel.from_pretrained(copy.deepcopy(plain(make)), folder)
    same(dict(loaded.named_parameters()), dict(theirs_again.named_parameters()))

    model.set_adapter(adapter)
    whole, _ = untied(model.merge_and_unload())
    whole = {key: one.half() if name == "net" else one for key, one in whole.items()}
    same(load_file(root / "merged" / "model.safetensors"), whole)
    manifest = json.loads((root / "merged" / "paramd-export.json").read_text())
    assert (manifest["step"], manifest["merge"], manifest["layout_note"]) == (STEP, True, "")


def plain(make: Callable[[], nn.Module]) -> nn.Module:
    """The base alone, with the values that it had when it was made."""
    torch.manual_seed(2)
    model: Any = make()
    found: nn.Module = model.unload()
    return found


def same(ours: Tensors, theirs: Tensors) -> None:
    assert {k: (v.dtype, v.shape) for k, v in ours.items()} == {
        k: (v.dtype, v.shape) for k, v in theirs.items()
    }
    assert [key for key in ours if raw(ours[key]) != raw(theirs[key])] == []


def local_layout(model: nn.Module) -> LocalLayout:
    tensors, aliases = untied(model)
    found = (
        TensorLayout(
            name,
            str(one.dtype).removeprefix("torch."),
            tuple(one.shape),
            TensorKind.PARAMETER,
            (),
            tuple(aliases.get(name, ())),
        )
        for name, one in tensors.items()
    )
    return LocalLayout(rank=0, arena_bytes=0, tensors=tuple(found))


def refusal(model: nn.Module, **settings: Any) -> str:
    local = described(model, local_layout(model))
    layout = Layout(1, (0,), local.tensors, adapters=local.adapters)
    with pytest.raises((UsageError, NotFoundError)) as told:
        plan_export(layout, ExportSettings(**settings))
    return str(told.value)


def test_what_cannot_be_merged_is_refused_with_the_reason() -> None:
    said = refusal(net(target_modules=["up"], use_dora=True), merge=True)
    assert "base_model.model.up is of LoRA's variant DoraLinear" in said
    ia3 = peft.IA3Config(target_modules=["up"], feedforward_modules=["up"])
    assert "it is IA3; paramd merges LoRA" in refusal(peft.get_peft_model(Net(), ia3), merge=True)
    merged: Any = net()
    merged.merge_adapter()
    assert "had ['default'] merged by the training already" in refusal(merged, merge=True)
    tied = Net()
    tied.head.weight = tied.embed.weight
    config = peft.LoraConfig(r=2, target_modules=["embed", "head"])
    assert "is tied, and has the adapter in several places" in refusal(
        peft.get_peft_model(tied, config), merge=True
    )
    conv = nn.Sequential(nn.Conv2d(3, 4, 3))
    config = peft.LoraConfig(r=2, target_modules=["0"])
    assert "paramd merges Linear and Embedding" in refusal(
        peft.get_peft_model(conv, config), merge=True
    )
    tokens = net(target_modules=["up"], trainable_token_indices={"embed": [1]})
    assert "is a TrainableTokensWrapper" in refusal(tokens, merge=True)


def test_settings_that_contradict_each_other_are_refused() -> None:
    model = net()
    assert "no adapter of PEFT" in refusal(Net(), format="peft")
    assert "there is no 'x'; this training has 'default'" in refusal(
        model, format="peft", adapter="x"
    )
    assert "there are several, 'default', 'other'; name one" in refusal(gpt2(), merge=True)
    for settings in (
        {"format": "peft", "merge": True},
        {"format": "peft", "patterns": ("*",)},
        {"format": "peft", "names": NameMap.of({"a": "b"})},
        {"format": "peft", "weights_from": "ema"},
        {"format": "dcp", "merge": True},
        {"weights_from": "ema", "merge": True},
        {"adapter": "default"},
    ):
        assert refusal(model, **settings)


def test_attaching_looks_at_the_model_and_changes_nothing() -> None:
    model = net()
    before = {name: (id(one), one.requires_grad) for name, one in model.named_parameters()}
    config = copy.deepcopy(model.peft_config)  # type: ignore[arg-type]
    noise = torch.get_rng_state()
    described(model, local_layout(model))
    assert torch.equal(torch.get_rng_state(), noise)
    assert model.peft_config == config
    assert {n: (id(one), one.requires_grad) for n, one in model.named_parameters()} == before
