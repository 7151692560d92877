"""Edits: plan, stage, agree, apply on all ranks or none, undo. Rows are never deleted.

machine.py      state machine of one edit; pure
spec.py         request -> manifest, documents and replica check; [edits] of paramd.toml
runner.py       runs one machine: its actions become calls to sidecars, their answers its events
incarnation.py  the open edits of one incarnation: staging, turns, timeouts, recovery
service.py      the operations behind REST: create, commit, preview, undo, abort
pauses.py       pause, step and resume training
marks.py        states that training can return to
"""
