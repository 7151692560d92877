"""A control plane's database: audit, tokens, alerts, metric history. SQLite or PostgreSQL.

`store.py` has the single writer thread and the readers, `schema.py` the current tables,
`migrations/` the upgrades; each kind of record has its own file.
"""
