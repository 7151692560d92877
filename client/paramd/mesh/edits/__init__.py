"""Edits of a running training, and pauses.

calls.py     REST: create, commit, watch, abort, undo; pause, step, resume; marks, rollbacks
editing.py   one edit from its operations to its end; `with mesh.summon(..., writeback=True)`
operands.py  tensor operands, cut into each rank's bytes
lending.py   memory that sidecars of this host copy them from
"""
