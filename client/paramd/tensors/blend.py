"""Weights that are made of several tensors, with torch's own functions: LoRA merged into its base
as PEFT merges it, and averages as schedulefree's `eval()` makes them. Bits are equal to theirs.

Source: huggingface/peft: tuners/lora/layer.py; facebookresearch/schedule_free.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paramd.layout.exports.files import BlendKind

_HALF = (torch.float16, torch.bfloat16)


def blend_(
    base: torch.Tensor,
    kind: BlendKind,
    inputs: Sequence[torch.Tensor],
    weight: float,
    *,
    transposed: bool = False,
) -> None:
    """Change `base` in place, as `BlendKind` says. All are on one device.

    Args:
        base: a tensor, or a box of one.
        inputs: as in `Blend`; of a box of a matrix only the rows of B, and columns of A, that
            it needs.
    """
    with torch.no_grad():
        if kind is BlendKind.LOW_RANK:
            a, b = inputs
            base += _low_rank(a, b, weight, transposed=transposed)
        elif kind is BlendKind.ADD:
            base += inputs[0] * weight
        else:
            base.lerp_(inputs[0], weight)


def _low_rank(a: torch.Tensor, b: torch.Tensor, scale: float, *, transposed: bool) -> torch.Tensor:
    # As PEFT does where CPUs have no products of 16 bits.
    half = b.dtype in _HALF and b.device.type == "cpu"
    product = b.float() @ a.float() if half else b @ a
    found = (product.T if transposed else product) * scale
    return found.to(b.dtype) if half else found
