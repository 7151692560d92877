"""Alerts: problems of a mesh, found by pure rules, tracked while they last, sent once."""
