"""What is wrong with a run: the ranks' own evidence, and the verdict on it."""
