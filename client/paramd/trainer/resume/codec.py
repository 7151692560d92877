"""State as bytes and back, without pickle.

Numbers, text, bytes, None, lists, tuples, dicts (also OrderedDict and Counter), tensors and numpy
arrays, nested in any way. Other values are refused by their path, as in
`['scheduler']['lr_lambdas'][0]`.

    size of the JSON, uint64; the JSON; the bytes of tensors, arrays and byte strings

Plain values appear in the JSON as they are, all others as {kind: ...}; a dict is a list of pairs,
so that its keys may be numbers.

The states of the random number generators that a training draws from are read and set here, too.
"""

from __future__ import annotations

import json
import random
import re
import struct
import sys
from array import array
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from paramd.errors import UsageError
from paramd.trainer.model import accelerator
from paramd.trainer.model.local_shard import dtype_name
from paramd.trainer.model.plain import has_plain_memory

_SIZE = struct.Struct("=Q")
_DICTS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_MAKE_DICT: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "ordered": OrderedDict,
    "counter": lambda pairs: Counter(dict(pairs)),
}
_DTYPE = re.compile(r"[<>|=][biufc][0-9]{1,2}")
"""As `numpy.dtype.str` has it, of the kinds that are kept."""
_KEYS = (str, int, float, bool, type(None))
MOST_DEPTH = 100


def encode(value: object, *, name: str = "") -> bytes:
    """`value` as bytes; UsageError names the path, from `name` on, of a part without a form."""
    blobs = bytearray()
    text = json.dumps(_encoded(value, name, blobs, MOST_DEPTH), separators=(",", ":")).encode()
    return _SIZE.pack(len(text)) + text + bytes(blobs)


def decode(data: bytes) -> Any:
    """The inverse of `encode`, with tensors in host memory; UsageError if malformed."""
    with legible():
        (size,) = _SIZE.unpack_from(data)
        found = json.loads(data[_SIZE.size : _SIZE.size + size])
        return _decoded(found, memoryview(data)[_SIZE.size + size :])


@contextmanager
def legible() -> Iterator[None]:
    """Raise UsageError where the block finds that a state is not what `encode` was given.

    It may have been kept by another program, or by a host that lies: whatever is wrong with it, the
    next way to resume is taken, and no start ends in a traceback.
    """
    try:
        yield
    except UsageError:
        raise
    except _ILLEGIBLE as error:
        raise UsageError(f"the kept state cannot be read: {error!r}") from None


_ILLEGIBLE = (
    struct.error,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    # Of torch, for shapes and sizes that do not go together or fit into no memory.
    RuntimeError,
    OverflowError,
    MemoryError,
)


def _encoded(value: object, path: str, blobs: bytearray, depth: int) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if not depth:
        raise UsageError(f"{path}: nested more than {MOST_DEPTH} times")
    if kind in (list, tuple, torch.Size):
        several: Any = value
        items = [_encoded(one, f"{path}[{i}]", blobs, depth - 1) for i, one in enumerate(several)]
        return items if kind is list else {"tuple": items}
    if kind in _DICTS or kind is defaultdict:
        return _encoded_dict(value, path, blobs, depth)
    if kind in (bytes, bytearray):
        return {"bytes": _placed(bytes(value), blobs)}  # type: ignore[call-overload]
    if isinstance(value, torch.Tensor):
        return _encoded_tensor(value, path, blobs)
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        shape = list(value.shape) if isinstance(value, np.ndarray) else None
        return {"numpy": [value.dtype.str, shape, *_placed(value.tobytes(), blobs)]}
    raise UsageError(
        f"{path or 'state'} is a {kind.__module__}.{kind.__qualname__}, which cannot be kept; "
        "expected numbers, text, bytes, None, lists, tuples, dicts, tensors and numpy arrays"
    )


def _encoded_dict(value: Any, path: str, blobs: bytearray, depth: int) -> Any:
    pairs = []
    for key, item in value.items():
        if type(key) not in _KEYS:
            raise UsageError(f"{path}: the key {key!r} cannot be kept; expected text or a number")
        pairs.append([key, _encoded(item, f"{path}[{key!r}]", blobs, depth - 1)])
    return {_DICTS.get(type(value), "dict"): pairs}


