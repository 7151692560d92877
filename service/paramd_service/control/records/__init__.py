"""What is kept: events, audit, store."""
