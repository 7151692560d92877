"""The audit: what was to be changed, by whom, recorded before it is.

`audit.py` records; `heads.py` keeps the end of the chain in a second place; `chain_store.py`
has the chain's rows; `__main__.py` checks a store whose control
plane is not running. How records are linked stands in `paramd/chain.py`.
"""
