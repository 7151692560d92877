"""Edits: planned, staged, agreed, applied on all ranks or on none, undone; kept for ever.

machine.py    PURE: what is known of an edit, and what to ask next
planning.py   PURE: what is asked for -> manifest, facts, which digests must be equal
limits.py     [edits] of paramd.toml, and how many a minute
calls.py      what is asked of sidecars
runner.py     runs one machine: its actions are calls, their answers its events
work.py       the edits of a job: those under way, those in the store
service.py    what REST asks for: create, commit, preview, undo, abort
holds.py      training held, stepped, resumed
"""
