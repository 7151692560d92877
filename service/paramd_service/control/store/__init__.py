"""A control plane's database: audit, tokens, alerts, metric history. SQLite or PostgreSQL.

`store.py` has the single writer thread and the readers, `schema.py` the current tables,
`migrations/` the way there; each kind of record has a file of its own.
"""
