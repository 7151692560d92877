"""Operations of edits, as short as tests need them."""

from paramd.layout.edits.kinds import NUMBERS, EditKind
from paramd.layout.edits.ops import WHOLE_BOX
from paramd.layout.types import Box
from paramd.v1 import sidecar_pb2 as pb


def edit_op(
    fqn: str, kind: EditKind, box: Box = WHOLE_BOX, with_data: bool = False, **numbers: float
) -> pb.EditOp:
    """An operation on a parameter, or on a region of it."""
    return pb.EditOp(
        fqn=fqn,
        begin=box.begin,
        end=box.end,
        kind=pb.EditKind.ValueType(kind),
        with_data=with_data,
        **(NUMBERS | numbers),
    )
