"""The process of blend.py: one request after the other on standard input, until that ends.

a line of JSON; the bytes of the base and of its inputs  ->  the bytes of the base
"""

import json
import os
import sys
from typing import Any

import torch

from paramd.layout.exports.files import BlendKind
from paramd.tensors.blend import blend_


def main() -> None:
    # The training is on the same cores.
    os.nice(5)
    torch.set_num_threads(1)
    while line := sys.stdin.buffer.readline():
        told = json.loads(line)
        base, *inputs = map(_tensor, told["tensors"])
        blend_(
            base,
            BlendKind(told["kind"]),
            inputs,
            told["weight"],
            transposed=told["transposed"],
        )
        sys.stdout.buffer.write(base.reshape(-1).view(torch.uint8).numpy().data)
        sys.stdout.buffer.flush()


def _tensor(head: dict[str, Any]) -> torch.Tensor:
    data = bytearray(sys.stdin.buffer.read(head["size_bytes"]))
    if len(data) != head["size_bytes"]:
        raise EOFError
    found = torch.frombuffer(data, dtype=getattr(torch, head["dtype"]))
    return found.reshape(head["shape"])


if __name__ == "__main__":
    main()
