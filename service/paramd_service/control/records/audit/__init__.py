"""The audit: who is about to change what, recorded before it happens.

`audit.py` records and keeps each chain's head apart from the store; `__main__.py` verifies a
store without its control plane. `paramd/chain.py` defines how records are linked.
"""
