"""Edits of a running training, and holds.

calls.py     REST: create, commit, watch, abort, undo; pause, step, resume
editing.py   one edit from its operations to its end; `with mesh.summon(..., writeback=True)`
operands.py  tensor operands, cut into each rank's bytes
upload.py    the upload of those bytes to the sidecars
"""
