"""Jobs, their incarnations and ranks: registry, view, boundary requests, statistics."""
