"""Changing a running training from outside: edits, undo, and holding it.

results.py  what the control plane says of an edit or a hold
calls.py    create, commit, watch, undo; pause, step, resume
editing.py  one edit from its operations to its end; `with mesh.summon(..., writeback=True)`
upload.py   operands that are tensors, to the sidecars that need them
"""
