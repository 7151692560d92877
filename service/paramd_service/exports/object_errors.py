"""What the errors of an object store mean for an export."""

from __future__ import annotations

from paramd.errors import DeniedError, NotFoundError, ParamdError, UnreachableError
from paramd_service.exports.place import Target


def explained(error: BaseException, target: Target) -> ParamdError:
    """What a store's error means for an export."""
    from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

    if isinstance(error, ParamdError):
        return error
    where = f"{target.destination}/{target.key}"
    if isinstance(error, PermissionDeniedError | UnauthenticatedError):
        return DeniedError(
            f"{where}: the object store refuses; the sidecars' environment must hold keys that "
            "may read, write, list and delete there"
        )
    if isinstance(error, FileNotFoundError):
        return NotFoundError(f"{where}: the bucket, or the object, is not there")
    return UnreachableError(f"{where}: the object store failed ({_first_line(error)})")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:300]
