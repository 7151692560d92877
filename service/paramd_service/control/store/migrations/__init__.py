"""Schema migrations; Alembic runs the modules in `versions`."""
