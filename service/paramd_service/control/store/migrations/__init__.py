"""How a store of any age becomes one of today; Alembic runs what stands in `versions`."""
