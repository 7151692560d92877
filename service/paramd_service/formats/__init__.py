"""Where exports go: destinations by name, and how files get there."""
