"""The kernel's own out-of-memory kills, under a real training: see `python -m tests.kills`."""
