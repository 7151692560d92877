"""Exports of tiny models of transformers, read back by `from_pretrained`: equal in every bit."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule

from paramd.layout.exports.files import piece_bytes
from paramd.layout.exports.settings import ExportSettings
from paramd.layout.merge import LocalLayout
from paramd.layout.types import HubPart, Layout, TensorKind, TensorLayout, full_box
from paramd.mesh.exports.calls import joined_parts, values_of
from paramd.trainer.model.hub import described
from paramd.trainer.resume.exported import Exported, Offered
from tests.integration.export_mesh import raw, still_mesh

transformers = pytest.importorskip("transformers")

WORDS = 61
SMALL = {
    "vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


def llama(*, tied: bool) -> torch.nn.Module:
    config = transformers.LlamaConfig(**SMALL, intermediate_size=28, tie_word_embeddings=tied)
    return transformers.LlamaForCausalLM(config)  # type: ignore[no-any-return]


def gpt2() -> torch.nn.Module:
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=12, n_layer=2, n_head=2, n_positions=32, n_inner=20
    )
    return transformers.GPT2LMHeadModel(config)  # type: ignore[no-any-return]


def mixture() -> torch.nn.Module:
    config = transformers.MixtralConfig(
        **SMALL, intermediate_size=20, num_local_experts=4, num_experts_per_tok=2
    )
    return transformers.MixtralForCausalLM(config)  # type: ignore[no-any-return]


MODELS = {
    "llama": lambda: llama(tied=False),
    "llama-tied": lambda: llama(tied=True),
    "gpt2": gpt2,
    "mixture": mixture,
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("llama", "fsdp1"),
        ("llama-tied", "fsdp2"),
        ("gpt2", "tensor_parallel"),
        ("mixture", "fsdp2"),
    ],
)
def test_from_pretrained_reads_what_was_exported(name: str, way: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    tensors, aliases = untied(model)
    root = tmp_path / "out"
    root.mkdir()
    with still_mesh(tmp_path / "m", tensors, way, aliases=aliases, model=model) as mesh:
        target = mesh.target(root, "hf")
        mesh.export(ExportSettings(max_shard_bytes=9_000), target)
        layout = mesh.layout
        for rank, trainer in enumerate(mesh.trainers):
            went_on_from(root / "hf", layout, rank, bytes(trainer.arena.buffer))
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = stored_in(root / "hf"), stored_in(tmp_path / "theirs")
    assert {key: raw(one) for key, one in ours.items()} == {
        key: raw(one) for key, one in theirs.items()
    }
    manifest = json.loads((root / "hf" / "paramd-export.json").read_text())
    assert (manifest["missing"], manifest["layout_note"]) == ({}, "")
    restored = values_of(layout, joined_parts(layout, ours, manifest["parts"]), manifest["renamed"])
    assert {key: raw(one) for key, one in restored.items()} == {
        key: raw(one) for key, one in tensors.items()
    }
    model.config.save_pretrained(root / "hf")
    loaded, facts = type(model).from_pretrained(root / "hf", output_loading_info=True)
    loaded.eval()
    assert not any(facts[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ours, theirs = dict(model.named_parameters()), dict(loaded.named_parameters())
    assert sorted(ours) == sorted(theirs)
    assert all(raw(ours[key]) == raw(theirs[key]) for key in ours)
    tokens = torch.arange(2 * 9).reshape(2, 9) % WORDS
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, loaded(tokens).logits)


SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": WORDS, "max_position_embeddings": 64, "head_dim": 8,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_num_experts": 4, "moe_k": 2, "moe_topk": 2, "moe_intermediate_size": 16, "n_group": 2,
    "shared_expert_intermediate_size": 16, "topk_group": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "n_shared_experts": 1, "layer_types": ["full_attention"] * 2,
}  # fmt: skip
"""Each architecture takes those that it knows."""
ARCHITECTURES = [
    "llama", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "phimoe", "deepseek_v3", "jamba",
    "glm4_moe", "minimax", "ernie4_5_moe", "hunyuan_v1_moe", "granitemoe",
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_layout_is_what_save_pretrained_writes(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    known = transformers.AutoConfig.for_model(name).to_dict()
    sizes = {key: value for key, value in SIZES.items() if key in known}
    config = transformers.AutoConfig.for_model(name, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    tensors, _ = untied(model)
    found = described(model, local_layout(tensors))
    assert found.hub_note == ""
    ours = {
        part.name: tensors[one.fqn][tuple(map(slice, part.box.begin, part.box.end))].reshape(
            part.shape
        )
        for one in found.tensors
        for part in (one.hub or (HubPart(one.fqn, full_box(one.shape), one.shape),))
    }
    model.save_pretrained(tmp_path)
    theirs = stored_in(tmp_path)
    assert {key: raw(one) for key, one in ours.items()} == {
        key: raw(one) for key, one in theirs.items()
    }


@pytest.mark.filterwarnings("ignore")
def test_a_class_that_sharding_gave_a_model_is_no_other_architecture() -> None:
    text = transformers.LlamaConfig(**{key: SIZES[key] for key in list(SIZES)[:7]})
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        image_size=16, patch_size=8,
    )  # fmt: skip
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=9)
    model = transformers.LlavaForConditionalGeneration(config)
    local = local_layout(untied(model)[0])
    plain = described(model, local)
    assert all(one.hub and one.hub[0].name != one.fqn for one in plain.tensors)
    for module in (model, model.model, model.model.language_model):
        bases = (FSDPModule, type(module))
        module.__class__ = type(f"FSDP{type(module).__name__}", bases, {})
    assert described(model, local) == plain


class Odd(torch.nn.Linear):
    """As bitsandbytes keeps what a packed weight means."""

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}

    def set_extra_state(self, state: object) -> None: ...

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.absmax"] = torch.ones(1)


def test_what_a_state_dict_has_beside_tensors_is_named_in_the_manifest(tmp_path: Path) -> None:
    model = torch.nn.Sequential(Odd(4, 4), torch.nn.BatchNorm1d(4))
    tensors = {name: one for name, one in model.state_dict().items() if name in MODEL_TENSORS}
    root = tmp_path / "out"
    root.mkdir()
    with still_mesh(tmp_path / "m", tensors, "fsdp1", model=model) as mesh:
        mesh.export(ExportSettings(), mesh.target(root, "odd"))
    manifest = json.loads((root / "odd" / "paramd-export.json").read_text())
    assert sorted(manifest["missing"]) == sorted(set(model.state_dict()) - set(tensors))


MODEL_TENSORS = {"0.weight", "0.bias", "1.weight", "1.bias"} | {
    f"1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
}


def went_on_from(folder: Path, layout: Layout, rank: int, known: bytes) -> None:
    """A training that begins with the export has the parameters that were exported."""
    told = json.loads((folder / "paramd-export.json").read_text())
    offered = Offered(told["export_id"], 0, "safetensors", "", str(folder), "")
    found = Exported(offered, layout, rank)
    arena = bytearray(layout.arena_bytes[rank])
    try:
        found.open([], share=(0, 1))
        found.fill(memoryview(arena))
    finally:
        found.close()
    for tensor in layout.tensors:
        for piece in (one for one in tensor.pieces if one.rank == rank):
            end = piece.arena_begin + piece_bytes(piece, tensor.dtype)
            assert arena[piece.arena_begin : end] == known[piece.arena_begin : end], tensor.fqn


def stored_in(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def local_layout(tensors: dict[str, torch.Tensor]) -> LocalLayout:
    found = tuple(
        TensorLayout(name, "float32", tuple(one.shape), TensorKind.PARAMETER, ())
        for name, one in tensors.items()
    )
    return LocalLayout(rank=0, arena_bytes=0, tensors=found)


def untied(model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, list[str]]]:
    """The state dict, tied tensors under their first name, and their further names."""
    first: dict[int, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        known = first.setdefault(id(tensor), name)
        if known == name:
            tensors[name] = tensor.detach()
        else:
            aliases.setdefault(known, []).append(name)
    return tensors, aliases
