"""How a worker process begins: with what its command line says, in a group of all ranks."""

from __future__ import annotations

import argparse
import inspect
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

import torch
import torch.distributed as dist

from tests.ending import end


class Cases(list[Callable[..., None]]):
    """What a worker checks, case by case; as a decorator it takes one up."""

    def __call__(self, function: Callable[..., None]) -> Callable[..., None]:
        self.append(function)
        return function

    def run(self, names: Sequence[str] = (), *given: object) -> None:
        """Those of these names, or all: from the same seed, with all ranks at each end."""
        for function in self:
            if not names or function.__name__ in names:
                began_s = time.monotonic()
                torch.manual_seed(0)
                function(*given)
                dist.barrier()
                print(f"ok {function.__name__} {time.monotonic() - began_s:.1f} s", flush=True)


def run(main: Callable[..., int | None], *, alone: bool = False) -> NoReturn:
    """Runs `main` with the command line in a gloo group, and ends; with `alone` a single rank has
    no group.

    Its positional parameters are words, a list takes those that are left; the others are options,
    `pause_s` as `--pause-s`, and a bool is whether its option is there.
    """
    end(partial(_in_group, main, alone))


def _in_group(main: Callable[..., int | None], alone: bool) -> int | None:
    given = _given(main)
    if not alone or int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    status = main(**given)
    if dist.is_initialized():
        dist.destroy_process_group()
    return status


def _given(main: Callable[..., object]) -> dict[str, Any]:
    parser, kinds = argparse.ArgumentParser(), get_type_hints(main)
    for name, one in inspect.signature(main).parameters.items():
        kind, option = kinds[name], f"--{name.replace('_', '-')}"
        if one.kind is not one.KEYWORD_ONLY:
            several = get_args(kind)[0] if get_origin(kind) is list else None
            parser.add_argument(name, type=several or kind, nargs="*" if several else None)
        elif kind is bool:
            parser.add_argument(option, action="store_true")
        else:
            required = one.default is one.empty
            default = None if required else one.default
            parser.add_argument(option, type=kind, required=required, default=default)
    return vars(parser.parse_args())
