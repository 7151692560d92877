"""Planted bugs that the fast tests must find: `make mutants`."""
