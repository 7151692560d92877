"""Changing a running training from outside: edits, undo, and holding it.

calls.py    create, commit, watch, undo; pause, step, resume; what the control plane answers
editing.py  one edit from its operations to its end; `with mesh.summon(..., writeback=True)`
upload.py   operands that are tensors, to the sidecars that need them
"""