def _encoded_tensor(value: torch.Tensor, path: str, blobs: bytearray) -> Any:
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or not has_plain_memory(value):
        raise UsageError(
            f"{path or 'state'} is a {type(value).__name__} of layout {value.layout}, which cannot "
            "be kept; expected a plain tensor"
        )
    local = value.detach().cpu().contiguous()
    data = local.reshape(-1).view(torch.uint8).numpy().tobytes() if local.numel() else b""
    return {"tensor": [dtype_name(value.dtype), list(value.shape), *_placed(data, blobs)]}


def _placed(data: bytes, blobs: bytearray) -> tuple[int, int]:
    # Aligned, so that arrays and tensors can be made of them without care.
    blobs.extend(b"\0" * (-len(blobs) % 16))
    begin = len(blobs)
    blobs.extend(data)
    return begin, len(data)


def _decoded(found: Any, blobs: memoryview) -> Any:
    if isinstance(found, list):
        return [_decoded(item, blobs) for item in found]
    if not isinstance(found, dict):
        return found
    ((kind, value),) = found.items()
    if kind == "tuple":
        return tuple(_decoded(item, blobs) for item in value)
    if kind in _MAKE_DICT:
        return _MAKE_DICT[kind]([(key, _decoded(item, blobs)) for key, item in value])
    if kind == "bytes":
        return _at(blobs, *value)
    if kind == "numpy":
        dtype, shape, begin, size = value
        # numpy takes whole expressions for a dtype, and fails in ways of its own.
        if not _DTYPE.fullmatch(dtype):
            raise ValueError(f"dtype {dtype!r}")
        array = np.frombuffer(_at(blobs, begin, size), np.dtype(dtype)).copy()
        return array[0] if shape is None else array.reshape(shape)
    if kind == "tensor":
        name, shape, begin, size = value
        dtype = getattr(torch, name)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"dtype {name!r}")
        if not size:
            return torch.empty(shape, dtype=dtype, device="cpu")
        data = torch.frombuffer(bytearray(_at(blobs, begin, size)), dtype=torch.uint8)
        return data.view(dtype).reshape(shape)
    raise ValueError(f"unknown kind {kind!r}")


def _at(blobs: memoryview, begin: int, size: int) -> bytes:
    if not 0 <= begin <= begin + size <= len(blobs):
        raise ValueError(f"bytes [{begin}, {begin + size}) of {len(blobs)}")
    return bytes(blobs[begin : begin + size])


def random_state() -> dict[str, Any]:
    """The states of Python's generator, NumPy's global one if imported, and torch's on all devices.

    A device costs a synchronization with it. Their states are under the accelerator's name, "cuda"
    for CUDA and HIP, and left out while the training has not used it.
    """
    version, words, gauss = random.getstate()
    found: dict[str, Any] = {
        "python": [version, array("I", words).tobytes(), gauss],
        "torch": torch.get_rng_state(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        found["numpy"] = [name, keys, *rest]
    devices = accelerator.in_use()
    if devices is not None:
        found[str(accelerator.kind())] = devices.get_rng_state_all()
    return found


def check_random_state(found: dict[str, Any]) -> None:
    """Raise UsageError unless `set_random_state` could continue with these; nothing is set."""
    with legible():
        version, words, gauss = found["python"]
        random.Random().setstate((version, tuple(array("I", words)), gauss))
        if "numpy" in found:
            np.random.RandomState().set_state(tuple(found["numpy"]))
        torch.Generator().set_state(found["torch"])


def set_random_state(found: dict[str, Any]) -> None:
    """Continue with the states that `random_state` recorded."""
    version, words, gauss = found["python"]
    random.setstate((version, tuple(array("I", words)), gauss))
    if "numpy" in found:
        import numpy

        numpy.random.set_state(tuple(found["numpy"]))
    kind = accelerator.kind()
    if kind in found and torch.accelerator.is_available():
        states = found[kind][: torch.accelerator.device_count()]
        torch.get_device_module(kind).set_rng_state_all(states)
    torch.set_rng_state(found["torch"])
