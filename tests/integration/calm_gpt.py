"""The demo's training with pauses, for tests that look at it for long: it need not take a core."""

import time

from torch import Tensor

from paramd.examples import train_gpt

PAUSE_S = 0.05


class CalmPassages(train_gpt.Passages):
    """The same ones, each after a pause."""

    def __next__(self) -> Tensor:
        time.sleep(PAUSE_S)
        return super().__next__()


if __name__ == "__main__":
    train_gpt.Passages = CalmPassages  # type: ignore[misc]
    raise SystemExit(train_gpt.main())
