"""What a method of SidecarService is to the servicer: how it is called, and with what.

Each subject's module has `calls(rank)`, a table of its methods by name; the servicer merges
the tables and treats all methods alike.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from google.protobuf.message import Message

Unary: TypeAlias = Callable[[Any, float], Awaitable[Message]]
"""(request, seconds left) -> answer"""

Answers: TypeAlias = Callable[[Any, float], AsyncGenerator[bytes, None]]
"""(request, seconds left) -> serialized answers"""

Requests: TypeAlias = Callable[[AsyncIterator[Any], float], Awaitable[Message]]
"""(requests, seconds left) -> answer"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One method; exactly one of `unary`, `answers` and `requests` is set."""

    request: type[Message]
    unary: Unary | None = None
    answers: Answers | None = None
    """Answers with a stream; always heavy."""
    requests: Requests | None = None
    """Takes a stream; always heavy."""
    part: Callable[[bytes], Any] | None = None
    """Parses one message of such a stream, where a protobuf object would cost a copy."""
    heavy: bool | Callable[[Any], bool] = False
    """Takes one of the slots that bound concurrent work; a function decides by the request."""


CallTable: TypeAlias = Mapping[str, Call]
"""Methods by their name in SidecarService."""
