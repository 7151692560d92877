"""The copying thread: from the arena to a snapshot, under the gate."""
