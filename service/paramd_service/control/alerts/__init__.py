"""Alerts: what is wrong with a mesh, found by pure rules, kept while it lasts, told once."""
