"""Records: events, audit and store."""
