"""Exports of tiny models of transformers, read back by `from_pretrained`: equal in every bit."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paramd.layout.exports.settings import ExportSettings
from tests.integration.export_mesh import raw, still_mesh

transformers = pytest.importorskip("transformers")

WORDS = 61


def llama(*, tied: bool) -> torch.nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=28,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config)  # type: ignore[no-any-return]


def gpt2() -> torch.nn.Module:
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=12, n_layer=2, n_head=2, n_positions=32, n_inner=20
    )
    return transformers.GPT2LMHeadModel(config)  # type: ignore[no-any-return]


def mixture() -> torch.nn.Module:
    config = transformers.MixtralConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
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
    with still_mesh(tmp_path / "m", tensors, way, ranks=2, aliases=aliases) as mesh:
        target = mesh.target(root, "hf")
        mesh.export(ExportSettings(max_shard_bytes=9_000), target)
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
