"""The tensors of the layout by name, with this rank's pieces alone: what edits here need."""

from __future__ import annotations

from paramd.layout.codec import decode_layout
from paramd.layout.types import TensorLayout
from paramd.v1 import layout_pb2


class RankLayout:
    """Kept as serialized tensors: as objects, those of 100,000 names take 100 MB."""

    def __init__(self, serialized: bytes, rank: int) -> None:
        """Slow for large layouts: off the event loop."""
        self._tensors: dict[str, bytes] = {}
        for tensor in layout_pb2.Layout.FromString(serialized).tensors:
            own = [piece for piece in tensor.pieces if piece.rank == rank]
            del tensor.pieces[:]
            tensor.pieces.extend(own)
            data = tensor.SerializeToString()
            for name in (tensor.fqn, *tensor.aliases):
                self._tensors[name] = data

    def find(self, name: str) -> TensorLayout | None:
        """The tensor of a name, aliases included."""
        data = self._tensors.get(name)
        if data is None:
            return None
        tensor = layout_pb2.Tensor.FromString(data)
        return decode_layout(layout_pb2.Layout(tensors=[tensor])).tensors[0]
