"""Parsers and servers fed with bytes that a fuzzer invents: `make fuzz`.

`parsers.py` and `servers.py` say what must hold for any input, `corpus/<target>/` has a few
inputs to start from, among them those that once broke something, and `__main__.py` runs Atheris.
"""
