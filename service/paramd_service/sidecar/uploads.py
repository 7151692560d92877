"""What a client uploads to a sidecar, whichever way its bytes come."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Protocol, TypeAlias

from paramd_service.admission import Who

Fill = Callable[[int, int, int], None]
"""(address, begin, size) -> None: writes bytes [begin, begin + size) of a part to an address.
Called for the whole part, in blocks and in order; if the first call raises, nothing was written."""

Part: TypeAlias = tuple[int, int, Fill]
"""Offset and size in bytes, and the function that writes it."""


class Upload(Protocol):
    """One upload."""

    @property
    def size_bytes(self) -> int:
        """Of all of it."""

    @property
    def staged_bytes(self) -> int:
        """Of what has arrived: the next part begins there."""


class Uploads(ABC):
    """The uploads of one attachment, by id. Event loop only."""

    @abstractmethod
    async def opened(self, upload_id: str, who: Who) -> Upload:
        """The upload that its author may go on with. Raises NotFoundError, DeniedError."""

    @abstractmethod
    def upload(self, upload_id: str) -> Upload:
        """The upload.

        Raises:
            NotFoundError: It is gone.
        """

    @abstractmethod
    async def take_parts(self, upload: Upload, parts: Iterable[Part]) -> None:
        """Take parts in order, on a thread.

        Raises:
            UsageError: A part leaves a gap, or is not valid.
            NotFoundError: The upload is gone.
            DataLossError: Raised by a part's `fill`.
        """
