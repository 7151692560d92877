"""Which versions of a package an integration is for."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from paramd.errors import UsageError


def require(package: str, *, at_least: str, below: str, extra: str) -> None:
    """Check that a framework is installed in a version that this integration is for.

    Raises:
        UsageError: it is missing, or of another version.
    """
    wanted = f"{package}>={at_least},<{below}"
    try:
        found = version(package)
    except PackageNotFoundError:
        raise UsageError(f"this needs {wanted}; run: pip install 'paramd[{extra}]'") from None
    if not _numbers(at_least) <= _numbers(found) < _numbers(below):
        raise UsageError(
            f"this needs {wanted}, and {package} {found} is installed; "
            f"run: pip install 'paramd[{extra}]'"
        )


def _numbers(text: str) -> tuple[int, ...]:
    """The release's numbers: (2, 13) of "2.13.dev1+cpu"."""
    numbers = []
    for part in text.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
