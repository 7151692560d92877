"""Edits: planned, staged, agreed, applied on all ranks or on none, undone; kept for ever.

machine.py      PURE: what is known of an edit, and what to ask next
spec.py         what is asked for -> manifest, facts, which digests must be equal; [edits] of
                paramd.toml
runner.py       runs one machine: its actions are calls of sidecars, their answers its events
incarnation.py  the edits of one incarnation of a job: those under way, those in the store
service.py      what REST asks for: create, commit, preview, undo, abort
holds.py        training held, stepped, resumed
"""
