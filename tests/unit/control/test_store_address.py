"""Where the store is: what is taken, what is refused, and no password in any text."""

from pathlib import Path

import pytest

from paramd.errors import UsageError
from paramd_service.control.store.engine import parse_store

SECRET = "s3cr3t"


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg"])
def test_postgresql_is_taken_and_its_password_is_shown_nowhere(scheme: str) -> None:
    text = f"{scheme}://user:{SECRET}@db.example:5433/site?password={SECRET}&sslmode=require"
    address = parse_store(text, directory=Path("/nowhere"))
    assert address.path is None
    assert str(address) == "postgresql://user@db.example:5433/site"
    assert SECRET not in repr(address)
    assert address.url.password == SECRET
    assert address.url.drivername == "postgresql+psycopg"


@pytest.mark.parametrize(
    "text",
    [
        SECRET,
        f"mysql://u:{SECRET}@h/d",
        f"sqlite:///{SECRET}",
        "sqlite://",
        f"sqlite:////abs/{SECRET}?mode=memory",
        f"postgresql://h:{SECRET}x/d",
        f"postgresql+asyncpg://u:{SECRET}@h/d",
    ],
)
def test_anything_else_is_refused_without_being_repeated(text: str) -> None:
    with pytest.raises(UsageError, match="expected sqlite:////absolute/path or postgresql:") as got:
        parse_store(text, directory=Path("/nowhere"))
    assert SECRET not in str(got.value)
