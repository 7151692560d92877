"""Starts ranks as torchrun does: python under_torchrun.py [torchrun's arguments]."""

from __future__ import annotations

import sys

from torch.distributed.run import main

if __name__ == "__main__":
    main(sys.argv[1:])
