"""The versions of packages that integrations support."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from paramd.errors import UsageError
from paramd.extras import install


def require(package: str, *, at_least: str, below: str, extra: str) -> None:
    """Check that a framework is installed in a supported version; UsageError if it is not."""
    wanted = f"{package}>={at_least},<{below}"
    try:
        found = version(package)
    except PackageNotFoundError:
        raise UsageError(f"this needs {wanted}; {install(extra)}") from None
    if not release(at_least) <= release(found) < release(below):
        raise UsageError(
            f"this needs {wanted}, and {package} {found} is installed; {install(extra)}"
        )


def release(version: str) -> tuple[int, ...]:
    """The numbers a version begins with: "2.13.dev1+cpu" is (2, 13)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
