"""What an edit does to values, and what of it falls to which rank. Pure."""
