"""Evaluate a training that runs, at the weights that it has, as they change.

    python examples/evaluate.py --job my-run --every 10

Beside `python examples/train_gpt.py --job my-run`, which needs no change. Each frame has all
parameters at one step; of those that changed only the elements that did are sent.
"""

from __future__ import annotations

import argparse

import torch

import paramd


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", help="its name; found by itself if there is only one")
    parser.add_argument("--every", type=int, default=1, help="updates between two evaluations")
    parser.add_argument("--frames", type=int, default=0, help="stop after that many; 0: never")
    arguments = parser.parse_args()
    with paramd.connect(job=arguments.job) as mesh:
        followed = mesh.follow("*", every=arguments.every, deltas=True)
        for number, frame in enumerate(followed, 1):
            # A model of yours: model.load_state_dict(dict(frame)), and its loss on held-out data.
            norm = torch.stack([tensor.float().norm() for tensor in frame.values()]).norm()
            print(
                f"step {frame.step}: norm {float(norm):.6f}, {frame.sent_bytes:,} bytes sent, "
                f"{frame.changed_bytes:,} changed",
                flush=True,
            )
            if number == arguments.frames:
                break


if __name__ == "__main__":
    main()
