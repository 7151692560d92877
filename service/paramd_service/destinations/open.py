"""Open the place of a target."""

import re

from paramd.errors import UsageError
from paramd.v1.export_pb2 import ExportTarget
from paramd_service.destinations.destinations import DestinationKind, Place, check_key, parse_root
from paramd_service.destinations.directory import DirectoryPlace

_EXPORT_ID = re.compile(r"[0-9a-f]{32}")


def open_place(target: ExportTarget) -> Place:
    """The place of a target. No I/O yet; the key is checked.

    Raises:
        UsageError: If the target is malformed.
    """
    check_key(target.key)
    if not _EXPORT_ID.fullmatch(target.export_id):
        raise UsageError("export_id: expected 32 hexadecimal digits")
    kind, root = parse_root(target.root, target.destination)
    if kind is DestinationKind.DIRECTORY:
        return DirectoryPlace(root, target)
    # Loaded only for exports to a store.
    from paramd_service.destinations.object_store import ObjectPlace

    return ObjectPlace(root, target)
