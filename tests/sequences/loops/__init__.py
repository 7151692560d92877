"""Loops that real scripts have, and a reference that is recorded by them.

loops.py      each loop, as a user writes it
training.py   one rank of a training with such a loop
recorder.py   in the rank: every state right before it is published, every update's gradients
truth.py      in the test: what all ranks have recorded, by the whole name of a state
session.py    a session whose answers are compared with that
"""
