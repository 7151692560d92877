"""What is wrong with a run: stuck ranks, differences between states."""
