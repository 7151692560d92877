"""Exports as durable jobs: decided, kept, run, scheduled."""
