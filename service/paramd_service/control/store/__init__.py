"""What a control plane remembers: audit, tokens, alerts, metric history. SQLite or PostgreSQL.

`store.py` has the one writer thread and the readers; `schema.py` the tables as they are now,
`migrations/` the way there; each kind of record has a file of its own.
"""
